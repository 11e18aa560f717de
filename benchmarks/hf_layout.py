"""Writes one of our models as the folder of a `LlavaForConditionalGeneration`, with the files that its processor reads.

It fits a Llama decoder, a CLIP tower and a projector without norm. The names are those of the published LLaVA-1.5
folders, which transformers 4 and 5 read.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llava.mm_utils import load_tokenizer

RENAMED = (  # ours, theirs; the first that fits
    ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
    ("model.vision_tower.vision_tower.vision_model.", "vision_tower.vision_model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
IMAGE = "<image>"


def renamed(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of our model under the names of a published LLaVA-1.5 folder.

    Raises:
        ValueError: a tensor has no place there, such as the norm's gain.
    """
    tensors = {}
    for name, tensor in state_dict.items():
        ours, theirs = next(((ours, theirs) for ours, theirs in RENAMED if name.startswith(ours)), ("", ""))
        if not ours or (theirs == "language_model.model." and name.startswith("model.mm_projector.")):
            raise ValueError(f"{name}: LlavaForConditionalGeneration has no such tensor; export a model without norm")
        tensors[theirs + name.removeprefix(ours)] = tensor.detach().contiguous().clone()
    return tensors


def write_hf_model(model: Any, tower: Path, tokenizer: Path, chat_template: str, folder: Path) -> None:
    """Weights, configs, processor and tokenizer (with one more token, `<image>`) in `folder`.

    Args:
        model: a LLaVA of this tree with `--mm_projector_type mlp2x_gelu --mm_projector_norm none`.
        tower: the folder of its CLIP tower, for the image processor.
        tokenizer: the folder of its tokenizer.
        chat_template: Jinja, which writes `<image>` where a picture belongs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    tensors = renamed(model.state_dict())
    if config.tie_word_embeddings:
        tensors.pop("language_model.lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    extended = load_tokenizer(str(tokenizer))
    extended.add_special_tokens({"additional_special_tokens": [*_additional(tokenizer), IMAGE]})
    extended.chat_template = chat_template
    extended.save_pretrained(folder)
    # As transformers 4 reads them too: one file for each, special tokens by their older name.
    _update(folder / "tokenizer_config.json", {"tokenizer_class": _settings(tokenizer)["tokenizer_class"]})
    _update(folder / "tokenizer_config.json", {"additional_special_tokens": [*_additional(tokenizer), IMAGE]})
    _update(folder / "tokenizer_config.json", {"extra_special_tokens": {}})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": chat_template}))
    shutil.copy(tower / "preprocessor_config.json", folder)
    _update(folder / "preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"})
    vision = json.loads((tower / "config.json").read_text())
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "num_additional_image_tokens": 1,
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": "default",
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))

    text = {k: v for k, v in config.to_dict().items() if not k.startswith("mm_") and k != "architectures"}
    text |= {"model_type": "llama", "rope_theta": config.rope_parameters["rope_theta"]}
    written = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": extended.convert_tokens_to_ids(IMAGE),
        "image_token_id": extended.convert_tokens_to_ids(IMAGE),
        "pad_token_id": extended.pad_token_id,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "vision_config": vision | {"model_type": "clip_vision_model"},
        "vision_feature_layer": config.mm_vision_select_layer,
        "vision_feature_select_strategy": "default",
    }
    (folder / "config.json").write_text(json.dumps(written, indent=1))


def _settings(tokenizer: Path) -> dict[str, Any]:
    return json.loads((tokenizer / "tokenizer_config.json").read_text())


def _additional(tokenizer: Path) -> list[str]:
    return _settings(tokenizer).get("additional_special_tokens", [])


def _update(file: Path, fields: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields, indent=1))
