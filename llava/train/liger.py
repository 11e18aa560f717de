"""Liger's fused kernels (NVIDIA GPUs).

In the decoder: RMSNorm, gated MLP and rotary embedding. In a tower that is not compiled: LayerNorm and gated MLP.
"""

import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from llava.model.language_model.families import family_of
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.loss import LIGER_MINIMUM, has_liger
from llava.train.compilation import missing_compiler
from llava.utils.code_folders import refuse_shared_variable

logger = logging.getLogger(__name__)


def check_liger(flag: str) -> None:
    """Raises ValueError that names `flag` if Liger's kernels cannot run here."""
    if reason := _obstacle():
        raise ValueError(f"{flag}: {reason}; leave the flag out")


def set_up_liger(model: LlavaMetaForCausalLM, args: Any) -> None:
    """Lets the model run on Liger's kernels as `--use_liger_kernel` says, and replaces `auto` by the decision.

    `--compile_layers` must be decided already: a tower that is compiled gets no kernels of Liger's.

    Raises:
        ValueError: the flag is True and Liger has no kernels for the family.
    """
    if args.use_liger_kernel == "auto":
        reason = "--compile_layers True fuses the layers' kernels" if args.compile_layers is True else _obstacle(model)
        args.use_liger_kernel = reason is None
        if reason and torch.cuda.is_available():  # on a CPU nobody expects them
            logger.info("the decoder runs on PyTorch's kernels, not on Liger's: %s", reason)
    if args.use_liger_kernel:
        refuse_shared_variable("TRITON_CACHE_DIR")
        logging.getLogger("liger_kernel.backends").setLevel(logging.ERROR)  # it warns of kernels for other devices
        apply_liger(model)
        if not args.compile_layers:
            apply_liger_to_tower(model)


def _obstacle(model: LlavaMetaForCausalLM | None = None) -> str | None:
    """Why Liger's kernels cannot run here, or in `model`; None if they can."""
    if not torch.cuda.is_available() or torch.version.hip:
        return "Liger's kernels need an NVIDIA GPU, and none was found"
    if not has_liger():
        return f"liger-kernel {LIGER_MINIMUM} or newer is not installed (EXTRAS=liger bash scripts/setup.sh adds it)"
    if model is not None and _function_for(model) is None:
        return f"Liger has no kernels for {_plain_type(model)} decoders"
    return missing_compiler()


def _plain_type(model: LlavaMetaForCausalLM) -> str:
    return family_of(model.config).config.model_type


def _function_for(model: LlavaMetaForCausalLM) -> Callable[..., None] | None:
    """Liger's function that replaces the kernels of the model's family, or None."""
    from liger_kernel import transformers as kernels

    return getattr(kernels, f"apply_liger_kernel_to_{_plain_type(model)}", None)


def apply_liger(model: LlavaMetaForCausalLM) -> None:
    """Lets the decoder's norms, MLPs and rotary embedding run on Liger's kernels; forward pass and loss stay ours.

    Liger replaces the rotary function for the whole process, also for other models of the same family.

    Raises:
        ValueError: Liger has no kernels for the family.
    """
    apply = _function_for(model)
    if apply is None:
        raise ValueError(
            f"--use_liger_kernel: Liger has no kernels for {_plain_type(model)} decoders; leave the flag out"
        )
    gated_mlp = "geglu" if "geglu" in inspect.signature(apply).parameters else "swiglu"
    # Liger can only rotate whole heads.
    rope = model.config.rope_parameters.get("partial_rotary_factor", 1.0) == 1
    apply(
        rope=rope,
        rms_norm=True,
        **{gated_mlp: True},
        cross_entropy=False,
        fused_linear_cross_entropy=False,  # would replace the forward pass
        model=model.get_model(),
    )
    used = ["RMSNorm", {"geglu": "GeGLU", "swiglu": "SwiGLU"}[gated_mlp], *["rotary embedding"] * rope]
    logger.info("Liger's kernels: %s of %d layers", ", ".join(used), model.config.num_hidden_layers)


def apply_liger_to_tower(model: LlavaMetaForCausalLM) -> None:
    """Lets the LayerNorms and the MLPs gated by SiLU in the tower's layers run on Liger's kernels.

    Liger has no kernel for MLPs that are not gated, as in SigLIP and CLIP.
    """
    modules = [module for layer in model.get_model().vision_tower.layers for module in layer.modules()]
    norms = [module for module in modules if isinstance(module, nn.LayerNorm)]
    mlps = [m for m in modules if hasattr(m, "gate_proj") and isinstance(m.act_fn, nn.SiLU | SiLUActivation)]
    for norm in norms:
        norm.forward = MethodType(_layer_norm, norm)
    for mlp in mlps:
        mlp.forward = MethodType(_gated_mlp, mlp)
    logger.info("fused kernels in the vision tower: %d LayerNorms, %d gated MLPs", len(norms), len(mlps))


def _layer_norm(norm: nn.LayerNorm, hidden_states: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_layer_norm

    return liger_layer_norm(hidden_states, norm.weight, norm.bias, norm.eps)


def _gated_mlp(mlp: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return mlp.down_proj(liger_swiglu(mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)))
