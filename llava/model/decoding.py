"""How answers are decoded: what a checkpoint's generation_config.json says, and the options that evaluation passes.

A loaded model has the file's token ids alone: what is trained, exported, scored and said does not depend on its other
settings, which are named where they are not used.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

logger = logging.getLogger(__name__)

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Options of `from_pretrained` that say where a checkpoint's files are."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GREEDY = {"do_sample": False, "num_beams": 1, "use_cache": True}
_METADATA = ("_from_model_config", "_commit_hash", "transformers_version")


def read_generation_config(folder_or_id: str, **hub_options: Any) -> dict[str, Any]:
    """The fields of a checkpoint's generation_config.json; none where it has no readable one."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(folder_or_id, GENERATION_CONFIG_NAME, **quiet, **hub_options)
    if file is None:
        return {}
    try:
        with open(file, encoding="utf-8") as text:
            return dict(json.load(text))
    except (ValueError, TypeError) as error:
        logger.warning("%s: not a JSON object (%s); the token ids of config.json are taken", file, error)
        return {}


def token_ids_alone(fields: Mapping[str, Any], otherwise: Any) -> GenerationConfig:
    """A generation config of token ids and nothing else.

    Args:
        fields: those of a generation_config.json.
        otherwise: an object with the ids that the file does not give.
    """
    ids = {name: getattr(otherwise, name, None) if fields.get(name) is None else fields[name] for name in TOKEN_IDS}
    # Old Llama checkpoints have -1 for none, with which the library does not save.
    return GenerationConfig(**{name: None if isinstance(i, int) and i < 0 else i for name, i in ids.items()})


def other_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json says besides token ids."""
    return {k: v for k, v in fields.items() if k not in TOKEN_IDS + _METADATA and v is not None}


def unused(source: str, settings: Mapping[str, Any]) -> str:
    """A message that names `other_settings` of a checkpoint that are not used; empty without any."""
    return f"{source}/generation_config.json: not used: {', '.join(settings)}" if settings else ""


def sampling_options(temperature: float) -> dict[str, Any]:
    """Options of `generate` for a temperature, 0 for greedy decoding."""
    return {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}


def evaluation_options(
    max_new_tokens: int, temperature: float = 0, top_p: float | None = None, num_beams: int = 1
) -> dict[str, Any]:
    """Options of `generate` that decide an answer together with a model's token ids; temperature 0 is greedy."""
    options = GREEDY | {"num_beams": num_beams, "max_new_tokens": max_new_tokens} | sampling_options(temperature)
    if options["do_sample"]:
        options |= {"top_p": 1.0 if top_p is None else top_p, "top_k": 50}  # the library's defaults
    return options


def evaluation_record(settings: Mapping[str, Any], decoding: Any) -> dict[str, Any]:
    """What a record of an evaluation says about decoding, and about `other_settings`, which have no part in it."""
    return {"decoding": decoding, "unused_generation_config": dict(settings)}
