"""Loads models: a language model or LLaVA checkpoint for training, and a whole checkpoint for inference."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from llava.mm_utils import load_tokenizer
from llava.model.context import context_length
from llava.model.decoding import other_settings, read_generation_config, token_ids_alone
from llava.model.hf_folder import extra_rows, is_hf_folder, key_mapping, own_fields
from llava.model.language_model.families import MODEL_CLASSES, decoder_of
from llava.model.llava_arch import LlavaMetaForCausalLM, check_same_projector
from llava.model.lora import NON_LORA_FILE, apply_lora, load_non_lora, read_non_lora, recorded_base
from llava.model.multimodal_encoder.builder import has_image_processor, load_image_processor
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, adapter_state_dict, load_adapter
from llava.utils import plugins
from llava.utils.digests import warn_of_other_base

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

logger = logging.getLogger(__name__)


def _read_fields(model_path: str, **kwargs: Any) -> dict[str, Any]:
    try:
        return PretrainedConfig.get_config_dict(model_path, **kwargs)[0]
    except OSError as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"{model_path}: no config.json found ({first}); expected a model folder or hub id") from error


def read_config(model_path: str, **kwargs: Any) -> PretrainedConfig:
    """The LLaVA config of a folder or hub id, LLaVA's or of a plain language model; ValueError if it has none."""
    fields = _read_fields(model_path, **kwargs)
    if is_hf_folder(fields):
        fields = own_fields(fields, model_path)
    plugins.load_named()
    model_type = fields.get("model_type")
    if model_type not in MODEL_CLASSES:
        known = f"{', '.join(MODEL_CLASSES)} (--plugin FILE adds one)"
        raise ValueError(f"{model_path}: model_type {model_type!r}; expected one of {known}")
    config_class = MODEL_CLASSES[model_type].config_class
    if model_type == "llava":  # checkpoints of other families share this type; their class tells them apart
        classes = {cls.__name__: cls for cls in MODEL_CLASSES.values()}
        named = [classes[name] for name in fields.get("architectures") or () if name in classes]
        config_class = named[0].config_class if named else config_class
    # The plain class reads the fields first, so that its own defaults and migrations apply to a plain language model.
    plain_class = decoder_of(config_class).config
    fields = (plain_class if model_type == plain_class.model_type else config_class).from_dict(fields).to_dict()
    return config_class.from_dict({k: v for k, v in fields.items() if k not in ("model_type", "architectures")})


def load_language_model(model_path: str, config: PretrainedConfig | None = None, **kwargs: Any) -> LlavaMetaForCausalLM:
    """The LLaVA class for `model_path`, with its weights; tower and projector only if the checkpoint has them.

    Raises ValueError for a LoRA folder, which is not a whole model; `kwargs` are those of `from_pretrained`.
    """
    if Path(model_path, "adapter_config.json").is_file():
        raise ValueError(
            f"{model_path} is a LoRA folder, and a whole model is expected; merge it with "
            f"python -m llava.model.merge_lora --model-path {model_path} --save-model-path FOLDER"
        )
    config = config or read_config(model_path)
    model_class = class_of(config)
    fields = _read_fields(model_path, cache_dir=kwargs.get("cache_dir"))
    if not is_hf_folder(fields):
        return model_class.from_pretrained(model_path, config=config, **kwargs)
    model = model_class.from_pretrained(model_path, config=config, key_mapping=key_mapping(config), **kwargs)
    if added := extra_rows(fields):
        model.resize_token_embeddings(config.vocab_size - added)
    return model


def load_as_stored(
    model_path: str, config: PretrainedConfig | None = None, dtype: str | None = None
) -> LlavaMetaForCausalLM:
    """As `load_language_model`, with each weight in the type of its file, or all in `dtype`.

    The library converts all weights to one type, but training leaves a projector in fp32 beside 16-bit weights.
    """
    config = config or read_config(model_path)
    if dtype:
        return load_language_model(model_path, config, dtype=getattr(torch, dtype))
    model_class, parts = class_of(config), ["mm_projector", "image_newline"]
    model_class._keep_in_fp32_modules_strict = parts
    try:
        model = load_language_model(model_path, config, dtype="auto")
    finally:
        del model_class._keep_in_fp32_modules_strict
    model._keep_in_fp32_modules_strict = set()
    own = [p for name, p in model.named_parameters() if any(part in name for part in parts)]
    if all(torch.equal(p, p.to(model.dtype).to(p.dtype)) for p in own):  # stored as the others are
        for p in own:
            p.data = p.data.to(model.dtype)
    return model


def class_of(config: PretrainedConfig) -> type[LlavaMetaForCausalLM]:
    """The LLaVA class that belongs to a config."""
    return next(cls for cls in MODEL_CLASSES.values() if cls.config_class is type(config))


