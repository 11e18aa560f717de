"""Device memory of a run by estimate: which layers recompute their activations, and what `auto` stands for.

The estimate follows what autograd keeps (tests compare the two), and rounds up where it depends on the data.
Attention has no matrix of all pairs of tokens unless the backend is `eager`, or `sdpa` over packed samples.

`--deepspeed auto` takes the first that fits: whole weights on every device, in ZeRO-2, or without DeepSpeed on a single
one; ZeRO-3, or recomputation on a single device; offload. ZeRO-2 sends no more bytes than ZeRO-3 in any of the recipes
(docs/clusters.md). The choice is made before the model is loaded, since ZeRO-3 partitions it while it loads.

Shapes: T tokens of the largest micro-batch, V visual tokens per image.
"""

import copy
import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from accelerate.utils import gather_object
from torch import nn

from llava.model.attention import SEGMENTS, VARLEN, packed_attention
from llava.model.builder import class_of, read_config
from llava.model.llava_arch import PROJECTOR_FIELDS, LlavaMetaForCausalLM
from llava.model.lora import add_lora, is_adapter
from llava.model.loss import LMHead, rows_at_a_time
from llava.model.multimodal_encoder.builder import read_vision_config
from llava.model.multimodal_encoder.towers import VisionTower
from llava.model.zero3 import full_shape
from llava.train.arguments import ModelArguments, TrainingArguments, parse_flags, read_flags
from llava.train.kernels import has_compiler, liger_runs
from llava.train.optim import LANGUAGE_MODEL, VISION_TOWER, is_trained, keeps_masters, set_trainable, tunable_parts
from llava.train.zero import fill_bucket_sizes
from llava.utils.paths import shipped

logger = logging.getLogger(__name__)

_USABLE = 0.9  # share of the free memory; the rest goes to fragmentation and communication buffers
_ZERO3_LIVE_PARAMETERS = 10**9  # DeepSpeed's default for stage3_max_live_parameters
_ZERO3_SUB_GROUP = 10**9  # and for sub_group_size


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int
    step: int  # copies of gradients in fp32, which exist while the optimizer steps, when there are no activations
    embeddings: int  # spliced inputs, projector, final norm
    loss_head: int
    num_layers: int
    layer: int  # what one decoder layer keeps for the backward pass
    layer_input: int  # what it keeps when it recomputes the rest
    tower_layers: int  # layers that keep anything: 0 for a frozen tower
    tower_layer: int
    tower_layer_input: int

    def activations(self, checkpointed: int) -> int:
        """Bytes of the decoder's activations when its first `checkpointed` layers recompute."""
        return checkpointed * self.layer_input + (self.num_layers - checkpointed) * self.layer

    def tower(self, checkpointed: bool) -> int:
        return self.tower_layers * (self.tower_layer_input if checkpointed else self.tower_layer)

    def total(self, plan: "CheckpointPlan") -> int:
        fixed = self.parameters + self.gradients + self.optimizer + self.embeddings
        # The loss head is done when the first layer's backward pass begins.
        working = max(self.loss_head, self.layer, self.tower_layer if self.tower_layers else 0)
        return fixed + max(self.step, working + self.activations(plan.decoder_layers) + self.tower(plan.tower))


@dataclass(frozen=True)
class CheckpointPlan:
    """Which layers recompute their activations: the first `decoder_layers`, and all of the tower's or none."""

    decoder_layers: int = 0
    tower: bool = False


def estimate_memory(
    model: LlavaMetaForCausalLM, args: Any, tokens: int, crops_per_token: float | None = None
) -> MemoryEstimate:
    """The estimate for a model whose `requires_grad` is set.

    Args:
        model: the model, with its vision tower.
        args: the training arguments (DeepSpeed, precision, optimizer).
        tokens: T, the tokens of the largest micro-batch.
        crops_per_token: the most crops per token of any sample; None if every picture has one crop.
    """
    decoder, tower = model.get_model(), model.get_model().vision_tower
    config = decoder.config
    residual = decoder.embed_tokens.weight.element_size()
    matmul = 2 if args.bf16 or args.fp16 else residual
    # The most squares that the tower can see in a micro-batch.
    visual = model.crop_rules().tokens_per_crop
    images = max(1, tokens // visual if crops_per_token is None else math.ceil(tokens * crops_per_token))
    tower_tokens = images * tower.num_inner_tokens
    tower_trained = is_trained(tower)
    parameters, gradients, optimizer, step = _state_bytes(model, args)
    width = config.hidden_size
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        step=step,
        embeddings=tokens * width * (4 + 4 * residual)
        + images * matmul * (tower.num_tokens * tower.hidden_size + 3 * visual * width),
        loss_head=_loss_head_bytes(model.lm_head, tokens, matmul, args.device),
        num_layers=len(decoder.layers),
        layer=_decoder_layer_bytes(model, tokens, residual, matmul, args.device, args.use_liger_kernel),
        layer_input=tokens * width * residual,
        tower_layers=tower.num_layers_used if tower_trained else 0,
        tower_layer=tower_tokens * _tower_layer_bytes(tower, residual, matmul),
        tower_layer_input=tower_tokens * tower.hidden_size * residual,
    )


