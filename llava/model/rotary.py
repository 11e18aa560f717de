"""Rotary frequencies in fp32, whatever type the weights have: bf16 rounds them by up to 0.4 %, 1 rad at position 1000.

Loading keeps them, but a cast of the whole model rounds them, and `zero.Init` makes tensors in the type of the weights.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

Module = nn.Module if TYPE_CHECKING else object  # at run time mixins must not inherit from what they are mixed into


class KeepsRotary(Module):
    """Mixin for modules with rotary embeddings: `.half()`, `.to(dtype)` and their like leave frequencies in fp32."""

    def _apply(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        before = [(module, frequencies(module)) for module in self.modules()]
        applied = super()._apply(fn, *args, **kwargs)
        for module, values in before:
            for name, after in frequencies(module).items():
                if after.dtype.itemsize < values[name].dtype.itemsize:
                    module._buffers[name] = values[name].to(after.device)
        return applied


def frequencies(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's own buffers with rotary frequencies: some models have one for each kind of layer."""
    own = module._buffers.items()
    return {name: buffer for name, buffer in own if name.endswith("inv_freq") and buffer is not None}


def rebuild_rotary(model: nn.Module) -> None:
    """Computes all rotary frequencies again, in fp32, by each model's own function; ValueError where it cannot."""
    for module in filter(frequencies, model.modules()):
        for name, buffer in frequencies(module).items():
            module._buffers[name] = torch.full_like(buffer, torch.nan, dtype=torch.float32)
        models = (part for part in model.modules() if isinstance(part, PreTrainedModel))
        owners = [part for part in models if any(module is child for child in part.modules())]
        for owner in owners[-1:]:  # the innermost of the library's models
            owner._init_weights(module)
        if lost := [name for name, buffer in frequencies(module).items() if buffer.isnan().any()]:
            raise ValueError(
                f"{type(model).__name__}: rotary frequencies {', '.join(lost)} of {type(module).__name__} cannot be "
                "computed again after DeepSpeed may have rounded them; train this model without --deepspeed"
            )
