"""Builds the projector from a model config: LLaVA's projector types, with the norm as the last element."""

import re

from torch import nn
from transformers import PretrainedConfig

from llava.model.multimodal_projector.norm import end_with_norm


def build_vision_projector(config: PretrainedConfig) -> nn.Module:
    """The projector from vision features [..., E] to visual tokens [..., D], as `config` describes it.

    Reads `mm_projector_type` (`linear`, `mlpNx_gelu`, `identity`), `mm_hidden_size` (E), `hidden_size` (D) and the
    `mm_projector_norm*` fields. With `mm_projector_norm` = `none`, the parameters, their names and the forward pass are
    LLaVA's.

    Raises:
        ValueError: the projector or norm type is unknown, or `identity` is given two different widths.
    """
    projector_type = getattr(config, "mm_projector_type", "linear")
    return end_with_norm(_bare_projector(projector_type, config.mm_hidden_size, config.hidden_size), config)


def _bare_projector(projector_type: str, mm_hidden_size: int, hidden_size: int) -> nn.Module:
    # LLaVA's linear and identity projectors are bare modules, so their parameter names carry no index.
    if projector_type == "linear":
        return nn.Linear(mm_hidden_size, hidden_size)
    if projector_type == "identity":
        if mm_hidden_size != hidden_size:
            raise ValueError(
                f"--mm_projector_type identity: vision width {mm_hidden_size} differs from the LLM's {hidden_size}; "
                "use 'linear' or 'mlp2x_gelu'"
            )
        return nn.Identity()
    layers: list[nn.Module] = [nn.Linear(mm_hidden_size, hidden_size)]
    for _ in range(projector_depth(projector_type) - 1):
        layers += [nn.GELU(), nn.Linear(hidden_size, hidden_size)]
    return nn.Sequential(*layers)


def projector_depth(projector_type: str) -> int:
    """Number of linear layers in a projector of this type, with a GELU between each two.

    Raises:
        ValueError: there is no such type.
    """
    if projector_type in ("identity", "linear"):
        return int(projector_type == "linear")
    if match := re.fullmatch(r"mlp([1-9]\d*)x_gelu", projector_type or ""):
        return int(match[1])
    raise ValueError(
        "--mm_projector_type: expected 'linear', 'identity' or 'mlp<N>x_gelu' (as mlp2x_gelu), "
        f"found {projector_type!r}"
    )
