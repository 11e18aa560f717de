"""The trainer's flags: the fields of LLaVA's three dataclasses, read by `HfArgumentParser`.

Names and meanings are LLaVA's where LLaVA has the flag; the norm's flags stand with the norm, the Hugging Face
Trainer's own in `transformers.TrainingArguments`. `WITHOUT_EFFECT` and `CHANGEABLE` say what each means for a run that
is continued.
"""

import argparse
import dataclasses
from dataclasses import MISSING, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers import HfArgumentParser
from transformers.integrations import is_tensorboard_available

from llava.anyres import check_grids_given, check_modes
from llava.model.multimodal_projector.builder import find_projector
from llava.model.multimodal_projector.norm import ProjectorNormArguments
from llava.utils import plugins
from llava.utils.commands import Parser, program_name
from llava.utils.paths import shipped

WITHOUT_EFFECT = (
    # This tree's; of the data the records' digest decides, not their path.
    "plugin data_path image_folder eval_data_path eval_image_folder on_bad_record data_cache_dir "
    "lazy_preprocess is_multimodal activation_checkpointing "
    "gradient_checkpointing hang_timeout cache_dir telemetry_steps profile_steps "
    "evaluation_strategy "
    # The library's.
    "output_dir resume_from_checkpoint per_device_eval_batch_size logging_* log_* save_* eval_* "
    "hub_* push_to_hub trackio_* ddp_timeout ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers "
    "ddp_find_unused_parameters dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order run_name local_rank project "
    "report_to deepspeed_plugin disable_tqdm gradient_checkpointing_kwargs do_train do_eval do_predict "
    "skip_memory_metrics include_num_input_tokens_seen use_cache batch_eval_metrics torch_empty_cache_steps "
    "enable_jit_checkpoint restore_callback_states_from_checkpoint debug use_cpu"
)
"""Flags that cannot change the numbers of a run, so that a continuation may have other values; * ends a prefix."""

CHANGEABLE = (
    # Rounding alone.
    "attn_implementation use_liger_kernel padding_free max_tokens_per_micro_batch compile_layers tf32 "
    # A moved folder; the checkpoint's own projector is loaded over the adapter.
    "model_name_or_path vision_tower pretrain_mm_mlp_adapter "
    # The number of ranks, with the same global batch.
    "world_size per_device_train_batch_size gradient_accumulation_steps"
)
"""Flags that decide numbers, in which a continuation may differ all the same: it says so."""

REFUSED = (
    "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object prediction_loss_only include_for_metrics "
    "batch_eval_metrics bf16_full_eval fp16_full_eval do_predict do_eval label_names push_to_hub hub_token "
    "hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision torch_compile torch_compile_backend "
    "torch_compile_mode fsdp fsdp_config parallelism_config auto_find_batch_size length_column_name "
    "activation_checkpointing_kwargs gradient_checkpointing_kwargs label_smoothing_factor liger_kernel_config "
    "enable_jit_checkpoint use_cache neftune_noise_alpha accelerator_config dataloader_in_order "
    "dataloader_multiprocessing_context load_best_model_at_end metric_for_best_model greater_is_better"
)
"""The library's flags that this trainer does not take."""


def decides_numbers(name: str) -> bool:
    """Whether a flag of the trainer, this tree's or the library's, can change the numbers of a run."""
    return not any(fnmatchcase(name, pattern) for pattern in WITHOUT_EFFECT.split())


def flag(default: Any, help: str = "", **parsing: Any) -> Any:
    """The field of a flag; `parsing` are further arguments of `ArgumentParser.add_argument`."""
    return dataclasses.field(default=default, kw_only=default is MISSING, metadata={"help": help} | parsing)


