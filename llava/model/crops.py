"""The visual tokens of pictures in crops, in the order in which they enter the LLM.

Shapes: K crops of all pictures, V visual tokens per crop, D LLM hidden size.
"""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from llava.anyres import CropRules, Patches, Picture


def line_up(
    features: torch.Tensor, pictures: Sequence[Picture], rules: CropRules, newline: torch.Tensor | None
) -> torch.Tensor:
    """The visual tokens of all pictures, one after another, as they enter the LLM.

    Args:
        features: the visual tokens of every crop [K, V, D], after the norm.
        pictures: the pictures that the crops belong to.
        rules: the model's, which say how crops are laid out.
        newline: `image_newline` [D], which does not pass through the norm; None if the rules have none.
    """
    if rules.merge_type == "flat":
        return features.flatten(0, 1)
    newline = None if newline is None else newline.to(features.dtype)[None]
    parts = []
    for picture, crops in zip(pictures, features.split([p.crops for p in pictures]), strict=True):
        parts.append(crops[0])
        if picture.crops > 1:
            parts.append(_in_rows(crops[1:], rules.patches(picture), newline))
        elif newline is not None:
            parts.append(newline)
    return torch.cat(parts)


def _in_rows(crops: torch.Tensor, patches: Patches, newline: torch.Tensor | None) -> torch.Tensor:
    """The visual tokens of a grid of crops, row by row of patches, with a newline after each row."""
    side = math.isqrt(crops.shape[1])
    grid = crops.view(patches.rows, patches.columns, side, side, -1).transpose(1, 2)
    grid = grid.reshape(patches.rows * side, patches.columns * side, -1)
    grid = grid[patches.top : patches.top + patches.height, patches.left : patches.left + patches.width]
    if patches.shrunk is not None:
        width, height = patches.shrunk
        grid = F.interpolate(grid.permute(2, 0, 1)[None], size=(height, width), mode="bilinear")[0].permute(1, 2, 0)
    if newline is not None:  # also if no row remains, so that it gets a gradient
        grid = torch.cat([grid, newline[None].expand(len(grid), 1, -1)], dim=1)
    return grid.flatten(0, 1)
