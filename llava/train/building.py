"""Builds what a training needs from its flags: tokenizer, model, data set and trainer."""

import logging
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from llava.anyres import Picture, is_anyres, parse_pinpoints
from llava.data.collate import DataCollatorForSupervisedDataset
from llava.data.dataset import LazySupervisedDataset
from llava.data.records import RecordTable
from llava.mm_utils import load_tokenizer
from llava.model.attention import packed_attention
from llava.model.builder import load_language_model, read_config
from llava.model.context import context_length
from llava.model.decoding import unused
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import TOWER
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.rotary import rebuild_rotary
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.batches import largest_micro_batch, log_micro_batches, most_crops
from llava.train.compilation import set_up_compilation
from llava.train.heldout import HeldOut, check_metric, eval_data_arguments
from llava.train.liger import set_up_liger
from llava.train.llava_trainer import LLaVATrainer
from llava.train.lora import add_lora_by_flags, lora_modules, prepare_quantized, quantized_loading
from llava.train.masters import keeps_masters
from llava.train.memory import set_up_checkpointing
from llava.train.optim import LANGUAGE_MODEL, PARTS, VISION_TOWER, set_trainable, tunable_parts
from llava.train.run_checks import EVAL_IMAGES, image_store
from llava.train.run_record import Settings, run_settings
from llava.train.zero import fit_zero

logger = logging.getLogger(__name__)

# Model flags that LLaVA keeps in the config under their own names, besides those of the projector.
CONFIG_FLAGS = ("tune_mm_mlp_adapter", "freeze_mm_mlp_adapter", "mm_use_im_start_end", "mm_use_im_patch_token")


def training_tokenizer(model_args: ModelArguments, training_args: TrainingArguments) -> PreTrainedTokenizerBase:
    """The language model's tokenizer.

    Raises:
        ValueError: there is none; the message names the flag.
    """
    path = model_args.model_name_or_path
    try:
        return load_tokenizer(
            path,
            cache_dir=training_args.cache_dir,
            model_max_length=training_args.model_max_length,
            padding_side="right",
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--model_name_or_path {path}: no tokenizer found ({reason}); expected a model folder or hub id"
        ) from error


def arithmetic_dtype(training_args: TrainingArguments) -> torch.dtype:
    """The type in which the model computes, by `--bf16` and `--fp16`."""
    return torch.bfloat16 if training_args.bf16 else torch.float16 if training_args.fp16 else torch.float32


def build_model(
    model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments
) -> LlavaMetaForCausalLM:
    """The model with tower, projector and norm, `requires_grad` set, and every choice recorded in its config."""
    parts = tunable_parts(model_args)
    frozen_dtype = arithmetic_dtype(training_args)
    # DeepSpeed keeps fp32 masters itself. Elsewhere trained weights are fp32 and autocast lowers the arithmetic; only
    # the large parts, language model and tower, are in 16 bits if they have masters.
    trained_dtype = frozen_dtype if training_args.deepspeed else torch.float32
    large_dtype = frozen_dtype if keeps_masters(training_args) else trained_dtype
    attention = model_args.attn_implementation
    if training_args.padding_free:
        attention = packed_attention(
            attention, training_args.device, frozen_dtype, compiled=training_args.compile_layers is True
        )
    model = load_language_model(
        model_args.model_name_or_path,
        read_config(model_args.model_name_or_path, cache_dir=training_args.cache_dir),
        dtype=large_dtype if LANGUAGE_MODEL in parts and not training_args.lora_enable else frozen_dtype,
        attn_implementation=attention,
        cache_dir=training_args.cache_dir,
        **quantized_loading(training_args, frozen_dtype),
    )
    prepare_quantized(model, training_args, frozen_dtype)
    if note := unused(model_args.model_name_or_path, model.file_decoding):
        logger.info("%s (recorded in run.json)", note)
    if model.get_vision_tower() is None and not model_args.vision_tower:
        raise ValueError("--vision_tower is missing: --model_name_or_path is a plain language model")
    decoder = model.get_model()
    adapted_tower = training_args.lora_enable and TOWER in lora_modules(training_args)
    tower_dtype = large_dtype if VISION_TOWER in parts and not adapted_tower else frozen_dtype
    decoder.initialize_vision_modules(model_args, dtype=tower_dtype)
    decoder.vision_tower.to(tower_dtype)  # one that came with the checkpoint had the language model's
    decoder.mm_projector.to(trained_dtype)
    if decoder.image_newline is not None:
        decoder.image_newline.data = decoder.image_newline.data.to(trained_dtype)
    if training_args.deepspeed:
        rebuild_rotary(model)  # `zero.Init`, under which ZeRO-3 loads, makes them in the type of the weights
    add_lora_by_flags(model, training_args, trained_dtype)
    set_trainable(model, parts)
    set_up_compilation(model, training_args)
    set_up_liger(model, training_args)
    model.padding_free = training_args.padding_free
    model.lm_head.loss_head = training_args.loss_head
    record_choices(model, parts, model_args, data_args, training_args)
    model.crop_rules()  # raises now, before the data is read, if settings do not fit together
    return model