def _state_bytes(model: nn.Module, args: TrainingArguments) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients, optimizer states, and of the copies of gradients that its step makes.

    What DeepSpeed keeps in CPU memory is not counted.
    """
    parameters = list(model.parameters())
    stored = sum(full_shape(p).numel() * p.element_size() for p in parameters)
    trained = sum(full_shape(p).numel() for p in parameters if p.requires_grad)
    trained_bytes = sum(full_shape(p).numel() * p.element_size() for p in parameters if p.requires_grad)
    per_element = 2 if "8bit" in str(args.optim) else 8  # two moments in one byte each or in fp32
    if not args.deepspeed:
        in_fp32 = sum(p.numel() for p in parameters if p.requires_grad and p.dtype == torch.float32)
        copies = 2 * in_fp32 if args.bf16 or args.fp16 else 0  # autocast keeps 16-bit copies of fp32 weights
        masters = 4 * (trained - in_fp32)
        buckets = 2 if args.world_size > 1 else 1  # DDP reduces copies
        return stored + copies, buckets * 4 * trained, per_element * trained + masters, 0
    config = args.hf_deepspeed_config.config
    zero = config.get("zero_optimization", {})
    stage, ranks = zero.get("stage", 0), args.world_size
    offload_optimizer, offload_parameters = (
        (zero.get(f"offload_{what}") or {}).get("device", "none") != "none" for what in ("optimizer", "param")
    )
    if stage == 3:
        # A rank that is alone takes the weights where they are stored (DeepSpeed 0.19.8, `NoGatherHandle`).
        gathered = min(stored, _ZERO3_LIVE_PARAMETERS * 2) if ranks > 1 or offload_parameters else 0
        stored = gathered + (0 if offload_parameters else stored // ranks)
    kept_in_fp32 = config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    gradients = (4 * trained if kept_in_fp32 else trained_bytes) // (ranks if stage >= 2 else 1)
    bucket = zero.get("reduce_bucket_size", 0)  # there are two: one is filled while the other is sent
    buckets = int(2 * bucket * trained_bytes / trained) if isinstance(bucket, int | float) else 0
    updated = trained // (ranks if stage >= 1 else 1)
    states = (4 + per_element) * updated  # fp32 weights, moments
    # DeepSpeed 0.19.8: ZeRO-2 steps on gradients kept in fp32 as they are; all else copies them, ZeRO-3 part by part.
    copied = min(updated, int(zero.get("sub_group_size", _ZERO3_SUB_GROUP))) if stage == 3 else updated
    step = 0 if stage == 2 and kept_in_fp32 else 4 * copied
    if offload_optimizer:
        states = step = 0
        gradients = 0 if stage >= 2 else gradients
    return stored, gradients + buckets, states, step


def _decoder_layer_bytes(
    model: LlavaMetaForCausalLM, tokens: int, residual: int, matmul: int, device: torch.device, fused: bool
) -> int:
    """Bytes that autograd keeps for one layer: norms, inputs of trained linear layers, attention, MLP.

    Args:
        residual, matmul: bytes per element of the residual stream, and of the operands of matrix products.
        fused: whether Liger's kernels run, which keep less.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = model.get_model().layers[0]
    linears = {name: m for name, m in layer.named_modules() if isinstance(m, nn.Linear) and not is_adapter(f".{name}")}
    fed = sum(m.in_features for m in linears.values())
    norms = {name: module for name, module in layer.named_modules() if name.endswith("norm")}
    trained = any(norm.weight.requires_grad for norm in norms.values())
    backend = config._attn_implementation
    if backend in ("eager", "sdpa"):
        keys = queries  # repeated for the heads that share them

    of_heads = {"self_attn.q_norm": queries, "self_attn.k_norm": keys}
    norm = sum(
        of_heads.get(name, width)
        # RMSNorm in PyTorch computes in fp32, and keeps what it multiplies with a trained weight.
        * (residual if fused or isinstance(module, nn.LayerNorm) else 4 + residual * trained)
        for name, module in norms.items()
    )
    attention = matmul * 2 * (queries + keys)
    if hasattr(layer.self_attn, "qkv_proj"):  # values are a view of all three, which keeps all beside the rotated ones
        attention += matmul * (queries + keys)
    in_mlp = sum(m.in_features * m.out_features for name, m in linears.items() if name.startswith("mlp."))
    if in_mlp > 2 * width * mlp:  # gate, its activation, and what the gate multiplies; Liger recomputes the activation
        mlp_kept = matmul * mlp * (2 if fused else 3)
    else:
        mlp_kept = matmul * mlp
    if any(is_adapter(name) for name, _ in layer.named_parameters()):
        inputs = fed * _dropout_bytes(layer, matmul, device)
    elif trained:
        # Products after a norm share its output; autocast makes a copy for each.
        normed_inputs = 2 * width if matmul == residual else fed - queries - mlp
        inputs = matmul * (normed_inputs + mlp + (queries if backend == SEGMENTS else 0))
    else:
        inputs = 0
    pairs = tokens * config.num_attention_heads * (4 + (matmul if matmul < 4 else 0)) if backend == "eager" else 0
    if backend == "sdpa" and model.padding_free:  # a copy of the mask in the queries' precision
        pairs = tokens * matmul
    return tokens * (norm + attention + mlp_kept + inputs + pairs)


