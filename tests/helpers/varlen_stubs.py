"""PyTorch's `varlen_attn` on the CPU: each release's arguments, and its rule on fewer key heads than query heads."""

import inspect
from collections.abc import Callable

import torch
from torch.nn import functional as F

from llava.model import attention


def attend(q, k, v, cu_seqlens, longest: int, scale: float | None, window: int | None = None) -> torch.Tensor:
    """What every variable-length kernel computes [T, H, C], after a check that the arguments are what it takes."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.ndim == k.ndim == v.ndim == 3 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous() and cu_seqlens.device == q.device
    lengths = cu_seqlens.diff().tolist()
    assert type(longest) is int and longest == max(lengths) and sum(lengths) == len(q) == len(k) == len(v)
    outputs = []
    for parts in zip(*(x.transpose(0, 1).float().split(lengths, dim=1) for x in (q, k, v)), strict=True):
        length = parts[0].shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
        outputs.append(F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(outputs, dim=1).transpose(0, 1).to(q.dtype)


def varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):  # fmt: skip
    """2.11's, which hands fewer key heads to the kernel as they are."""
    before, after = window_size
    assert after == 0 and torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k and return_aux is None
    return attend(query, key, value, cu_seq_q, max_q, scale, None if before == -1 else before + 1)


def varlen_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """2.12's and 2.13's, which refuse fewer key heads without the flag."""
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError("Expect query and key/value to have the same number of heads")
    assert seqused_k is block_table is num_splits is None
    return varlen_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


VARLENS = [varlen_2_11, varlen_2_12]


def use_varlen(monkeypatch, function: Callable) -> None:
    """Gives `llava.model.attention` this release's function instead of the installed one."""
    monkeypatch.setattr(attention, "varlen_attn", function)
    monkeypatch.setattr(attention, "NAMES_GROUPS", "enable_gqa" in inspect.signature(function).parameters)
