"""Sees every decoder layer's attention weights, keys and values, and can replace keys and values, while a model runs.

Works on any model whose layers call transformers' attention interface, by a function registered
there: plain eager attention with a callback. Weights exist for one layer at a time. Layers without attention (hybrid
decoders) are passed over; the others keep their number among all layers.

Shapes: B samples, H heads, K key/value heads, S sequence, C channels per head.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from llava.analysis.probe import Batch, Edit, Observation, Probe

WATCHED = "analysis_watched"
# Arguments of attention functions that `watched_attention` may ignore: they are for kernels that build masks, or
# for other parts of the model. An argument of any other name could change the result.
PASSED_BY = {
    *("position_ids", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("cache_position", "use_cache", "return_dict", "num_items_in_batch", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}


class Attention(NamedTuple):
    """One layer's attention in the batch's first sample.

    Attributes:
        weights: [H, S, S] fp32; with learned sinks a row sums to less than one.
        keys, values: [K, S, C] with positions applied.
        allowed: [1 or H, S, S] bool, where the layer's mask lets a token (second axis) look at another (third).
    """

    weights: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    allowed: torch.Tensor


See = Callable[[int, Attention], None]
"""Gets a layer's index and its attention."""
Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Gets a layer's index, keys and values [K, S, C]; returns those that the layer is to use."""


class _Watch(NamedTuple):
    numbers: dict[int, int]  # by a module's id, the number of the layer that holds it
    see: See | None
    change: Change | None
    passed_by: frozenset[str]


_watches: list[_Watch] = []


def run(
    probe: Probe, batch: Batch, edit: Edit | None = None, see: See | None = None, change: Change | None = None
) -> Observation:
    """What `Probe.run` gives, with the attention watched as in `watched`; a model's first run begins with `check`.

    Raises:
        ValueError: see `check` and `watched`.
    """
    if not probe.attention_checked:
        check(probe, batch)
        probe.attention_checked = True
    with watched(probe.parts.layers, see, change, batch.inputs):
        return probe.run(batch, edit)


def check(probe: Probe, batch: Batch) -> None:
    """Runs `batch` plainly and watched, and compares the logits.

    Raises:
        ValueError: they differ by more than rounding, no layer was seen, or one was seen twice.
    """
    plain = probe.run(batch)
    numbers: list[int] = []
    with watched(probe.parts.layers, lambda index, _: numbers.append(index), passed_by=batch.inputs):
        seen = probe.run(batch)
    if not numbers:
        raise ValueError(
            f"{probe.name}: no decoder layer calls transformers' attention interface, so no attention can be watched"
        )
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{probe.name}: a decoder layer has more than one attention; which one is meant is not known")
    tolerance = math.sqrt(torch.finfo(plain.hidden_states[0].dtype).eps)
    gap = difference(plain.logits[0], seen.logits[0])
    if not gap <= tolerance:
        raise ValueError(
            f"{probe.name} ({type(probe.model).__name__}): with its attention watched, the logits differ from a plain "
            f"run's by {gap:.2g} of their standard deviation, and rounding explains {tolerance:.1g}: its attention "
            "does something that is not repeated here, so it cannot be measured"
        )


def difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Root mean square of the difference of logits [S, C] over their standard deviation, masked ones left out."""
    unmasked = expected > torch.finfo(expected.dtype).min / 2
    expected, actual = expected[unmasked].double(), actual[unmasked].double()
    return ((actual - expected).square().mean().sqrt() / expected.std()).item()


@contextlib.contextmanager
def watched(
    layers: Sequence[nn.Module], see: See | None = None, change: Change | None = None, passed_by: Sequence[str] = ()
) -> Iterator[None]:
    """Within the block, every layer of a run without a cache calls `change`, then `see`, for the batch's first sample.

    Args:
        passed_by: names of the model's own inputs, which some models hand down to their attention.

    Raises:
        ValueError: no layer uses transformers' attention interface; a layer's attention gets an
            argument that is not known here.
    """
    modules = [(number, module) for number, layer in enumerate(layers) for module in layer.modules()]
    configs = {
        id(module.config): module.config
        for _, module in modules
        if getattr(module, "layer_idx", None) is not None and hasattr(module, "config")
    }.values()
    if not configs:
        raise ValueError(
            f"{type(layers[0]).__name__}: has no attention with `layer_idx` and `config`, as transformers' attention "
            "interface needs; its attention cannot be watched"
        )
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = WATCHED
    _watches.append(_Watch({id(module): number for number, module in modules}, see, change, frozenset(passed_by)))
    try:
        yield
    finally:
        _watches.pop()
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def watched_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain steps, with the block's callbacks; one of transformers' attention functions.

    Args:
        query: [B, H, S, C].
        key, value: [B, K, S, C].
        attention_mask: additive or bool; None lets a token look at all tokens, or at the earlier ones
            (`is_causal`).
        s_aux: [H] logits of a sink that is no token (gpt-oss).

    Returns:
        [B, S, H, C] and the weights [B, H, S, S].

    Raises:
        ValueError: there is an argument that is not known here, dropout, or cross-attention.
    """
    watch = _watches[-1]
    _check_arguments(module, query, key, attention_mask, others, dropout, watch.passed_by)
    number = watch.numbers.get(id(module))
    if watch.change is not None and number is not None:
        changed = watch.change(number, key[0], value[0])
        key, value = (torch.cat([new[None], old[1:]]) for new, old in zip(changed, (key, value), strict=True))
    groups = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query.float() @ keys.float().transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    allowed = allowed_by(attention_mask, scores, getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        scores = scores + attention_mask[..., : scores.shape[-1]]
    else:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sink = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    if watch.see is not None and number is not None:
        watch.see(number, Attention(weights[0], key[0], value[0], allowed[0]))
    return (weights.to(values.dtype) @ values).transpose(1, 2).contiguous(), weights


def allowed_by(mask: torch.Tensor | None, scores: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Where tokens may look, [B, 1 or H, S, S] bool, under a mask in one of the forms that attention functions get."""
    if mask is None:
        everywhere = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        return (everywhere.tril() if is_causal else everywhere).expand(len(scores), 1, -1, -1)
    mask = mask[..., : scores.shape[-1]].expand(len(scores), -1, -1, -1)
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _check_arguments(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    others: dict[str, Any],
    dropout: float,
    passed_by: frozenset[str],
) -> None:
    name = type(module).__name__
    unknown = sorted(
        n for n, value in others.items() if value is not None and n not in PASSED_BY and n not in passed_by
    )
    if unknown:
        raise ValueError(f"{name}: its attention takes {', '.join(unknown)}, which is not known here: not measured")
    if mask is None and others.get("sliding_window") is not None:
        raise ValueError(f"{name}: its attention has a sliding window but no mask that says so: not measured")
    if dropout:
        raise ValueError(f"{name}: its attention drops out {dropout:g} of the weights; expected a model in eval mode")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{name}: {query.shape[2]} queries look at {key.shape[2]} keys; expected attention within one sequence"
        )


AttentionInterface.register(WATCHED, watched_attention)
AttentionMaskInterface.register(WATCHED, eager_mask)
