"""The trainer's command line: it shows every flag in its group, and refuses with a reason what cannot work here.

The flags themselves, with types, defaults and help texts, are the fields of `llava.train.arguments`.
"""

import argparse
import copy
import dataclasses
import sys
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from transformers import HfArgumentParser

from llava.model.multimodal_projector.norm import NORM_FIELDS
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.sections import FLAGS, SECTIONS, TRAINING_SECTIONS
from llava.utils import plugins
from llava.utils.commands import Parser, program_name
from llava.utils.names import nearest_name

REST = "other flags of the Hugging Face Trainer, as its documentation says"
GROUPS = ("model", "norm", "data", *(section.title for section in TRAINING_SECTIONS), REST)

# Flags that can have no value other than their default, by the reason.
REFUSED = {
    "held-out loss is computed as in training, without predictions; bash scripts/evaluate.sh scores a checkpoint": (
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object prediction_loss_only "
        "include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval do_predict label_names"
    ),
    "--eval_strategy says whether and when held-out data is read": "do_eval",
    "the folder is complete only when the run has ended; then send it with python -m llava.export push": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "it compiles the whole model again for every batch; use --compile_layers True": (
        "torch_compile torch_compile_backend torch_compile_mode"
    ),
    "only DeepSpeed shards the model here; use --deepspeed deepspeed_configs/zero3.json": (
        "fsdp fsdp_config parallelism_config"
    ),
    "the size of a batch decides the order of the data; --activation_checkpointing auto makes the batch fit": (
        "auto_find_batch_size"
    ),
    "lengths are measured from the records; use --group_by_modality_length True": "length_column_name",
    "the loss over supervised rows has no smoothing": "label_smoothing_factor",
    "the flags --use_liger_kernel and --loss_head choose the kernels": "liger_kernel_config",
    "a checkpoint is written at SIGTERM without it": "enable_jit_checkpoint",
    "training never uses a cache": "use_cache",
    "text embeddings go into one row with visual tokens, where its noise cannot be added": "neftune_noise_alpha",
    "this trainer assigns samples to ranks, not Accelerate": "accelerator_config",
    "samples always come in the same order, so that a run can be continued": "dataloader_in_order",
    "worker processes are started in PyTorch's default way": "dataloader_multiprocessing_context",
}
# The library's flags that are accepted but not shown: those that LLaVA's launchers pass, and older names.
_HIDDEN = {"do_train", "local_rank", "skip_memory_metrics", "gradient_checkpointing_kwargs"}
_HIDDEN |= {name for name, field in FLAGS.items() if field.metadata["facts"]["hidden"]}
_REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def parse_flags(argv: list[str], **defaults: Any) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The command line as three dataclasses; ends the process with one line if a flag is wrong.

    The first two are frozen. The Hugging Face Trainer writes into the third.

    Args:
        argv: the flags.
        defaults: values of flags that `argv` does not give.

    Raises:
        ValueError: flags contradict each other.
    """
    parser = FlagParser()
    parser.set_defaults(**defaults)
    parsed: Any = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    for arguments in parsed[:2]:
        arguments.freeze()
    return parsed


def group_of(name: str) -> str:
    """The title of the group that a flag is shown in."""
    if name in NORM_FIELDS:
        return "norm"
    for section in SECTIONS:
        own = {field.name for field in dataclasses.fields(section)}
        library = getattr(section, "library", "").split()
        if name in own or (name not in FLAGS and any(fnmatchcase(name, pattern) for pattern in library)):
            return section.title
    return REST


class FlagParser(Parser, HfArgumentParser):
    """Shows each flag once, in its group, and refuses unknown flags and those that cannot work in one line."""

    def __init__(self) -> None:
        self._titled: dict[str, Any] = {}
        super().__init__(
            (),
            prog=program_name("llava.train.train"),
            usage="%(prog)s --FLAG VALUE ...",
            description="Trains a LLaVA, stage 1 or stage 2. A switch --x alone means True; --x False, or --no_x where "
            "the default is True, means False. Hyphens stand for underscores.",
            epilog=f"Accepted as well, with the values that LLaVA's scripts pass: {', '.join(sorted(_HIDDEN))}.",
            allow_abbrev=False,
        )
        for title in GROUPS:
            self._titled[title] = self.add_argument_group(title)
        owners = (ModelArguments, DataArguments, TrainingArguments)
        self.dataclass_types = list(owners)
        for owner in owners:
            self._add_dataclass_arguments(owner)

    def _parse_dataclass_field(self, parser: Any, field: dataclasses.Field) -> None:
        before = len(self._actions)
        shown = copy.copy(field)
        shown.metadata = MappingProxyType({k: v for k, v in field.metadata.items() if k != "facts"})  # argparse's
        HfArgumentParser._parse_dataclass_field(self._titled[group_of(field.name)], shown)
        for action in self._actions[before:]:
            action.option_strings = action.option_strings[:1]  # the other spelling is accepted, but not shown
            if field.name in _HIDDEN | _REASONS.keys() or action.option_strings[0] != f"--{field.name}":
                action.help = argparse.SUPPRESS
            if action.choices is None:
                kind: Any = action.type
                action.metavar = "True|False" if action.const is True else _METAVARS.get(kind, "VALUE")

    def parse_known_args(self, args=None, namespace=None):
        """Parses as the library does, but refuses flags that are unknown, have no effect or cannot work."""
        self._load_plugins(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse_unknown(unknown)
        for name, reason in _REASONS.items():
            if getattr(parsed, name) != self.get_default(name):
                self.error(f"--{name} {getattr(parsed, name)}: {reason}")
        return parsed, unknown

    def _load_plugins(self, words: list[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--plugin", nargs="+", action="extend", default=[])
        try:
            plugins.load(",".join(parser.parse_known_args(words)[0].plugin))
        except ValueError as error:
            self.error(str(error))

    def _refuse_unknown(self, words: list[str]) -> None:
        flag = next((word for word in words if word.startswith("--")), words[0])
        name = flag.partition("=")[0]
        known = [action.option_strings[0] for action in self._actions if action.help != argparse.SUPPRESS]
        meant = nearest_name(name, known)
        self.error(f"{name} is not a flag" + (f"; did you mean {meant}?" if meant else ""))
