"""Folders of Hugging Face's LLaVA classes in terms of this tree: their config, and the names of their parameters.

Such folders are written by `python -m llava.export hf`, or published, as those of LLaVA 1.5
(`llava-hf/llava-1.5-7b-hf`), with the names of transformers 4 or 5.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import LlavaConfig, LlavaNextConfig, PretrainedConfig

from llava.model.multimodal_encoder.towers import TOWERS
from llava.model.multimodal_projector.builder import build_vision_projector
from llava.model.multimodal_projector.norm import ProjectorNorm

STOCK, NEXT, WITH_NORM = "llava", "llava_next", "llava_norm"
"""Model types: two of transformers, LLaVA and LLaVA-NeXT, and that of the code in an exported folder."""
CARRIED = (
    "mm_", "image_aspect", "image_grid", "tokenizer_", "use_mm_proj", "tune_mm", "freeze_mm",
)  # fmt: skip
"""Prefixes of the fields of our config that an exported folder keeps, for the way back."""
ROWS = "text_vocab_size"
"""Field of an exported folder's config: rows of the text embedding before `<image>` got one."""
_PROJECTOR = "multi_modal_projector"


def is_hf_folder(fields: dict[str, Any]) -> bool:
    """Whether a config's fields are those of Hugging Face's LLaVA; LLaVA's first checkpoints share the name."""
    return fields.get("model_type") in (STOCK, NEXT, WITH_NORM) and isinstance(fields.get("text_config"), dict)


def own_fields(fields: dict[str, Any], model_path: str) -> dict[str, Any]:
    """Hugging Face's fields as ours, with the plain decoder's `model_type`; ValueError names what this tree lacks."""
    config = LlavaConfig.from_dict({k: v for k, v in fields.items() if k != "model_type"})
    vision, text = config.vision_config, config.text_config
    assert isinstance(vision, PretrainedConfig) and isinstance(text, PretrainedConfig)
    layer, activation, bias = config.vision_feature_layer, config.projector_hidden_act, config.multimodal_projector_bias
    if vision.model_type not in TOWERS:
        raise ValueError(
            f"{model_path}: its vision tower is a {vision.model_type!r}; expected one of {', '.join(TOWERS)}"
        )
    other_projector = fields["model_type"] in (STOCK, NEXT) and (activation, bias) != ("gelu", True)
    if other_projector or not isinstance(layer, int):
        raise ValueError(
            f"{model_path}: projector_hidden_act={activation!r}, multimodal_projector_bias={bias}, "
            f"vision_feature_layer={layer}; expected 'gelu', True and one layer, as LLaVA 1.5 has"
        )
    strategy, tower = config.vision_feature_select_strategy, TOWERS[vision.model_type]
    if strategy == "default" and not tower.num_prefix_tokens:
        what = f"a patch: {vision.model_type!r} has no class token"
        raise ValueError(f"{model_path}: vision_feature_select_strategy='default' drops {what}; expected 'full'")
    feature = "cls_patch" if strategy == "full" and "cls_patch" in tower.select_features else "patch"
    published = {
        "mm_vision_tower": vision._name_or_path or model_path,
        "mm_vision_config": vision.to_dict(),
        "mm_vision_select_layer": config.vision_feature_layer,
        "mm_vision_select_feature": feature,
        "mm_projector_type": "mlp2x_gelu",
        "mm_projector_norm": "none",
        "mm_hidden_size": vision.hidden_size,
        "mm_patch_merge_type": "flat",
        "use_mm_proj": True,
    }
    carried = {k: v for k, v in fields.items() if k.startswith(CARRIED)}
    if fields["model_type"] == NEXT:
        grids = [[width, height] for height, width in LlavaNextConfig.from_dict(fields).image_grid_pinpoints or ()]
        published |= {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"}
        carried["image_grid_pinpoints"] = grids
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    decoder = fields["text_config"] | {"model_type": text.model_type, "dtype": dtype}
    return decoder | published | carried


def extra_rows(fields: dict[str, Any]) -> int:
    """Number of rows that `python -m llava.export hf` has added at the end of the text embedding."""
    rows = fields["text_config"].get("vocab_size")
    return rows - fields[ROWS] if ROWS in fields and rows else 0


def key_mapping(config: PretrainedConfig) -> dict[str, str]:
    """Regular expressions for their parameters' names, with our names; `from_pretrained` tries them in this order."""
    prefix = r"^(?:model\.)?"
    projector = {
        rf"{prefix}{_PROJECTOR}\.{theirs}\.": f"model.mm_projector.{ours}{'.' if ours else ''}"
        for ours, theirs in projector_modules(config).items()
    }
    return (
        {
            rf"{prefix}vision_tower\.(?:vision_model\.)?": "model.vision_tower.vision_tower.vision_model.",
            r"^language_model\.lm_head\.": "lm_head.",
            rf"{prefix}image_newline$": "model.image_newline",
        }
        | projector
        | {r"^(?:model\.language_model\.|language_model\.model\.)": "model."}
    )


def projector_modules(config: PretrainedConfig) -> dict[str, str]:
    """The names of the projector's layers with parameters, ours and theirs: `linear_1`, `linear_2`, ..., `norm`."""
    with torch.device("meta"):
        projector = build_vision_projector(config)
    names = {}
    for name, module in projector.named_modules():
        if isinstance(module, nn.Linear):
            names[name] = f"linear_{len(names) + 1}"
        elif isinstance(module, ProjectorNorm):
            names[name] = "norm"
    return names


def hf_names(ours: Iterable[str], config: PretrainedConfig) -> dict[str, str]:
    """Our parameters' module paths, each with its path in Hugging Face's classes."""
    prefixes = {
        "model.vision_tower.vision_tower.vision_model.": "model.vision_tower.",
        **{
            f"model.mm_projector.{name}{'.' if name else ''}": f"model.{_PROJECTOR}.{theirs}."
            for name, theirs in projector_modules(config).items()
        },
        "model.image_newline": "model.image_newline",
        "model.": "model.language_model.",
        "lm_head.": "lm_head.",
    }
    names = {}
    for name in ours:
        prefix = next(prefix for prefix in prefixes if name.startswith(prefix))
        names[name] = prefixes[prefix] + name.removeprefix(prefix)
    return names
