"""Which area of a picture its processor shows to the vision encoder: all of it, a centred crop, or also margins."""

from typing import Any

Area = tuple[float, float, float, float]
"""Left, top, right and bottom in widths and heights of the picture; below 0 and above 1 are margins."""
WHOLE: Area = (0.0, 0.0, 1.0, 1.0)


def seen_area(image_processor: Any, size: tuple[int, int], pads: bool = False) -> Area:
    """The area that the encoder's grid of patches covers.

    Args:
        image_processor: of transformers.
        size: width and height of the picture.
        pads: the picture is padded to a square before the processor gets it.
    """
    seen = size
    if pads or (getattr(image_processor, "do_pad", False) and hasattr(image_processor, "pad_to_square")):
        seen = (max(size), max(size))
    if getattr(image_processor, "do_center_crop", False):
        seen = _cropped(image_processor, seen)
    left, top = ((1 - part / length) / 2 for part, length in zip(seen, size, strict=True))
    return left, top, 1 - left, 1 - top


def _cropped(image_processor: Any, size: tuple[int, int]) -> tuple[float, float]:
    """Width and height of the centred crop, in the pixels that it has before the picture is scaled."""
    crop, scaled = image_processor.crop_size, image_processor.size
    across = along = 1.0
    if image_processor.do_resize and scaled.get("shortest_edge"):
        across = along = scaled["shortest_edge"] / min(size)
    elif image_processor.do_resize:
        across, along = scaled["width"] / size[0], scaled["height"] / size[1]
    return crop["width"] / across, crop["height"] / along
