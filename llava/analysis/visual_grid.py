"""Where the visual tokens of one picture lie in it.

Shapes: S sequence, V visual tokens, R x C the places of the finest ones.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from llava.analysis.probe import VISUAL, Batch
from llava.anyres import CropRules, Picture, black_margins


def picture_map(model: Any, batch: Batch, groups: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function from the shares [V] of a picture's tokens to a map [R, C] over it; None if their places are unknown.

    Args:
        batch: of one sample.
        groups: [1, S], see `Probe.groups`.
    """
    rules = model.crop_rules() if hasattr(model, "crop_rules") else None
    if rules is not None and (rules.is_anyres or rules.has_newline):
        picture = rules.picture(batch.inputs["image_sizes"][0]) if rules.is_anyres else Picture()
        return partial(drawn_in_place, picture=picture, rules=rules)
    grid = visual_grid(model, batch, groups)
    return None if grid is None else lambda shares: shares.reshape(grid)


def drawn_in_place(shares: torch.Tensor, picture: Picture, rules: CropRules) -> torch.Tensor:
    """Shares [V] of a picture in crops as a map [R, C] that sums to 1.

    The tokens of the parts stand at their places. Those of the whole picture show it in coarser squares, over which
    their shares are spread. Patches of black margins and `image_newline` show nothing of it and are left out.
    """
    side = rules.patches_per_side
    drawn = whole = shares[: side * side].view(side, side)
    parts = _parts(shares[side * side :], picture, rules) if picture.crops > 1 else None
    if parts is not None and parts.numel():  # of a very narrow picture no row may remain
        spread = F.interpolate(whole[None, None], size=parts.shape, mode="area")[0, 0]
        drawn = parts + spread * (whole.sum() / spread.sum().clamp(min=torch.finfo(spread.dtype).tiny))
    return drawn / drawn.sum().clamp(min=torch.finfo(drawn.dtype).tiny)


def _parts(shares: torch.Tensor, picture: Picture, rules: CropRules) -> torch.Tensor:
    """Shares of the crops after the first, at their places in the picture."""
    patches, side = rules.patches(picture), rules.patches_per_side
    if rules.has_newline:
        width, height = patches.shrunk or (patches.width, patches.height)
        return shares.view(height, width + 1)[:, :width]
    rows, columns = patches.rows * side, patches.columns * side
    if rules.merge_type == "flat":
        shares = shares.view(patches.rows, patches.columns, side, side).transpose(1, 2)
    left, top = black_margins(picture.size, columns, rows)
    return shares.reshape(rows, columns)[top : rows - top, left : columns - left]


def visual_grid(model: PreTrainedModel, batch: Batch, groups: torch.Tensor) -> tuple[int, int] | None:
    """Rows and columns of the visual tokens of one sample, in raster order; None where they form no single grid.

    From the patch grid that the processor wrote (the Qwen-VL and GLM families), else a square where the tokens are one
    unbroken run of a square number. Tiles and line ends (LLaVA-NeXT, SmolVLM) form none.

    Args:
        batch, groups: see `picture_map`.
    """
    where = (groups[0] == VISUAL).nonzero().flatten()
    count = len(where)
    if not count or int(where[-1] - where[0]) + 1 != count:
        return None
    patches = batch.inputs.get("image_grid_thw")
    if patches is not None:
        merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 1)
        frames, rows, columns = patches.tolist()[0]
        rows, columns = rows // merge, columns // merge
        return (rows, columns) if len(patches) == frames == 1 and rows * columns == count else None
    side = math.isqrt(count)
    return (side, side) if side * side == count else None
