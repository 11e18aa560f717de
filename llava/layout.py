"""The source and the target of every row of the decoder's input, as indices computed on the CPU.

The data loader's workers compute them from the token ids. The device only follows the indices, so that no shape
depends on its values and the host never waits for it.

Shapes: B batch, S sequence, N images, T packed tokens, R targets; [rows] is [1, T] without padding and [B, S'] with it,
S' being the longest sample's length after images are expanded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from llava.anyres import Picture
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX


class Layout(NamedTuple):
    """The source and the target of every row of the decoder's input."""

    text_ids: torch.Tensor  # [number of text tokens], in reading order
    source: torch.Tensor  # [rows], a row of [zeros; text embeddings; visual tokens]; 0 at padding
    position_ids: torch.Tensor  # [rows], counting from 0 in every sample; 0 at padding
    labels: torch.Tensor  # [rows], IGNORE_INDEX at visual tokens and padding
    predicting: torch.Tensor  # [R], the flat rows whose next token is a target
    targets: torch.Tensor  # [R], those tokens
    cu_seqlens: torch.Tensor  # [B + 1] int32, start of each sample in the packed row, then T
    attention_mask: torch.Tensor | None  # [B, S'] bool; None without padding
    lengths: list[int]  # tokens of each sample
    pictures: list[Picture]  # the picture of each placeholder [N], in reading order

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Layout":
        """The same with its tensors on `device`."""
        fields: dict[str, Any] = self._asdict()
        for name, x in fields.items():
            if isinstance(x, torch.Tensor):
                fields[name] = x.to(device, non_blocking=non_blocking)
        return Layout(**fields)


def lay_out(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labels: torch.Tensor,
    visual_tokens: Sequence[int],
    max_length: int | None = None,
    pictures: Sequence[Picture] | None = None,
) -> Layout:
    """The layout of a batch without padding: its samples one after another.

    Args:
        input_ids: [B, S] on the CPU, with any number of IMAGE_TOKEN_INDEX at any place.
        attention_mask: [B, S] bool; False positions are dropped.
        labels: [B, S].
        visual_tokens: number of visual tokens of each image [N], one entry per placeholder in reading order.
        max_length: each sample keeps its first `max_length` positions, counted after expansion.
        pictures: the images' crops [N]; None means one crop each.

    Raises:
        ValueError: the numbers of `visual_tokens` and of placeholders differ.
    """
    ids, labels, sample = input_ids[attention_mask], labels[attention_mask], attention_mask.nonzero()[:, 0]
    is_image = ids == IMAGE_TOKEN_INDEX
    num_images = torch.bincount(sample[is_image], minlength=len(input_ids)).tolist()
    if sum(num_images) != len(visual_tokens):
        raise ValueError(
            f"the batch has {sum(num_images)} image placeholders ({num_images} per sample), but visual tokens of "
            f"{len(visual_tokens)} images"
        )
    widths = torch.ones_like(ids)
    widths[is_image] = torch.tensor(visual_tokens, dtype=ids.dtype)
    token = torch.arange(len(ids)).repeat_interleave(widths)  # which of `ids` each position belongs to
    sample = sample[token]
    starts = torch.searchsorted(sample, torch.arange(len(input_ids)))
    position_ids = torch.arange(len(token)) - starts[sample]
    is_visual = is_image[token]
    visual_row = is_visual.cumsum(0) - 1
    if max_length is not None:
        keep = position_ids < max_length
        token, sample, position_ids, is_visual, visual_row = (
            x[keep] for x in (token, sample, position_ids, is_visual, visual_row)
        )

    text_ids = ids[token[~is_visual]]
    source = torch.where(is_visual, 1 + len(text_ids) + visual_row, (~is_visual).cumsum(0))
    lengths = torch.bincount(sample, minlength=len(input_ids))
    labels = labels[token].masked_fill(is_visual, IGNORE_INDEX)[None]
    # A sample's first token has no token of that sample before it to predict it.
    predicting, targets = predicting_rows(labels.masked_fill(position_ids == 0, IGNORE_INDEX))
    return Layout(
        text_ids,
        source[None],
        position_ids[None],
        labels,
        predicting,
        targets,
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        attention_mask=None,
        lengths=lengths.tolist(),
        pictures=[Picture()] * len(visual_tokens) if pictures is None else list(pictures),
    )


def pad_layout(layout: Layout, padding_side: str = "right") -> Layout:
    """The layout of the same samples as a rectangle [B, S'], padded on the `left` or `right`."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side: expected 'left' or 'right', found {padding_side!r}")
    lengths = torch.tensor(layout.lengths)
    longest = int(lengths.max())
    columns = torch.arange(longest)
    mask = columns < lengths[:, None] if padding_side == "right" else columns >= (longest - lengths)[:, None]

    def spread(values: torch.Tensor, fill: int) -> torch.Tensor:
        out = values.new_full(mask.shape, fill)
        out[mask] = values[0]
        return out

    rows = mask.flatten().nonzero()[:, 0]  # of each packed token
    return layout._replace(
        source=spread(layout.source, 0),
        position_ids=spread(layout.position_ids, 0),
        labels=spread(layout.labels, IGNORE_INDEX),
        predicting=rows[layout.predicting],
        attention_mask=mask,
    )


def predicting_rows(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The flat rows [R] of `labels` [B, S] whose next token is a target, and those targets [R]."""
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
    rows = (following != IGNORE_INDEX).nonzero()[:, 0]
    return rows, following[rows]
