"""Builds the projector from a model config: LLaVA's projector types, with the norm as the last element."""

import math
import re

from torch import nn
from transformers import PretrainedConfig

from llava.model.multimodal_projector.norm import NORM_TYPES, ProjectorNorm

NORM_CHOICES = tuple(NORM_TYPES)


def build_vision_projector(config: PretrainedConfig) -> nn.Module:
    """The projector from vision features [..., E] to visual tokens [..., D], as `config` describes it.

    Reads `mm_projector_type` (`linear`, `mlpNx_gelu`, `identity`), `mm_hidden_size` (E), `hidden_size` (D) and the
    `mm_projector_norm*` fields. With `mm_projector_norm` = `none` parameters, their names and the forward are LLaVA's.

    Raises:
        ValueError: unknown projector or norm type, or widths that `identity` cannot join.
    """
    projector_type = getattr(config, "mm_projector_type", "linear")
    layers = _projector_layers(projector_type, config.mm_hidden_size, config.hidden_size)
    norm = build_projector_norm(config)
    if norm is not None:
        layers.append(norm)
    # LLaVA's linear and identity projectors are bare modules: their parameter names carry no index.
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _projector_layers(projector_type: str, mm_hidden_size: int, hidden_size: int) -> list[nn.Module]:
    if projector_type == "linear":
        return [nn.Linear(mm_hidden_size, hidden_size)]
    if projector_type == "identity":
        if mm_hidden_size != hidden_size:
            raise ValueError(
                f"--mm_projector_type identity: vision width {mm_hidden_size} differs from the LLM's {hidden_size}; "
                "use 'linear' or 'mlp2x_gelu'"
            )
        return [nn.Identity()]
    if match := re.fullmatch(r"mlp([1-9]\d*)x_gelu", projector_type or ""):
        layers: list[nn.Module] = [nn.Linear(mm_hidden_size, hidden_size)]
        for _ in range(int(match[1]) - 1):
            layers += [nn.GELU(), nn.Linear(hidden_size, hidden_size)]
        return layers
    raise ValueError(
        "--mm_projector_type: expected 'linear', 'identity' or 'mlp<N>x_gelu' (as mlp2x_gelu), "
        f"found {projector_type!r}"
    )


def build_projector_norm(config: PretrainedConfig) -> ProjectorNorm | None:
    """The norm that ends the projector, or None.

    The gain starts at `mm_projector_norm_target / sqrt(D)`; weights loaded afterwards overwrite it.

    Raises:
        ValueError: `mm_projector_norm` is not one of `NORM_CHOICES`.
    """
    name = getattr(config, "mm_projector_norm", None) or "none"
    if name not in NORM_TYPES:
        raise ValueError(f"--mm_projector_norm: expected one of {', '.join(NORM_CHOICES)}; found {name!r}")
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


def projector_norm(projector: nn.Module) -> ProjectorNorm | None:
    """The norm that ends `projector`, or None where there is none."""
    last = projector[-1] if isinstance(projector, nn.Sequential) else projector
    return last if isinstance(last, ProjectorNorm) else None
