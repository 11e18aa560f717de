"""A trial before the first step: the final folder is written and read back once, and the disk must have room.

With up to `FULL_TRIAL` bytes of weights the folder is written as at the end, also under ZeRO-3, loaded from the disk
and compared. Larger models write everything but the weights' values: every name with one number, config, tokenizer,
image processor. Then the model is built from that config without memory, and its names must be the written ones.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from llava.mm_utils import load_tokenizer
from llava.model.builder import load_language_model, read_config
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import has_lora
from llava.model.zero3 import full_shape
from llava.train.arguments import TrainingArguments
from llava.train.checkpoint import STAGING, SaveError, free_gib, trains_adapter_only
from llava.train.ranks import from_first

logger = logging.getLogger(__name__)

_FAILED = "the final folder could not be written and read in a trial before the first step"
FULL_TRIAL = 2 * 2**30  # bytes of weights that are written and read in seconds


def try_save(
    model: LlavaMetaForCausalLM,
    args: TrainingArguments,
    save_model: Callable[[str], None],
    save_tensors: Callable[[str, dict[str, torch.Tensor]], None],
) -> None:
    """Writes and reads the final folder once. Every rank must call, when the model is ready to train.

    Args:
        model: the model.
        args: the training arguments.
        save_model: writes the final folder.
        save_tensors: writes it with these tensors in place of the weights.

    Raises:
        SaveError: the folder cannot be written, or does not read back as it was written.
    """
    start = time.perf_counter()
    folder = Path(args.output_dir, STAGING, "trial")
    full = model_bytes(model) <= FULL_TRIAL
    fault = None
    try:
        with torch.random.fork_rng(devices=[]):
            if full:
                save_model(str(folder))
            elif args.should_save:
                save_tensors(str(folder), {name: torch.zeros(1) for name in model.state_dict()})
            if args.should_save and not has_lora(model):  # a LoRA folder cannot load without its base
                fault = _read_back(folder, model, full)
    except Exception as error:  # it would fail after the last step as well
        raise SaveError(f"{_FAILED}: {type(error).__name__}: {error}") from error
    if fault:
        raise SaveError(f"{_FAILED}: {fault}")
    if args.should_save:
        shutil.rmtree(folder.parent)
        logger.info(
            "trial of the final folder (%s): written and read in %.1f s",
            "whole" if full else "names and settings",
            time.perf_counter() - start,
        )


def _read_back(folder: Path, model: LlavaMetaForCausalLM, full: bool) -> str | None:
    """What is wrong with the written folder, or None."""
    load_tokenizer(str(folder))
    with without_zero3():
        config = read_config(str(folder))
        if full:
            loaded = load_language_model(str(folder), config, dtype="auto", device_map={"": "cpu"}).state_dict()
        else:
            with torch.device("meta"):
                loaded = type(model)(config).state_dict()
    written = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            written |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    tied = set(model.all_tied_weights_keys or ())
    if lost := sorted(loaded.keys() - written.keys() - tied):
        return f"{len(lost)} tensors are missing, the first is {lost[0]}"
    if unknown := sorted(written.keys() - loaded.keys()):
        return f"{len(unknown)} tensors would not be read, the first is {unknown[0]}"
    # What is trained may be stored in fp32 beside 16-bit weights, and is rounded when the folder is loaded.
    other = [n for n, tensor in written.items() if full and not torch.equal(tensor.to(loaded[n].dtype), loaded[n])]
    return f"{len(other)} tensors are read with other values, the first is {other[0]}" if other else None


@contextlib.contextmanager
def without_zero3() -> Iterator[None]:
    """A context in which models are built whole, on one rank alone, although the run itself partitions them."""
    from transformers.integrations import deepspeed

    config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config


# --- room on the disk -------------------------------------------------------------------------------------------------


def model_bytes(model: nn.Module) -> int:
    """Bytes of all weights, before any partitioning."""
    return sum(full_shape(p).numel() * p.element_size() for p in model.parameters())


def checkpoint_bytes(model: nn.Module, args: TrainingArguments) -> int:
    """About how many bytes a `checkpoint-N` takes: weights, and master weights and moments of what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    elements = sum(full_shape(p).numel() for p in trained)
    weights = sum(full_shape(p).numel() * p.element_size() for p in trained)
    whole = weights if trains_adapter_only(model) or has_lora(model) else model_bytes(model)
    per_element = 2 if "8bit" in str(args.optim) else 8
    if not args.deepspeed:
        return whole + per_element * elements
    module = 0 if args.hf_deepspeed_config.is_zero3() else model_bytes(model)
    return whole + module + (per_element + 4) * elements


def needed_bytes(model: nn.Module, args: TrainingArguments, max_steps: int) -> int:
    """The maximum bytes that the run's files take: checkpoints, one more during a save, the final folder."""
    strategy: Any = args.save_strategy  # the library has made an enum of it
    every = args.save_steps if str(strategy.value) == "steps" else max_steps
    saves = 0 if str(strategy.value) == "no" else max(1, int(max_steps // max(1, every)))
    limit = max(args.save_total_limit or 0, 2 if args.metric_for_best_model else 0)  # the newest and the best
    kept = min(saves, limit + 1) if args.save_total_limit else saves
    return kept * checkpoint_bytes(model, args) + model_bytes(model)


def check_disk(model: nn.Module, args: TrainingArguments, max_steps: int) -> None:
    """Raises SaveError if the output folder's disk is too small; the message says how much is needed.

    Every rank must call.
    """
    output_dir = Path(args.output_dir)
    needed, present = needed_bytes(model, args, max_steps) / 2**30, folder_gib(output_dir)
    free = from_first(free_gib(output_dir))
    if needed > free + from_first(present):
        raise SaveError(
            f"--output_dir {output_dir}: the run will write about {needed:.2f} GiB "
            f"({checkpoint_bytes(model, args) / 2**30:.2f} per checkpoint), and {free:.2f} are free; make room, lower "
            "--save_total_limit (one more is kept while a new one is written), or choose another disk"
        )


def folder_gib(folder: Path) -> float:
    """GiB of the files in a folder; 0 if there is none."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**30 if folder.exists() else 0.0
