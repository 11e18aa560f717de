"""Builds what a training needs from its flags: tokenizer, model, data set and trainer."""

import logging
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from llava.anyres import Picture, is_anyres, parse_pinpoints
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.conversation import get_template
from llava.data.dataset import DataCollatorForSupervisedDataset, LazySupervisedDataset
from llava.data.preprocess import write_parts
from llava.data.records import RecordTable
from llava.mm_utils import from_anywhere, load_tokenizer
from llava.model.attention import packed_attention
from llava.model.builder import load_language_model, quantization_config, read_config
from llava.model.context import context_length
from llava.model.decoding import unused
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_encoder.builder import has_image_processor, load_image_processor
from llava.model.rotary import rebuild_rotary
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.batches import largest_micro_batch, most_crops
from llava.train.checks import EVAL_IMAGES, image_store
from llava.train.heldout import HeldOut, eval_data_arguments
from llava.train.kernels import set_up_kernels
from llava.train.llava_trainer import LLaVATrainer
from llava.train.memory import set_up_checkpointing
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, PARTS, VISION_TOWER, set_up_parts, tunable_parts, weight_dtypes
from llava.train.zero import fit_zero

logger = logging.getLogger(__name__)

# Model flags that LLaVA keeps in the config under their own names, besides those of the projector.
CONFIG_FLAGS = ("tune_mm_mlp_adapter", "freeze_mm_mlp_adapter", "mm_use_im_start_end", "mm_use_im_patch_token")


def training_tokenizer(path: str, model_max_length: int, cache_dir: str | None) -> PreTrainedTokenizerBase:
    """The language model's tokenizer; ValueError if there is none, or it has ids beyond the embedding."""
    try:
        tokenizer = load_tokenizer(path, cache_dir=cache_dir, model_max_length=model_max_length, padding_side="right")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--model_name_or_path {path}: no tokenizer found ({reason}); expected a model folder or hub id"
        ) from error
    last, rows = max(tokenizer.get_vocab().values()), read_config(path, cache_dir=cache_dir).vocab_size
    if last >= rows:
        raise ValueError(
            f"--model_name_or_path {path}: the tokenizer has ids up to {last} and the embedding {rows} rows; resize "
            "the embedding, or take out the tokens that were added"
        )
    return tokenizer


def build_model(
    model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments
) -> LlavaMetaForCausalLM:
    """The model with tower, projector and norm, `requires_grad` set, and every choice recorded in its config."""
    parts, path, lora = tunable_parts(model_args), model_args.model_name_or_path, training_args.lora_enable
    frozen_dtype, _, large_dtype = weight_dtypes(training_args)
    attention = model_args.attn_implementation
    if training_args.padding_free:
        attention = packed_attention(attention, training_args.device, frozen_dtype)
    for flag, part in (("mm_vision_tower_lr", VISION_TOWER), ("mm_projector_lr", ADAPTER)):
        if getattr(training_args, flag) is not None and part not in parts:
            logger.warning("--%s has no effect: %s is not trained; leave it out", flag, part)
    quantization: dict[str, Any] = {}
    if training_args.bits < 16:
        config = quantization_config(training_args.bits, frozen_dtype)
        quantization = {"quantization_config": config, "device_map": {"": training_args.device}}
    model = load_language_model(
        path,
        read_config(path, cache_dir=training_args.cache_dir),
        dtype=large_dtype if LANGUAGE_MODEL in parts and not lora else frozen_dtype,
        attn_implementation=attention,
        cache_dir=training_args.cache_dir,
        **quantization,
    )
    if quantization:
        from peft import prepare_model_for_kbit_training  # norms in fp32, as PEFT advises; the Trainer recomputes

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model.get_input_embeddings().to(frozen_dtype)
        model.lm_head.to(frozen_dtype)
    if note := unused(path, model.file_decoding):
        logger.info("%s", note)
    decoder, named = model.get_model(), model_args.vision_tower
    if decoder.get_vision_tower() is None and not named:
        raise ValueError("--vision_tower is missing: --model_name_or_path is a plain language model")
    if decoder.get_vision_tower() and named and from_anywhere(named) != (own := model.config.mm_vision_tower):
        logger.warning("--vision_tower %s is not read: the checkpoint in %s keeps its own tower, %s", named, path, own)
    decoder.initialize_vision_modules(model_args, dtype=large_dtype if VISION_TOWER in parts else frozen_dtype)
    if training_args.deepspeed:
        rebuild_rotary(model)  # `zero.Init`, under which ZeRO-3 loads, makes them in the type of the weights
    set_up_parts(model, parts, training_args)
    set_up_kernels(model, training_args)
    model.padding_free = training_args.padding_free
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
    config.mm_conv_version, config.mm_label_masking = model_args.version, data_args.label_masking
    config.mm_tunable_parts = ",".join(part for part in PARTS if part in parts)
    for field in CONFIG_FLAGS:
        setattr(config, field, getattr(model_args, field))
    for field in ("mm_projector_lr", "mm_vision_tower_lr"):
        setattr(config, field, getattr(training_args, field))
    config.image_aspect_ratio = data_args.image_aspect_ratio
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


