"""Faster kernels on NVIDIA GPUs: Liger's in the decoder, and torch.compile for the vision tower's layers.

Liger fuses RMSNorm, gated MLP and rotary embedding. The tower's layers share one compiled function.
"""

import inspect
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from llava.model.language_model.families import decoder_of
from llava.model.llava_arch import LlavaMetaForCausalLM

logger = logging.getLogger(__name__)

# Releases of the library before 5.23 recompute in `__call__`, around whatever `forward` is.
_FORWARD_CHECKPOINTS = "__call__" not in vars(GradientCheckpointingLayer)


def has_compiler() -> bool:
    """Whether Triton can build its launchers: it needs a C compiler and Python's header files."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return any(map(shutil.which, compilers)) and Path(sysconfig.get_path("include"), "Python.h").is_file()


def has_liger() -> bool:
    """Whether the package liger-kernel is installed."""
    return find_spec("liger_kernel") is not None


def liger_runs() -> bool:
    """Whether Liger's kernels run on this machine."""
    return torch.cuda.is_available() and not torch.version.hip and has_liger() and has_compiler()


def check_kernels(args: Any) -> None:
    """Raises ValueError if `--use_liger_kernel` or `--compile_layers` cannot be done."""
    if args.use_liger_kernel is True and not liger_runs():
        raise ValueError(
            "--use_liger_kernel True needs an NVIDIA GPU, liger-kernel (EXTRAS=liger bash scripts/setup.sh), a C "
            "compiler (CC, gcc, clang) and Python's header files (python3-dev); leave it out"
        )
    if args.compile_layers is True and is_deepspeed_zero3_enabled():
        raise ValueError("--compile_layers True: ZeRO-3 gathers weights module by module; take ZeRO-2, or leave it out")


def decide_liger(model: LlavaMetaForCausalLM, args: Any) -> None:
    """Replaces `--use_liger_kernel auto` by whether the kernels run here, for the family of `model`."""
    if args.use_liger_kernel == "auto":
        args.use_liger_kernel = liger_runs() and _liger_function(model) is not None


def set_up_kernels(model: LlavaMetaForCausalLM, args: Any) -> None:
    """Compiles the tower and applies Liger's kernels as the flags say, and replaces `auto` by the decision."""
    if args.compile_layers == "auto":
        compiles = torch.cuda.is_available() and find_spec("triton") is not None and has_compiler()
        args.compile_layers = compiles and not is_deepspeed_zero3_enabled()
    if args.compile_layers:
        compile_layers(model.get_model().vision_tower.layers)
    decide_liger(model, args)
    if args.use_liger_kernel:
        logging.getLogger("liger_kernel.backends").setLevel(logging.ERROR)  # it warns of kernels for other devices
        apply_liger(model)


# --- Liger ------------------------------------------------------------------------------------------------------------


def _liger_function(model: LlavaMetaForCausalLM) -> Callable[..., None] | None:
    """Liger's function that replaces the kernels of the model's family, or None."""
    from liger_kernel import transformers as kernels

    return getattr(kernels, f"apply_liger_kernel_to_{decoder_of(model.config).config.model_type}", None)


def apply_liger(model: LlavaMetaForCausalLM) -> None:
    """Lets the decoder's norms, MLPs and rotary embedding run on Liger's kernels; forward pass and loss stay ours.

    Liger replaces the rotary function for the whole process, also for other models of the same family.
    """
    apply = _liger_function(model)
    if apply is None:
        name = decoder_of(model.config).config.model_type
        raise ValueError(f"--use_liger_kernel: Liger has no kernels for {name} decoders; leave the flag out")
    gated_mlp = "geglu" if "geglu" in inspect.signature(apply).parameters else "swiglu"
    whole_heads = model.config.rope_parameters.get("partial_rotary_factor", 1.0) == 1  # Liger can rotate no others
    options = {"rope": whole_heads, "rms_norm": True, gated_mlp: True, "cross_entropy": False}
    # With CuTe's compiler installed (FlashAttention 4) Liger 0.8.5 takes a rotary kernel that compiles for each length.
    os.environ.setdefault("LIGER_KERNEL_IMPL_ROPE", "triton")
    apply(**options, fused_linear_cross_entropy=False, model=model.get_model())  # fused, it would replace `forward`
    logger.info("Liger's kernels: %s", ", ".join(name for name, used in options.items() if used))


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compile_layers(layers: torch.nn.ModuleList | list[Any], backend: str = "inductor") -> None:
    """Replaces the forward pass of layers of one class by a compiled one, which they have in common.

    Recomputation of activations stays outside the compiled code, so that every variant of it works.
    """
    forward: Any = type(layers[0]).forward
    if _FORWARD_CHECKPOINTS:
        forward = forward.__wrapped__  # without the library's checkpointing, which `_forward` puts back
    compiled = torch.compile(forward, dynamic=True, backend=backend)
    for layer in layers:
        layer.forward = MethodType(partial(_forward, compiled), layer)
    logger.info("compiled when first used: %s", type(layers[0]).__name__)


def _forward(compiled: Callable[..., Any], layer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
    if hidden_states._is_view():  # the first layer's input often is; compiled code for views fits no other layer
        hidden_states = hidden_states.clone()
    run = partial(compiled, layer, **kwargs)
    if _FORWARD_CHECKPOINTS and layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(run, hidden_states)
    return run(hidden_states)
