"""Builds the vision tower from a model config; the tower's own config, never its path, decides its type."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, BaseImageProcessor, PretrainedConfig
from transformers.utils import cached_file

from llava.model.multimodal_encoder.towers import TOWERS, VisionTower


def read_vision_config(vision_tower: str) -> dict[str, Any]:
    """The config of a vision encoder, a folder or hub id; ValueError where there is none of a kind in `TOWERS`."""
    try:
        config = AutoConfig.from_pretrained(vision_tower)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--vision_tower {vision_tower}: no vision encoder config found ({error}). Expected a Hugging Face folder "
            f"or hub id of one of {', '.join(TOWERS)}."
        ) from error
    config = getattr(config, "vision_config", config)
    if config.model_type not in TOWERS:
        raise ValueError(
            f"--vision_tower {vision_tower}: its model_type is {config.model_type!r}; "
            f"expected one of {', '.join(TOWERS)}"
        )
    return config.to_dict()


def build_vision_tower(config: PretrainedConfig) -> VisionTower:
    """The tower that `config` describes, with untrained weights.

    Reads `mm_vision_config` (written by this tree), or else the config of `mm_vision_tower` (upstream checkpoints),
    and `mm_vision_select_layer`, `mm_vision_select_feature`.
    """
    if not getattr(config, "mm_vision_config", None):
        config.mm_vision_config = read_vision_config(config.mm_vision_tower)
    vision_config = dict(config.mm_vision_config)
    if (kind := vision_config.pop("model_type")) not in TOWERS:
        raise ValueError(f"vision tower {kind!r}: expected one of {', '.join(TOWERS)} (--plugin FILE adds one)")
    tower_class = TOWERS[kind]
    return tower_class(
        tower_class.config_class(**vision_config),
        select_layer=getattr(config, "mm_vision_select_layer", -2),
        select_feature=getattr(config, "mm_vision_select_feature", "patch"),
    )


def has_image_processor(folder_or_id: str, cache_dir: str | None = None) -> bool:
    """Whether a folder or hub id holds an image processor, in its own file or in that of a whole processor."""
    own, whole = (
        cached_file(folder_or_id, name, cache_dir=cache_dir, _raise_exceptions_for_missing_entries=False)
        for name in ("preprocessor_config.json", "processor_config.json")
    )
    return bool(own or (whole and "image_processor" in json.loads(Path(whole).read_text(encoding="utf-8"))))


def load_image_processor(folder_or_id: str, tower: VisionTower, cache_dir: str | None = None) -> BaseImageProcessor:
    """The image processor stored with a checkpoint or vision encoder.

    It always runs on the PIL backend, so that pixels are the same everywhere. A local folder without an image processor
    gets the encoder family's default at the tower's image size. ValueError where it makes another size.
    """
    if Path(folder_or_id).is_dir() and not has_image_processor(folder_or_id):
        return tower.default_image_processor()
    processor = tower.image_processor_class.from_pretrained(folder_or_id, cache_dir=cache_dir)
    processor: Any = tower.fit_image_processor(processor)
    size = getattr(processor, "crop_size" if getattr(processor, "do_center_crop", False) else "size", None)
    sides, side = (size["height"], size["width"]) if size else (None, None), tower.image_size
    if None not in sides and sides != (side, side):
        raise ValueError(
            f"{folder_or_id}: its image processor makes {sides[0]} x {sides[1]} pixels, and the vision tower takes "
            f"{side} x {side} (image_size in its config.json): correct the one that is wrong"
        )
    return processor
