"""Compiles the decoder's and the tower's layers, each kind once, for any number of tokens."""

import logging
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from llava.model.llava_arch import LlavaMetaForCausalLM

logger = logging.getLogger(__name__)

# Most compilations per kind of layer: training or not, with gradients or not, one sample or several. Beyond the limit
# PyTorch warns and runs the layer uncompiled.
_RECOMPILE_LIMIT = 8
# Releases of the library before 5.23 recompute in `__call__`, around whatever `forward` is.
_FORWARD_CHECKPOINTS = "__call__" not in vars(GradientCheckpointingLayer)


def compile_layers(model: LlavaMetaForCausalLM, backend: str = "inductor") -> None:
    """Replaces the forward pass of every decoder layer, and of every tower layer that runs, by a compiled one.

    All layers of a kind share the compiled code. Layers that recompute their activations are compiled too; the
    recomputation stays outside the compiled code, so that every variant of it works.

    Args:
        model: the model, with its vision tower.
        backend: backend of `torch.compile`.
    """
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    kinds: dict[type, Callable[..., Any]] = {}
    decoder = model.get_model()
    layers: tuple[Any, ...] = (*decoder.layers, *decoder.vision_tower.layers)
    for layer in layers:
        if type(layer) not in kinds:
            forward = type(layer).forward
            if _FORWARD_CHECKPOINTS:
                forward = forward.__wrapped__  # without the library's checkpointing, which `_forward` puts back
            kinds[type(layer)] = torch.compile(forward, dynamic=True, backend=backend)
        layer.forward = MethodType(partial(_forward, kinds[type(layer)]), layer)
    logger.info("compiled when first used: %s", ", ".join(kind.__name__ for kind in kinds))


def _forward(compiled: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    if hidden_states._is_view():  # the first layer's input often is; compiled code for views fits no other layer
        hidden_states = hidden_states.clone()
    run = partial(compiled, layer, **kwargs)
    if _FORWARD_CHECKPOINTS and layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(run, hidden_states)
    return run(hidden_states)