@dataclass
class ModelArguments(ProjectorNormArguments):
    """What is trained: language model, vision tower, projector, norm."""

    model_name_or_path: str = flag(
        MISSING, "Language model (families: docs/models.md) or LLaVA checkpoint of this tree: folder or hub id."
    )
    plugin: list[str] = dataclasses.field(
        default_factory=list,
        metadata={
            "help": "Python files with your own norm, projector, tower or decoder (docs/models.md), joined by commas.",
            "action": "extend",
        },
    )
    version: str = flag("v1", "Conversation template: plain, v1, qwen_1_5, ... (llava.conversation.conv_templates).")
    attn_implementation: str | None = flag(
        None, "Attention: sdpa, eager, flash_attention_2, ...; default: the fastest."
    )
    freeze_backbone: bool = flag(False, "Freeze the language model.")
    tune_mm_mlp_adapter: bool = flag(False, "Train only the projector and its norm (stage 1).")
    freeze_mm_mlp_adapter: bool = flag(False, "Freeze the projector and its norm.")
    unfreeze_mm_vision_tower: bool = flag(False, "Train the vision tower too.")
    mm_tunable_parts: str | None = flag(
        None,
        "What is trained, in place of these four flags: mm_vision_tower, mm_mlp_adapter, mm_language_model, by commas.",
    )
    vision_tower: str | None = flag(None, "Vision encoder (kinds: docs/models.md): local folder or hub id.")
    mm_vision_select_layer: int = flag(-2, "Hidden state of the tower that is taken; -2: the last layer's input.")
    mm_vision_select_feature: Literal["patch", "cls_patch"] = flag("patch", "The patches, or also the class token.")
    pretrain_mm_mlp_adapter: str | None = flag(None, "mm_projector.bin of stage 1, or its folder, to start from.")
    mm_projector_type: str = flag(
        "mlp2x_gelu",
        "linear, identity, mlp<N>x_gelu, pixel_shuffle_2x_mlp2x_gelu (2 x 2 patches to a token), "
        "pre_layernorm_mlp2x_gelu (normalizes the tower's output first).",
    )
    mm_patch_merge_type: str = flag(
        "flat",
        "An image's crops: flat (one after another) or spatial_unpad (rows of the grid without padding, each with a "
        "learned image_newline).",
    )
    mm_use_im_start_end: bool = flag(False, "Accepted for LLaVA's scripts; must be False.")
    mm_use_im_patch_token: bool = flag(False, "Accepted for LLaVA's scripts; must be False.")

    def __post_init__(self) -> None:
        super().__post_init__()
        find_projector(self.mm_projector_type)


@dataclass
class DataArguments:
    """What is read and how it becomes samples."""

    data_path: str | None = flag(
        None,
        "Records: .json, .jsonl or .parquet files, joined by commas, a pattern, a folder, or a .yaml that mixes data "
        "sets (docs/data.md).",
    )
    image_folder: str | None = flag(None, "Folder or zip file that the records' image paths start from.")
    eval_data_path: str | None = flag(None, "Held-out records, as --data_path; needs --eval_strategy. Logs eval/loss.")
    eval_image_folder: str | None = flag(None, "The same for the held-out records; default --image_folder.")
    on_bad_record: Literal["error", "skip"] = flag(
        "error",
        "Unusable records, found before the first step: error refuses to train; skip leaves them out and lists them in "
        "quarantine.jsonl. A picture found damaged later ends the run (error), or its sample is not learnt (skip).",
    )
    data_cache_dir: str | None = flag(
        None,
        "Where converted records, checks and lengths are kept; default .llava_cache beside the data, or else "
        "~/.cache/llava/data.",
    )
    image_aspect_ratio: str = flag(
        "square",
        "square: resize to the tower's size (CLIP: resize and crop); pad: pad to a square first; anyres: the whole "
        "image and the crops of a grid that fits it; anyres_max_N: with at most about N crops' tokens.",
    )
    image_grid_pinpoints: str | None = flag(
        None, "With anyres: the grids to choose from, in pixels, [[336,672],[672,336]], or in crops, (1x1),...,(6x6)."
    )
    label_masking: Literal["assistant", "upstream"] = flag(
        "assistant", "Targets: what the assistant says with its end token, or exactly those of LLaVA and LLaVA-NeXT."
    )
    lazy_preprocess: bool = flag(True, "Accepted for LLaVA's scripts; samples are always prepared when needed.")
    is_multimodal: bool = flag(True, "Accepted for LLaVA's scripts; records with and without images always mix.")

    def __post_init__(self) -> None:
        check_modes(self.image_aspect_ratio)
        check_grids_given(self.image_aspect_ratio, self.image_grid_pinpoints)


