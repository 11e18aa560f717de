"""Tiny random models in the form of Kimi-VL, Ovis 2.5 and MoonViT, in folders as people download them.

The code of `own_code/` travels in the folders, and their configs name its classes, as the published ones do.
"""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from saved_models import MEAN
from tiny_models import byte_tokenizer
from transformers.initialization import no_init_weights
from vision_language_models import IMAGE, TEXT

from llava.analysis.remote_code import restore_removed_names

CODE = Path(__file__).parent / "own_code"
VISION = {"hidden_size": 24, "patch_size": 4}
KIMI_IMAGES = {"AutoImageProcessor": "kimi_vl.KimiVLImageProcessor"}
MEDIA = ["<|media_pad|>", "<|media_start|>", "<|media_content|>", "<|media_end|>"]
KIMI_PICTURE = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
MLA = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16} | {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def made(module: str, config: str, model: str, settings: dict[str, Any], **given: Any) -> torch.nn.Module:
    """A model with random weights, of a class and a config by their names in `own_code`.

    Args:
        given: attributes of the config that no file has.
    """
    restore_removed_names()
    code = importlib.import_module(f"own_code.{module}")
    config = getattr(code, config)(**settings)
    for name, value in given.items():
        setattr(config, name, value)
    with no_init_weights():  # which its code cannot do under transformers 5
        built = getattr(code, model)(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_((0.2 if parameter.ndim > 1 else 0.1) * torch.randn(parameter.shape, generator=generator))
            parameter += 0.0 if parameter.ndim > 1 else 0.5
    return built.eval()


def moonvit() -> torch.nn.Module:
    return made("kimi_vl", "MoonViTConfig", "MoonVitPretrainedModel", VISION)


def kimi_vl() -> torch.nn.Module:
    text = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"} | MLA | EXPERTS
    settings = {"vision_config": VISION, "text_config": text | {"num_key_value_heads": 4}}
    settings["media_placeholder_token_id"] = IMAGE
    eager = {"_attn_implementation": "eager"}
    return made("kimi_vl", "KimiVLConfig", "KimiVLForConditionalGeneration", settings, **eager)


def ovis2_5(folder: Path) -> torch.nn.Module:
    """Reads its tokenizer and image processor from `folder`, as the published one does."""
    settings = {"llm_config": TEXT | {"head_dim": 8}, "vit_config": VISION, "hidden_size": TEXT["hidden_size"]}
    settings["visual_vocab_size"] = 40
    return made("ovis2_5", "Ovis2_5_Config", "Ovis2_5", settings, name_or_path=str(folder))


def template(picture: str) -> str:
    """A chat template that writes `picture` for a picture."""
    part = f"{{{{ '{picture}' if part['type'] == 'image' else part['text'] }}}}"
    return f"{{% for turn in messages %}}{{% for part in turn['content'] %}}{part}{{% endfor %}}{{% endfor %}}\nanswer:"


def write_tokenizer(folder: Path, picture: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<unused{index}>" for index in range(IMAGE - len(tokenizer))])
    tokenizer.add_tokens(MEDIA, special_tokens=True)
    tokenizer.chat_template = template(picture)
    tokenizer.save_pretrained(folder)


def write(folder: Path, model: torch.nn.Module, auto: dict[str, str], images: dict[str, Any]) -> None:
    """Writes config, code, weights and the image processor's settings."""
    folder.mkdir(exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    fields = json.loads(model.config.to_json_string(use_diff=False))
    (folder / "config.json").write_text(
        json.dumps(fields | {"auto_map": auto, "architectures": [type(model).__name__]})
    )
    save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, folder / "model.safetensors")


def write_moonvit(folder: Path) -> torch.nn.Module:
    auto = {"AutoConfig": "kimi_vl.MoonViTConfig", "AutoModel": "kimi_vl.MoonVitPretrainedModel"}
    images = {"image_processor_type": "KimiVLImageProcessor", "auto_map": KIMI_IMAGES}
    write(folder, model := moonvit(), auto, images)
    return model


def write_kimi_vl(folder: Path) -> torch.nn.Module:
    auto = {"AutoConfig": "kimi_vl.KimiVLConfig"}
    auto["AutoModelForCausalLM"] = "kimi_vl.KimiVLForConditionalGeneration"
    processor = {"AutoProcessor": "kimi_vl.KimiVLProcessor"}
    images = {"image_processor_type": "KimiVLImageProcessor", "processor_class": "KimiVLProcessor"}
    write(folder, model := kimi_vl(), auto, images | {"auto_map": KIMI_IMAGES | processor})
    write_tokenizer(folder, KIMI_PICTURE)
    return model


def write_ovis2_5(folder: Path) -> torch.nn.Module:
    folder.mkdir()
    write_tokenizer(folder, "<image>")
    images = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}} | MEAN
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    auto = {"AutoConfig": "ovis2_5.Ovis2_5_Config", "AutoModelForCausalLM": "ovis2_5.Ovis2_5"}
    write(folder, model := ovis2_5(folder), auto, images)
    return model
