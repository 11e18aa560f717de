"""Applies the LoRA flags: their checks, the quantised base of QLoRA, and the adapters."""

from dataclasses import fields
from typing import Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from llava.model.builder import quantization_config
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import DECODER, TOWER, add_lora
from llava.train.arguments import ModelArguments, TrainingArguments
from llava.train.optim import LANGUAGE_MODEL, VISION_TOWER, tunable_parts

_LORA_FLAGS = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_bias", "lora_modules", "lora_use_dora",
    "bits", "double_quant", "quant_type",
)  # fmt: skip


def check_lora_flags(model_args: ModelArguments, training_args: TrainingArguments) -> None:
    """Raises ValueError if a LoRA flag is wrong; the message names the flag and says what to do."""
    if training_args.lora_weight_path:
        raise ValueError(
            "--lora_weight_path: LLaVA never reads it; to continue from a LoRA, merge it with llava.model.merge_lora "
            "and pass the result as --model_name_or_path"
        )
    if not training_args.lora_enable:
        changed = [flag for flag in _LORA_FLAGS if getattr(training_args, flag) != _default(training_args, flag)]
        if changed:
            raise ValueError(f"{', '.join(f'--{flag}' for flag in changed)}: only with --lora_enable True")
        return
    _check_modules(model_args, training_args)
    for flag in ("lora_r", "lora_alpha"):
        if getattr(training_args, flag) < 1:
            raise ValueError(f"--{flag}: expected a positive number, found {getattr(training_args, flag)}")
    if not 0 <= training_args.lora_dropout < 1:
        raise ValueError(f"--lora_dropout: must be in [0, 1), found {training_args.lora_dropout}")
    if training_args.bits < 16:
        quantization_config(training_args.bits)  # raises now if bitsandbytes is missing
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                f"--bits {training_args.bits}: ZeRO-3 cannot partition quantised weights; "
                "use deepspeed_configs/zero2.json"
            )
    if training_args.lora_use_dora:
        if training_args.bits < 16:
            raise ValueError(
                f"--lora_use_dora True needs the norms of whole weights, which --bits {training_args.bits} does not "
                "keep; leave out one of them"
            )
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "--lora_use_dora True: ZeRO-3 has released a layer's weights when DoRA computes their norms; use "
                "deepspeed_configs/zero2.json"
            )


def lora_modules(training_args: TrainingArguments) -> frozenset[str]:
    """The parts that `--lora_modules` names.

    Raises:
        ValueError: it names something else, or nothing.
    """
    modules = frozenset(name.strip() for name in training_args.lora_modules.split(",") if name.strip())
    if not modules or modules - {DECODER, TOWER}:
        raise ValueError(
            f"--lora_modules: expected {DECODER}, {TOWER} or both with a comma, found {training_args.lora_modules!r}"
        )
    return modules


def _check_modules(model_args: ModelArguments, training_args: TrainingArguments) -> None:
    """The part of `check_lora_flags` about `--lora_modules`: only parts that are trained can have adapters."""
    modules, parts = lora_modules(training_args), tunable_parts(model_args)
    if DECODER in modules and LANGUAGE_MODEL not in parts:
        raise ValueError(
            "--lora_enable trains the language model by LoRA, but the other flags leave it out: drop "
            "--tune_mm_mlp_adapter / --freeze_backbone (LoRA freezes the weights anyway), or name mm_language_model in "
            "--mm_tunable_parts"
        )
    if TOWER in modules and VISION_TOWER not in parts:
        raise ValueError(
            f"--lora_modules {training_args.lora_modules} trains the vision tower by LoRA, but the other flags do not: "
            "name mm_vision_tower in --mm_tunable_parts, or pass --unfreeze_mm_vision_tower True (LoRA freezes the "
            "weights anyway)"
        )
    if DECODER in modules:
        return
    if LANGUAGE_MODEL in parts:
        raise ValueError(
            f"--lora_modules {training_args.lora_modules} gives the language model no adapters, and a LoRA folder does "
            "not hold it: add decoder, or leave mm_language_model out of --mm_tunable_parts (--freeze_backbone True)"
        )
    if training_args.lora_bias != "none":
        raise ValueError(f"--lora_bias {training_args.lora_bias} is about the language model, which has no adapters")


def _default(args: TrainingArguments, name: str) -> Any:
    return next(field.default for field in fields(args) if field.name == name)


def quantized_loading(training_args: TrainingArguments, compute_dtype: torch.dtype) -> dict[str, Any]:
    """`from_pretrained`'s options for `--bits`; empty if the model is not quantised."""
    if training_args.bits == 16:
        return {}
    config = quantization_config(
        training_args.bits, compute_dtype, training_args.double_quant, training_args.quant_type
    )
    return {"quantization_config": config, "device_map": {"": training_args.device}}


def prepare_quantized(model: LlavaMetaForCausalLM, training_args: TrainingArguments, dtype: torch.dtype) -> None:
    """Makes a quantised model trainable as PEFT advises: norms in fp32; embedding and head are put back to `dtype`."""
    if training_args.bits == 16:
        return
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # the Trainer switches it on
    model.get_input_embeddings().to(dtype)
    model.lm_head.to(dtype)


def add_lora_by_flags(model: LlavaMetaForCausalLM, training_args: TrainingArguments, dtype: torch.dtype) -> None:
    """Adds the adapters that the flags ask for; nothing without `--lora_enable`."""
    if training_args.lora_enable:
        add_lora(
            model,
            r=training_args.lora_r,
            alpha=training_args.lora_alpha,
            dropout=training_args.lora_dropout,
            bias=training_args.lora_bias,
            dtype=dtype,
            modules=lora_modules(training_args),
            use_dora=training_args.lora_use_dora,
        )
