"""How the visual tokens of one picture lie in rows and columns.

Shapes: S sequence, V visual tokens.
"""

import math
from typing import Any

import torch

from llava.analysis.probe import VISUAL, Batch
from llava.anyres import is_anyres


def visual_grid(model: Any, batch: Batch, groups: torch.Tensor) -> tuple[int, int] | None:
    """Rows and columns of the visual tokens of one sample, in raster order; None where they form no single grid.

    From the patch grid that the processor wrote (the Qwen-VL and GLM families), else a square where the tokens are one
    unbroken run of a square number. Tiles and line ends (LLaVA-NeXT and our anyres, SmolVLM) form none.

    Args:
        batch: of one sample.
        groups: [1, S], see `Probe.groups`.
    """
    if is_anyres(getattr(model.config, "image_aspect_ratio", None)):
        return None
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
