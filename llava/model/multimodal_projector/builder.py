"""Builds the projector from a model config: a row of `PROJECTOR_TYPES`, with the norm as the last element.

Shapes: N images, V patches per image, E vision hidden size, D LLM hidden size.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from llava.model.multimodal_projector.norm import end_with_norm


class MergePatches(nn.Module):
    """Joins the channels of each square of patches into one token, patch after patch, row by row.

    Patches and tokens come row by row, as in the pixel shuffles of Idefics3 and InternVL in transformers.

    Args:
        side: patches along a square.
    """

    def __init__(self, side: int):
        super().__init__()
        self.side = side

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        tokens = math.isqrt(features.shape[-2]) // self.side  # in a row of `features` [N, V, E]
        squares = features.unflatten(-2, (tokens, self.side, tokens, self.side))  # [N, tokens, side, tokens, side, E]
        return squares.transpose(-4, -3).flatten(-5, -4).flatten(-3)  # [N, V / side ** 2, side ** 2 * E]


class ProjectorType(NamedTuple):
    """A row of `PROJECTOR_TYPES`."""

    build: Callable[[int, int, int], nn.Module]  # without norm, from E, D and the number that its name has for N, or 0
    merge: int = 1  # side of the square of patches that becomes one visual token


def _identity(mm_hidden_size: int, hidden_size: int, _: int) -> nn.Module:
    if mm_hidden_size != hidden_size:
        raise ValueError(
            f"--mm_projector_type identity: vision width {mm_hidden_size} differs from the LLM's {hidden_size}; "
            "use 'linear' or 'mlp2x_gelu'"
        )
    return nn.Identity()


def _mlp(mm_hidden_size: int, hidden_size: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(mm_hidden_size, hidden_size)]
    for _ in range(depth - 1):
        layers += [nn.GELU(), nn.Linear(hidden_size, hidden_size)]
    return nn.Sequential(*layers)


def _pixel_shuffle_mlp(mm_hidden_size: int, hidden_size: int, depth: int) -> nn.Sequential:
    return nn.Sequential(MergePatches(2), *_mlp(4 * mm_hidden_size, hidden_size, depth))


def _pre_layernorm_mlp(mm_hidden_size: int, hidden_size: int, depth: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(mm_hidden_size), *_mlp(mm_hidden_size, hidden_size, depth))


# LLaVA's linear and identity projectors are bare modules, so their parameter names carry no index.
PROJECTOR_TYPES: dict[str, ProjectorType] = {
    "linear": ProjectorType(lambda mm_hidden_size, hidden_size, _: nn.Linear(mm_hidden_size, hidden_size)),
    "identity": ProjectorType(_identity),
    "mlpNx_gelu": ProjectorType(_mlp),
    "pixel_shuffle_2x_mlpNx_gelu": ProjectorType(_pixel_shuffle_mlp, merge=2),
    "pre_layernorm_mlpNx_gelu": ProjectorType(_pre_layernorm_mlp),
}
"""Projectors by `mm_projector_type`; N in a name stands for a number from 1."""


def find_projector(name: str) -> tuple[ProjectorType, int]:
    """The row of this projector type, and the number that it has for N, or 0; ValueError if there is none."""
    if row := PROJECTOR_TYPES.get(name):
        return row, 0
    for pattern, row in PROJECTOR_TYPES.items():
        if match := re.fullmatch(re.escape(pattern).replace("N", r"([1-9]\d*)", 1), name or ""):
            return row, int(match[1]) if match.groups() else 0
    raise ValueError(
        f"--mm_projector_type: expected one of {', '.join(PROJECTOR_TYPES)}, with a number for N as in mlp2x_gelu; "
        f"found {name!r} (docs/study.md names the commit that has the exploratory ones)"
    )


def build_vision_projector(config: PretrainedConfig) -> nn.Module:
    """The projector from vision features [N, V, E] to visual tokens [N, V / merge ** 2, D], as `config` describes it.

    With `mm_projector_norm` = `none`, the parameters, their names and the forward pass of `linear`, `identity` and
    `mlpNx_gelu` are LLaVA's. Raises ValueError where the projector or norm type is unknown.
    """
    row, number = find_projector(getattr(config, "mm_projector_type", "linear"))
    return end_with_norm(row.build(config.mm_hidden_size, config.hidden_size, number), config)


def token_grid(config: PretrainedConfig, tower: Any) -> tuple[int, int]:
    """Visual tokens of one crop after the projector, and of a row of it; ValueError where squares cannot be merged."""
    name = getattr(config, "mm_projector_type", "linear")
    merge, side = find_projector(name)[0].merge, tower.num_patches_per_side
    if merge == 1:
        return tower.num_tokens, side
    if tower.num_tokens != side**2:
        raise ValueError(
            f"--mm_projector_type {name} merges squares of patches, which have no place for a class token; pass "
            "--mm_vision_select_feature patch"
        )
    if side % merge:
        raise ValueError(
            f"--mm_projector_type {name} merges {merge} x {merge} patches, and the vision tower's grid has {side} x "
            f"{side}; choose a --vision_tower whose image and patch size give a multiple of {merge}, or mlp2x_gelu"
        )
    return (side // merge) ** 2, side // merge
