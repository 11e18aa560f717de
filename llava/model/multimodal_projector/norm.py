"""The layers that may end the projector, and their flags: built from a config, set by a measurement of the text norm.

A visual token leaves the projector with a norm far above that of a text embedding, and a Pre-Norm LLM therefore turns
its direction slowly. The paper ends the projector with a LayerNorm whose gain is a constant `T / sqrt(D)`, so that
visual tokens enter the LLM with the mean text norm `T` (paper section 5.1). Such a gain is tiny (about 0.02) and
shrinks every gradient that passes through it; *global weight compensation* divides the gradient by the mean |gain|.

An arm of a comparison is a class here and a row of `NORM_TYPES`, which all else reads. `patches/apply.py` copies this
file into upstream trees: it needs only torch, zero3.py, and the fields of a config.

Shapes: N any leading dimensions, D LLM hidden size.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from llava.model.zero3 import full_shape, gathered

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

EPS = 1e-5
MIN_GAIN = 1e-3


class ScaleGradient(torch.autograd.Function):
    """Identity in the forward pass; multiplies the gradient by a 0-dim tensor in the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    # pyrefly: ignore[bad-override]  # one output, one gradient
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale.to(grad.dtype), None


class ProjectorNorm(nn.Module):
    """What all arms share: a gain with one initial value, and compensation of the gradient if `compensated`.

    Args:
        hidden_size: D.
        eps: added to the variance (or mean square) before the root.
        init_gain: every element of the initial gain.
        min_gain: lower bound of the mean |gain| that the gradient is divided by (paper eq. 25).
        learnable: False keeps gain and bias fixed.
    """

    compensated = False  # whether the gradient is divided by the mean |gain|
    has_bias = False
    one_gain = False  # whether the gain is a single number instead of D

    def __init__(
        self,
        hidden_size: int,
        eps: float = EPS,
        init_gain: float = 1.0,
        min_gain: float = MIN_GAIN,
        learnable: bool = True,
    ):
        super().__init__()
        self.hidden_size, self.eps, self.init_gain, self.min_gain = hidden_size, eps, init_gain, min_gain
        self.learnable = learnable
        self.weight = nn.Parameter(torch.empty(1 if self.one_gain else hidden_size), requires_grad=learnable)
        self.bias = nn.Parameter(torch.empty(hidden_size), requires_grad=learnable) if self.has_bias else None
        self.reset_parameters()

    def train(self, mode: bool = True) -> "ProjectorNorm":
        """Keeps a norm that is not learnable out of training: loading and PEFT make every parameter trainable."""
        if not self.learnable:
            self.requires_grad_(False)
        return super().train(mode)

    @staticmethod
    def gain_for(target: float, hidden_size: int) -> float:
        """The gain that gives a visual token the norm `target` (paper eq. 11)."""
        return target / math.sqrt(hidden_size)

    def reset_parameters(self) -> None:
        """Sets the gain to `init_gain` and the bias to zero."""
        with torch.no_grad():
            self.weight.fill_(self.init_gain)
            if self.bias is not None:
                self.bias.zero_()

    def mean_abs_gain(self) -> torch.Tensor:
        """Mean |gain|, 0-dim, at least fp32 (paper eq. 24). Under ZeRO-3 only valid while the gain is gathered."""
        gain = self.weight.detach()
        return gain.abs().mean(dtype=torch.promote_types(gain.dtype, torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension of `x` [N, D]; the gradient at `x` is compensated in training mode only."""
        if self.compensated and self.training and torch.is_grad_enabled() and x.requires_grad:
            # The layer's backward is linear in its incoming gradient, so 1/s at the input equals 1/s at x_hat (eq. 26).
            x = ScaleGradient.apply(x, self.mean_abs_gain().clamp(min=self.min_gain).reciprocal())
        return self.normalize(x)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, D] for `x` [N, D]; it acts on the last dimension."""
        raise NotImplementedError


class AlignedLayerNorm(ProjectorNorm):
    """LayerNorm with an aligned initial gain and the plain backward."""

    has_bias = True

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps)


class GlobalWeightCompensatedLayerNorm(AlignedLayerNorm):
    """LayerNorm with an aligned initial gain and global weight compensation (paper eq. 22 to 26)."""

    compensated = True


class AlignedRMSNorm(ProjectorNorm):
    """RMSNorm with an aligned initial gain and the plain backward."""

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        # rms_norm does not have a mixed-precision kernel on every device; LayerNorm's keeps a gain in fp32 too.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(dtype), (self.hidden_size,), self.weight.to(dtype), self.eps).to(x.dtype)


class GlobalWeightCompensatedRMSNorm(AlignedRMSNorm):
    """RMSNorm with an aligned initial gain and global weight compensation."""

    compensated = True


class NormClip(ProjectorNorm):
    """Scales visual tokens whose norm exceeds the gain down to it, `y = x min(1, g / |x|)`; others pass unchanged."""

    one_gain = True

    @staticmethod
    def gain_for(target: float, hidden_size: int) -> float:
        return target

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        norms = x.float().norm(dim=-1, keepdim=True)
        return x * (self.weight.float() / norms.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1).to(x.dtype)


NORM_TYPES: dict[str, type[ProjectorNorm] | None] = {
    "none": None,
    "layernorm": AlignedLayerNorm,
    "gwc_layernorm": GlobalWeightCompensatedLayerNorm,
    "rmsnorm": AlignedRMSNorm,
    "gwc_rmsnorm": GlobalWeightCompensatedRMSNorm,
    "clip": NormClip,
}

PAPER_ARMS = {"none": "w/o Norm", "layernorm": "w/ Norm, w/o GWC", "gwc_layernorm": "w/ Norm, w/ GWC"}
"""The paper's arms, with its names for them."""


@dataclass
class ProjectorNormArguments:
    """The norm's flags, which become config fields of the same names."""

    mm_projector_norm: str = field(
        default="none",
        metadata={
            "choices": NORM_TYPES.keys(),  # also those that plug-ins add
            "help": "Last layer of the projector: none (LLaVA); layernorm or rmsnorm, with a gain aligned with the "
            "text norm; clip, which scales larger tokens down to it. gwc_ adds global weight compensation of the "
            "gradient.",
        },
    )
    mm_projector_norm_init: str = field(
        default="text_norm",
        metadata={
            "help": "Initial L2 norm of visual tokens: text_norm (the mean norm of the text embeddings, measured), a "
            "multiple of it such as 3x, a number (the norm itself), or default (gain 1 in a LayerNorm, that is the "
            "square root of the hidden size)."
        },
    )
    mm_projector_norm_eps: float = field(default=EPS, metadata={"help": "Epsilon under the norm's square root."})
    mm_projector_norm_min_gain: float = field(
        default=MIN_GAIN,
        metadata={"help": "Lower bound of the mean |gain| by which compensation divides the gradient."},
    )
    mm_projector_norm_learnable: bool = field(
        default=True, metadata={"help": "Train gain and bias of the norm; False keeps the initial scale."}
    )

    def __post_init__(self) -> None:
        norm_class(self.mm_projector_norm)
        parse_init(self.mm_projector_norm_init)
        for name in ("mm_projector_norm_eps", "mm_projector_norm_min_gain"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"--{name}: expected a positive number, found {value}")


NORM_FIELDS = tuple(f.name for f in fields(ProjectorNormArguments))
# Fields that may differ between two stages: the initial gain, and whether it is trained.
_FREE_FIELDS = ("mm_projector_norm_init", "mm_projector_norm_learnable")


def with_norm_arguments(arguments: type) -> type:
    """The dataclass `arguments` with the fields of `ProjectorNormArguments` after its own, for upstream's trees."""
    body = {"__module__": arguments.__module__, "__doc__": arguments.__doc__}
    return dataclass(type(arguments.__name__, (ProjectorNormArguments, arguments), body))


def norm_differences(recorded: object, requested: object) -> list[tuple[str, object, object]]:
    """The fields, with both values, that make two trained norms different layers.

    Args:
        recorded, requested: configs or flags, as objects or mappings; a missing field has its default.
    """
    names = [name for name in NORM_FIELDS if name not in _FREE_FIELDS]
    if "none" in (_setting(source, "mm_projector_norm") for source in (recorded, requested)):
        names = ["mm_projector_norm"]  # without a norm the other settings mean nothing
    both = [(name, _setting(recorded, name), _setting(requested, name)) for name in names]
    return [(name, a, b) for name, a, b in both if a != b]


def _setting(source: object, name: str) -> Any:
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    return getattr(ProjectorNormArguments, name) if value is None else value  # its default


def norm_class(name: str) -> type[ProjectorNorm] | None:
    """The class of `mm_projector_norm`, None for `none`; raises ValueError where there is no such norm."""
    if name not in NORM_TYPES:
        raise ValueError(
            f"--mm_projector_norm: expected one of {', '.join(NORM_TYPES)}; found {name!r} (--plugin FILE adds one; "
            "docs/study.md names the commit that has the exploratory ones)"
        )
    return NORM_TYPES[name]


def record_norm(config: "PretrainedConfig", flags: object, embedding: nn.Module | torch.Tensor) -> None:
    """Writes the norm's flags, the measured target norm and the initial gain into `config`, which then builds the norm.

    `flags` has the fields `NORM_FIELDS`; `embedding` is the text embedding before any token is added.
    """
    for name in NORM_FIELDS:
        setattr(config, name, getattr(flags, name))
    name, init = config.mm_projector_norm, config.mm_projector_norm_init
    norm_type = norm_class(name)
    if norm_type is not None:
        target = config.mm_projector_norm_target = resolve_target_norm(init, embedding)
        gain = config.mm_projector_norm_init_gain = norm_type.gain_for(target, config.hidden_size)
        logger.info("mm_projector_norm=%s: target norm %.6g (%s), initial gain %.6g", name, target, init, gain)


def build_projector_norm(config: "PretrainedConfig") -> ProjectorNorm | None:
    """The norm that ends the projector, or None; ValueError where the config names no target or an unknown norm."""
    name = _setting(config, "mm_projector_norm")
    norm_type = norm_class(name)
    if norm_type is None:
        return None
    target = getattr(config, "mm_projector_norm_target", None)
    if target is None:
        raise ValueError(
            f"config has mm_projector_norm={name} but no mm_projector_norm_target (the initial norm of visual tokens)"
        )
    return norm_type(
        config.hidden_size,
        eps=_setting(config, "mm_projector_norm_eps"),
        init_gain=norm_type.gain_for(target, config.hidden_size),
        min_gain=_setting(config, "mm_projector_norm_min_gain"),
        learnable=_setting(config, "mm_projector_norm_learnable"),
    )


def end_with_norm(projector: nn.Module, config: "PretrainedConfig") -> nn.Module:
    """`projector` with the norm of `config` as its last element; `projector` itself if `config` has none.

    A plain Sequential keeps its parameter names; any other module becomes element 0.
    """
    norm = build_projector_norm(config)
    if norm is None:
        return projector
    layers = projector if type(projector) is nn.Sequential else (projector,)
    return nn.Sequential(*layers, norm)


def projector_norm(projector: nn.Module) -> ProjectorNorm | None:
    """The norm that ends `projector`, or None where there is none."""
    last = projector[-1] if isinstance(projector, nn.Sequential) else projector
    return last if isinstance(last, ProjectorNorm) else None


def freeze_fixed_norm(projector: nn.Module) -> None:
    """Freezes a norm that is not learnable, even if the whole projector was set to be trained."""
    norm = projector_norm(projector)
    if norm is not None and not norm.learnable:
        norm.requires_grad_(False)


def parse_init(init: str | float) -> tuple[str, float]:
    """`--mm_projector_norm_init` parsed: ("text_norm", multiple), ("default", 1) or ("norm", the norm itself)."""
    text = str(init)
    if text in ("text_norm", "default"):
        return text, 1.0
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            "--mm_projector_norm_init: expected 'text_norm', a multiple of it such as '3x', 'default', or a positive "
            f"number (the initial norm of visual tokens); found {init!r}"
        )
    return ("text_norm" if text.endswith("x") else "norm"), value


