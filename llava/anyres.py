"""How a picture of any size becomes crops and visual tokens: LLaVA-NeXT's anyres as arithmetic, without pixels.

The vision tower takes squares. With `image_aspect_ratio` `anyres` it is shown a picture several times: whole, squeezed
to its square, and in parts. For the parts the picture is scaled into the best of the grids of `image_grid_pinpoints`,
centred on black, and cut into squares. `mm_patch_merge_type` says how their visual tokens enter the LLM: `flat`, crop
after crop; `spatial_unpad`, the whole picture and then the rows of the grid, without rows or columns that only show
black, each with the learnt token `image_newline` at its end. `anyres_max_N` shrinks grids of more than about N crops'
tokens. A picture with a single crop is followed by one `image_newline`.

Shapes: V visual tokens per crop.
"""

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

MERGE_TYPES = ("flat", "spatial_unpad")
_CROPS = re.compile(r"\[?\((\d+)x(\d+)\),\.\.\.,\((\d+)x(\d+)\)\]?")
_SHRINK_FROM = 1.1  # LLaVA-NeXT shrinks a grid only if its sides are too long by more than this factor

Size = tuple[int, int]
"""Width and height."""
Pinpoints = str | Sequence[Sequence[int]]
"""`image_grid_pinpoints`, see `parse_pinpoints`."""


class Picture(NamedTuple):
    """One picture as the model gets it: how many crops, and its original size where it has several."""

    crops: int = 1
    size: Size | None = None


class Patches(NamedTuple):
    """Which patches of a grid of crops become visual tokens: a rectangle, and what it is shrunk to."""

    columns: int  # of crops
    rows: int
    left: int  # patches that are cut off on each side
    top: int
    width: int  # patches that remain
    height: int
    shrunk: Size | None  # None: they stay as they are


