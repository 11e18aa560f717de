"""Samples to a batch.

Shapes: B batch, S longest sample, N images of the batch.
"""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from llava.constants import IGNORE_INDEX


class DataCollatorForSupervisedDataset:
    """Pads token ids and labels on the right and concatenates the images.

    The mask comes from the lengths, never from comparing ids with the padding id, which may be a real token.

    Args:
        pad_token_id: fills `input_ids`; masked out everywhere.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The batch of `samples`.

        Returns:
            `input_ids`, `labels`, `attention_mask` [B, S]; `num_images`, how many of the images are each sample's, a
            list of B; `images` [N, 3, H, W] and `indices` [B] if samples have them.
        """
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        batch = {
            "input_ids": pad_sequence(
                [s["input_ids"] for s in samples], batch_first=True, padding_value=self.pad_token_id
            ),
            "labels": pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=IGNORE_INDEX),
            "attention_mask": torch.arange(int(lengths.max())) < lengths[:, None],
        }
        images = [sample["images"] for sample in samples if "images" in sample]
        if images:
            batch["images"] = torch.cat(images)
        batch["num_images"] = [len(sample["images"]) if "images" in sample else 0 for sample in samples]
        if "index" in samples[0]:
            batch["indices"] = torch.tensor([sample["index"] for sample in samples])
        return batch
