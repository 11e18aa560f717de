"""Estimated device memory of a run: which layers recompute their activations, and what `--deepspeed auto` stands for.

The estimate follows what autograd keeps (tests compare the two), and rounds up where it depends on the data. `auto` is
decided before the model is loaded, since ZeRO-3 partitions it while it loads.

    python -m llava.train.memory RANKS FLAGS    what a training with these flags takes of a card; nothing is loaded

Shapes: T tokens of the largest micro-batch, V visual tokens per image.
"""

import copy
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import torch
from accelerate.utils import gather_object
from torch import nn

from llava.model.attention import SEGMENTS, packed_attention
from llava.model.builder import class_of, read_config
from llava.model.llava_arch import PROJECTOR_FIELDS, LlavaMetaForCausalLM
from llava.model.lora import is_adapter
from llava.model.loss import LMHead, rows_at_a_time
from llava.model.multimodal_encoder.builder import read_vision_config
from llava.model.zero3 import full_shape
from llava.train.arguments import ModelArguments, TrainingArguments, parse_flags, read_flags
from llava.train.kernels import decide_liger
from llava.train.optim import LANGUAGE_MODEL, is_trained, moment_bytes, set_up_parts, tunable_parts, weight_dtypes
from llava.train.zero import fill_bucket_sizes
from llava.utils.paths import shipped

logger = logging.getLogger(__name__)

AUTO = "auto"
ZERO_2, ZERO_3 = "deepspeed_configs/zero2.json", "deepspeed_configs/zero3.json"
OFFLOAD = "deepspeed_configs/zero3_offload.json"
MOST_TOKENS = 16384  # of a micro-batch that is chosen: beyond it a GPU's products become no faster
_STEP = 512
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_USABLE = 0.9  # share of the free memory; the rest goes to fragmentation and communication buffers
_ZERO3_LIVE_PARAMETERS = 10**9  # DeepSpeed's default for stage3_max_live_parameters


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    embeddings: int  # spliced inputs, projector, final norm
    loss_head: int
    num_layers: int
    layer: int  # what one decoder layer keeps for the backward pass
    layer_input: int  # what it keeps when it recomputes the rest
    tower_layers: int  # layers that keep anything: 0 for a frozen tower
    tower_layer: int
    tower_layer_input: int

    def total(self, recomputed: int = 0) -> int:
        """Bytes when the first `recomputed` decoder layers recompute, and with all of them the tower's."""
        fixed = self.parameters + self.gradients + self.optimizer + self.embeddings
        # The loss head is done when the first layer's backward pass begins.
        working = max(self.loss_head, self.layer, self.tower_layer if self.tower_layers else 0)
        tower = self.tower_layers * (self.tower_layer_input if recomputed == self.num_layers else self.tower_layer)
        return fixed + working + recomputed * self.layer_input + (self.num_layers - recomputed) * self.layer + tower


def estimate_memory(
    model: LlavaMetaForCausalLM, args: Any, tokens: int, crops_per_token: float | None = None
) -> MemoryEstimate:
    """The estimate for a model whose `requires_grad` is set, and micro-batches of up to T `tokens`.

    `crops_per_token` is the largest of any sample; None if every picture has one crop.
    """
    decoder, tower = model.get_model(), model.get_model().vision_tower
    width = decoder.config.hidden_size
    residual = decoder.embed_tokens.weight.element_size()  # bytes per element of the residual stream
    matmul = 2 if args.bf16 or args.fp16 else residual  # bytes per element of the operands of matrix products
    visual = model.crop_rules().tokens_per_crop
    images = max(1, tokens // visual if crops_per_token is None else math.ceil(tokens * crops_per_token))
    tower_tokens = images * tower.num_inner_tokens
    mlp_kept = tower.mlp_width * (3 if tower.gated_mlp or tower.config.hidden_act == "quick_gelu" else 2)
    parameters, gradients, optimizer = _state_bytes(model, args)
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        embeddings=tokens * width * (4 + 4 * residual)
        + images * matmul * (tower.num_tokens * tower.hidden_size + 3 * visual * width),
        loss_head=_loss_head_bytes(model.lm_head, tokens, matmul, args.device),
        num_layers=len(decoder.layers),
        layer=tokens * _decoder_layer_bytes(model, tokens, residual, matmul, args),
        layer_input=tokens * width * residual,
        tower_layers=tower.num_layers_used if is_trained(tower) else 0,
        tower_layer=tower_tokens * (tower.hidden_size * (2 * residual + 6 * matmul) + mlp_kept * matmul),
        tower_layer_input=tower_tokens * tower.hidden_size * residual,
    )


