"""Compiles the decoder's and the tower's layers, or the tower's alone, each kind once, for any number of tokens."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.utils.code_folders import refuse_shared_variable

logger = logging.getLogger(__name__)

# Most compilations per kind of layer: training or not, with gradients or not, one sample or several. Beyond the limit
# PyTorch warns and runs the layer uncompiled.
_RECOMPILE_LIMIT = 8
# Releases of the library before 5.23 recompute in `__call__`, around whatever `forward` is.
_FORWARD_CHECKPOINTS = "__call__" not in vars(GradientCheckpointingLayer)


def set_up_compilation(model: LlavaMetaForCausalLM, args: Any) -> None:
    """Compiles what `--compile_layers` names."""
    decide_compilation(args)
    if args.compile_layers == "tower":
        compile_tower(model)
    elif args.compile_layers:
        compile_layers(model)


def decide_compilation(args: Any) -> None:
    """Replaces `--compile_layers auto` by what it means here, the tower's layers or none, so that a run records it."""
    if args.compile_layers == "auto":
        reason = _obstacle()
        args.compile_layers = False if reason else "tower"
        if reason and torch.cuda.is_available():  # on a CPU nobody expects it
            logger.info("the vision tower is not compiled: %s", reason)


def _obstacle() -> str | None:
    """Why the tower's layers cannot be compiled for this GPU; None if they can."""
    if not torch.cuda.is_available():
        return "compiling pays only on a GPU, and none was found"
    if is_deepspeed_zero3_enabled():
        return "ZeRO-3 gathers weights module by module, so that a layer cannot be compiled"
    if find_spec("triton") is None:
        return "Triton is not installed"
    return missing_compiler()


def missing_compiler() -> str | None:
    """What Triton lacks on this machine to build its launchers; None if nothing is missing."""
    if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
        return "Triton needs a C compiler, and none was found (CC, gcc, clang)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python's header files, and Python.h was not found (Debian: python3-dev)"
    return None


def compile_layers(model: LlavaMetaForCausalLM, backend: str = "inductor") -> None:
    """Replaces the forward pass of every decoder layer, and of every tower layer that runs, by a compiled one.

    All layers of a kind share the compiled code. Layers that recompute their activations are compiled too; the
    recomputation stays outside the compiled code, so that every variant of it works.

    Args:
        model: the model, with its vision tower.
        backend: backend of `torch.compile`.
    """
    decoder = model.get_model()
    _compile((*decoder.layers, *decoder.vision_tower.layers), backend)


def compile_tower(model: LlavaMetaForCausalLM, backend: str = "inductor") -> None:
    """As `compile_layers`, for the tower's layers alone."""
    _compile(model.get_model().vision_tower.layers, backend)


def _compile(layers: Iterable[Any], backend: str) -> None:
    refuse_shared_variable("TORCHINDUCTOR_CACHE_DIR")
    refuse_shared_variable("TRITON_CACHE_DIR")
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    kinds: dict[type, Callable[..., Any]] = {}
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
