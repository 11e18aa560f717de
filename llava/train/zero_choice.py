"""`--deepspeed auto` and `--max_tokens_per_micro_batch auto`: what a run takes, by what its cards have free.

ZeRO-2 with compiled layers where whole weights fit by the memory estimate; it sends no more bytes than ZeRO-3 in any of
the recipes (docs/clusters.md), and only whole layers can be compiled. Otherwise ZeRO-3, or ZeRO-2 with recomputation on
a single card, which has nothing to split; and what does not fit either is offloaded. The choice is made before the
model is loaded, since ZeRO-3 partitions it while it loads.
"""

import copy
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from llava.model.attention import VARLEN, packed_attention
from llava.model.builder import class_of, read_config
from llava.model.llava_arch import PROJECTOR_FIELDS, LlavaMetaForCausalLM
from llava.model.multimodal_encoder.builder import read_vision_config
from llava.train.arguments import ModelArguments, TrainingArguments, parse_flags, read_flags
from llava.train.building import arithmetic_dtype
from llava.train.compilation import missing_compiler
from llava.train.lora import add_lora_by_flags
from llava.train.memory import MemoryEstimate, estimate_memory, memory_budget, plan_checkpointing
from llava.train.optim import set_trainable, tunable_parts
from llava.train.ranks import from_all
from llava.train.zero import fill_bucket_sizes
from llava.utils.paths import shipped

AUTO = "auto"
ZERO_2, ZERO_3 = "deepspeed_configs/zero2.json", "deepspeed_configs/zero3.json"
OFFLOAD = "deepspeed_configs/zero3_offload.json"
MOST_TOKENS = 16384  # of a micro-batch that is chosen: beyond it a GPU's products become no faster
_STEP = 512


@dataclass(frozen=True)
class Choice:
    """What a run takes: the file of DeepSpeed, the tokens of a micro-batch, and whether layers recompute.

    `needed` are the estimated bytes per device, as few layers recomputed as bring them below the budget if any do.
    """

    zero: str
    tokens: int
    recomputes: bool
    needed: int


def resolve_auto(argv: list[str]) -> list[str]:
    """The command line with the flags that `--deepspeed auto` stands for; without it, as it is. Every rank must call.

    The user's own `--compile_layers` and `--use_liger_kernel True` stay. The first rank prints the choice.
    """
    if read_flags(argv).deepspeed != AUTO:
        return argv
    parsed: Any = parse_flags([*argv, "--deepspeed", ZERO_2])
    model_args, _, args = parsed
    if args.bits < 16 or args.lora_use_dora:  # ZeRO-3 can do neither
        cap = args.max_tokens_per_micro_batch == AUTO
        return [*argv, "--deepspeed", ZERO_2, *cap * ["--max_tokens_per_micro_batch", str(args.model_max_length)]]
    uses_liger = args.use_liger_kernel is True
    args.use_liger_kernel = False  # Liger's kernels keep less than these
    model = planned_model(model_args, args)
    budget = min(from_all(memory_budget(args.device, 0)))
    by_memory = args.max_tokens_per_micro_batch == AUTO
    # Without a cap a bound for what micro-batches will hold; crops are known only once the data is read.
    tokens = args.max_tokens_per_micro_batch or args.train_batch_size * args.model_max_length
    choice = choose(model, args, budget, None if by_memory else tokens)
    compiles = choice.zero == ZERO_2 and not choice.recomputes and not uses_liger and can_compile(model, args)
    compiled = ["--compile_layers", "True"] if compiles else []
    zero = ["--deepspeed", choice.zero]
    cap = ["--max_tokens_per_micro_batch", str(choice.tokens)] if by_memory else []
    if args.process_index == 0:
        recomputed = "with layers recomputed" if choice.recomputes else "without recomputation"
        print(
            f"--deepspeed auto: {' '.join([*zero, *cap, *compiled])}, which takes {choice.needed / 2**30:.2f} of "
            f"{budget / 2**30:.2f} usable GiB {recomputed}, by estimate",
            flush=True,
        )
    return [*compiled, *argv, *zero, *cap]


def choose(model: LlavaMetaForCausalLM, args: Any, budget: float, tokens: int | None) -> Choice:
    """What fits into `budget` bytes of each device, the first of `_candidates`; the last of them if none does.

    Args:
        model: the model with `requires_grad` set; it needs no weights.
        args: the training arguments; their `deepspeed` does not count.
        budget: bytes that a rank may take.
        tokens: of the largest micro-batch; None chooses them, at least those of the longest sample.
    """
    choice = None
    for zero, sizes, recomputes in _candidates(args, tokens):

        def made(size: int, zero: str = zero, recomputes: bool = recomputes) -> Choice:
            estimate = estimate_under(zero, model, args, size)
            plan = plan_checkpointing(AUTO if recomputes else False, estimate, budget)
            return Choice(zero, size, recomputes, estimate.total(plan))

        # Sizes fall, and fewer tokens need less.
        first = bisect_left(sizes, True, key=lambda size, made=made: made(size).needed <= budget)
        choice = made(sizes[min(first, len(sizes) - 1)])
        if choice.needed <= budget:
            break
    assert choice is not None
    return choice


def _candidates(args: Any, tokens: int | None) -> Iterator[tuple[str, range | list[int], bool]]:
    """Files of DeepSpeed, sizes of a micro-batch and whether layers may recompute, the best first.

    A micro-batch is as large as fits without recomputation; with it, as large as the longest sample.
    """
    longest = args.model_max_length
    sizes = [tokens] if tokens else range(max(longest, MOST_TOKENS), longest - 1, -_STEP)
    shortest = [tokens or longest]
    yield ZERO_2, sizes, False
    yield ZERO_3 if args.world_size > 1 else ZERO_2, shortest, True
    if args.device.type == "cuda":  # on a CPU there is nowhere else to put the weights
        yield OFFLOAD, shortest, True


def estimate_under(zero: str, model: LlavaMetaForCausalLM, args: Any, tokens: int) -> MemoryEstimate:
    """The memory estimate of a run with the file `zero` of DeepSpeed."""
    config = json.loads(Path(shipped(zero)).read_text(encoding="utf-8"))
    fill_bucket_sizes(model, config["zero_optimization"])
    planned = copy.copy(args)
    planned.deepspeed, planned.hf_deepspeed_config = zero, SimpleNamespace(config=config)
    return estimate_memory(model, planned, tokens)


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