def load_pretrained_model(
    model_path: str,
    model_base: str | None,
    model_name: str,
    load_8bit: bool = False,
    load_4bit: bool = False,
    device_map: str | dict[str, int | str | torch.device] | None = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    torch_dtype: str | torch.dtype | None = None,
    customized_config: PretrainedConfig | str | None = None,
    overwrite_config: dict[str, Any] | None = None,
    multimodal: bool | None = None,
    use_flash_attn: bool = False,
    **kwargs: Any,
) -> tuple[PreTrainedTokenizerBase, LlavaMetaForCausalLM, BaseImageProcessor | None, int]:
    """Loads a checkpoint for inference, as LLaVA's function of this name.

    Args:
        model_path: a checkpoint folder or hub id; with `model_base` a LoRA folder, or a stage-1 folder that holds
            `mm_projector.bin`. LoRA is recognised by its `adapter_config.json` and merged, unless quantised.
        model_base: the model that a LoRA or stage-1 folder was trained on; None takes the one that a LoRA records.
        model_name, multimodal: accepted for LLaVA's and LLaVA-NeXT's callers; the files decide what is built.
        load_8bit, load_4bit: quantise with bitsandbytes.
        device_map, device: where the weights go; `device="cpu"` wins over `device_map="auto"`.
        attn_implementation, use_flash_attn: the decoder's attention, as the library names it; or FlashAttention 2.
        torch_dtype: type of the weights; by default the checkpoint's own on an accelerator and fp32 on a CPU.
        customized_config, overwrite_config: a config (or its file) instead of the checkpoint's, and fields to change.
        kwargs: passed to `from_pretrained`.

    Returns (tokenizer, model in eval mode, image_processor or None for a text-only model, context length).
    """
    on_cpu = not torch.accelerator.is_available() or str(device or "").startswith("cpu")
    options = dict(kwargs)
    place = "cpu" if on_cpu else device if device_map in (None, "auto") else None
    options["device_map"] = {"": place} if place else device_map
    options["dtype"] = torch_dtype or (torch.float32 if on_cpu else "auto")
    if use_flash_attn or attn_implementation:
        options["attn_implementation"] = attn_implementation or "flash_attention_2"
    if load_8bit or load_4bit:
        options["quantization_config"] = quantization_config(4 if load_4bit else 8)

    config = read_config(customized_config) if isinstance(customized_config, str) else customized_config
    config = config or read_config(model_path)
    for field, value in (overwrite_config or {}).items():
        setattr(config, field, value)
    lora_file = find_adapter_config_file(model_path)
    if lora_file and model_base is None:
        model_base = recorded_base(model_path)
        logger.info("%s: LoRA on the base that it records, %s", model_path, model_base)
    if model_base is None:
        model = load_language_model(model_path, config, **options)
    else:
        base = read_config(model_base)
        for field, value in (overwrite_config or {}).items():
            setattr(base, field, value)
        model = _load_on_base(model_path, model_base, base, config, is_lora=lora_file is not None, **options)
    model.eval()

    tokenizer = load_tokenizer(model_base or model_path)
    tower, image_processor = model.get_vision_tower(), None
    if tower is not None:
        own = [p for p in (model_path, model_base) if p and has_image_processor(p)]
        image_processor = load_image_processor([*own, config.mm_vision_tower][0], tower)
    context_len = context_length(model.config)
    tokenizer.model_max_length = context_len  # training leaves its truncation length there
    return tokenizer, model, image_processor, context_len


def _load_on_base(
    model_path: str, model_base: str, base: PretrainedConfig, config: PretrainedConfig, is_lora: bool, **options: Any
) -> LlavaMetaForCausalLM:
    """A model with the config `base`, what a stage-1 or LoRA folder adds, and the tower of `config` if it has none."""
    adapter = Path(model_path, ADAPTER_FILE)
    if not is_lora and not adapter.is_file():
        raise FileNotFoundError(
            f"{adapter} does not exist, nor does adapter_config.json; model_base is for stage-1 and LoRA folders; "
            "omit it for a complete checkpoint"
        )
    warn_of_other_base(model_path, model_base)
    model = load_language_model(model_base, base, **options)
    if model.get_model().get_vision_tower() is not None:
        check_same_projector(model_path, config, model.config)
    for field, value in config.to_dict().items():
        if field.startswith(("mm_", "image_", "tokenizer_")):
            setattr(model.config, field, value)
    fields = read_generation_config(model_path)  # the base's settings are not those of what was trained on it
    model.generation_config = token_ids_alone(fields, model.generation_config)
    model.file_decoding = other_settings(fields)
    decoder = model.get_model()
    tensors = read_non_lora(model_path) if is_lora else {}
    if decoder.get_vision_tower() is None:
        decoder.build_vision_modules()
        names = adapter_state_dict(decoder.mm_projector, decoder.image_newline)
        if is_lora and (lost := [name for name in names if name not in tensors]):
            raise ValueError(f"{model_path}: {NON_LORA_FILE} lacks {', '.join(lost)}")
        if not any(".vision_tower." in name for name in tensors):
            decoder.vision_tower.load_pretrained(config.mm_vision_tower)
    decoder.add_newline()  # where the base has tower and projector, but no newline
    if is_lora:
        load_non_lora(model, tensors, model_path)
    else:
        load_adapter(decoder.mm_projector, adapter, model.config, decoder.image_newline)
    weight = decoder.embed_tokens.weight
    for module in (decoder.vision_tower, decoder.mm_projector):
        module.to(device=weight.device, dtype=weight.dtype)
    if decoder.image_newline is not None:
        decoder.image_newline.data = decoder.image_newline.data.to(weight)
    return apply_lora(model, model_path, merge="quantization_config" not in options) if is_lora else model


def quantization_config(bits: int, compute_dtype: torch.dtype = torch.bfloat16) -> "BitsAndBytesConfig":
    """bitsandbytes' configuration for the decoder's linear layers in 4 or 8 bits, without head, projector and tower."""
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise ImportError("--bits and load_4bit / load_8bit need the package bitsandbytes: pip install bitsandbytes")
    return BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        llm_int8_skip_modules=["model.mm_projector", "model.vision_tower", "lm_head"],  # as whole prefixes
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
    )