def _dropout_bytes(layer: nn.Module, matmul: int, device: torch.device) -> int:
    """Bytes per input element of a layer with adapters, each with its own dropout: the dropped-out value and a mask."""
    dropped = max(matmul, next((p.element_size() for p in layer.parameters() if p.requires_grad), 0))
    return dropped + (1 if device.type == "cuda" else dropped)


def _tower_layer_bytes(tower: VisionTower, residual: int, matmul: int) -> int:
    """Bytes per token that a layer of a trained tower keeps."""
    kept = 3 if tower.gated_mlp or tower.config.hidden_act == "quick_gelu" else 2
    return tower.hidden_size * (2 * residual + 6 * matmul) + tower.mlp_width * kept * matmul


def _loss_head_bytes(lm_head: LMHead, rows: int, matmul: int, device: torch.device) -> int:
    """Bytes of the loss head, as if every token were a target."""
    vocabulary, width = lm_head.out_features, lm_head.in_features
    logits = matmul + 4 + 4  # as the product gives them, as fp32, and their softmax
    weight_gradient = vocabulary * width * (4 + matmul) if lm_head.weight.requires_grad else 0
    return 2 * rows * width * matmul + weight_gradient + rows_at_a_time(rows, vocabulary, device) * vocabulary * logits


# --- recomputation ----------------------------------------------------------------------------------------------------


def plan_checkpointing(requested: bool | int | str, estimate: MemoryEstimate, budget: float) -> CheckpointPlan:
    """Which layers recompute their activations.

    Args:
        requested: True, False, a number of decoder layers, or `auto`: as few decoder layers as bring the total below
            `budget`, and a trained tower's layers only if all of the decoder's are not enough.
        estimate: the estimate for the model.
        budget: bytes that a rank may take.

    Raises:
        ValueError: the decoder has fewer layers than requested.
    """
    everything = CheckpointPlan(estimate.num_layers, tower=estimate.tower_layers > 0)
    if isinstance(requested, bool):
        return everything if requested else CheckpointPlan()
    if isinstance(requested, int):
        if requested > estimate.num_layers:
            raise ValueError(
                f"--activation_checkpointing {requested}: the language model has {estimate.num_layers} layers"
            )
        return CheckpointPlan(requested)
    excess = estimate.total(CheckpointPlan()) - budget
    if excess <= 0:
        return CheckpointPlan()
    needed = math.ceil(excess / max(1, estimate.layer - estimate.layer_input))
    return CheckpointPlan(needed) if needed <= estimate.num_layers else everything