def warn_of_split_markers(version: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Logs a warning if the template's markers are several tokens each: the template of another family."""
    turns = [("human", DEFAULT_IMAGE_TOKEN), ("gpt", "")]
    text = "".join(part.text for part in write_parts(turns, get_template(version)))
    for marker in dict.fromkeys(re.findall(r"<\|\w+\|>", text)):
        if (count := len(tokenizer.encode(marker, add_special_tokens=False))) > 1:
            logger.warning(
                "--version %s: %s is %d tokens for this tokenizer, not one: is the template of another family meant? "
                "docs/models.md names those of each", version, marker, count,
            )  # fmt: skip


def build_trainer(
    model: LlavaMetaForCausalLM,
    records: RecordTable,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_records: RecordTable | None = None,
    **options: Any,
) -> LLaVATrainer:
    """The trainer on `records`, which measures the loss of `eval_records`; `options` are those of `LLaVATrainer`."""
    path, max_length, cache_dir = model_args.model_name_or_path, training_args.model_max_length, training_args.cache_dir
    tokenizer = tokenizer or training_tokenizer(path, max_length, cache_dir)
    warn_of_split_markers(model_args.version, tokenizer)
    tower, crop_rules = model.get_model().vision_tower, model.crop_rules()
    num_visual_tokens = crop_rules.visual_tokens(Picture())
    own = getattr(read_config(path, cache_dir=cache_dir), "mm_vision_tower", None)
    if own and has_image_processor(path, cache_dir):
        image_processor = load_image_processor(path, tower, cache_dir)
    else:
        image_processor = load_image_processor(model.config.mm_vision_tower, tower)
    dataset = LazySupervisedDataset(
        records,
        tokenizer,
        version=model_args.version,
        image_processor=image_processor,
        image_folder=image_store(data_args, records),
        image_aspect_ratio=data_args.image_aspect_ratio,
        num_visual_tokens=num_visual_tokens,
        model_max_length=max_length,
        label_masking=data_args.label_masking,
        show_progress=training_args.process_index == 0,
        pixel_dtype=weight_dtypes(training_args)[0],
        crop_rules=crop_rules,
        leaves_out=data_args.on_bad_record == "skip",
    )
    fit_zero(model, training_args)
    largest = largest_micro_batch(dataset, training_args)
    set_up_checkpointing(model, training_args, largest, most_crops(dataset))
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    collator = DataCollatorForSupervisedDataset(
        pad_token_id or 0, num_visual_tokens, max_length, training_args.padding_free, crop_rules
    )
    if eval_records is not None:
        images = image_store(eval_data_arguments(data_args), eval_records, EVAL_IMAGES)
        heldout = dataset.over(eval_records, images)
        options["heldout"] = HeldOut(heldout, collator, training_args, largest)
    return LLaVATrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        data_collator=collator,
        processing_class=tokenizer,
        image_processor=image_processor,
        **options,
    )
