"""LLaVA's `auto_upgrade`, which its merging programs call before they load a checkpoint."""

import json
from pathlib import Path

from transformers import PretrainedConfig

from llava.utils.files import write_json


def auto_upgrade(config: str) -> None:
    """Asks to upgrade the `config.json` of a first-version LLaVA checkpoint, whose model type is that of a plain Llama.

    Args:
        config: a checkpoint's folder; ignored without `llava` in its path.

    Raises:
        ValueError: it is neither a LLaVA model nor a Llama, or no folder of this machine.
        SystemExit: the user declines.
    """
    settings, _ = PretrainedConfig.get_config_dict(config)
    kind, file = settings.get("model_type", ""), Path(config) / "config.json"
    if "llava" not in config or "llava" in kind:
        return
    if kind != "llama" or not file.is_file():
        where = "" if file.is_file() else " on the hub"
        raise ValueError(f"{config}: expected a folder with a LLaVA or Llama model, found model_type {kind!r}{where}")
    if input(f"{file} is of LLaVA's first version. Write model_type llava_llama into it? [y/n] ").lower() != "y":
        raise SystemExit(1)
    upgraded = {"model_type": "llava_llama", "architectures": ["LlavaLlamaForCausalLM"]}
    write_json(file, json.loads(file.read_text()) | upgraded)
