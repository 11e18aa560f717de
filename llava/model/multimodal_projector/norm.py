"""The norm layers that may end the projector: built from a config, set by a measurement of the text embeddings.

A visual token leaves the projector with a norm far above that of a text embedding and is therefore turned slowly by a
Pre-Norm LLM. The layers here end the projector with a LayerNorm (or RMSNorm) whose gain is a constant `T / sqrt(D)`, so
that visual tokens enter the LLM with the mean text norm `T` (paper section 5.1). Such a gain is tiny (about 0.02) and
shrinks every gradient that passes through it; *global weight compensation* divides the gradient by the mean |gain|.

`patches/apply.py` copies this file into upstream trees: it needs torch, zero3.py, and of a config only its fields.

Shapes: N any leading dimensions, D LLM hidden size.
"""

import logging
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from llava.model.zero3 import full_shape, gathered

logger = logging.getLogger(__name__)

# Flags that become config fields of the same name.
NORM_FIELDS = (
    "mm_projector_norm",
    "mm_projector_norm_init",
    "mm_projector_norm_eps",
    "mm_projector_norm_min_gain",
    "mm_projector_norm_learnable",
)


class _ScaleGradient(torch.autograd.Function):
    """Identity in the forward pass; multiplies the gradient by a 0-dim tensor in the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale.to(grad.dtype), None


class ProjectorNorm(nn.Module):
    """What all four norms share: a constant initial gain, and the gradient compensation where `compensated` says so.

    Args:
        hidden_size: D.
        eps: added to the variance (or mean square) before the root.
        init_gain: every element of the initial gain; `T / sqrt(D)` aligns the output norm with T (paper eq. 11).
        min_gain: lower bound of the mean |gain| that the gradient is divided by (paper eq. 25).
        learnable: False keeps gain and bias fixed.
    """

    compensated = False
    has_bias = True

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        init_gain: float = 1.0,
        min_gain: float = 1e-3,
        learnable: bool = True,
    ):
        super().__init__()
        self.hidden_size, self.eps, self.init_gain, self.min_gain = hidden_size, eps, init_gain, min_gain
        self.learnable = learnable
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=learnable)
        self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=learnable) if self.has_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the gain to `init_gain` and the bias to zero."""
        with torch.no_grad():
            self.weight.fill_(self.init_gain)
            if self.bias is not None:
                self.bias.zero_()

    def mean_abs_gain(self) -> torch.Tensor:
        """Mean |gain|, 0-dim, at least fp32 (paper eq. 24). Under ZeRO-3 valid only while the gain is gathered."""
        gain = self.weight.detach()
        return gain.abs().mean(dtype=torch.promote_types(gain.dtype, torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension of `x` [N, D]; the gradient at `x` is compensated in training mode only."""
        if self.compensated and self.training and torch.is_grad_enabled() and x.requires_grad:
            # The norm's backward is linear in its incoming gradient, so 1/s at the input equals 1/s at x_hat (eq. 26).
            x = _ScaleGradient.apply(x, self.mean_abs_gain().clamp(min=self.min_gain).reciprocal())
        return self.normalize(x)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, init_gain={self.init_gain:.6g}, learnable={self.learnable}"


class AlignedLayerNorm(ProjectorNorm):
    """LayerNorm with an aligned initial gain and the plain backward ("w/ Norm, w/o GWC" in the paper)."""


class GlobalWeightCompensatedLayerNorm(ProjectorNorm):
    """LayerNorm with an aligned initial gain and global weight compensation (paper eq. 22 to 26)."""

    compensated = True


class AlignedRMSNorm(ProjectorNorm):
    """RMSNorm with an aligned initial gain and the plain backward."""

    has_bias = False

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        # rms_norm has no mixed-precision kernel on every device: match the gain to the input, as layer_norm would.
        return F.rms_norm(x, (self.hidden_size,), self.weight.to(x.dtype), self.eps)


class GlobalWeightCompensatedRMSNorm(AlignedRMSNorm):
    """RMSNorm with an aligned initial gain and global weight compensation."""

    compensated = True


NORM_TYPES: dict[str, type[ProjectorNorm] | None] = {
    "none": None,
    "layernorm": AlignedLayerNorm,
    "gwc_layernorm": GlobalWeightCompensatedLayerNorm,
    "rmsnorm": AlignedRMSNorm,
    "gwc_rmsnorm": GlobalWeightCompensatedRMSNorm,
}


def record_norm(config: Any, flags: Any, embedding: nn.Module | torch.Tensor) -> None:
    """Writes the norm's flags, the measured target norm and the initial gain into `config`, which then builds the norm.

    Args:
        config: model config with `hidden_size`.
        flags: an object with the fields `NORM_FIELDS`.
        embedding: of the text, see `mean_text_embedding_norm`, before any token is added.
    """
    for field in NORM_FIELDS:
        setattr(config, field, getattr(flags, field))
    if config.mm_projector_norm == "none":
        return
    target = resolve_target_norm(config.mm_projector_norm_init, embedding)
    config.mm_projector_norm_target = target
    config.mm_projector_norm_init_gain = target / math.sqrt(config.hidden_size)
    logger.info(
        "mm_projector_norm=%s: target norm %.6g (%s), initial gain %.6g",
        config.mm_projector_norm,
        target,
        config.mm_projector_norm_init,
        config.mm_projector_norm_init_gain,
    )


def build_projector_norm(config: Any) -> ProjectorNorm | None:
    """The norm that ends the projector, or None.

    The gain starts at `mm_projector_norm_target / sqrt(D)`; weights loaded afterwards overwrite it.

    Raises:
        ValueError: `mm_projector_norm` is not a key of `NORM_TYPES`, or the config lacks the target.
    """
    name = getattr(config, "mm_projector_norm", None) or "none"
    if name not in NORM_TYPES:
        raise ValueError(f"--mm_projector_norm: expected one of {', '.join(NORM_TYPES)}; found {name!r}")
    if NORM_TYPES[name] is None:
        return None
    target = getattr(config, "mm_projector_norm_target", None)
    if target is None:
        raise ValueError(
            f"config has mm_projector_norm={name} but no mm_projector_norm_target (the norm a visual token starts with)"
        )
    return NORM_TYPES[name](
        config.hidden_size,
        eps=getattr(config, "mm_projector_norm_eps", 1e-5),
        init_gain=target / math.sqrt(config.hidden_size),
        min_gain=getattr(config, "mm_projector_norm_min_gain", 1e-3),
        learnable=getattr(config, "mm_projector_norm_learnable", True),
    )


def end_with_norm(projector: nn.Module, config: Any) -> nn.Module:
    """`projector` with the norm that `config` asks for as its last element; `projector` itself where it asks for none.

    A Sequential keeps its parameter names; a bare module becomes element 0.
    """
    norm = build_projector_norm(config)
    if norm is None:
        return projector
    layers = projector if isinstance(projector, nn.Sequential) else (projector,)
    return nn.Sequential(*layers, norm)


def projector_norm(projector: nn.Module) -> ProjectorNorm | None:
    """The norm that ends `projector`, or None where there is none."""
    last = projector[-1] if isinstance(projector, nn.Sequential) else projector
    return last if isinstance(last, ProjectorNorm) else None


def freeze_fixed_norm(projector: nn.Module) -> None:
    """Takes a norm that is not learnable out of training, whatever was switched on for the whole projector."""
    norm = projector_norm(projector)
    if norm is not None and not norm.learnable:
        norm.requires_grad_(False)


def resolve_target_norm(init: str | float, embedding: nn.Module | torch.Tensor) -> float:
    """The L2 norm that a visual token shall have at the start of training, from `--mm_projector_norm_init`.

    Args:
        init: `text_norm` (measure the text embeddings), `default` (gain 1, so sqrt(D)) or a number (the norm itself).
        embedding: of the text, see `mean_text_embedding_norm`.

    Raises:
        ValueError: `init` is neither one of the words nor a positive number.
    """
    if init == "text_norm":
        return mean_text_embedding_norm(embedding)
    if init == "default":
        return math.sqrt(full_shape(getattr(embedding, "weight", embedding))[-1])
    try:
        target = float(init)
    except (TypeError, ValueError):
        target = math.nan
    if not (math.isfinite(target) and target > 0):
        raise ValueError(
            f"--mm_projector_norm_init: expected 'text_norm', 'default' or a positive number "
            f"(the norm a visual token starts with), found {init!r}"
        )
    return target


@torch.no_grad()
def mean_text_embedding_norm(embedding: nn.Module | torch.Tensor, chunk_rows: int = 16384) -> float:
    """Mean L2 norm over the non-zero text embeddings (paper eq. 11), measured in fp32 chunks.

    Args:
        embedding: the LLM's `embed_tokens`, of which what it returns is measured (Gemma's multiplies by sqrt(D)), or a
            matrix [rows, D]; any floating dtype. Under ZeRO-3 it is gathered first, so every rank must call.
        chunk_rows: rows converted to fp32 at a time, which bounds the extra memory for huge vocabularies.

    Raises:
        ValueError: a row holds NaN or infinity, or every row is zero.
    """
    weight = getattr(embedding, "weight", embedding)
    with gathered(weight):
        if weight.is_meta:
            raise ValueError("text embeddings are on the meta device: load the language model before measuring them")
        if embedding is weight:
            chunks = weight.split(chunk_rows)
        else:
            chunks = map(embedding, torch.arange(len(weight), device=weight.device).split(chunk_rows))
        norms = torch.cat([chunk.float().norm(dim=-1).cpu() for chunk in chunks])
    bad = (~torch.isfinite(norms)).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"text embeddings: {len(bad)} of {len(norms)} rows are NaN or infinite (first: row {int(bad[0])}); "
            "the text norm cannot be measured. Check that the language model's weights are complete."
        )
    norms = norms[norms > 0].double()
    if not len(norms):
        raise ValueError("text embeddings: every row is zero. Check that the language model's weights were loaded.")
    return norms.mean().item()