@dataclass
# pyrefly: ignore[inconsistent-inheritance]  # some flags take fewer values than the library's
class TrainingArguments(transformers.TrainingArguments):
    """The Hugging Face Trainer's flags and LLaVA's additions."""

    if TYPE_CHECKING:
        output_dir: str = ""  # the library has a default in place of None

    # --- steps, rates, order of the samples, loss ---
    lr_scheduler_type: str = flag("cosine", "Learning-rate schedule.")
    warmup_ratio: float = flag(0.0, "Fraction of all steps over which the learning rate rises; needs --warmup_steps 0.")
    mm_projector_lr: float | None = flag(None, "Learning rate of projector and norm; default --learning_rate.")
    mm_vision_tower_lr: float | None = flag(None, "Learning rate of the vision tower; default --learning_rate.")
    model_max_length: int = flag(2048, "Maximum tokens of a sample, with those of its images; longer ones are cut.")
    group_by_modality_length: bool = flag(False, "Global batches of one modality and similar length.")
    length_group_window: int = flag(
        1,
        "With --group_by_modality_length: pair long and short samples over this many global batches; 1: as LLaVA.",
    )
    loss_reduction: Literal["token_mean", "micro_batch_mean"] = flag(
        "token_mean",
        "Mean over the targets of the whole step, or of the means of micro-batches, as LLaVA with accumulation.",
    )

    # --- LoRA ---
    lora_enable: bool = flag(False, "LoRA on the language model's linear layers; projector and norm train fully.")
    lora_r: int = flag(64, "Rank of the LoRA adapters.")
    lora_alpha: int = flag(16, "The adapters are scaled by --lora_alpha / --lora_r.")
    lora_dropout: float = flag(0.05, "Dropout before the adapters.")
    lora_weight_path: str = flag("", "Accepted for LLaVA's scripts, which never read it; must stay empty.")
    bits: Literal[4, 8, 16] = flag(16, "Bits of the language model under LoRA: 4 or 8 is QLoRA (bitsandbytes).")

    # --- micro-batches, kernels, recomputation, and what a rank waits for ---
    activation_checkpointing: str | None = flag(
        None,
        "Recompute activations: auto (default; as few decoder layers as the memory estimate needs), True, False, or a "
        "number of decoder layers.",
        nargs="?",
        const="True",
    )
    gradient_checkpointing: bool | None = flag(  # older releases of the library have False here, as if it were given
        None, "The older name of --activation_checkpointing.", nargs="?", const=True
    )
    use_liger_kernel: str = flag(
        "False",
        "Liger's fused kernels in the language model (NVIDIA GPUs, package liger-kernel): True, False, or auto (where "
        "they can run).",
        nargs="?",
        const="True",
    )
    remove_unused_columns: bool = flag(False, "Must stay False: the collator names its fields.")
    padding_free: bool = flag(
        True,
        "Micro-batches as one row without padding, of even length; False pads them and assigns samples to ranks as "
        "LLaVA does. Loss and gradients are the same.",
    )
    max_tokens_per_micro_batch: str | None = flag(
        None,
        "With --padding_free: compute a step's samples in as few micro-batches of so many tokens as possible, in place "
        "of --gradient_accumulation_steps. auto, with --deepspeed auto: by the memory estimate. On a CPU 2048.",
    )
    hang_timeout: float = flag(
        1800.0, "Seconds without progress after which a rank says so and ends the run; 0: never."
    )
    compile_layers: str = flag(
        "auto",
        "Run the vision tower's layers compiled by torch.compile: True, False, or auto (on a GPU, where they can be "
        "compiled). Not with ZeRO-3.",
        nargs="?",
        const="True",
    )

    # --- the output folder ---
    save_strategy: Literal["no", "steps", "epoch"] = flag("steps", "Checkpoints every --save_steps, or every epoch.")
    cache_dir: str | None = flag(None, "Where downloads from the hub are kept.")

    # --- held-out data and what is logged ---
    evaluation_strategy: Literal["no"] = flag("no", "Accepted for LLaVA's scripts, which pass no.")
    telemetry_steps: int | None = flag(
        None, "Steps between measurements of gradient norms and token norms; default --logging_steps, 0: never."
    )
    profile_steps: str | None = flag(None, "FIRST:LAST, steps to profile on rank 0: a trace and a table of kernels.")

    def __post_init__(self):
        if self.warmup_ratio:
            if self.warmup_steps:
                raise ValueError("--warmup_ratio and --warmup_steps: pass one of them; WARMUP_RATIO= drops a script's")
            if not 0 <= self.warmup_ratio < 1:
                raise ValueError(f"--warmup_ratio {self.warmup_ratio}: must be in [0, 1)")
            self.warmup_steps = self.warmup_ratio
        if not torch.accelerator.is_available() and not self.deepspeed:
            self.use_cpu = True
        if isinstance(self.deepspeed, str) and self.deepspeed.endswith(".json"):
            self.deepspeed = shipped(self.deepspeed)
            if not Path(self.deepspeed).is_file():
                raise ValueError(f"--deepspeed {self.deepspeed}: no such file; the recipes' are in deepspeed_configs/")
        if self.report_to in ("auto", ["auto"]):
            self.report_to = "tensorboard" if is_tensorboard_available() else "none"
        if self.remove_unused_columns:
            raise ValueError("--remove_unused_columns must be False: it would drop the images")
        older, newer = self.gradient_checkpointing, self.activation_checkpointing
        if None not in (older, newer) and str(older) != str(newer):
            raise ValueError(
                f"--activation_checkpointing {newer} contradicts --gradient_checkpointing {older}; pass one"
            )
        newer = "auto" if older is newer is None else older if newer is None else newer
        # From here on these hold a choice; as fields they hold the text from which the parser makes flags.
        choices: dict[str, Any] = {"activation_checkpointing": choice("activation_checkpointing", newer, counts=True)}
        choices |= {name: choice(name, getattr(self, name)) for name in ("use_liger_kernel", "compile_layers")}
        if (cap := self.max_tokens_per_micro_batch) not in (None, "auto"):
            choices["max_tokens_per_micro_batch"] = int(cap)
        vars(self).update(choices)
        if self.profile_steps is not None:
            steps_to_profile(self.profile_steps)
        self.gradient_checkpointing = None  # the library sets it from the newer name
        # The rank that hangs shall be named before the others' collectives give up.
        self.ddp_timeout = max(self.ddp_timeout, int(self.hang_timeout or 10**6) + 600)  # 0: never
        super().__post_init__()


