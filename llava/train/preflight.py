"""Checks that fail in the first second instead of after an hour: flags, paths, and a sample of the images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.integrations import is_deepspeed_zero3_enabled

from llava.conversation import get_template
from llava.data.records import Record, record_images, record_name
from llava.train.liger import check_liger
from llava.train.lora import check_lora_flags
from llava.train.optim import tunable_parts

_IMAGES_CHECKED = 100


def check_flags(model_args: Any, data_args: Any, training_args: Any) -> None:
    """Raises ValueError or FileNotFoundError that names the flag at fault and what to do."""
    get_template(model_args.version)
    tunable_parts(model_args)
    check_lora_flags(model_args, training_args)
    if not data_args.data_path:
        raise ValueError("--data_path is missing: pass a LLaVA-format .json or .jsonl file")
    if data_args.image_folder and not Path(data_args.image_folder).is_dir():
        raise FileNotFoundError(f"--image_folder {data_args.image_folder}: no such folder")
    for flag in ("mm_use_im_start_end", "mm_use_im_patch_token"):
        if getattr(model_args, flag):
            raise ValueError(f"--{flag} must be False: no published recipe of today adds these tokens")
    if model_args.mm_projector_norm == "none" and model_args.mm_projector_norm_init not in ("text_norm", "default"):
        raise ValueError("--mm_projector_norm_init has no effect with --mm_projector_norm none; leave it out")
    check_kernels(training_args)
    if training_args.label_smoothing_factor:
        raise ValueError("--label_smoothing_factor: the loss over supervised rows has no smoothing; leave it out")
    for flag in ("length_group_window", "max_tokens_per_micro_batch"):
        value = getattr(training_args, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag}: expected a positive number, found {value}")
    if training_args.max_tokens_per_micro_batch and not training_args.padding_free:
        raise ValueError("--max_tokens_per_micro_batch needs --padding_free True")
    if training_args.length_group_window > 1 and not training_args.group_by_modality_length:
        raise ValueError("--length_group_window has no effect without --group_by_modality_length True")
    if training_args.model_max_length < 1:
        raise ValueError(f"--model_max_length: expected a positive number, found {training_args.model_max_length}")


def check_kernels(training_args: Any) -> None:
    """The part of `check_flags` about fused and compiled kernels."""
    if training_args.use_liger_kernel:
        check_liger("--use_liger_kernel True")
    if training_args.loss_head == "liger":
        check_liger("--loss_head liger")
    if training_args.torch_compile:
        raise ValueError("--torch_compile compiles the whole model, for every batch anew; use --compile_layers True")
    if training_args.compile_layers and training_args.use_liger_kernel:
        raise ValueError("--compile_layers and --use_liger_kernel both fuse the layers' kernels; pass one of them")
    if training_args.compile_layers and is_deepspeed_zero3_enabled():
        raise ValueError(
            "--compile_layers True: ZeRO-3 gathers weights module by module, which leaves nothing to compile; "
            "use deepspeed_configs/zero2.json or leave the flag out"
        )


def check_images(records: Sequence[Record], image_folder: str | None) -> None:
    """Opens nothing, but makes sure that evenly chosen records' images exist below `image_folder`.

    Raises:
        FileNotFoundError: names the first missing image's record and how many of the checked ones are missing.
    """
    step = max(1, len(records) // _IMAGES_CHECKED)
    checked = [(i, name) for i in range(0, len(records), step) for name in record_images(records[i])]
    missing = [(i, name) for i, name in checked if not Path(image_folder or "", name).is_file()]
    if missing:
        index, name = missing[0]
        raise FileNotFoundError(
            f"{record_name(records[index], index)}: image {Path(image_folder or '', name)} does not exist "
            f"({len(missing)} of {len(checked)} checked images are missing); check --image_folder {image_folder}"
        )
