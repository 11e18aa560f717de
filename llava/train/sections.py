"""The flags of this tree by section: type, default, help, and whether a flag decides a run's numbers.

`llava.train.arguments` joins the sections into LLaVA's three dataclasses. Nothing but Python is needed here, so the
launcher and the shell scripts know the same flags before anything is installed. A section's `title` heads its flags in
the help; `library` names the Hugging Face Trainer's flags that are shown with them, where a name that ends in * means
all that begin with it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from llava.constants import LossHead

ROUNDING = "changes rounding only"


def flag(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    identity: bool = True,
    changeable: str = "",
    hidden: bool = False,
    **parsing: Any,
) -> Any:
    """The field of a flag, with all that the rest of this tree knows about it.

    Args:
        default: value where the flag is not given; without one the flag is required.
        help: what `--help` and docs/flags.md say.
        identity: whether the flag can change the numbers of a run, so that a continuation must share its value.
        changeable: why `--resume_allow_changes` may name the flag all the same; empty: it may not.
        hidden: accepted for LLaVA's scripts, but not shown.
        parsing: further arguments of `ArgumentParser.add_argument`.
    """
    facts = {"identity": identity, "changeable": changeable, "hidden": hidden}
    given: dict[str, Any] = {"default": default}
    if isinstance(default, list):
        given = {"default_factory": default.copy}
    return dataclasses.field(
        **given,
        kw_only=default is dataclasses.MISSING,
        metadata={"help": help, "facts": facts} | parsing,
    )


@dataclass
class ModelFlags:
    """What is trained: language model, vision tower, projector."""

    title = "model"

    model_name_or_path: str = flag(
        help="Language model (families: docs/models.md) or LLaVA checkpoint of this tree: folder or hub id.",
        changeable="for a moved folder: what is frozen comes from there",
    )
    plugin: list[str] = flag(
        [],
        "Python files that register your own norm, projector, tower, decoder or optimizer (docs/models.md), joined by "
        "commas; they are executed before the other flags are parsed. May be given several times.",
        identity=False,
        action="extend",
    )
    version: str = flag(
        "v1", "Conversation template, a key of llava.conversation.conv_templates (plain, v1, qwen_1_5, ...)."
    )
    attn_implementation: str | None = flag(
        None,
        "Attention of the language model: sdpa, eager, flash_attention_2, ... (default: the fastest)",
        changeable=ROUNDING,
    )
    freeze_backbone: bool = flag(False, "Freeze the language model.")
    tune_mm_mlp_adapter: bool = flag(False, "Train only the projector and its norm (stage 1).")
    freeze_mm_mlp_adapter: bool = flag(False, "Freeze the projector and its norm.")
    unfreeze_mm_vision_tower: bool = flag(False, "Train the vision tower too.")
    mm_tunable_parts: str | None = flag(
        None,
        "Exactly what is trained, comma-separated: mm_vision_tower, mm_mlp_adapter, mm_language_model. Replaces the "
        "four flags above.",
    )
    vision_tower: str | None = flag(
        None,
        "Vision encoder (kinds: docs/models.md): local folder or hub id.",
        changeable="for a moved folder: what is frozen comes from there",
    )
    mm_vision_select_layer: int = flag(
        -2, "Hidden state of the tower that becomes visual tokens; -2 is the last layer's input."
    )
    mm_vision_select_feature: Literal["patch", "cls_patch"] = flag(
        "patch", "Visual tokens: the patches, or the patches and the tower's class token, if it has one."
    )
    pretrain_mm_mlp_adapter: str | None = flag(
        None,
        "mm_projector.bin of stage 1 (or its folder): projector and norm start from it.",
        changeable="the checkpoint's own projector is loaded over it",
    )
    mm_projector_type: str = flag(
        "mlp2x_gelu",
        "Projector: linear, mlp2x_gelu, mlp<N>x_gelu or identity; pixel_shuffle_2x_mlp2x_gelu joins the channels of "
        "2 x 2 patches to one token; pre_layernorm_mlp2x_gelu normalizes the tower's output first.",
    )
    mm_patch_merge_type: str = flag(
        "flat",
        "Layout of the visual tokens of an image's crops: flat (one crop after another), spatial (the whole image, "
        "then the rows of the grid), spatial_unpad (the same without padding and with a learned image_newline at each "
        "row's end).",
    )
    mm_newline_init: Literal["default", "text_norm"] = flag(
        "default",
        "Initial L2 norm of a new image_newline: default (LLaVA-NeXT's, near 1) or text_norm (mean norm of the text "
        "embeddings, measured). The projector's norm does not touch it.",
    )
    mm_use_im_start_end: bool = flag(
        False, "Markers around images; must be False (no current recipe uses them).", hidden=True
    )
    mm_use_im_patch_token: bool = flag(False, "Patch token of LLaVA v0; must be False.", hidden=True)


@dataclass
class DataFlags:
    """What is read and how it becomes samples."""

    title = "data"

    data_path: str | None = flag(
        None,
        "Records in LLaVA's form or chat messages: a .json, .jsonl or .parquet file, several separated by commas, a "
        "pattern, or a folder of either kind; or a .yaml that mixes such data sets (docs/data.md).",
        identity=False,  # the records' digest decides
    )
    image_folder: str | None = flag(
        None,
        "Folder or zip file that the records' image paths start from; not needed for Parquet rows that hold their "
        "images. In a mixture it applies to data sets that name no folder.",
        identity=False,
    )
    eval_data_path: str | None = flag(
        None,
        "Held-out records, in the forms that --data_path takes; needs --eval_strategy. Their loss is logged as "
        "eval/loss, and by modality as eval/loss_text and eval/loss_image.",
        identity=False,
    )
    eval_image_folder: str | None = flag(
        None, "Where the held-out records' image paths start from; default --image_folder.", identity=False
    )
    on_bad_record: Literal["error", "skip"] = flag(
        "error",
        "What to do with unusable records, which are detected before the first step: error refuses to train; skip "
        "leaves them out and writes them to quarantine.jsonl in --output_dir. Nothing replaces them.",
        identity=False,
    )
    data_cache_dir: str | None = flag(
        None,
        "Where converted records, results of checks and measured lengths are kept; default .llava_cache beside the "
        "data, or ~/.cache/llava/data if that is not writable.",
        identity=False,
    )
    image_aspect_ratio: str = flag(
        "square",
        "square: resize to the tower's size (CLIP: its own resize and crop); pad: pad to a square first; anyres: the "
        "whole image and the crops of a grid that fits it; anyres_max_N: the same, with the grid shrunk to about N "
        "crops' tokens (with spatial_unpad).",
    )
    image_orientation: Literal["stored", "exif"] = flag(
        "stored",
        "stored: images as their files store them, as LLaVA reads them; exif: rotated upright by their EXIF "
        "orientation. Written to the checkpoint, so that inference does the same.",
    )
    image_grid_pinpoints: str | None = flag(
        None,
        "With anyres: the grids to choose from, in pixels, [[336,672],[672,336]], or in crops, (1x1),...,(6x6).",
    )
    label_masking: Literal["assistant", "upstream"] = flag(
        "assistant",
        "Targets: assistant, what the assistant says with its end token; or upstream, exactly the labels of LLaVA and "
        "LLaVA-NeXT (for comparisons).",
    )
    lazy_preprocess: bool = flag(
        True,
        "Accepted for LLaVA's scripts; samples are always prepared when they are needed.",
        identity=False,
        hidden=True,
    )
    is_multimodal: bool = flag(
        True,
        "Accepted for LLaVA's scripts; records with and without images always mix.",
        identity=False,
        hidden=True,
    )


@dataclass
class OptimisationFlags:
    """Steps, rates, order of the samples, loss."""

    title = "optimisation"
    library = (
        "num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps learning_rate "
        "lr_scheduler_kwargs warmup_steps optim_* weight_decay adam_* max_grad_norm seed data_seed"
    )

    optim: str = flag(
        "adamw_torch_fused",
        "Optimizer, as the Hugging Face Trainer names it. If DeepSpeed keeps the states in CPU memory, it uses its "
        "own CPU Adam instead.",
    )
    lr_scheduler_type: str = flag("cosine", "Learning-rate schedule.")
    warmup_ratio: float = flag(0.0, "Fraction of all steps over which the learning rate rises; needs --warmup_steps 0.")
    mm_projector_lr: float | None = flag(None, "Learning rate of projector and norm; default --learning_rate.")
    mm_vision_tower_lr: float | None = flag(None, "Learning rate of the vision tower; default --learning_rate.")
    model_max_length: int = flag(
        2048, "Maximum sample length in tokens, counted after images are expanded; longer samples are cut."
    )
    train_sampling_strategy: Literal["random", "sequential"] = flag(
        "random", "Order of the samples without --group_by_modality_length."
    )
    group_by_modality_length: bool = flag(False, "Global batches of one modality and similar length.")
    length_group_window: int = flag(
        1,
        "With --group_by_modality_length: pair the samples of this many global batches, the longest with the shortest, "
        "and put pairs of similar length in one batch. 1 (LLaVA) keeps every global batch a random sample of its "
        "modality; larger values keep ranks with few samples equally busy.",
    )
    loss_head: LossHead = flag(
        "auto",
        "Loss over the supervised rows: chunked (some rows of logits at a time), plain (all logits), liger (Liger's "
        "fused kernel, NVIDIA GPUs), auto (chunked).",
        changeable=ROUNDING,
    )
    loss_reduction: Literal["token_mean", "micro_batch_mean"] = flag(
        "token_mean",
        "token_mean: mean over the targets of the whole step; micro_batch_mean: mean of the micro-batches' means, as "
        "upstream with gradient accumulation, over upstream's micro-batches. Not with --max_tokens_per_micro_batch.",
    )
    max_nonfinite_steps: int = flag(
        10,
        "Stop after this many consecutive steps whose loss or gradient is infinite or not a number. Such steps are "
        "skipped.",
        identity=False,
    )


@dataclass
class LoraFlags:
    """Adapters in the language model and the tower."""

    title = "LoRA"

    lora_enable: bool = flag(
        False, "Train --lora_modules by LoRA on their linear layers; projector and norm are trained fully."
    )
    lora_modules: str = flag(
        "decoder",
        "What gets adapters: decoder, tower, or both with a comma. The tower's adapters learn with "
        "--mm_vision_tower_lr. Parts named here are trained by LoRA alone.",
    )
    lora_use_dora: bool = flag(
        False, "DoRA: adapters learn direction and magnitude of the weights separately (PEFT's use_dora)."
    )
    lora_r: int = flag(64, "Rank of the LoRA adapters.")
    lora_alpha: int = flag(16, "The adapters are scaled by --lora_alpha / --lora_r.")
    lora_dropout: float = flag(0.05, "Dropout before the adapters.")
    lora_bias: Literal["none", "all", "lora_only"] = flag(
        "none", "The language model's biases that are trained: none, all, or those of adapted layers."
    )
    lora_weight_path: str = flag("", "Must stay empty: LLaVA has this flag but never reads it.", hidden=True)
    bits: Literal[4, 8, 16] = flag(
        16, "Bits of the frozen language model under LoRA: 4 or 8 (QLoRA; needs bitsandbytes), 16 (as it is)."
    )
    double_quant: bool = flag(True, "With --bits 4: quantise the quantisation constants too.")
    quant_type: Literal["fp4", "nf4"] = flag("nf4", "With --bits 4: the data type.")


@dataclass
class SpeedFlags:
    """Micro-batches, kernels, recomputation, and what a rank waits for."""

    title = "speed and memory"
    library = "bf16 fp16 tf32 deepspeed use_cpu dataloader_* torch_empty_cache_steps ddp_timeout"

    activation_checkpointing: str | None = flag(
        None,
        "Recompute activations instead of keeping them: auto (default; as few decoder layers as the memory estimate "
        "needs, none if everything fits), True (every layer), False, or a number (that many decoder layers, from the "
        "first). --gradient_checkpointing True or False, as LLaVA's scripts pass it, means the same.",
        identity=False,
        nargs="?",
        const="True",
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = flag(  # releases of the library before 5.23 lack it
        None,
        "How activations are recomputed, as JSON: use_reentrant and the other arguments of PyTorch's checkpoint; "
        "every_n_layers recomputes every n-th layer only; offload keeps what is saved in host memory.",
        identity=False,
    )
    gradient_checkpointing: bool | None = flag(  # older releases of the library have False here, as if it were given
        None,
        "The older name of --activation_checkpointing.",
        identity=False,
        hidden=True,
        nargs="?",
        const=True,
    )
    use_liger_kernel: str = flag(
        "False",
        "Run the language model's norms, MLPs and rotary embedding, and a tower's norms and gated MLPs unless it is "
        "compiled, on Liger's fused kernels (NVIDIA GPUs, package liger-kernel): True, False, or auto (where they can "
        "run; the log says which and why). For the loss see --loss_head.",
        changeable=ROUNDING,
        nargs="?",
        const="True",
    )
    dataloader_num_workers: int = flag(0, "Processes that prepare samples, per rank.", identity=False)
    remove_unused_columns: bool = flag(False, "Must stay False: the collator names its fields.", hidden=True)
    padding_free: bool = flag(
        True,
        "Run a micro-batch as one row without padding, with micro-batches of even length; False pads them and assigns "
        "samples to ranks as LLaVA does (--loss_reduction micro_batch_mean always does). Loss and gradients are the "
        "same.",
        changeable=ROUNDING,
    )
    max_tokens_per_micro_batch: str | None = flag(
        None,
        "With --padding_free: maximum tokens per micro-batch. A step then takes as few micro-batches as possible, the "
        "same number on all ranks, whatever --gradient_accumulation_steps says. Its samples stay the same. auto, with "
        "--deepspeed auto: as many as the memory estimate allows. Without the flag a CPU splits micro-batches of more "
        "than 2048 tokens, which is faster there.",
        changeable=ROUNDING,
    )
    hang_timeout: float = flag(
        1800.0,
        "Seconds without progress after which a rank reports where it hangs and ends the run; 0: never.",
        identity=False,
    )
    compile_layers: str = flag(
        "auto",
        "Compile layers with torch.compile, once for all lengths: True (language model and tower), tower (the tower's "
        "alone, beside Liger's kernels in the language model), False, or auto (tower on a GPU, where it can be "
        "compiled). Not with ZeRO-3.",
        changeable=ROUNDING,
        nargs="?",
        const="True",
    )


@dataclass
class SavingFlags:
    """The output folder, checkpoints, and continuing from them."""

    title = "saving and resuming"
    library = "save_*"

    # pyrefly: ignore[bad-assignment]  # None until `TrainingArguments.__post_init__`, where the library names a folder
    output_dir: str = flag(
        None, "Where model, checkpoints and logs are written; relative to the working directory.", identity=False
    )
    save_strategy: Literal["no", "steps", "epoch"] = flag(
        "steps", "When checkpoints are written: every --save_steps, every epoch, or never.", identity=False
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "Checkpoint folder to continue from; True: the newest in --output_dir, which must have one; False: start from "
        "scratch; default: the newest complete one in --output_dir, if any.",
        identity=False,
    )
    cache_dir: str | None = flag(None, "Where downloads from the hub are kept.", identity=False)
    trial_save: bool = flag(True, "Write the final folder and read it back once before the first step.", identity=False)
    overwrite_output_dir: bool = flag(
        False,
        "Start from scratch if --output_dir holds a finished run or a run with other settings, and remove what that "
        "run wrote. An unfinished run with these settings is still continued, unless --resume_from_checkpoint is "
        "False.",
        identity=False,
    )
    resume_allow_changes: str = flag(
        "",
        "Settings in which a checkpoint to continue from may differ, comma-separated, such as world_size or max_steps; "
        "a refusal lists them.",
        identity=False,
    )


@dataclass
class HeldOutFlags:
    """When held-out data is measured, and what follows from it."""

    title = "held-out data"
    library = "eval_*"

    eval_strategy: Literal["no", "steps", "epoch"] = flag(
        "no",
        "When --eval_data_path is evaluated: every --eval_steps and at the end, every epoch, or never. The weights of "
        "the run stay the same.",
        identity=False,
    )
    eval_steps: float | None = flag(
        None,
        "Steps between two evaluations, or the fraction of all steps if below 1; default --logging_steps.",
        identity=False,
    )
    eval_delay: float = flag(
        0, "Steps or epochs, as --eval_strategy counts, before the first evaluation.", identity=False
    )
    per_device_eval_batch_size: int = flag(
        8,
        "Maximum evaluation batch per device, in samples; never more tokens than in training. The loss does not depend "
        "on it.",
        identity=False,
    )
    eval_on_start: bool = flag(False, "Evaluate --eval_data_path once before the first step too.", identity=False)
    load_best_model_at_end: bool = flag(
        False,
        "Put the checkpoint with the best --metric_for_best_model into the final folder, in place of the last step's "
        "model. --save_strategy and --eval_strategy must match. That checkpoint is kept beside the newest.",
        identity=False,
    )
    metric_for_best_model: str | None = flag(
        None,
        "Which logged metric decides, without eval/: loss (default), loss_image, loss_text, accuracy.",
    )
    greater_is_better: bool | None = flag(None, "Whether larger is better; default: True unless it is a loss.")
    eval_generate: int = flag(
        0,
        "Number of held-out questions with short answers to ask at every evaluation; logged as eval/accuracy.",
        identity=False,
    )
    evaluation_strategy: Literal["no"] = flag(
        "no", "Accepted for LLaVA's scripts, which pass no.", identity=False, hidden=True
    )


@dataclass
class LoggingFlags:
    """What a run logs."""

    title = "logging"
    library = "logging_* log_* report_to run_name project trackio_* disable_tqdm"

    telemetry_steps: int | None = flag(
        None,
        "Steps between measurements of gradient norms and token norms; default --logging_steps, 0: never.",
        identity=False,
    )
    peak_tflops: float | None = flag(
        None,
        "Peak TFLOP/s of a device, of which the logged mfu is a fraction; default: the datasheet's dense bf16 figure, "
        "for known NVIDIA GPUs.",
        identity=False,
    )
    profile_steps: str | None = flag(
        None,
        "Steps to profile on rank 0, FIRST:LAST, counted from 1 over the whole run: a trace, a table of kernels and "
        "the seconds of each piece, in the folder profile of --output_dir.",
        identity=False,
    )


TRAINING_SECTIONS = (OptimisationFlags, LoraFlags, SpeedFlags, SavingFlags, HeldOutFlags, LoggingFlags)
SECTIONS = (ModelFlags, DataFlags, *TRAINING_SECTIONS)
FLAGS = {field.name: field for section in SECTIONS for field in dataclasses.fields(section)}
"""Every flag of this tree, but for those of the projector's norm, which stand in llava/model with it."""