def memory_budget(device: torch.device, parameters: int) -> float:
    """Bytes that a rank may take, with the `parameters` that a CPU's memory holds already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _USABLE * (free + torch.cuda.memory_reserved(device))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return _USABLE * psutil.virtual_memory().available / ranks + parameters


def set_up_checkpointing(
    model: LlavaMetaForCausalLM, args: Any, tokens: int, crops_per_token: float | None = None
) -> CheckpointPlan:
    """Logs the estimate, decides by `--activation_checkpointing`, and switches recomputation on; returns the decision.

    Every rank must call: all ranks decide alike, since recomputing gathers weights under ZeRO-3.
    """
    estimate = estimate_memory(model, args, tokens, crops_per_token)
    budget = min(gather_object([memory_budget(args.device, estimate.parameters)]))
    plan = plan_checkpointing(args.activation_checkpointing, estimate, budget)
    total = estimate.total(plan)
    logger.info(
        "memory estimate: total with working space %.2f of %.2f GiB usable, micro-batches of up to %d tokens; "
        "activation checkpointing: %d of %d decoder layers%s",
        total / 2**30, budget / 2**30, tokens, plan.decoder_layers, estimate.num_layers,
        ", and the tower's" if plan.tower else "",
    )  # fmt: skip
    if args.activation_checkpointing == "auto" and total > budget:
        logger.warning(
            "even with every layer recomputed the estimate exceeds what is free; if memory runs out, lower "
            "--max_tokens_per_micro_batch or --per_device_train_batch_size, or use deepspeed_configs/zero3.json, "
            "zero3_offload.json or more GPUs"
        )
    checkpoint_layers(model, plan)
    args.activation_checkpointing = args.gradient_checkpointing = False  # the Trainer would switch on every layer
    return plan


def checkpoint_layers(model: LlavaMetaForCausalLM, plan: CheckpointPlan) -> None:
    """Switches recomputation on for the planned layers."""
    if plan == CheckpointPlan():
        return
    # Releases of the library before 5.23 know only the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    decoder = model.get_model()
    others: list[Any] = [*decoder.layers[plan.decoder_layers :], *([] if plan.tower else decoder.vision_tower.layers)]
    for layer in others:
        layer.gradient_checkpointing = False


# --- what auto stands for ---------------------------------------------------------------------------------------------

AUTO = "auto"
ZERO_2, ZERO_3 = "deepspeed_configs/zero2.json", "deepspeed_configs/zero3.json"
OFFLOAD = "deepspeed_configs/zero3_offload.json"
MOST_TOKENS = 16384  # of a micro-batch that is chosen: beyond it a GPU's products become no faster
_STEP = 512
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Choice:
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

    A process that is alone and takes no DeepSpeed also leaves its launcher's group of one rank.

    Raises:
        ValueError: a process that is alone sees several GPUs, over which the library would divide a batch.
    """
    if read_flags(argv).deepspeed != AUTO:
        return argv
    alone, ranks = runs_alone(), {name: os.environ[name] for name in _RANK_VARIABLES if name in os.environ}
    if alone and torch.cuda.device_count() > 1:
        raise ValueError("--deepspeed auto with one rank: several GPUs are visible; set CUDA_VISIBLE_DEVICES to one")
    for name in ranks if alone else ():
        del os.environ[name]
    parsed: Any = parse_flags([*argv, "--deepspeed", "" if alone else ZERO_2])
    model_args, _, args = parsed
    by_memory = args.max_tokens_per_micro_batch == AUTO
    if args.bits < 16:  # ZeRO-3 cannot partition quantised weights
        cap = ["--max_tokens_per_micro_batch", str(args.model_max_length)] if by_memory else []
        return [*argv, "--deepspeed", "" if alone else ZERO_2, *cap]
    model = planned_model(model_args, args)
    if args.use_liger_kernel == AUTO:
        args.use_liger_kernel = args.compile_layers is not True and liger_runs(model)
    budget = min(gather_object([memory_budget(args.device, 0)]))
    # Without a cap a bound for what micro-batches will hold; crops are known only once the data is read.
    tokens = args.max_tokens_per_micro_batch or args.train_batch_size * args.model_max_length
    choice = choose(model, args, budget, None if by_memory else tokens)
    if alone and choice.zero:
        os.environ.update(ranks)
    whole = choice.zero in ("", ZERO_2) and not choice.recomputes
    compiles = whole and not args.use_liger_kernel and can_compile(model, args)
    compiled = ["--compile_layers", "True"] if compiles else []
    cap = ["--max_tokens_per_micro_batch", str(choice.tokens)] if by_memory else []
    if args.process_index == 0:
        zero = f"--deepspeed {choice.zero}" if choice.zero else "no DeepSpeed"
        print(
            f"--deepspeed auto: {' '.join([zero, *cap, *compiled])}, which takes {choice.needed / 2**30:.2f} of "
            f"{budget / 2**30:.2f} usable GiB with{'' if choice.recomputes else 'out'} recomputation, by estimate",
            flush=True,
        )
    return [*compiled, *argv, "--deepspeed", choice.zero, *cap]