def record_choices(
    model: LlavaMetaForCausalLM,
    parts: frozenset[str],
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
) -> None:
    """Writes into the model's config what the flags chose, from which a checkpoint is rebuilt."""
    config = model.config
    config.use_cache = False
    config.mm_conv_version = model_args.version
    config.mm_tunable_parts = ",".join(part for part in PARTS if part in parts)
    for field in CONFIG_FLAGS:
        setattr(config, field, getattr(model_args, field))
    for field in ("mm_projector_lr", "mm_vision_tower_lr"):
        setattr(config, field, getattr(training_args, field))
    config.image_aspect_ratio = data_args.image_aspect_ratio
    config.image_orientation = data_args.image_orientation
    config.image_grid_pinpoints = None
    if is_anyres(data_args.image_aspect_ratio):
        config.image_grid_pinpoints = [
            list(grid)
            for grid in parse_pinpoints(data_args.image_grid_pinpoints or "", model.get_model().vision_tower.image_size)
        ]
    config.tokenizer_padding_side = "right"
    config.tokenizer_model_max_length = training_args.model_max_length
    if training_args.model_max_length > (context := context_length(config)):
        logger.warning(
            "--model_max_length %d is longer than the model's context of %d tokens (config.json): samples are trained "
            "beyond it, and inference refuses such prompts",
            training_args.model_max_length,
            context,
        )


def build_trainer(
    model: LlavaMetaForCausalLM,
    records: RecordTable,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_records: RecordTable | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> LLaVATrainer:
    """The trainer on `records`; `options` are those of `LLaVATrainer`.

    Args:
        eval_records: records whose loss is measured.
    """
    tokenizer = tokenizer or training_tokenizer(model_args, training_args)
    if settings is None:
        settings = run_settings(model_args, data_args, training_args, records, tokenizer, eval_records)
    tower, crop_rules = model.get_model().vision_tower, model.crop_rules()
    num_visual_tokens = crop_rules.visual_tokens(Picture())
    image_processor = load_image_processor(model_args.vision_tower or model_args.model_name_or_path, tower)
    dataset = LazySupervisedDataset(
        records,
        tokenizer,
        version=model_args.version,
        image_processor=image_processor,
        image_folder=image_store(data_args, records),
        image_aspect_ratio=data_args.image_aspect_ratio,
        num_visual_tokens=num_visual_tokens,
        model_max_length=training_args.model_max_length,
        label_masking=data_args.label_masking,
        show_progress=training_args.process_index == 0,
        pixel_dtype=arithmetic_dtype(training_args),
        crop_rules=crop_rules,
    )
    log_micro_batches(dataset, training_args)
    fit_zero(model, training_args)
    largest = largest_micro_batch(dataset, training_args)
    set_up_checkpointing(model, training_args, largest, most_crops(dataset))
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    collator = DataCollatorForSupervisedDataset(
        pad_token_id or 0, num_visual_tokens, training_args.model_max_length, training_args.padding_free, crop_rules
    )
    if eval_records is not None:
        images = image_store(eval_data_arguments(data_args), eval_records, EVAL_IMAGES)
        heldout = dataset.over(eval_records, images)
        options["heldout"] = HeldOut(heldout, collator, training_args, largest, context_length(model.config))
        check_metric(training_args, options["heldout"].keys)
    return LLaVATrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        data_collator=collator,
        processing_class=tokenizer,
        image_processor=image_processor,
        settings=settings,
        **options,
    )