def _state_bytes(model: nn.Module, args: Any) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states, without what DeepSpeed keeps in CPU memory.

    The copies of gradients that a step makes are not counted: by then the activations, which take more, are gone.
    """
    sizes = [(full_shape(p).numel(), p.element_size(), p.requires_grad) for p in model.parameters()]
    stored = sum(count * size for count, size, _ in sizes)
    trained = sum(count for count, _, is_learned in sizes if is_learned)
    moments = moment_bytes(args)
    if not args.deepspeed:
        in_fp32 = sum(count for count, size, is_learned in sizes if is_learned and size == 4)
        copies = 2 * in_fp32 if args.bf16 or args.fp16 else 0  # autocast keeps 16-bit copies of fp32 weights
        buckets = 2 if args.world_size > 1 else 1  # DDP reduces copies
        return stored + copies, buckets * 4 * trained, moments * trained + 4 * (trained - in_fp32)
    config = args.hf_deepspeed_config.config
    zero = config.get("zero_optimization", {})
    stage, ranks = zero.get("stage", 0), args.world_size
    offload_optimizer, offload_parameters = (
        (zero.get(f"offload_{what}") or {}).get("device", "none") != "none" for what in ("optimizer", "param")
    )
    if stage == 3:
        # A rank that is alone takes the weights where they are stored (DeepSpeed 0.19.8, `NoGatherHandle`).
        gathered = min(stored, 2 * _ZERO3_LIVE_PARAMETERS) if ranks > 1 or offload_parameters else 0
        stored = gathered + (0 if offload_parameters else stored // ranks)
    trained_bytes = sum(count * size for count, size, is_learned in sizes if is_learned)
    adds_in_fp32 = config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    gradients = (4 * trained if adds_in_fp32 else trained_bytes) // (ranks if stage >= 2 else 1)
    bucket = zero.get("reduce_bucket_size", 0)  # there are two: one is filled while the other is sent
    buckets = int(2 * bucket * trained_bytes / trained) if isinstance(bucket, int | float) else 0
    if offload_optimizer:
        return stored, buckets + (0 if stage >= 2 else gradients), 0
    updated = trained // (ranks if stage >= 1 else 1)
    return stored, gradients + buckets, (4 + moments) * updated  # fp32 weights and moments


def _decoder_layer_bytes(model: LlavaMetaForCausalLM, tokens: int, residual: int, matmul: int, args: Any) -> int:
    """Bytes per token that autograd keeps for one layer; `residual` and `matmul` as in `estimate_memory`."""
    config, layer, backend = model.config, model.get_model().layers[0], model.config._attn_implementation
    fused = args.use_liger_kernel  # Liger's kernels keep less
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    if backend in ("eager", "sdpa"):
        keys = queries  # repeated for the heads that share them
    linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear) and not is_adapter(f".{name}")}
    fed = sum(m.in_features for m in linears.values())
    gated = sum(m.out_features for name, m in linears.items() if name.startswith("mlp.")) > width + mlp
    norms = {name: module for name, module in layer.named_modules() if name.endswith("norm")}
    trained = any(norm.weight.requires_grad for norm in norms.values())
    of_heads = {"self_attn.q_norm": queries, "self_attn.k_norm": keys}

    kept = 0
    for name, norm in norms.items():  # RMSNorm in PyTorch computes in fp32, and keeps what a trained weight multiplies
        own = residual if fused or isinstance(norm, nn.LayerNorm) else 4 + residual * trained
        kept += of_heads.get(name, width) * own
    # Values in one product with the others are a view of all three, which keeps all beside the rotated ones.
    kept += matmul * (queries + keys) * (3 if hasattr(layer.self_attn, "qkv_proj") else 2)
    # Gate, its activation, and what the gate multiplies; Liger recomputes the activation.
    kept += matmul * mlp * ((2 if fused else 3) if gated else 1)
    adapters = [p for name, p in layer.named_parameters() if is_adapter(name)]
    if adapters:  # each has its own dropout: the dropped-out value and a mask
        dropped = max(matmul, adapters[0].element_size())
        kept += fed * (dropped + (1 if args.device.type == "cuda" else dropped))
    elif trained:
        # Products after a norm share its output; autocast makes a copy for each.
        normed_inputs = 2 * width if matmul == residual else fed - queries - mlp
        kept += matmul * (normed_inputs + mlp + (queries if backend == SEGMENTS else 0))
    if backend == "sdpa" and model.padding_free:  # a copy of the mask in the queries' precision
        kept += tokens * matmul
    if backend == "eager":  # a matrix of all pairs of tokens for every head, in fp32 and for the product
        kept += tokens * config.num_attention_heads * (4 + (matmul if matmul < 4 else 0))
    return kept


def _loss_head_bytes(lm_head: LMHead, rows: int, matmul: int, device: torch.device) -> int:
    """Bytes of the loss head, as if every token were a target."""
    vocabulary, width = lm_head.out_features, lm_head.in_features
    logits = matmul + 4 + 4  # as the product gives them, as fp32, and their softmax
    weight_gradient = vocabulary * width * (4 + matmul) if lm_head.weight.requires_grad else 0
    return 2 * rows * width * matmul + weight_gradient + rows_at_a_time(rows, vocabulary, device) * vocabulary * logits


# --- recomputation ----------------------------------------------------------------------------------------------------


def layers_to_recompute(requested: bool | int | str, estimate: MemoryEstimate, budget: float) -> int:
    """The number of decoder layers, from the first, that recompute; with all of them the tower's do so too.

    `auto` takes as few as bring the total below `budget` bytes, or else all.
    """
    if isinstance(requested, bool):
        return estimate.num_layers * requested
    if isinstance(requested, str):
        excess = max(0, estimate.total() - budget)
        return min(estimate.num_layers, math.ceil(excess / max(1, estimate.layer - estimate.layer_input)))
    if requested > estimate.num_layers:
        raise ValueError(f"--activation_checkpointing {requested}: the language model has {estimate.num_layers} layers")
    return requested


def memory_budget(device: torch.device, parameters: int) -> float:
    """Bytes that a rank may take, with the `parameters` that a CPU's memory holds already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _USABLE * (free + torch.cuda.memory_reserved(device))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return _USABLE * psutil.virtual_memory().available / ranks + parameters


