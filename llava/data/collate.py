"""Makes a batch of samples.

Shapes: B batch, S longest sample, N images of the batch.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch.nn.utils.rnn import pad_sequence

from llava.anyres import CropRules
from llava.constants import IGNORE_INDEX
from llava.data.dataset import Sample
from llava.layout import Layout, lay_out, pad_layout


class Batch(TypedDict, total=False):
    """What a model receives; `layout` if the collator makes it, `images` and `indices` if the samples have them."""

    input_ids: torch.Tensor  # [B, S]
    labels: torch.Tensor  # [B, S]
    attention_mask: torch.Tensor  # [B, S]
    images: torch.Tensor  # [N, 3, H, W], or the crops of all images
    layout: Layout
    indices: torch.Tensor  # [B]


class DataCollatorForSupervisedDataset:
    """Pads token ids and labels on the right, concatenates the images, and lays out the decoder's input.

    The mask comes from the lengths, never from comparing ids with the padding id, which may be a real token.

    Args:
        pad_token_id: fills `input_ids`; masked out everywhere.
        num_visual_tokens: V, the tokens that one placeholder expands to; None leaves the layout to the model.
        max_length: length at which samples are cut, counted after expansion.
        padding_free, crop_rules: the model's.
    """

    def __init__(
        self,
        pad_token_id: int,
        num_visual_tokens: int | None = None,
        max_length: int | None = None,
        padding_free: bool = True,
        crop_rules: CropRules | None = None,
    ):
        self.pad_token_id, self.num_visual_tokens, self.max_length = pad_token_id, num_visual_tokens, max_length
        self.padding_free, self.crop_rules = padding_free, crop_rules

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """The batch of `samples`."""
        ids, labels = [s["input_ids"] for s in samples], [s["labels"] for s in samples]
        lengths = torch.tensor([len(row) for row in ids])
        batch: Batch = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
            "attention_mask": torch.arange(int(lengths.max())) < lengths[:, None],
        }
        if images := [sample["images"] for sample in samples if "images" in sample]:
            batch["images"] = torch.cat(images)
        if self.num_visual_tokens is not None:
            batch["layout"] = self._layout(samples, self.num_visual_tokens, batch)
        if "index" in samples[0]:
            batch["indices"] = torch.tensor([sample["index"] for sample in samples])
        return batch

    def _layout(self, samples: Sequence[Sample], num_visual_tokens: int, batch: Batch) -> Layout:
        pictures = [picture for sample in samples for picture in sample.get("pictures", ())]
        visual_tokens = [num_visual_tokens] * len(batch.get("images", ()))
        if pictures and self.crop_rules is not None:
            visual_tokens = [self.crop_rules.visual_tokens(picture) for picture in pictures]
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        layout = lay_out(ids, mask, labels, visual_tokens, self.max_length, pictures or None)
        return layout if self.padding_free else pad_layout(layout)
