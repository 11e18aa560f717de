"""Splices visual tokens into text embeddings, as tensor operations over one flat row of all the batch's tokens.

Shapes: B batch, S sequence, N images, V visual tokens per image, T packed tokens, D LLM hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX


@dataclass
class PackedSequences:
    """The batch's samples one after another, without padding."""

    inputs_embeds: torch.Tensor  # [T, D]
    labels: torch.Tensor  # [T], IGNORE_INDEX at visual tokens
    position_ids: torch.Tensor  # [T], counting from 0 in every sample
    cu_seqlens: torch.Tensor  # [B + 1], start of each sample, then T

    def lengths(self) -> list[int]:
        """Tokens of each sample, on the host."""
        return self.cu_seqlens.diff().tolist()

    def next_token_labels(self) -> torch.Tensor:
        """`labels` [T] without each sample's first token, which no token of the same sample predicts."""
        return self.labels.masked_fill(self.position_ids == 0, IGNORE_INDEX)


def splice_images(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labels: torch.Tensor,
    image_features: torch.Tensor,
    embed_tokens: Callable[[torch.Tensor], torch.Tensor],
    max_length: int | None = None,
) -> PackedSequences:
    """Replaces each IMAGE_TOKEN_INDEX by the V visual tokens of the next image.

    Args:
        input_ids: [B, S] with any number of IMAGE_TOKEN_INDEX at any place.
        attention_mask: [B, S] bool; False positions are dropped.
        labels: [B, S].
        image_features: [N, V, D], one entry per placeholder, in reading order.
        embed_tokens: the LLM's embedding, called once on the text ids [number of text tokens].
        max_length: each sample keeps its first `max_length` positions, counted after expansion.
    """
    num_visual = image_features.shape[1]
    sample = attention_mask.nonzero()[:, 0]
    ids, labels = input_ids[attention_mask], labels[attention_mask]

    repeats = torch.where(ids == IMAGE_TOKEN_INDEX, num_visual, 1)
    ids, labels, sample = (x.repeat_interleave(repeats) for x in (ids, labels, sample))
    lengths = torch.bincount(sample, minlength=len(input_ids))
    position_ids = torch.arange(len(ids), device=ids.device) - (lengths.cumsum(0) - lengths)[sample]
    is_visual = ids == IMAGE_TOKEN_INDEX

    keep = torch.ones_like(is_visual) if max_length is None else position_ids < max_length
    features = image_features.flatten(0, 1)[keep[is_visual]]
    ids, labels, sample, position_ids, is_visual = (x[keep] for x in (ids, labels, sample, position_ids, is_visual))

    text = embed_tokens(ids[~is_visual])
    # One gather instead of a masked write: row i of the output is row `source[i]` of [text; visual].
    source = torch.where(is_visual, len(text) + is_visual.cumsum(0) - 1, (~is_visual).cumsum(0) - 1)
    inputs_embeds = torch.cat([text, features.to(text.dtype)])[source]
    cu_seqlens = torch.bincount(sample, minlength=len(input_ids)).cumsum(0)
    return PackedSequences(
        inputs_embeds,
        labels.masked_fill(is_visual, IGNORE_INDEX),
        position_ids,
        torch.nn.functional.pad(cu_seqlens, (1, 0)),
    )


def pad_packed(
    packed: PackedSequences, padding_side: str = "right"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads packed samples to a rectangle.

    Returns:
        inputs_embeds [B, S, D] (zeros at padding), labels [B, S], attention_mask [B, S] bool, position_ids [B, S].
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side: expected 'left' or 'right', found {padding_side!r}")
    lengths = packed.cu_seqlens.diff()
    longest = int(lengths.max())
    columns = torch.arange(longest, device=lengths.device)
    mask = columns < lengths[:, None] if padding_side == "right" else columns >= (longest - lengths)[:, None]

    def scatter(values: torch.Tensor, fill: int) -> torch.Tensor:
        out = values.new_full((*mask.shape, *values.shape[1:]), fill)
        out[mask] = values
        return out

    return (
        scatter(packed.inputs_embeds, 0),
        scatter(packed.labels, IGNORE_INDEX),
        mask,
        scatter(packed.position_ids, 0),
    )
