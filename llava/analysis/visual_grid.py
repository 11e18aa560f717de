"""Where the visual tokens of one picture are in it.

Shapes: S sequence, V visual tokens, R x C the places of the finest ones.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from llava.analysis.probe import VISUAL, Batch
from llava.anyres import CropRules, Picture, black_margins

_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "hyperclovax_vision_v2")
_PATCHES += ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "kimi_k25", "cosmos3_edge")
_PIXELS = ("llava", "llava_next", "llava_onevision", "vipllava", "paligemma", "gemma3", "got_ocr2", "deepseek_vl")
_PIXELS += ("ovis2", "internvl", "aya_vision", "cohere2_vision", "idefics3", "smolvlm", "llama4", "fast_vlm")
SHAPE_INPUTS = dict.fromkeys(_PATCHES, "image_grid_thw") | dict.fromkeys((*_PIXELS, "perception_lm"), "pixel_values")
SHAPE_INPUTS |= {"mistral3": "image_sizes", "lfm2_vl": "spatial_shapes", "minicpmv4_6": "target_sizes"}
SHAPE_INPUTS |= {"gemma4": "image_position_ids"}
"""The model input that says how large the picture is, by model_type, for the families whose visual tokens are places of
the picture, row by row. A family that is not here has no map."""
LATENTS = {"idefics2", "aria"}
"""Families whose visual tokens are a resampler's latents: each has looked at the whole picture."""

Place = Callable[[torch.Tensor], torch.Tensor]
"""Gets the shares [V] of a picture's tokens and returns a map [R, C] of them."""


class NoMap(ValueError):
    """A picture's visual tokens have no known places in it; the message says why."""


def picture_map(model: Any, batch: Batch, groups: torch.Tensor) -> Place:
    """Where the visual tokens of a picture are in the area that the encoder sees.

    Args:
        batch: of one sample.
        groups: [1, S], see `Probe.groups`.

    Raises:
        NoMap: the places of the tokens are not known.
    """
    count = int((groups[0] == VISUAL).sum())
    if not hasattr(model, "crop_rules"):
        grid = visual_grid(model.config.model_type, batch.inputs, count)
        return lambda shares: shares.reshape(grid)
    rules = model.crop_rules()
    picture = rules.picture(batch.inputs["image_sizes"][0]) if rules.is_anyres else Picture()
    if rules.tokens_per_crop != rules.tokens_per_side**2 or rules.visual_tokens(picture) != count:
        raise NoMap(f"{count} visual tokens do not fill {rules.tokens_per_side} rows and columns")
    return partial(drawn_in_place, picture=picture, rules=rules)


def drawn_in_place(shares: torch.Tensor, picture: Picture, rules: CropRules) -> torch.Tensor:
    """Shares [V] of a picture in crops as a map [R, C] that sums to 1.

    The tokens of the parts are at their places. Those of the whole picture show it in coarser squares, over which
    their shares are spread. Patches of black margins and `image_newline` show nothing of it and are left out.
    """
    side = rules.tokens_per_side
    drawn = whole = shares[: side * side].view(side, side)
    parts = _parts(shares[side * side :], picture, rules) if picture.crops > 1 else None
    if parts is not None and parts.numel():  # of a very narrow picture no row may remain
        spread = F.interpolate(whole[None, None], size=parts.shape, mode="area")[0, 0]
        drawn = parts + spread * (whole.sum() / spread.sum().clamp(min=torch.finfo(spread.dtype).tiny))
    return drawn / drawn.sum().clamp(min=torch.finfo(drawn.dtype).tiny)


def _parts(shares: torch.Tensor, picture: Picture, rules: CropRules) -> torch.Tensor:
    """Shares of the crops after the first, at their places in the picture."""
    patches, side = rules.patches(picture), rules.tokens_per_side
    if rules.has_newline:
        width, height = patches.shrunk or (patches.width, patches.height)
        return shares.view(height, width + 1)[:, :width]
    rows, columns = patches.rows * side, patches.columns * side
    if rules.merge_type == "flat":
        shares = shares.view(patches.rows, patches.columns, side, side).transpose(1, 2)
    left, top = black_margins(picture.size, columns, rows)
    return shares.reshape(rows, columns)[top : rows - top, left : columns - left]


def visual_grid(model_type: str, inputs: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Rows and columns of one picture's visual tokens, from the shape that the processor gave the picture.

    Args:
        inputs: of the model, for one sample.
        count: of its visual tokens.

    Raises:
        NoMap: the tokens form no single grid that is known.
    """
    if not count:
        raise NoMap("there are no visual tokens")
    if model_type in LATENTS:
        raise NoMap(f"the visual tokens of {model_type} are latents of a resampler, not places in a picture")
    if model_type not in SHAPE_INPUTS:
        raise NoMap(f"it is not known here where the visual tokens of {model_type} lie in a picture")
    # LLaVA around Pixtral pads the pictures of a batch, and says their own sizes.
    name = "image_sizes" if model_type == "llava" and "image_sizes" in inputs else SHAPE_INPUTS[model_type]
    shapes = _shapes(name, inputs[name])
    if len(shapes) > 1:
        raise NoMap(f"{model_type} cuts them into tiles")
    rows, columns = shapes[0]
    for side in range(math.isqrt(rows * columns // count), 0, -1):  # of a token, in patches or pixels
        if (rows // side) * (columns // side) == count:
            return rows // side, columns // side
    raise NoMap(f"{count} visual tokens do not fill the {rows} x {columns} of {name}")


def _shapes(name: str, value: torch.Tensor) -> list[tuple[int, int]]:
    """Rows and columns of each picture, or of each tile or frame of one, that a model input tells."""
    if name == "pixel_values":  # [..., channels, rows, columns]
        return [(value.shape[-2], value.shape[-1])] * math.prod(value.shape[:-3])
    if name == "image_position_ids":  # [pictures, patches, 2], x before y, -1 at padding
        return [(1 + int(places[:, 1].max()), 1 + int(places[:, 0].max())) for places in value]
    return [(rows, columns) for *frames, rows, columns in value.tolist() for _ in range(math.prod(frames))]
