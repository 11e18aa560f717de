"""Sees every decoder layer's attention weights, keys and values, and can replace keys and values, while a model runs.

Works on any model whose layers ask transformers' attention interface for their attention, by a function registered
there: plain eager attention with a callback. Weights exist for one layer at a time.

Shapes: B samples, H heads, K key/value heads, S sequence, C channels per head.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

WATCHED = "analysis_watched"
See = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Gets layer index, weights [H, S, S] (fp32), keys and values [K, S, C] with positions applied."""
Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Gets layer index, keys and values [K, S, C]; returns those that the layer shall use."""

_callbacks: list[tuple[See | None, Change | None]] = []


@contextlib.contextmanager
def watched(layers: Iterable[nn.Module], see: See | None = None, change: Change | None = None) -> Iterator[None]:
    """Within the block, runs without a cache call `change`, then `see`, in every layer, for the batch's first sample.

    Raises:
        ValueError: the layers do not use transformers' attention interface.
    """
    configs = {id(config): config for config in map(_attention_config, layers)}.values()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = WATCHED
    _callbacks.append((see, change))
    try:
        yield
    finally:
        _callbacks.pop()
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def _attention_config(layer: nn.Module) -> Any:
    for module in layer.modules():
        if getattr(module, "layer_idx", None) is not None and hasattr(module, "config"):
            return module.config
    raise ValueError(
        f"{type(layer).__name__}: has no attention with `layer_idx` and `config`, as transformers' attention interface "
        "needs; its attention cannot be watched"
    )


def watched_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain steps, with the block's callbacks; one of transformers' attention functions.

    Args:
        query: [B, H, S, C].
        key, value: [B, K, S, C].
        attention_mask: additive, or None for a causal one.

    Returns:
        [B, S, H, C] and the weights [B, H, S, S].
    """
    see, change = _callbacks[-1]
    if change is not None:
        changed = change(module.layer_idx, key[0], value[0])
        key, value = (torch.cat([new[None], old[1:]]) for new, old in zip(changed, (key, value), strict=True))
    groups = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query.float() @ keys.float().transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask[..., : scores.shape[-1]]
    else:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    weights = scores.softmax(dim=-1)
    if see is not None:
        see(module.layer_idx, weights[0], key[0], value[0])
    return (weights.to(values.dtype) @ values).transpose(1, 2).contiguous(), weights


AttentionInterface.register(WATCHED, watched_attention)
AttentionMaskInterface.register(WATCHED, eager_mask)