def set_up_checkpointing(
    model: LlavaMetaForCausalLM, args: Any, tokens: int, crops_per_token: float | None = None
) -> None:
    """Logs the estimate, decides by `--activation_checkpointing`, and switches recomputation on.

    Every rank must call: all ranks decide alike, since recomputing gathers weights under ZeRO-3.
    """
    estimate = estimate_memory(model, args, tokens, crops_per_token)
    budget = min(gather_object([memory_budget(args.device, estimate.parameters)]))
    recomputed = layers_to_recompute(args.activation_checkpointing, estimate, budget)
    logger.info(
        "memory estimate: total with working space %.2f of %.2f GiB usable, micro-batches of up to %d tokens; "
        "activation checkpointing: %d of %d decoder layers%s",
        estimate.total(recomputed) / 2**30, budget / 2**30, tokens, recomputed, estimate.num_layers,
        ", and the tower's" if estimate.tower_layers and recomputed == estimate.num_layers else "",
    )  # fmt: skip
    args.activation_checkpointing = args.gradient_checkpointing = False  # the Trainer would switch on every layer
    if not recomputed:
        return
    # Releases of the library before 5.23 know only the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    decoder: Any = model.get_model()
    others, tower = decoder.layers[recomputed:], decoder.vision_tower
    for layer in (*others, *(tower.layers if others or not is_trained(tower) else ())):
        layer.gradient_checkpointing = False


