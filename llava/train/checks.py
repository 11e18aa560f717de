"""Checks that fail before the first step instead of after an hour: flags, paths, and every record with its images."""

import logging
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from llava.anyres import check_modes
from llava.conversation import get_template
from llava.data.errors import named_by
from llava.data.images import ImageStore
from llava.data.preflight import Rules, preflight, usable_records, write_quarantine
from llava.data.records import RecordTable, load_records, source_lines
from llava.data.turns import check_label_masking
from llava.model.builder import quantization_config
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.heldout import eval_data_arguments
from llava.train.kernels import check_kernels
from llava.train.optim import LANGUAGE_MODEL, tunable_parts
from llava.train.zero import check_zero

logger = logging.getLogger(__name__)

QUARANTINE = "quarantine.jsonl"
EVAL_IMAGES = "--eval_image_folder"
# Flags that the preflight takes too.
_PREFLIGHT = ("data_path", "image_folder", "data_cache_dir", "label_masking")
_POSITIVE = (
    "length_group_window", "max_tokens_per_micro_batch", "model_max_length", "lora_r", "lora_alpha",
    "per_device_eval_batch_size",
)  # fmt: skip


def check_flags(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments) -> None:
    """Raises ValueError or ImportError if a flag is wrong; the message names the flag and says what to do."""
    check_label_masking(data_args.label_masking, get_template(model_args.version))
    check_modes(data_args.image_aspect_ratio, model_args.mm_patch_merge_type)
    if training_args.bits < 16:
        quantization_config(training_args.bits)  # raises now if bitsandbytes is missing
    for fault in _faults(model_args, data_args, training_args):
        raise ValueError(fault)
    check_kernels(training_args)
    check_zero(training_args)


def _faults(model_args: ModelArguments, data_args: DataArguments, args: TrainingArguments) -> Iterator[str]:
    if not data_args.data_path:
        yield "--data_path is missing: pass .json, .jsonl or .parquet files, or a .yaml that mixes them"
    for flag in ("mm_use_im_start_end", "mm_use_im_patch_token"):
        if getattr(model_args, flag):
            yield f"--{flag} must be False: no current recipe adds these tokens"
    if model_args.mm_projector_norm == "none" and model_args.mm_projector_norm_init not in ("text_norm", "default"):
        yield "--mm_projector_norm_init has no effect with --mm_projector_norm none; leave it out"

    if (cap := args.max_tokens_per_micro_batch) == "auto":
        yield "--max_tokens_per_micro_batch auto needs --deepspeed auto; set both, or give a number"
    for flag in _POSITIVE:
        if (value := getattr(args, flag)) is not None and value < 1:
            yield f"--{flag}: expected a positive number, found {value}"
    if cap and not args.padding_free:
        yield "--max_tokens_per_micro_batch needs --padding_free True"
    if cap and args.loss_reduction == "micro_batch_mean":
        yield "--max_tokens_per_micro_batch does not go with --loss_reduction micro_batch_mean; leave one of them out"
    if args.length_group_window > 1 and not args.group_by_modality_length:
        yield "--length_group_window has no effect without --group_by_modality_length True"
    if args.train_sampling_strategy not in ("random", "sequential"):  # by length: --group_by_modality_length
        yield f"--train_sampling_strategy {args.train_sampling_strategy}: expected random or sequential"
    if args.train_sampling_strategy == "sequential" and args.group_by_modality_length:
        yield "--train_sampling_strategy sequential does not go with --group_by_modality_length True; choose one"

    if not data_args.eval_data_path:
        passed = ["eval_strategy"] * (args.eval_strategy != "no")
        passed += [flag for flag in ("eval_steps", "eval_on_start") if getattr(args, flag)]
        for flag in passed + ["eval_image_folder"] * bool(data_args.eval_image_folder):
            yield f"--{flag} needs held-out records; name them with --eval_data_path"
    elif args.eval_strategy == "no" and not args.eval_on_start:
        path = data_args.eval_data_path
        yield f"--eval_data_path {path}: nothing says when it is read; pass --eval_strategy, or --eval_on_start True"
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        schedule = SchedulerType(args.lr_scheduler_type).value
        yield f"--lr_scheduler_type {schedule} would let held-out data decide the learning rate; take cosine"
    if args.optim.startswith("schedule_free"):
        name = OptimizerNames(args.optim).value
        yield f"--optim {name}: its averaged weights, which it is meant to give, would not be saved; take adamw_torch"
    if args.lr_scheduler_type == "constant" and args.warmup_steps:
        yield "--lr_scheduler_type constant has no warm-up; take constant_with_warmup, or WARMUP_RATIO="

    parts, lora = tunable_parts(model_args), ("lora_r", "lora_alpha", "lora_dropout", "bits")
    changed = [f"--{flag}" for flag in lora if getattr(args, flag) != getattr(TrainingArguments, flag)]
    if args.lora_weight_path:
        yield "--lora_weight_path: LLaVA never reads it; merge that LoRA (python -m llava.model.merge_lora) instead"
    if changed and not args.lora_enable:
        yield f"{', '.join(changed)}: only with --lora_enable True"
    if args.lora_enable and LANGUAGE_MODEL not in parts:
        yield (
            "--lora_enable trains the language model, which other flags leave out: drop --tune_mm_mlp_adapter and "
            "--freeze_backbone (LoRA freezes the weights), or name mm_language_model in --mm_tunable_parts"
        )
    if args.bits < 16 and is_deepspeed_zero3_enabled():
        yield f"--bits {args.bits}: ZeRO-3 cannot partition quantised weights; use deepspeed_configs/zero2.json"


