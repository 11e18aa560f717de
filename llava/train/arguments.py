"""LLaVA's three argument dataclasses, whose fields are the flags of `llava/train/train.py`.

Names and meanings are LLaVA's where LLaVA has the flag. The fields stand in `llava.train.sections`, those of the norm
with the norm; here is what depends on several flags, and what holds for the Hugging Face Trainer's own.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers

from llava.anyres import check_grids_given, check_modes
from llava.model.multimodal_projector.builder import find_projector
from llava.model.multimodal_projector.norm import ProjectorNormArguments
from llava.train.sections import (
    FLAGS,
    ROUNDING,
    DataFlags,
    HeldOutFlags,
    LoggingFlags,
    LoraFlags,
    ModelFlags,
    OptimisationFlags,
    SavingFlags,
    SpeedFlags,
)
from llava.utils.paths import shipped

# What `llava.train.sections` says of each flag of this tree, for the Hugging Face Trainer's own; a name ending in *
# means all that begin with it.
_WITHOUT_EFFECT_ON_NUMBERS = (
    "logging_* log_* save_* eval_* hub_* push_to_hub trackio_* ddp_timeout ddp_backend ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_find_unused_parameters dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order run_name local_rank project "
    "report_to deepspeed_plugin disable_tqdm gradient_checkpointing_kwargs do_train do_eval do_predict "
    "skip_memory_metrics include_num_input_tokens_seen use_cache batch_eval_metrics torch_empty_cache_steps "
    "enable_jit_checkpoint restore_callback_states_from_checkpoint debug use_cpu"
)
_CHANGEABLE = {
    "per_device_train_batch_size": "the position in the data is kept by samples",
    "gradient_accumulation_steps": "the position in the data is kept by samples",
    "max_steps": "the schedule's length changes from here on",
    "num_train_epochs": "the schedule's length changes from here on",
    "ignore_data_skip": "the samples of the current epoch are seen again, so that the weights differ",
    "max_grad_norm": "applies from here on",
    "tf32": ROUNDING,
}


def decides_numbers(name: str) -> bool:
    """Whether a flag of the trainer, this tree's or the library's, can change the numbers of a run."""
    if name in FLAGS:
        return FLAGS[name].metadata["facts"]["identity"]
    return not any(fnmatchcase(name, pattern) for pattern in _WITHOUT_EFFECT_ON_NUMBERS.split())


def changeable_flags() -> dict[str, str]:
    """The flags in which a continuation may differ, each with the reason why."""
    facts = {name: field.metadata["facts"]["changeable"] for name, field in FLAGS.items()}
    return {name: reason for name, reason in (facts | _CHANGEABLE).items() if reason}


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], "TrainingArguments"], torch.optim.Optimizer]] = {}
"""Optimizers besides the library's, by `--optim`: plug-ins add them."""


class Frozen:
    """Takes no other value after `freeze`: from then on a flag is what the command line said."""

    _frozen = False

    def freeze(self) -> None:
        """Called once the command line is parsed."""
        self._frozen = True

    def __setattr__(self, name: str, value: object) -> None:
        if self._frozen:
            raise dataclasses.FrozenInstanceError(f"--{name} is parsed; make a copy by dataclasses.replace")
        super().__setattr__(name, value)