# --- what auto stands for ---------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """DeepSpeed's file ("" for none), tokens of a micro-batch, whether layers recompute, and bytes per device."""

    zero: str
    tokens: int
    recomputes: bool
    needed: int


def runs_alone() -> bool:
    """Whether the launcher started this process alone."""
    return int(os.environ.get("WORLD_SIZE", 1)) == 1


def resolve_auto(argv: list[str]) -> list[str]:
    """The command line with the flags that `--deepspeed auto` stands for; without it, as it is. Every rank must call.

    A process that is alone and takes no DeepSpeed also leaves its launcher's group of one rank. It must not see several
    GPUs, over which the library would divide a batch.
    """
    if read_flags(argv).deepspeed != AUTO:
        return argv
    alone = runs_alone()
    if alone and torch.cuda.device_count() > 1:
        raise ValueError("--deepspeed auto with one rank: several GPUs are visible; set CUDA_VISIBLE_DEVICES to one")
    group = {name: os.environ.pop(name) for name in _RANK_VARIABLES if alone and name in os.environ}
    parsed: Any = parse_flags([*argv, "--deepspeed", "" if alone else ZERO_2])
    model_args, _, args = parsed
    # Without a cap a bound for what micro-batches will hold; crops are known only once the data is read.
    tokens = args.max_tokens_per_micro_batch or args.train_batch_size * args.model_max_length
    budget = min(gather_object([memory_budget(args.device, 0)]))
    choice = choose(planned_model(model_args, args), args, budget, tokens)
    if choice.zero:
        os.environ.update(group)
    flags = ["--deepspeed", choice.zero]
    flags += ["--max_tokens_per_micro_batch", str(choice.tokens)] if tokens == AUTO else []
    if args.process_index == 0:
        print(
            f"--deepspeed auto: {shlex.join(flags)}, which takes {choice.needed / 2**30:.2f} of {budget / 2**30:.2f} "
            f"usable GiB with{'' if choice.recomputes else 'out'} recomputation, by estimate",
            flush=True,
        )
    return [*argv, *flags]


def choose(model: LlavaMetaForCausalLM, args: Any, budget: float, tokens: int | str, zero: str = AUTO) -> Choice:
    """The first candidate that fits into `budget` bytes of each device; the last, which saves most, if none does.

    With `zero`, DeepSpeed's file is given; otherwise the candidates are whole weights on every device (ZeRO-2, or no
    DeepSpeed on a single one), ZeRO-3 or recomputation, and offload. If `tokens` is `auto`, a micro-batch is as large
    as fits without recomputation, or else as large as the longest sample. The model needs no weights.
    """
    longest, several = args.model_max_length, args.world_size > 1
    least: Any = longest if tokens == AUTO else tokens
    if zero != AUTO:
        candidates: list[tuple[str, Any, Any]] = [(zero, least, args.activation_checkpointing)]
    else:
        sizes = range(max(longest, MOST_TOKENS), longest - 1, -_STEP) if tokens == AUTO else [tokens]
        candidates = [(ZERO_2 if several else "", size, False) for size in sizes]
        candidates.append((ZERO_3 if several else "", least, AUTO))
        if args.device.type == "cuda":  # on a CPU there is nowhere else to put the weights
            candidates.append((OFFLOAD, least, AUTO))
    for name, size, requested in candidates:
        estimate = estimate_under(name, model, args, size)
        recomputed = layers_to_recompute(requested, estimate, budget)
        choice = Choice(name, size, bool(recomputed), estimate.total(recomputed))
        if choice.needed <= budget:
            break
    return choice