def choice(flag: str, value: Any, counts: bool = False) -> bool | int | str:
    """The value of `--<flag>` as True, False, `auto` or, with `counts`, a number; ValueError if it is none of these."""
    text = str(value).lower()
    if counts and text.isdecimal():
        return int(text) or False
    choices: dict[str, bool | str] = {"auto": "auto", "true": True, "1": True, "false": False, "0": False}
    if text not in choices:
        expected = "auto, a number of decoder layers" if counts else "auto"
        raise ValueError(f"--{flag}: expected {expected}, True or False; found {value!r}")
    return choices[text]


def steps_to_profile(text: str) -> range:
    """The steps that `--profile_steps` names."""
    first, colon, last = text.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        return range(int(first), int(last) + 1)
    raise ValueError(f"--profile_steps: expected FIRST:LAST with 1 <= FIRST <= LAST, such as 5:8; found {text!r}")


# --- the command line -------------------------------------------------------------------------------------------------


class FlagParser(Parser, HfArgumentParser):
    """The parser of all flags, whose errors are one line."""

    def __init__(self) -> None:
        super().__init__(
            (ModelArguments, DataArguments, TrainingArguments),
            prog=program_name("llava.train.train"),
            usage="%(prog)s --FLAG VALUE ...",
            description="Trains a LLaVA, stage 1 or 2. A switch --x alone means True; hyphens stand for underscores.",
            allow_abbrev=False,
        )


def read_flags(argv: list[str], **defaults: Any) -> argparse.Namespace:
    """The flags as text and numbers; ends the process with one line if a flag is unknown or not taken.

    Plug-ins are loaded first, so that flags may name their parts. `defaults` stand for flags that `argv` leaves out.
    """
    parser = FlagParser()
    parser.set_defaults(**defaults)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--plugin", nargs="+", action="extend", default=[])
    try:
        plugins.load(",".join(early.parse_known_args(argv)[0].plugin))
    except ValueError as error:
        parser.error(str(error))
    flags = parser.parse_args(argv)
    for name in REFUSED.split():
        if hasattr(flags, name) and getattr(flags, name) != parser.get_default(name):
            parser.error(f"--{name} {getattr(flags, name)}: this trainer does not take the flag; leave it out")
    return flags


def parse_flags(argv: list[str], **defaults: Any) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The command line as three dataclasses; ValueError if flags contradict each other. See `read_flags`."""
    parsed: Any = FlagParser().parse_dict(vars(read_flags(argv, **defaults)))
    return parsed
