"""Every flag of `llava/train/train.py`; names and meanings are LLaVA's where LLaVA has the flag."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from llava.anyres import check_grids_given, check_modes
from llava.constants import MAX_ASPECT_RATIO
from llava.model.loss import LossHead
from llava.model.multimodal_projector.norm import ProjectorNormArguments
from llava.utils.paths import shipped


@dataclass
class ModelArguments(ProjectorNormArguments):
    """What is trained: language model, vision tower, projector, norm."""

    model_name_or_path: str = field(
        kw_only=True,  # the norm's fields, which have defaults, come before it
        metadata={
            "help": "Language model (families: docs/models.md) or LLaVA checkpoint of this tree: folder or hub id."
        },
    )
    version: str = field(
        default="v1",
        metadata={
            "help": "Conversation template, a key of llava.conversation.conv_templates (plain, v1, qwen_1_5, ...)."
        },
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "Attention of the language model: sdpa, eager, flash_attention_2, ... (default: the fastest)"
        },
    )
    freeze_backbone: bool = field(default=False, metadata={"help": "Freeze the language model."})
    tune_mm_mlp_adapter: bool = field(
        default=False, metadata={"help": "Train only the projector and its norm (stage 1)."}
    )
    freeze_mm_mlp_adapter: bool = field(default=False, metadata={"help": "Freeze the projector and its norm."})
    unfreeze_mm_vision_tower: bool = field(default=False, metadata={"help": "Train the vision tower as well."})
    mm_tunable_parts: str | None = field(
        default=None,
        metadata={
            "help": "Exactly what is trained, comma-separated: mm_vision_tower, mm_mlp_adapter, mm_language_model. "
            "Replaces the four flags above."
        },
    )
    vision_tower: str | None = field(
        default=None, metadata={"help": "Vision encoder (kinds: docs/models.md): local folder or hub id."}
    )
    mm_vision_select_layer: int = field(
        default=-2,
        metadata={"help": "Hidden state of the tower that becomes visual tokens; -2 is the last layer's input."},
    )
    mm_vision_select_feature: Literal["patch", "cls_patch"] = field(
        default="patch",
        metadata={"help": "Visual tokens: the patches, or the class token, where there is one, and the patches."},
    )
    pretrain_mm_mlp_adapter: str | None = field(
        default=None,
        metadata={"help": "mm_projector.bin of stage 1 (or its folder): projector and norm start from it."},
    )
    mm_projector_type: str = field(
        default="mlp2x_gelu", metadata={"help": "Projector: linear, mlp2x_gelu, mlp<N>x_gelu or identity."}
    )
    mm_patch_merge_type: str = field(
        default="flat",
        metadata={
            "help": "How the visual tokens of a picture's crops are laid out: flat (one crop after another), "
            "spatial (the whole picture, then the rows of the grid), spatial_unpad (the same without black borders and "
            "with a learnt image_newline at each row's end)."
        },
    )
    mm_newline_init: Literal["default", "text_norm"] = field(
        default="default",
        metadata={
            "help": "Norm of a new image_newline: default (LLaVA-NeXT's, near 1) or text_norm (mean norm of the text "
            "embeddings, measured). The projector's norm does not touch it."
        },
    )
    mm_use_im_start_end: bool = field(
        default=False,
        metadata={"help": "Markers around images; must be False (no current recipe uses them)."},
    )
    mm_use_im_patch_token: bool = field(default=False, metadata={"help": "Patch token of LLaVA v0; must be False."})


@dataclass
class DataArguments:
    """What is read and how it becomes samples."""

    data_path: str | None = field(
        default=None,
        metadata={
            "help": "Records in LLaVA's form or chat messages: a .json, .jsonl or .parquet file, several separated by "
            "commas, a pattern, or a folder of either kind; hf:OWNER/NAME[SPLIT] or hf:FOLDER[SPLIT], which the "
            "datasets library reads; or a .yaml that mixes such data sets (docs/data.md)."
        },
    )
    image_folder: str | None = field(
        default=None,
        metadata={
            "help": "Folder or zip file that the records' image paths start from; not needed for Parquet rows that "
            "hold their images. In a mixture it is that of the data sets that name none of their own."
        },
    )
    eval_data_path: str | None = field(
        default=None,
        metadata={
            "help": "Held-out records, in the forms that --data_path takes; needs --eval_strategy. Their loss is "
            "logged as eval/loss, by modality as eval/loss_text and eval/loss_image, and for each comma-separated file "
            "as eval/loss/<its name>."
        },
    )
    eval_image_folder: str | None = field(
        default=None,
        metadata={"help": "Where the held-out records' image paths start from; default --image_folder."},
    )
    follow_image_links: bool = field(
        default=False, metadata={"help": "Let links in --image_folder lead out of it; else such images are faults."}
    )
    on_bad_record: Literal["error", "skip"] = field(
        default="error",
        metadata={
            "help": "What to do with records that cannot be used, which are found before the first step: error refuses "
            "to train, skip leaves them out and writes them to quarantine.jsonl in --output_dir. Nothing replaces them."
        },
    )
    full_decode: bool = field(
        default=False,
        metadata={"help": "Decode every image in full before the first step; otherwise only its header is read."},
    )
    recheck_data: bool = field(
        default=False,
        metadata={"help": "Check data and images again before the first step, whatever earlier checks found."},
    )
    data_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Where converted records, results of checks and measured lengths are kept; default .llava_cache "
            "beside the data, or ~/.cache/llava/data if that cannot be written."
        },
    )
    image_aspect_ratio: str = field(
        default="square",
        metadata={
            "help": "square: resize to the tower's size (CLIP: its own resize and crop); pad: pad to a square first; "
            "anyres: the whole picture and the crops of a grid that fits it; anyres_max_N: the same, with the grid "
            "shrunk to about N crops' tokens (with spatial_unpad)."
        },
    )
    image_orientation: Literal["stored", "exif"] = field(
        default="stored",
        metadata={
            "help": "stored: pictures as their files store them, as LLaVA reads them; exif: turned upright by their "
            "EXIF orientation, as phones mean them. Written to the checkpoint, which is asked in the same way."
        },
    )
    max_image_aspect_ratio: float = field(
        default=MAX_ASPECT_RATIO,
        metadata={"help": "A picture whose longer side is more times its shorter side is a fault of its record."},
    )
    image_grid_pinpoints: str | None = field(
        default=None,
        metadata={
            "help": "With anyres: the grids to choose from, in pixels, [[336,672],[672,336]], or in crops, "
            "(1x1),...,(6x6)."
        },
    )
    label_masking: Literal["assistant", "upstream"] = field(
        default="assistant",
        metadata={
            "help": "Targets: assistant, what the assistant says with its end token; or upstream, exactly the labels "
            "of LLaVA and LLaVA-NeXT (for comparisons)."
        },
    )
    lazy_preprocess: bool = field(
        default=True,
        metadata={"help": "Accepted for LLaVA's scripts; samples are always prepared when they are needed."},
    )
    is_multimodal: bool = field(
        default=True, metadata={"help": "Accepted for LLaVA's scripts; records with and without images always mix."}
    )

    def __post_init__(self) -> None:
        check_modes(self.image_aspect_ratio)
        check_grids_given(self.image_aspect_ratio, self.image_grid_pinpoints)
        if not self.max_image_aspect_ratio >= 1:
            raise ValueError(f"--max_image_aspect_ratio {self.max_image_aspect_ratio:g}: expected at least 1")


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """The Hugging Face Trainer's flags and LLaVA's additions."""

    # pyrefly: ignore[bad-assignment]  # None until `__post_init__`, where the library names a folder
    output_dir: str = field(
        default=None,
        metadata={"help": "Where model, checkpoints and logs are written; relative to the working directory."},
    )
    save_strategy: Literal["no", "steps", "epoch"] = field(
        default="steps", metadata={"help": "When checkpoints are written: every --save_steps, every epoch, or never."}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "Checkpoint folder to continue from; True: the newest in --output_dir, which must have one; False: "
            "start anew; default: the newest complete one in --output_dir, if there is one."
        },
    )
    train_sampling_strategy: Literal["random", "sequential"] = field(
        default="random", metadata={"help": "Order of the samples without --group_by_modality_length."}
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads from the hub are kept."})
    model_max_length: int = field(
        default=2048,
        metadata={"help": "Longest sample in tokens, counted after images are expanded; longer ones are cut."},
    )
    mm_projector_lr: float | None = field(
        default=None, metadata={"help": "Learning rate of projector and norm; default --learning_rate."}
    )
    mm_vision_tower_lr: float | None = field(
        default=None, metadata={"help": "Learning rate of the vision tower; default --learning_rate."}
    )
    group_by_modality_length: bool = field(
        default=False, metadata={"help": "Global batches of one modality and similar length."}
    )
    length_group_window: int = field(
        default=1,
        metadata={
            "help": "With --group_by_modality_length: pair the samples of this many global batches, the longest with "
            "the shortest, and put pairs of similar length in one batch. 1 (LLaVA) keeps every global batch a random "
            "sample of its modality; more keep ranks with few samples equally busy."
        },
    )
    padding_free: bool = field(
        default=True,
        metadata={
            "help": "Run a micro-batch as one row without padding, with micro-batches of even length; False pads them "
            "and deals samples to ranks as LLaVA does (--loss_reduction micro_batch_mean always does). Loss and "
            "gradients are the same."
        },
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "With --padding_free: most tokens of a micro-batch. A step then takes as few micro-batches as "
            "possible, the same number on all ranks, whatever --gradient_accumulation_steps says. Its samples stay the "
            "same."
        },
    )
    loss_head: LossHead = field(
        default="auto",
        metadata={
            "help": "Loss over the supervised rows: chunked (some rows of logits at a time), plain (all logits), liger "
            "(Liger's fused kernel, NVIDIA GPUs), auto (chunked)."
        },
    )
    loss_reduction: Literal["token_mean", "micro_batch_mean"] = field(
        default="token_mean",
        metadata={
            "help": "token_mean: mean over the targets of the whole step; micro_batch_mean: mean of the micro-batches' "
            "means, as upstream with gradient accumulation, over upstream's micro-batches. Not with "
            "--max_tokens_per_micro_batch."
        },
    )
    warmup_ratio: float = field(
        default=0.0, metadata={"help": "Share of all steps over which the learning rate rises; needs --warmup_steps 0."}
    )
    eval_strategy: Literal["no", "steps", "epoch"] = field(
        default="no",
        metadata={
            "help": "When the loss on --eval_data_path is measured: every --eval_steps and at the end, every epoch, or "
            "never. The weights of the run stay the same."
        },
    )
    eval_steps: float | None = field(
        default=None,
        metadata={
            "help": "Steps between two evaluations, or the share of all steps if below 1; default --logging_steps."
        },
    )
    eval_delay: float = field(
        default=0, metadata={"help": "Steps or epochs, as --eval_strategy counts, before the first evaluation."}
    )
    eval_on_start: bool = field(
        default=False, metadata={"help": "Measure the loss on --eval_data_path once before the first step as well."}
    )
    eval_generate: int = field(
        default=0,
        metadata={
            "help": "Number of held-out questions with short answers to ask at every evaluation; logged as "
            "eval/accuracy, with a table of pictures and answers for tensorboard, wandb and trackio."
        },
    )
    per_device_eval_batch_size: int = field(
        default=8,
        metadata={
            "help": "Most held-out samples that a device computes at a time; never more tokens than in training. The "
            "loss does not depend on it."
        },
    )
    load_best_model_at_end: bool = field(
        default=False,
        metadata={
            "help": "Put the checkpoint with the best --metric_for_best_model into the final folder, in place of the "
            "last step's model. --save_strategy and --eval_strategy must match. That checkpoint is kept beside the "
            "newest."
        },
    )
    metric_for_best_model: str | None = field(
        default=None,
        metadata={"help": "Which logged figure decides, without eval/: loss (default), loss_image, loss/<source>, ..."},
    )
    greater_is_better: bool | None = field(
        default=None, metadata={"help": "Whether larger is better; default: True unless it is a loss."}
    )
    evaluation_strategy: Literal["no"] = field(
        default="no", metadata={"help": "Accepted for LLaVA's scripts, which pass no."}
    )
    optim: str = field(
        default="adamw_torch_fused",
        metadata={
            "help": "Optimizer, as the Hugging Face Trainer names it. Where DeepSpeed keeps the states in CPU memory "
            "it takes its own CPU Adam instead."
        },
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning-rate schedule."})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that prepare samples, per rank."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay False: the collator names its fields."}
    )
    lora_enable: bool = field(
        default=False,
        metadata={"help": "Train --lora_modules by LoRA on their linear layers; projector and norm are trained fully."},
    )
    lora_modules: str = field(
        default="decoder",
        metadata={
            "help": "What gets adapters: decoder, tower, or both with a comma. The tower's learn with "
            "--mm_vision_tower_lr. Parts named here are trained by LoRA alone."
        },
    )
    lora_use_dora: bool = field(
        default=False,
        metadata={"help": "DoRA: adapters learn direction and magnitude of the weights separately (PEFT's use_dora)."},
    )
    lora_r: int = field(default=64, metadata={"help": "Rank of the LoRA adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "The adapters are scaled by --lora_alpha / --lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapters."})
    lora_bias: Literal["none", "all", "lora_only"] = field(
        default="none",
        metadata={"help": "The language model's biases that are trained: none, all, or those of adapted layers."},
    )
    lora_weight_path: str = field(
        default="", metadata={"help": "Must stay empty: LLaVA has this flag but never reads it."}
    )
    bits: Literal[4, 8, 16] = field(
        default=16,
        metadata={
            "help": "Bits of the frozen language model under LoRA: 4 or 8 (QLoRA; needs bitsandbytes), 16 (as it is)."
        },
    )
    double_quant: bool = field(
        default=True, metadata={"help": "With --bits 4: quantise the quantisation constants as well."}
    )
    quant_type: Literal["fp4", "nf4"] = field(default="nf4", metadata={"help": "With --bits 4: the data type."})
    telemetry_steps: int | None = field(
        default=None,
        metadata={
            "help": "Steps between measurements of gradient norms and token norms; default --logging_steps, 0: never."
        },
    )

    max_nonfinite_steps: int = field(
        default=10,
        metadata={
            "help": "Stop after this many steps in a row whose loss or gradient is infinite or not a number. Such "
            "steps are never applied."
        },
    )
    hang_timeout: float = field(
        default=1800.0,
        metadata={
            "help": "Seconds without progress after which a rank reports where it hangs, and ends the run; 0: never."
        },
    )
    trial_save: bool = field(
        default=True, metadata={"help": "Write the final folder and read it back once before the first step."}
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Start anew if --output_dir holds a finished run or one with other settings, and remove what that "
            "run wrote. An unfinished run with these settings is still continued, unless --resume_from_checkpoint is "
            "False."
        },
    )
    resume_allow_changes: str = field(
        default="",
        metadata={
            "help": "Settings in which a checkpoint to continue from may differ, comma-separated, such as world_size "
            "or max_steps; a refusal lists them."
        },
    )

    activation_checkpointing: str | None = field(
        default=None,
        metadata={
            "help": "Recompute activations instead of keeping them: auto (default; as few decoder layers as the memory "
            "estimate asks for, none where it fits), True (every layer), False, or a number (that many decoder layers, "
            "from the first). --gradient_checkpointing True or False, as LLaVA's scripts pass it, means the same.",
            "nargs": "?",
            "const": "True",
        },
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = field(  # releases of the library before 5.23 lack it
        default=None,
        metadata={
            "help": "How activations are recomputed, as JSON: use_reentrant and the other arguments of PyTorch's "
            "checkpoint; every_n_layers recomputes every n-th layer only; offload keeps what is saved in host memory."
        },
    )
    gradient_checkpointing: bool | None = field(  # older releases of the library have False here, as if it were given
        default=None,
        metadata={"help": "The older name of --activation_checkpointing.", "nargs": "?", "const": True},
    )
    use_liger_kernel: str = field(
        default="False",
        metadata={
            "help": "Run the language model's norms, MLPs and rotary embedding on Liger's fused kernels (NVIDIA GPUs, "
            "package liger-kernel): True, False, or auto (where they can run; the log says which and why). For the "
            "loss see --loss_head.",
            "nargs": "?",
            "const": "True",
        },
    )
    compile_layers: bool = field(
        default=False,
        metadata={
            "help": "Compile every layer of the language model and the tower with torch.compile, once for all lengths. "
            "Not with ZeRO-3."
        },
    )
    peak_tflops: float | None = field(
        default=None,
        metadata={
            "help": "Peak TFLOP/s of a device, of which the logged mfu is a share; default: the datasheet's dense bf16 "
            "figure, for known NVIDIA GPUs."
        },
    )

    def __post_init__(self):
        if self.warmup_ratio:
            if self.warmup_steps:
                raise ValueError("--warmup_ratio and --warmup_steps were both given; pass one of them")
            if not 0 <= self.warmup_ratio < 1:
                raise ValueError(f"--warmup_ratio: expected a share from 0 to below 1, found {self.warmup_ratio}")
            self.warmup_steps = self.warmup_ratio
        if not torch.accelerator.is_available() and not self.deepspeed:
            self.use_cpu = True
        if isinstance(self.deepspeed, str) and self.deepspeed.endswith(".json"):
            self.deepspeed = shipped(self.deepspeed)
            if not Path(self.deepspeed).is_file():
                raise ValueError(f"--deepspeed {self.deepspeed}: no such file; the recipes' are in deepspeed_configs/")
        if self.remove_unused_columns:
            raise ValueError("--remove_unused_columns must be False: it would drop the images")
        # From here on these two hold a choice; as fields they hold the text from which the parser makes flags.
        # pyrefly: ignore[bad-assignment]
        self.activation_checkpointing = checkpointing_choice(self.activation_checkpointing, self.gradient_checkpointing)
        # pyrefly: ignore[bad-assignment]
        self.use_liger_kernel = liger_choice(self.use_liger_kernel)
        self.gradient_checkpointing = None  # the library sets it from the newer name
        for flag in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
            setattr(self, flag, json_object(flag, getattr(self, flag)))
        if self.metric_for_best_model and self.greater_is_better is None:  # the library only knows names ending in loss
            self.greater_is_better = not self.metric_for_best_model.removeprefix("eval").lstrip("_/").startswith("loss")
        if self.metric_for_best_model:
            self.metric_for_best_model = self.metric_for_best_model.removeprefix("eval/")
        super().__post_init__()


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
        if isinstance(found := json.loads(value), dict):
            return found
    raise ValueError(f"--{flag}: expected a JSON object such as '{{\"use_reentrant\": true}}', found {value!r}")


def liger_choice(value: bool | str) -> bool | str:
    """`--use_liger_kernel` as True, False or `auto`.

    Raises:
        ValueError: the value is none of these.
    """
    choices = {"auto": "auto", "true": True, "1": True, "false": False, "0": False}
    if (text := str(value).lower()) not in choices:
        raise ValueError(f"--use_liger_kernel: expected auto, True or False; found {value!r}")
    return choices[text]