def estimate_under(zero: str, model: LlavaMetaForCausalLM, args: Any, tokens: int) -> MemoryEstimate:
    """The memory estimate of a run with the file `zero` of DeepSpeed, or without it."""
    planned = copy.copy(args)
    planned.deepspeed = zero
    if zero:
        config = json.loads(Path(shipped(zero)).read_text(encoding="utf-8"))
        fill_bucket_sizes(model, config["zero_optimization"])
        planned.hf_deepspeed_config = SimpleNamespace(config=config)
    return estimate_memory(model, planned, tokens)


def planned_model(model_args: ModelArguments, args: TrainingArguments) -> LlavaMetaForCausalLM:
    """The model that the flags describe, without weights, norm and newline, with `requires_grad` set; Liger is decided.

    It is in 16 bits, whatever `--bits` says.
    """
    config, parts = read_config(model_args.model_name_or_path, cache_dir=args.cache_dir), tunable_parts(model_args)
    if not getattr(config, "mm_vision_config", None):
        config.mm_vision_tower = model_args.vision_tower
        config.mm_vision_config = read_vision_config(model_args.vision_tower or "")
        for field in PROJECTOR_FIELDS:
            setattr(config, field, getattr(model_args, field))
    config.mm_projector_norm = "none"
    with torch.device("meta"):
        model: Any = class_of(config)(config)
    frozen, _, large = weight_dtypes(args)
    model.to(large if LANGUAGE_MODEL in parts and not args.lora_enable else frozen)
    model.tie_weights()
    set_up_parts(model, parts, args)
    attention = model_args.attn_implementation
    if args.padding_free:
        attention = packed_attention(attention, args.device, frozen)
    model.config._attn_implementation = attention
    decide_liger(model, args)
    return model


def rows_of_cards(argv: list[str], ranks: int, gibs: Iterable[int]) -> Iterator[str]:
    """A line for each card of so many GiB: what one of `ranks` such cards holds, by estimate, and what recomputes."""
    model_args, _, parsed = parse_flags([*argv, "--deepspeed", "", "--tf32", "False", "--bf16", "False"])
    zero = read_flags(argv).deepspeed or ""
    args: Any = SimpleNamespace(**vars(parsed))
    args.device, args.world_size, args.bf16 = torch.device("cuda"), ranks, not args.fp16
    args.deepspeed = zero if zero != AUTO else ZERO_2 if ranks > 1 else ""
    model_args.attn_implementation = model_args.attn_implementation or "sdpa"  # kernels of a card keep as much
    model: Any = planned_model(model_args, args)
    tokens = args.max_tokens_per_micro_batch or args.per_device_train_batch_size * args.model_max_length
    for gib in gibs:
        budget = _USABLE * gib * 2**30
        choice = choose(model, args, budget, tokens, zero)
        fits = "" if choice.needed <= budget else "DOES NOT FIT: "
        yield (
            f"{gib:>4} GB   {fits}{choice.needed / 2**30:.0f} of {budget / 2**30:.0f} GiB usable, micro-batches of "
            f"{choice.tokens} tokens, {Path(choice.zero).stem or 'no DeepSpeed'}{', recomputing' * choice.recomputes}"
        )


def main() -> None:
    """Prints the lines for this machine's first GPU, or for cards of 24, 48 and 80 GB where there is none."""
    gibs = (24, 48, 80)
    if torch.cuda.is_available():
        gibs = (round(torch.cuda.get_device_properties(0).total_memory / 2**30),)
    for row in rows_of_cards(sys.argv[2:], int(sys.argv[1]), gibs):
        print(row)


if __name__ == "__main__":
    main()
