"""Liger's fused kernels in the decoder: RMSNorm, gated MLP and rotary embedding (NVIDIA GPUs)."""

import inspect
import logging
from typing import Any

import torch

from llava.model.language_model.families import family_of
from llava.model.loss import LIGER_MINIMUM, has_liger

logger = logging.getLogger(__name__)


def check_liger(flag: str) -> None:
    """Raises ValueError or ImportError that names `flag` where Liger's kernels cannot run."""
    if not torch.cuda.is_available() or torch.version.hip:
        raise ValueError(f"{flag}: Liger's kernels need an NVIDIA GPU, and none was found; leave the flag out")
    if not has_liger():
        raise ImportError(
            f"{flag}: needs liger-kernel {LIGER_MINIMUM} or newer, which is not installed; "
            "EXTRAS=liger bash scripts/setup.sh installs it"
        )


def apply_liger(model: Any) -> None:
    """Lets the decoder's norms, MLPs and rotary embedding run on Liger's kernels; forward and loss stay ours.

    The rotary function is exchanged for the whole process, as Liger does it: other models of the same family see it.

    Raises:
        ValueError: Liger has no kernels for the family.
    """
    from liger_kernel import transformers as kernels

    plain_type = family_of(model.config).config.model_type
    apply = getattr(kernels, f"apply_liger_kernel_to_{plain_type}", None)
    if apply is None:
        raise ValueError(f"--use_liger_kernel: Liger has no kernels for {plain_type} decoders; leave the flag out")
    gated_mlp = "geglu" if "geglu" in inspect.signature(apply).parameters else "swiglu"
    # Liger rotates whole heads.
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