@dataclass
class ModelArguments(Frozen, ModelFlags, ProjectorNormArguments):
    """What is trained: language model, vision tower, projector, norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        find_projector(self.mm_projector_type)


@dataclass
class DataArguments(Frozen, DataFlags):
    """What is read and how it becomes samples."""

    def __post_init__(self) -> None:
        check_modes(self.image_aspect_ratio)
        check_grids_given(self.image_aspect_ratio, self.image_grid_pinpoints)


@dataclass
# pyrefly: ignore[inconsistent-inheritance]  # some flags take fewer values than the library's
class TrainingArguments(
    OptimisationFlags, LoraFlags, SpeedFlags, SavingFlags, HeldOutFlags, LoggingFlags, transformers.TrainingArguments
):
    """The Hugging Face Trainer's flags and LLaVA's additions."""

    def __post_init__(self):
        if self.warmup_ratio:
            if self.warmup_steps:
                raise ValueError("--warmup_ratio and --warmup_steps were both given; pass one of them")
            if not 0 <= self.warmup_ratio < 1:
                raise ValueError(f"--warmup_ratio {self.warmup_ratio}: must be in [0, 1)")
            self.warmup_steps = self.warmup_ratio
        if not torch.accelerator.is_available() and not self.deepspeed:
            self.use_cpu = True
        if isinstance(self.deepspeed, str) and self.deepspeed.endswith(".json"):
            self.deepspeed = shipped(self.deepspeed)
            if not Path(self.deepspeed).is_file():
                raise ValueError(f"--deepspeed {self.deepspeed}: no such file; the recipes' are in deepspeed_configs/")
        if self.remove_unused_columns:
            raise ValueError("--remove_unused_columns must be False: it would drop the images")
        # From here on these hold a choice; as fields they hold the text from which the parser makes flags.
        # pyrefly: ignore[bad-assignment]
        self.activation_checkpointing = checkpointing_choice(self.activation_checkpointing, self.gradient_checkpointing)
        # pyrefly: ignore[bad-assignment]
        self.use_liger_kernel = choice("use_liger_kernel", self.use_liger_kernel, "auto")
        # pyrefly: ignore[bad-assignment]
        self.compile_layers = choice("compile_layers", self.compile_layers, "auto", "tower")
        # pyrefly: ignore[bad-assignment]
        self.max_tokens_per_micro_batch = token_cap(self.max_tokens_per_micro_batch)
        if self.profile_steps is not None:
            steps_to_profile(self.profile_steps)
        self.gradient_checkpointing = None  # the library sets it from the newer name
        for flag in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            setattr(self, flag, json_object(flag, getattr(self, flag)))
        if self.metric_for_best_model and self.greater_is_better is None:  # the library only knows names ending in loss
            self.greater_is_better = not self.metric_for_best_model.removeprefix("eval").lstrip("_/").startswith("loss")
        if self.metric_for_best_model:
            self.metric_for_best_model = self.metric_for_best_model.removeprefix("eval/")
        optim = self.optim
        if optim in OPTIMIZERS:  # the library takes its own names alone
            self.optim = "adamw_torch"
        super().__post_init__()
        self.optim = optim if optim in OPTIMIZERS else self.optim


def checkpointing_choice(value: bool | int | str | None, older: bool | int | str | None) -> bool | int | str:
    """`--activation_checkpointing`, or else its older name, as True, False, a number of layers, or `auto`.

    Raises:
        ValueError: the value is none of these, or the two contradict each other.
    """
    if value is None or older is None:
        value = older if value is None else value
    elif str(value) != str(older):
        raise ValueError(f"--activation_checkpointing {value} contradicts --gradient_checkpointing {older}; pass one")
    text = "auto" if value is None else str(value).lower()
    if text in ("auto", "true", "false"):
        return {"auto": "auto", "true": True, "false": False}[text]
    if not text.isdecimal():
        raise ValueError(
            f"--activation_checkpointing: expected auto, True, False or a number of decoder layers; found {value!r}"
        )
    return int(text) or False


def json_object(flag: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The value of `--<flag>`, read where it is still text.

    Raises:
        ValueError: the text is no JSON object.
    """
    if not isinstance(value, str):
        return value
    with contextlib.suppress(json.JSONDecodeError):
        if isinstance(content := json.loads(value), dict):
            return content
    raise ValueError(f"--{flag}: expected a JSON object such as '{{\"use_reentrant\": true}}', found {value!r}")


def choice(flag: str, value: bool | str, *names: str) -> bool | str:
    """The value of `--<flag>` as True, False or one of `names`.

    Raises:
        ValueError: the value is none of these.
    """
    choices = {name: name for name in names} | {"true": True, "1": True, "false": False, "0": False}
    if (text := str(value).lower()) not in choices:
        raise ValueError(f"--{flag}: expected {', '.join(names)}, True or False; found {value!r}")
    return choices[text]


def token_cap(value: int | str | None) -> int | str | None:
    """`--max_tokens_per_micro_batch` as a number, `auto`, or None.

    Raises:
        ValueError: the value is none of these.
    """
    if value is None or str(value).lower() == "auto":
        return value and "auto"
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"--max_tokens_per_micro_batch: expected a number or auto, found {value!r}") from None


def steps_to_profile(text: str) -> range:
    """The steps that `--profile_steps` names.

    Raises:
        ValueError: the text is not FIRST:LAST.
    """
    first, colon, last = text.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return range(int(first), int(last) + 1)
    raise ValueError(f"--profile_steps: expected FIRST:LAST with 1 <= FIRST <= LAST, such as 5:8; found {text!r}")