def choose(model: LlavaMetaForCausalLM, args: Any, budget: float, tokens: int | None) -> Choice:
    """The first candidate that fits into `budget` bytes of each device; the last, which saves most, if none does.

    A micro-batch is as large as fits without recomputation; with it, as large as the longest sample.

    Args:
        model: the model with `requires_grad` set; it needs no weights.
        args: the training arguments; their `deepspeed` does not count.
        budget: bytes that a rank may take.
        tokens: of the largest micro-batch; None chooses them, at least those of the longest sample.
    """
    longest, several = args.model_max_length, args.world_size > 1
    sizes = [tokens] if tokens else range(max(longest, MOST_TOKENS), longest - 1, -_STEP)
    candidates = [(ZERO_2 if several else "", size, False) for size in sizes]
    candidates.append((ZERO_3 if several else "", tokens or longest, True))
    if args.device.type == "cuda":  # on a CPU there is nowhere else to put the weights
        candidates.append((OFFLOAD, tokens or longest, True))
    for zero, size, recomputes in candidates:
        estimate = estimate_under(zero, model, args, size)
        plan = plan_checkpointing(AUTO if recomputes else False, estimate, budget)
        choice = Choice(zero, size, recomputes, estimate.total(plan))
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


def weight_dtypes(args: TrainingArguments) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The types of frozen weights, of trained ones, and of the trained weights of language model and tower.

    DeepSpeed keeps fp32 masters itself. Elsewhere trained weights are fp32 and autocast lowers the arithmetic; only the
    large parts are in 16 bits if they have masters.
    """
    frozen = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    trained = frozen if args.deepspeed else torch.float32
    return frozen, trained, frozen if keeps_masters(args) else trained


def planned_model(model_args: ModelArguments, args: TrainingArguments) -> LlavaMetaForCausalLM:
    """The model that the flags describe, without weights, norm and newline, with `requires_grad` set."""
    config, parts = read_config(model_args.model_name_or_path, cache_dir=args.cache_dir), tunable_parts(model_args)
    frozen, trained, large = weight_dtypes(args)
    if not getattr(config, "mm_vision_config", None):
        config.mm_vision_tower = model_args.vision_tower
        config.mm_vision_config = read_vision_config(model_args.vision_tower or "")
        for field in PROJECTOR_FIELDS:
            setattr(config, field, getattr(model_args, field))
    config.mm_projector_norm = "none"
    with torch.device("meta"):
        model: Any = class_of(config)(config)
    model.to(large if LANGUAGE_MODEL in parts and not args.lora_enable else frozen)
    model.get_model().vision_tower.to(large if VISION_TOWER in parts else frozen)
    model.get_model().mm_projector.to(trained)
    model.tie_weights()
    if args.lora_enable:
        add_lora(model, args.lora_r, args.lora_alpha, args.lora_dropout, trained)
    set_trainable(model, parts)
    attention = model_args.attn_implementation
    if args.padding_free:
        attention = packed_attention(attention, args.device, frozen)
    model.config._attn_implementation = attention
    return model


def can_compile(model: LlavaMetaForCausalLM, args: TrainingArguments) -> bool:
    """Whether compiled layers would run here: on a GPU, with a kernel for packed samples, a compiler, no adapters."""
    packed = (VARLEN, "flash_attention_2", "flash_attention_3")
    return bool(
        args.device.type == "cuda"
        and not args.lora_enable
        and model.config._attn_implementation in packed
        and has_compiler()
    )
