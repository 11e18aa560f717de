"""What a picture is before a processor sees it: the shape that it may have, its orientation, its colours."""

import numpy as np
from PIL import Image

from llava.constants import MAX_ASPECT_RATIO, MAX_SIDE

_ORIENTATION_TAG, _BITS_TAG, _PHOTOMETRIC_TAG = 274, 258, 262  # of EXIF and TIFF
_UNCONVERTED_MODES = ("LAB", "La", "RGBa")


def check_header(image: Image.Image) -> None:
    """Raises ValueError where a picture, not decoded yet, is too long for its width or cannot become RGB."""
    short, long = sorted(image.size)
    if long > min(MAX_ASPECT_RATIO * short, MAX_SIDE):
        raise ValueError(
            f"{image.width:,} x {image.height:,} pixels; a side may be {MAX_ASPECT_RATIO:g} times the other and have "
            f"{MAX_SIDE:,} pixels: crop or resize it"
        )
    if image.mode in _UNCONVERTED_MODES:
        raise ValueError(f"colours of mode {image.mode}; convert it to RGB")


def exif_orientation(image: Image.Image) -> int:
    """The orientation that a picture's EXIF data give: 1 where it is upright, or where they say nothing."""
    if image.format == "TIFF":  # Pillow turns them itself
        return 1
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # Pillow's decoders raise whatever damaged bytes lead them to; the pixels may still be whole
        return 1
    return orientation if isinstance(orientation, int) and 1 < orientation <= 8 else 1


# --- colours ----------------------------------------------------------------------------------------------------------


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in mode RGB, in its stored colours: palettes are looked up, transparency is left out as LLaVA does.

    Grey of 16 bits is scaled, where Pillow's own conversion clips nearly everything to white.

    Raises:
        ValueError: the levels have another range than 8 or 16 bits.
    """
    if has_wide_levels(image):
        tags = getattr(image, "tag_v2", {})  # of TIFF
        if (
            image.mode == "F"
            or tags
            and (image.mode == "I" or tags.get(_BITS_TAG) == (12,) or not tags[_PHOTOMETRIC_TAG])
        ):
            raise ValueError("levels of 32 bits, of 12 bits, or with 0 for white: convert it to 8 bits")
        return Image.fromarray((np.asarray(image) * (255 / 65535) + 0.5).astype(np.uint8)).convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    # By way of RGBA, because Pillow warns where a palette's transparency is a table.
    return image.convert("RGBA" if "transparency" in image.info else "RGB").convert("RGB")


def has_wide_levels(image: Image.Image) -> bool:
    """Whether the levels have more than 8 bits: 16-bit grey, 32-bit integers, floats."""
    return image.mode == "F" or image.mode.startswith("I")
