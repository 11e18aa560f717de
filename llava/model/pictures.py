"""Matches a batch's pictures to its placeholders.

Shapes: N images, K crops of all images.
"""

from collections.abc import Iterator, Sequence

import torch

from llava.anyres import Picture

Images = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]] | None
Sizes = Sequence[tuple[int, int]] | torch.Tensor | None


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
        if not isinstance(entry, torch.Tensor):
            yield from _of_each_image(entry)
        else:
            yield entry[None] if entry.ndim == 3 else entry


def _without_unused(entries: list, placeholders: list[int]) -> list:
    """`entries`, one per image, without the unused ones of text-only samples, if there are any."""
    used = [count > 0 for count in placeholders for _ in range(max(count, 1))]
    return (
        [entry for entry, is_used in zip(entries, used, strict=True) if is_used]
        if len(entries) == len(used)
        else entries
    )


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
    groups = [_one_or_more(x) for x in ([] if images is None else images)]
    of_each = [max(n, 1) for n in placeholders]  # a text-only sample's unused image is among them
    flat = [image for group in groups for image in group] if all(len(group) == 1 for group in groups) else None
    if flat is not None and len(flat) == sum(placeholders):
        return torch.stack(flat) if flat else None
    if flat is not None and len(flat) == sum(of_each):
        remaining = iter(flat)
        groups = [[next(remaining) for _ in range(n)] for n in of_each]
    elif images is None or all(isinstance(x, torch.Tensor) and x.ndim == 3 for x in images):
        raise ValueError(_wrong_number(placeholders, len(groups)))
    elif len(groups) > len(placeholders):
        raise ValueError(f"images for {len(groups)} samples were given, but the batch has {len(placeholders)}")
    groups += [[] for _ in range(len(placeholders) - len(groups))]
    matched = []
    for index, (group, expected) in enumerate(zip(groups, placeholders, strict=True)):
        if len(group) != expected and not (expected == 0 and len(group) == 1):
            raise ValueError(f"sample {index} of the batch has {expected} image placeholders but {len(group)} images")
        matched += group[:expected]
    return torch.stack(matched) if matched else None


def _one_or_more(images: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The images [3, H, W] of one entry: an image, several in a tensor, or a list of them."""
    return [images] if isinstance(images, torch.Tensor) and images.ndim == 3 else list(images)


def _wrong_number(placeholders: list[int], num_images: int) -> str:
    return (
        f"the batch has {sum(placeholders)} image placeholders ({placeholders} per sample) but {num_images} images"
        + _first_sample_short_of_images(placeholders, num_images)
    )


def _first_sample_short_of_images(placeholders: list[int], num_images: int) -> str:
    seen = 0
    for index, count in enumerate(placeholders):
        seen += count
        if seen > num_images:
            return f"; sample {index} is the first without enough images"
    last = max((i for i, n in enumerate(placeholders) if n), default=0)
    return f"; {num_images - seen} are left over after sample {last}, the last with a placeholder"
