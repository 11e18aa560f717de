"""A batch's pictures: matched to its placeholders, and their visual tokens in the order in which they enter the LLM.

Shapes: N images, K crops of all images, V visual tokens per crop, D LLM hidden size.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch.nn import functional as F

from llava.anyres import CropRules, Patches, Picture

Images = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]] | None
Sizes = Sequence[tuple[int, int]] | torch.Tensor | None


def refuse_video(modalities: Sequence[str] | str | None) -> None:
    """Raises NotImplementedError if `modalities` names a video."""
    if modalities is not None and "video" in ([modalities] if isinstance(modalities, str) else list(modalities)):
        raise NotImplementedError("modalities has 'video': videos are not supported; pass pictures ('image')")


def match_images(images: Images, placeholders: list[int]) -> torch.Tensor | None:
    """The placeholders' images, in reading order [N, 3, H, W]; None without placeholders.

    Args:
        images: see `prepare_inputs_labels_for_multimodal`.
        placeholders: number of placeholders of each sample.

    Raises:
        ValueError: too few or too many images; the message names the sample.
    """
    entries = [] if images is None else list(images)
    groups = [[x] if isinstance(x, torch.Tensor) and x.ndim == 3 else list(x) for x in entries]
    if all(len(group) == 1 for group in groups):  # an entry per image
        matched = _without_unused([group[0] for group in groups], placeholders)
        if len(matched) == sum(placeholders):
            return torch.stack(matched) if matched else None
    if all(isinstance(x, torch.Tensor) and x.ndim == 3 for x in entries):
        raise ValueError(_wrong_number(placeholders, len(entries)))
    if len(groups) > len(placeholders):
        raise ValueError(f"images for {len(groups)} samples were given, but the batch has {len(placeholders)}")
    groups += [[] for _ in range(len(placeholders) - len(groups))]
    matched = []
    for index, (group, expected) in enumerate(zip(groups, placeholders, strict=True)):  # an entry per sample
        if len(group) != expected and not (expected == 0 and len(group) == 1):
            raise ValueError(f"sample {index} of the batch has {expected} image placeholders but {len(group)} images")
        matched += group[:expected]
    return torch.stack(matched) if matched else None


def match_crops(
    images: Images, image_sizes: Sizes, placeholders: list[int]
) -> tuple[torch.Tensor | None, list[Picture]]:
    """All crops [K, 3, H, W] of the placeholders' images, and these pictures; for `anyres`.

    Args:
        images: as LLaVA-NeXT passes them: a tensor [N, n, 3, H, W] or a list with one entry per image, of its crops
            [n, 3, H, W] or, for a single one, [3, H, W]. A text-only sample may have one unused image.
        image_sizes: width and height of each image.
        placeholders: number of placeholders of each sample.

    Raises:
        ValueError: too few or too many images or sizes; the message has both numbers.
    """
    crops = _without_unused(list(_of_each_image([] if images is None else images)), placeholders)
    if len(crops) != sum(placeholders):
        raise ValueError(_wrong_number(placeholders, len(crops)))
    sizes = [None] * len(crops) if image_sizes is None else [tuple(map(int, size)) for size in image_sizes]
    sizes = _without_unused(sizes, placeholders)
    if len(sizes) != len(crops):
        raise ValueError(f"image_sizes has {len(sizes)} entries for {len(crops)} images; expected one for each")
    pictures = [Picture(len(image_crops), size) for image_crops, size in zip(crops, sizes, strict=True)]
    return (torch.cat(crops) if crops else None), pictures


def _of_each_image(images: torch.Tensor | Sequence) -> Iterator[torch.Tensor]:
    """The crops [n, 3, H, W] of every image."""
    for entry in images:
        if isinstance(entry, torch.Tensor):
            yield entry[None] if entry.ndim == 3 else entry
        else:
            yield from _of_each_image(entry)


def _without_unused(entries: list, placeholders: list[int]) -> list:
    """`entries`, one per image, without the unused ones of text-only samples, if there are any."""
    used = [count > 0 for count in placeholders for _ in range(max(count, 1))]
    return entries if len(entries) != len(used) else [entry for entry, use in zip(entries, used, strict=True) if use]


def line_up(
    features: torch.Tensor, pictures: Sequence[Picture], rules: CropRules, newline: torch.Tensor | None
) -> torch.Tensor:
    """The visual tokens of all pictures, one after another, as they enter the LLM.

    Args:
        features: the visual tokens of every crop [K, V, D], after the norm.
        pictures: the pictures that the crops belong to.
        rules: the model's, which say how crops are laid out.
        newline: `image_newline` [D], which does not pass through the norm; None where the rules have none.
    """
    if not rules.has_newline:
        return features.flatten(0, 1)
    assert newline is not None  # the model is built by the same config as the rules
    newline, parts = newline.to(features.dtype)[None], []
    for picture, crops in zip(pictures, features.split([p.crops for p in pictures]), strict=True):
        parts.append(crops[0])
        if picture.crops > 1:
            parts.append(_in_rows(crops[1:], rules.patches(picture), newline))
        else:
            parts.append(newline)
    return torch.cat(parts)


def _in_rows(crops: torch.Tensor, patches: Patches, newline: torch.Tensor) -> torch.Tensor:
    """The visual tokens of a grid of crops, row by row of patches, with a newline after each row."""
    side = math.isqrt(crops.shape[1])
    grid = crops.view(patches.rows, patches.columns, side, side, -1).transpose(1, 2)
    grid = grid.reshape(patches.rows * side, patches.columns * side, -1)
    grid = grid[patches.top : patches.top + patches.height, patches.left : patches.left + patches.width]
    if patches.shrunk is not None:
        width, height = patches.shrunk
        grid = F.interpolate(grid.permute(2, 0, 1)[None], size=(height, width), mode="bilinear")[0].permute(1, 2, 0)
    # Also if no row remains, so that the newline gets a gradient.
    return torch.cat([grid, newline[None].expand(len(grid), 1, -1)], dim=1).flatten(0, 1)


def _wrong_number(placeholders: list[int], images: int) -> str:
    short = next((i for i, end in enumerate(accumulate(placeholders)) if end > images), None)
    detail = "some are left over" if short is None else f"sample {short} is the first without enough"
    return f"{sum(placeholders)} image placeholders ({placeholders} per sample) but {images} images; {detail}"
