"""Matches a batch's pictures to its placeholders.

Shapes: N images, K crops of all images.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from llava.anyres import Picture

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
    if isinstance(images, torch.Tensor) and images.ndim == 4 and 0 < len(images) == sum(placeholders):
        return images
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
        ValueError: too few or too many images or sizes; the message names the sample.
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


def _wrong_number(placeholders: list[int], num_images: int) -> str:
    ends, total = list(accumulate(placeholders)), sum(placeholders)
    if num_images < total:
        detail = (
            f"sample {next(i for i, end in enumerate(ends) if end > num_images)} is the first without enough images"
        )
    else:
        last = max((i for i, count in enumerate(placeholders) if count), default=0)
        detail = f"{num_images - total} are left over after sample {last}, the last with a placeholder"
    return f"the batch has {total} image placeholders ({placeholders} per sample) but {num_images} images; {detail}"
