"""`--deepspeed auto`: ZeRO-2 with compiled layers where whole weights fit by the memory estimate, else ZeRO-3.

ZeRO-2 sends no more bytes than ZeRO-3 in any of the recipes (docs/clusters.md), and only whole layers can be compiled.
The choice is made before the model is loaded, since ZeRO-3 partitions it while it loads.
"""

from typing import Any

import torch

from llava.model.attention import VARLEN, packed_attention
from llava.model.builder import class_of, read_config
from llava.model.llava_arch import PROJECTOR_FIELDS, LlavaMetaForCausalLM
from llava.model.multimodal_encoder.builder import read_vision_config
from llava.train.arguments import ModelArguments, TrainingArguments
from llava.train.building import arithmetic_dtype
from llava.train.compilation import missing_compiler
from llava.train.flags import FlagParser, parse_flags
from llava.train.lora import add_lora_by_flags
from llava.train.memory import CheckpointPlan, estimate_memory, memory_budget
from llava.train.optim import set_trainable, tunable_parts
from llava.train.ranks import from_all
from llava.train.zero import fit_zero

AUTO = "auto"
ZERO_2, ZERO_3 = "deepspeed_configs/zero2.json", "deepspeed_configs/zero3.json"


def resolve_auto(argv: list[str]) -> list[str]:
    """The command line with the flags that `--deepspeed auto` stands for; without it, as it is. Every rank must call.

    The user's own `--compile_layers` and `--use_liger_kernel True` stay. The first rank prints the choice.
    """
    given = FlagParser().parse_known_args(argv)[0]
    if given.deepspeed != AUTO:
        return argv
    parsed: Any = parse_flags([*argv, "--deepspeed", ZERO_2])
    model_args, _, args = parsed
    if args.bits < 16 or args.lora_use_dora:
        return [*argv, "--deepspeed", ZERO_2]  # ZeRO-3 can do neither
    uses_liger = args.use_liger_kernel is True
    args.use_liger_kernel = False  # Liger's kernels keep less than these
    model = planned_model(model_args, args)
    fit_zero(model, args)
    # Without a cap a bound for what micro-batches will hold; crops are known only once the data is read.
    tokens = args.max_tokens_per_micro_batch or args.train_batch_size * args.model_max_length
    needed = estimate_memory(model, args, tokens).total(CheckpointPlan())
    budget = min(from_all(memory_budget(args.device, 0)))
    fits = needed <= budget
    compiled = ["--compile_layers", "True"] if fits and not uses_liger and can_compile(model, args) else []
    zero = ["--deepspeed", ZERO_2 if fits else ZERO_3]
    if args.process_index == 0:
        print(
            f"--deepspeed auto: {' '.join([*zero, *compiled])}, since ZeRO-2 without recomputation takes "
            f"{needed / 2**30:.2f} of {budget / 2**30:.2f} usable GiB by estimate",
            flush=True,
        )
    return [*compiled, *argv, *zero]


def planned_model(model_args: ModelArguments, args: TrainingArguments) -> LlavaMetaForCausalLM:
    """The model that the flags describe, without weights, norm and newline, with `requires_grad` set."""
    config, dtype = read_config(model_args.model_name_or_path, cache_dir=args.cache_dir), arithmetic_dtype(args)
    if not getattr(config, "mm_vision_config", None):
        config.mm_vision_tower = model_args.vision_tower
        config.mm_vision_config = read_vision_config(model_args.vision_tower or "")
        for field in PROJECTOR_FIELDS:
            setattr(config, field, getattr(model_args, field))
    config.mm_projector_norm = "none"
    with torch.device("meta"):
        model: Any = class_of(config)(config)
    model.to(dtype)
    model.tie_weights()
    add_lora_by_flags(model, args, dtype)
    set_trainable(model, tunable_parts(model_args))
    attention = model_args.attn_implementation
    if args.padding_free:
        attention = packed_attention(attention, args.device, dtype)
    model.config._attn_implementation = attention
    model.lm_head.loss_head = args.loss_head
    return model


def can_compile(model: LlavaMetaForCausalLM, args: TrainingArguments) -> bool:
    """Whether compiled layers would run here: on a GPU, with a kernel for packed samples, a compiler, no adapters."""
    packed = (VARLEN, "flash_attention_2", "flash_attention_3")
    return bool(
        args.device.type == "cuda"
        and not args.lora_enable
        and model.config._attn_implementation in packed
        and not missing_compiler()
    )
