"""What a training run writes, and which checkpoint it continues from.

Final folder of both stages: the whole model, tokenizer, image processor; stage 1 adds LLaVA's `mm_projector.bin`.
`checkpoint-N` of stage 1: `mm_projector.bin` and `config.json` beside the optimizer's state; nothing else changes.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llava.model.multimodal_projector.adapter import ADAPTER_FILE, adapter_state_dict
from llava.train.optim import ADAPTER, part_of

logger = logging.getLogger(__name__)


def trains_adapter_only(model: nn.Module) -> bool:
    """Whether projector and norm are all that is trained (stage 1)."""
    return {part_of(name) for name, p in model.named_parameters() if p.requires_grad} == {ADAPTER}


def save_adapter(model: Any, output_dir: str, is_main_process: bool) -> None:
    """Writes `mm_projector.bin` and `config.json`. Every rank must call."""
    state_dict = adapter_state_dict(model.get_model().mm_projector)
    if is_main_process:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(state_dict, os.path.join(output_dir, ADAPTER_FILE))
        model.config.save_pretrained(output_dir)


def find_checkpoint(output_dir: str, requested: str | None) -> str | None:
    """The checkpoint to continue from.

    Args:
        output_dir: searched for the newest complete `checkpoint-N` where nothing is requested, as LLaVA does.
        requested: `--resume_from_checkpoint`: a folder, `True` (the newest must exist) or `False` (start anew).

    Raises:
        FileNotFoundError: the requested checkpoint does not exist or is incomplete.
    """
    if requested in ("False", "false", False):
        return None
    if requested not in (None, "True", "true", True):
        if not _is_complete(Path(requested)):
            raise FileNotFoundError(f"--resume_from_checkpoint {requested}: no complete checkpoint there")
        return str(requested)
    folders = sorted(Path(output_dir).glob("checkpoint-*"), key=_step, reverse=True)
    for folder in folders:
        if _is_complete(folder):
            logger.info("resuming from %s", folder)
            return str(folder)
        logger.warning("%s is incomplete (no trainer_state.json) and is skipped", folder)
    if requested is not None:
        raise FileNotFoundError(f"--resume_from_checkpoint {requested}: no complete checkpoint in {output_dir}")
    return None


def _is_complete(folder: Path) -> bool:
    return (folder / "trainer_state.json").is_file()  # the Trainer writes it last


def _step(folder: Path) -> int:
    suffix = folder.name.rsplit("-", 1)[1]
    return int(suffix) if suffix.isdigit() else -1