def resolve_target_norm(init: str | float, embedding: nn.Module | torch.Tensor) -> float:
    """The initial L2 norm of visual tokens: `parse_init` reads `init`, `mean_text_embedding_norm` the embedding."""
    unit, value = parse_init(init)
    if unit == "text_norm":
        return value * mean_text_embedding_norm(embedding)
    weight = embedding if isinstance(embedding, torch.Tensor) else embedding.get_parameter("weight")
    return math.sqrt(full_shape(weight)[-1]) if unit == "default" else value


@torch.no_grad()
def mean_text_embedding_norm(embedding: nn.Module | torch.Tensor, chunk_rows: int = 16384) -> float:
    """Mean L2 norm over the non-zero text embeddings (paper eq. 11), measured in fp32 chunks of rows.

    Args:
        embedding: the LLM's `embed_tokens`, whose output is measured (Gemma's multiplies by sqrt(D)), or a matrix
            [rows, D]; any floating dtype. Under ZeRO-3 it is gathered first, so every rank must call.

    Raises:
        ValueError: a row holds NaN or infinity, or every row is zero.
    """
    weight = embedding if isinstance(embedding, torch.Tensor) else embedding.get_parameter("weight")
    with gathered(weight):
        if weight.is_meta:
            raise ValueError("text embeddings are on the meta device: load the language model before measuring them")
        read = weight.__getitem__ if isinstance(embedding, torch.Tensor) else embedding
        ids = torch.arange(len(weight), device=weight.device)
        norms = torch.cat([read(rows).float().norm(dim=-1).cpu() for rows in ids.split(chunk_rows)])
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