@dataclass(frozen=True)
class CropRules:
    """What decides crops and visual tokens of a picture.

    Args:
        tokens_per_crop: V, after the projector.
        tokens_per_side: of a crop; a token stands for a patch, or for the patches that the projector merges.
        crop_side: pixels.
        aspect_ratio: `image_aspect_ratio`; None means `square`.
        merge_type: `mm_patch_merge_type`.
        grids: width and height in pixels of each grid that a picture may be cut by.

    Raises:
        ValueError: an unknown value, or two that contradict each other; the message names the flag.
    """

    tokens_per_crop: int
    tokens_per_side: int
    crop_side: int
    aspect_ratio: str | None = None
    merge_type: str = "flat"
    grids: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        check_modes(self.aspect_ratio, self.merge_type)
        if self.is_anyres and self.has_newline and self.tokens_per_crop != self.tokens_per_side**2:
            raise ValueError(
                f"--mm_patch_merge_type {self.merge_type} arranges patches in rows, which have no place for a "
                "class token; pass --mm_vision_select_feature patch"
            )

    @classmethod
    def of(cls, config: object, tokens_per_crop: int, tokens_per_side: int, crop_side: int) -> "CropRules":
        """The rules of a model with this config; the other arguments are the class's."""
        aspect_ratio, grids = getattr(config, "image_aspect_ratio", None), ()
        if is_anyres(aspect_ratio):
            grids = parse_pinpoints(getattr(config, "image_grid_pinpoints", None), crop_side)
        merge_type = getattr(config, "mm_patch_merge_type", None) or "flat"
        return cls(tokens_per_crop, tokens_per_side, crop_side, aspect_ratio, merge_type, grids)

    @property
    def is_anyres(self) -> bool:
        return is_anyres(self.aspect_ratio)

    @property
    def has_newline(self) -> bool:
        return has_newline(self.merge_type)

    def picture(self, size: Size) -> Picture:
        """The picture with all the crops that its size gives it."""
        if not self.is_anyres:
            return Picture()
        size = int(size[0]), int(size[1])  # DeepSpeed makes a list of a pair on its way to forward
        width, height = best_grid(size, self.grids)
        return Picture(1 + (width // self.crop_side) * (height // self.crop_side), size)

    def visual_tokens(self, picture: Picture) -> int:
        """How many rows of the LLM's input the picture takes; ValueError if its size gives another number of crops."""
        if picture.crops == 1:
            return self.tokens_per_crop + self.has_newline
        is_known = self.has_newline or self.is_anyres and picture.size is not None  # else LLaVA takes any number
        patches = self.patches(picture) if is_known else None
        if patches is None or not self.has_newline:
            return picture.crops * self.tokens_per_crop
        width, height = patches.shrunk or (patches.width, patches.height)
        return self.tokens_per_crop + height * (width + 1)

    def patches(self, picture: Picture) -> Patches:
        """How the crops after the first are arranged with `spatial_unpad`; see `visual_tokens`."""
        if not self.is_anyres:
            raise ValueError(
                f"a picture of {picture.crops} crops was given, but image_aspect_ratio is {self.aspect_ratio!r}; "
                "expected one crop, or a config with 'anyres'"
            )
        if picture.size is None:
            raise ValueError(f"the size of a picture of {picture.crops} crops is missing; pass image_sizes")
        expected = self.picture(picture.size)
        if picture.crops != expected.crops:
            raise ValueError(
                f"a picture of {picture.size[0]} x {picture.size[1]} pixels (image_sizes) has {expected.crops} crops "
                f"by image_grid_pinpoints; {picture.crops} were given"
            )
        return _patches(self, expected.size)


def is_anyres(aspect_ratio: str | None) -> bool:
    """Whether `image_aspect_ratio` cuts pictures into crops."""
    return bool(aspect_ratio) and aspect_ratio.startswith("anyres")


def has_newline(merge_type: str | None) -> bool:
    """Whether a model with this `mm_patch_merge_type` has the token `image_newline`."""
    return merge_type == "spatial_unpad"


def max_crops(aspect_ratio: str | None) -> int | None:
    """N of `anyres_max_N`."""
    match = re.fullmatch(r"anyres_max_([1-9]\d*)", aspect_ratio or "")
    return int(match[1]) if match else None


def check_modes(aspect_ratio: str | None, merge_type: str = "flat") -> None:
    """Raises ValueError where `image_aspect_ratio` or `mm_patch_merge_type` does not exist."""
    if aspect_ratio not in (None, "square", "pad", "anyres") and max_crops(aspect_ratio) is None:
        raise ValueError(
            f"image_aspect_ratio {aspect_ratio!r}: expected 'square', 'pad', 'anyres', or 'anyres_max_N' with a number "
            "for N, as in 'anyres_max_9'"
        )
    if merge_type not in MERGE_TYPES:
        raise ValueError(
            f"mm_patch_merge_type {merge_type!r}: expected {' or '.join(MERGE_TYPES)} (image_aspect_ratio anyres_max_N "
            "holds the number of crops to shrink to)"
        )


def check_grids_given(aspect_ratio: str | None, pinpoints: str | None) -> None:
    """Raises ValueError where `--image_grid_pinpoints` is missing, or has no effect."""
    if is_anyres(aspect_ratio) != bool(pinpoints):
        raise ValueError(
            f"--image_aspect_ratio {aspect_ratio} with --image_grid_pinpoints {pinpoints}: anyres needs the grids to "
            "choose from, such as (1x1),...,(3x3); other modes take none"
        )


def parse_pinpoints(value: Pinpoints | None, crop_side: int) -> tuple[Size, ...]:
    """The grids of `image_grid_pinpoints`, width and height in pixels.

    Args:
        value: pairs of pixels, or their text, as `[[336, 672], [672, 336]]`; or in crops, as `(1x1),...,(6x6)`, for all
            the grids between these two.
        crop_side: pixels.

    Raises:
        ValueError: `value` has none of these forms, or a side is not a multiple of `crop_side`.
    """
    expected = "expected pairs of pixels as [[336,672],[672,336]] or of crops as (1x1),...,(6x6)"
    try:
        if isinstance(value, str) and (crops := _CROPS.fullmatch(re.sub(r"\s", "", value))):
            first_column, first_row, last_column, last_row = map(int, crops.groups())
            columns, rows = range(first_column, last_column + 1), range(first_row, last_row + 1)
            grids = [(column * crop_side, row * crop_side) for column in columns for row in rows]
        else:
            pairs: Any = ast.literal_eval(value) if isinstance(value, str) else value  # None is no sequence
            grids = [(int(width), int(height)) for width, height in pairs]
    except (ValueError, TypeError, SyntaxError):
        raise ValueError(f"--image_grid_pinpoints {value!r}: {expected}") from None
    for grid in grids:
        if any(side < 1 or side % crop_side for side in grid):
            raise ValueError(
                f"--image_grid_pinpoints: {grid[0]} x {grid[1]} pixels cannot be cut into squares of the vision "
                f"tower's {crop_side}; expected multiples of it"
            )
    if not grids:
        raise ValueError(f"--image_grid_pinpoints {value!r}: no grid; {expected}")
    return tuple(grids)


@lru_cache(maxsize=1 << 16)
def best_grid(size: Size, grids: tuple[Size, ...]) -> Size:
    """The grid that keeps most of the picture's pixels; of equally good grids the smallest, as in LLaVA-NeXT."""
    width, height = size

    def worth(grid: Size) -> tuple[int, int]:
        scale = min(grid[0] / width, grid[1] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - grid[0] * grid[1]

    return max(grids, key=worth)


def fitted_size(size: Size, grid: Size) -> Size:
    """The picture's size when it is scaled into `grid`, which it fills in one direction."""
    across, down = grid[0] / size[0], grid[1] / size[1]
    if across < down:
        return grid[0], min(math.ceil(size[1] * across), grid[1])
    return min(math.ceil(size[0] * down), grid[0]), grid[1]


@lru_cache(maxsize=1 << 16)
def _patches(rules: CropRules, size: Size) -> Patches:
    grid, side = best_grid(size, rules.grids), rules.tokens_per_side
    columns, rows = grid[0] // rules.crop_side, grid[1] // rules.crop_side
    left, top = black_margins(size, columns * side, rows * side)
    width, height, shrunk = columns * side - 2 * left, rows * side - 2 * top, None
    if most := max_crops(rules.aspect_ratio):
        factor = math.sqrt(height * width / (most * side**2))
        if factor > _SHRINK_FROM:
            shrunk = max(1, int(width // factor)), max(1, int(height // factor))
    return Patches(columns, rows, left, top, width, height, shrunk)


def black_margins(size: Size, columns: int, rows: int) -> Size:
    """Black patches on the left and right, and above and below, of a picture of `size` centred on the grid."""
    if size[0] / size[1] > columns / rows:
        return 0, (rows - int(size[1] * (columns / size[0]))) // 2
    return (columns - int(size[0] * (rows / size[1]))) // 2, 0
