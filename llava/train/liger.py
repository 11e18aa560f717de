"""Liger's fused kernels in the decoder: RMSNorm, SwiGLU and rotary embedding (NVIDIA GPUs)."""

import logging
from typing import Any

import torch

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
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2

    by_type = {"llava_llama": apply_liger_kernel_to_llama, "llava_qwen": apply_liger_kernel_to_qwen2}
    by_type[model.config.model_type](
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,  # would replace the forward pass
        model=model.get_model(),
    )
    logger.info("Liger's kernels: RMSNorm, SwiGLU and rotary embedding of %d layers", model.config.num_hidden_layers)
