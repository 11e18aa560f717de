"""Access to parameters that DeepSpeed ZeRO-3 may have partitioned; without ZeRO-3 everything here is a no-op."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


@contextlib.contextmanager
def beside_another_model() -> Iterator[None]:
    """A context in which a model can be loaded and partitioned although the process holds one already."""
    if not is_deepspeed_zero3_enabled():
        yield
        return
    from deepspeed.utils import groups

    make = groups._create_zero_param_parallel_group

    def make_once(group_size: int) -> None:
        # A node's ranks (zero_hpz_partition_size) are one group for all models; DeepSpeed refuses to make it again.
        if groups._get_zero_param_intra_parallel_group() is None:
            make(group_size)

    groups._create_zero_param_parallel_group = make_once
    try:
        yield
    finally:
        groups._create_zero_param_parallel_group = make


@contextlib.contextmanager
def gathered(params: torch.Tensor | list[torch.Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """Makes full tensors of `params` available inside the context, on every rank.

    Args:
        params: one or more parameters; those that ZeRO-3 does not manage are left alone.
        modifier_rank: the rank whose in-place changes are broadcast and kept; None for reading only.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    partitioned = [p for p in params if hasattr(p, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank):
        yield


def is_partitioned(module: nn.Module) -> bool:
    """Whether ZeRO-3 manages the module's parameters, and so has put each rank's share on its device."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters and persistent buffers as full CPU tensors, on every rank. Every rank must call."""
    with gathered(list(module.parameters())):
        return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Copies full tensors into the module's parameters, whose names must match exactly. Every rank must call."""
    with gathered(list(module.parameters()), modifier_rank=0):
        module.load_state_dict(state_dict, strict=True)


def full_shape(param: torch.Tensor) -> torch.Size:
    """The parameter's shape before ZeRO-3 partitioned it."""
    return getattr(param, "ds_shape", param.shape)
