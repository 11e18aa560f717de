"""Causal attention within each of several samples that are packed into one row, without padding.

All backends compute the same; `packed_attention` chooses one and says how to get a faster one.
Shapes: T packed tokens, H heads, K key/value heads, C channels per head.
"""

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from llava.layout import Layout

logger = logging.getLogger(__name__)

VARLEN, SEGMENTS = "packed_varlen", "packed_segments"
# For these the library builds a block-diagonal mask, from positions that start again at 0.
MASKED = ("sdpa", "eager", "flex_attention")
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
PACKED_BACKENDS = (*FLASH, VARLEN, SEGMENTS, *MASKED)

# The kernel takes fewer key heads than query heads; only from PyTorch 2.12 on does its function want to be told.
NAMES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters

# Arguments that decoders pass to attention and that do not change what a token sees, given the samples' boundaries.
_WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
_WITHOUT_EFFECT |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def packed_attention(requested: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """The attention backend for packed training, a name that the library's `attn_implementation` takes.

    Args:
        requested: `--attn_implementation`; None chooses the fastest that this machine has.
        device, dtype: of the decoder's activations.

    Raises:
        ValueError: the requested backend cannot keep packed samples apart.
    """
    if requested is not None and requested not in PACKED_BACKENDS:
        raise ValueError(
            f"--attn_implementation {requested}: cannot keep packed samples apart; expected one of "
            f"{', '.join(PACKED_BACKENDS)}, or --padding_free False"
        )
    chosen = requested or _fastest(device, dtype)
    logger.info("attention over packed samples: %s", chosen)
    return chosen


def _fastest(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return SEGMENTS
    half = dtype in (torch.float16, torch.bfloat16)
    if half and (flash := installed_flash()):
        return flash
    if half and torch.cuda.get_device_capability() >= (8, 0):
        return VARLEN
    needs = f"an NVIDIA GPU from Ampere on{'' if half else ' and --bf16 True'}"
    logger.warning("attention over packed samples in one kernel needs %s; %s is slower", needs, SEGMENTS)
    return SEGMENTS


def installed_flash() -> str | None:
    """The fastest FlashAttention that is installed and can run here, as `attn_implementation`; None without one."""
    return next(iter(runnable_flash()), None)


def runnable_flash() -> list[str]:
    """Every FlashAttention that is installed (4 with its compiler) and has kernels for this GPU, the fastest first."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    there = {
        "flash_attention_4": major in (9, 10) and is_flash_attn_4_available() and find_spec("cutlass") is not None,
        "flash_attention_3": major == 9 and is_flash_attn_3_available(),
        "flash_attention_2": major >= 8 and is_flash_attn_2_available(),
    }
    return [name for name, runs in there.items() if runs]


def packed_attention_arguments(layout: Layout, backend: str) -> dict[str, Any]:
    """`attention_mask` and the other arguments that the decoder passes on to every layer's attention."""
    if backend in MASKED:
        return {"attention_mask": None}
    longest = max(layout.lengths)
    arguments: dict[str, Any] = {
        # The library passes on a mask of four dimensions: it builds no mask over all pairs of tokens, and does not
        # search the positions for samples.
        "attention_mask": layout.cu_seqlens.new_empty(1, 1, 0, 0),
        "cu_seq_lens_q": layout.cu_seqlens,
        "cu_seq_lens_k": layout.cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    if backend == SEGMENTS:
        arguments["segment_lengths"] = layout.lengths
    return arguments


def segments_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segment_lengths: list[int] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """PyTorch's attention sample by sample: no work and no memory for pairs of tokens of different samples.

    Args:
        query: [1, H, T, C].
        key, value: [1, K, T, C].
        segment_lengths: tokens of each sample; None for padded batches and generation, where the library's SDPA runs.
        sliding_window: number of keys that a query sees, its own included; None for all up to its own.

    Returns ([1, T, H, C], None), as the library's attention functions do. Raises ValueError for what it lacks.
    """
    if segment_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    _refuse_unknown(SEGMENTS, module, kwargs)
    grouped, dtype, on_cpu = query.shape[1] != key.shape[1], query.dtype, query.device.type == "cpu"
    if on_cpu:  # PyTorch's attention for half precision is slower there
        query, key, value = query.float(), key.float(), value.float()
    parts = zip(*(x.split(segment_lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = []
    # Autocast would halve the precision again.
    with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
        for q, k, v in parts:
            mask = _window_mask(q.shape[2], sliding_window, q.device)
            options = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": grouped}
            outputs.append(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options))
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), None


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees [length, length]; None where that is every key up to its own."""
    if sliding_window is None or length <= sliding_window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - sliding_window)


def _refuse_unknown(backend: str, module: torch.nn.Module | None, arguments: dict[str, Any]) -> None:
    """Raises ValueError for arguments of the decoder's attention that would silently be ignored."""
    unknown = [name for name, value in arguments.items() if value is not None and name not in _WITHOUT_EFFECT]
    if not getattr(module, "is_causal", True):
        unknown.append("is_causal=False")
    if unknown:
        raise ValueError(
            f"--attn_implementation {backend}: {type(module).__name__} asks for {', '.join(unknown)}, which this "
            "backend does not support; pass eager, or --padding_free False"
        )


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """PyTorch's own variable-length FlashAttention (NVIDIA GPUs from Ampere on, fp16 and bf16).

    Shapes as in `segments_attention`; `cu_seq_lens_q` are the samples' boundaries in the row. Raises ValueError for
    attention dropout, or what else it lacks.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    _refuse_unknown(VARLEN, module, kwargs)
    if dropout:
        raise ValueError(f"{VARLEN} has no attention dropout; pass --attn_implementation {SEGMENTS}, or set it to 0")
    # Under autocast the rotary positions, which are fp32, make queries and keys fp32; the kernel needs one half type.
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # [T, H or K, C]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # keys before the query's own, and after it
    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if NAMES_GROUPS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    samples = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    output = varlen_attn(query, key, value, *samples, **options)  # [T, H, C]
    assert isinstance(output, torch.Tensor)  # a tuple only if more outputs are requested
    return output[None], None


def _without_mask_where_packed(attention: Callable) -> Callable:
    """The library's FlashAttention, which would take the empty mask of packed batches for padding."""

    def flash_attention(module, query, key, value, attention_mask, *args, **kwargs):
        mask = attention_mask if kwargs.get("cu_seq_lens_q") is None else None
        return attention(module, query, key, value, mask, *args, **kwargs)

    return flash_attention


for _name in FLASH:
    AttentionInterface.register(_name, _without_mask_where_packed(AttentionInterface()[_name]))
for _name, _function in ((SEGMENTS, segments_attention), (VARLEN, varlen_attention)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)  # for padded batches and generation