# --- records ----------------------------------------------------------------------------------------------------------


def image_store(data_args: DataArguments, records: RecordTable, setting: str = "--image_folder") -> ImageStore:
    """The store of the records' images, by the flags and a mixture's entries; messages call its folder `setting`."""
    return ImageStore(data_args.image_folder, data_args.data_cache_dir, records.image_folders, setting)


def checked_records(
    version: str,
    data_args: DataArguments,
    training_args: TrainingArguments,
    data_from: str = "--data_path",
    images_from: str = "--image_folder",
) -> tuple[RecordTable, Callable[[Path], None]]:
    """The records that can be used, the same on every rank, and a function that writes those left out to a file.

    Messages name the flags `data_from` and `images_from`. Raises ValueError if records have faults and are not to be
    skipped, or ranks read different data.
    """
    seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
    options = {name: getattr(data_args, name) for name in _PREFLIGHT} | {"version": version, "seed": seed}
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    command = shlex.join(["python", "-m", "llava.data.preflight", *words])
    with named_by(data_from):
        is_first = training_args.process_index == 0
        table = load_records(data_args.data_path or "", data_args.data_cache_dir, False, is_first, seed)
    rules = Rules(get_template(version), data_args.label_masking)
    manifest, path = preflight(table, image_store(data_args, table, images_from), rules)
    with named_by(data_from):
        records = usable_records(table, manifest, data_args.on_bad_record, command, path)
    keys = gather_object([records.key])  # other nodes may read copies of the data with other faults
    if other := [rank for rank, key in enumerate(keys) if key != keys[0]]:
        raise ValueError(
            f"{data_from}: ranks {other} have other usable records than rank 0; data and images must be the same on "
            "every node (compare the manifests in .llava_cache)"
        )
    if records.left_out:
        logger.warning("%s: %d records are left out; %s --list shows them", data_from, records.left_out, command)
    for line in source_lines(records):
        logger.info("%s", line)
    if manifest.warnings:
        logger.info("warnings: %s (docs/data.md); %s --list shows them", manifest.kinds(manifest.warnings), command)
    return records, partial(write_quarantine, table, manifest)


def checked_eval_records(
    version: str, data_args: DataArguments, training_args: TrainingArguments, records: RecordTable
) -> RecordTable | None:
    """As `checked_records`, for the held-out records; None if none are named.

    Those that are also among the training's `records` are counted in a warning.
    """
    if not data_args.eval_data_path:
        return None
    held_out, _ = checked_records(
        version, eval_data_arguments(data_args), training_args, "--eval_data_path", EVAL_IMAGES
    )
    own, trained = held_out.places(), records.places()
    shared = {file: len(np.intersect1d(own[file], trained[file])) for file in sorted(own.keys() & trained.keys())}
    if total := sum(shared.values()):
        named = ", ".join(f"{count:,} of {file}" for file, count in shared.items() if count)
        logger.warning(
            "--eval_data_path: %s of %s records are also training records (%s), so their loss is not held out; "
            "choose others", f"{total:,}", f"{sum(map(len, own.values())):,}", named,
        )  # fmt: skip
    return held_out
