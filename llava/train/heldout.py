"""Held-out data during training: the mean loss over all targets.

A micro-batch holds samples of one modality, so that the same passes give the loss of both. The data alone decides the
micro-batches. Ranks take them in turn, and a rank that has none left repeats a sample without its targets, so that
every sample counts once on any number of ranks, and ZeRO-3's collectives meet.

Logged keys: `eval/loss`, `eval/loss_image`, `eval/loss_text`, `eval/seconds`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from llava.data.dataset import Batch, LazySupervisedDataset, Sample
from llava.train.arguments import DataArguments, TrainingArguments
from llava.train.batches import MicroBatches
from llava.utils.progress import progress

MODALITIES = ("image", "text")


def eval_data_arguments(data_args: DataArguments) -> DataArguments:
    """The flags about data, with the held-out records in place of the training's."""
    folder = data_args.eval_image_folder or data_args.image_folder
    return dataclasses.replace(data_args, data_path=data_args.eval_data_path, image_folder=folder)


# --- the loss ---------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """The samples of one micro-batch, all of one modality."""

    modality: str
    samples: list[int]


def parts_of(lengths: Sequence[int], max_samples: int, max_tokens: int) -> list[Part]:
    """All samples in micro-batches, samples with images first, and long ones before short ones.

    `lengths` are negative without an image. Tokens are counted with padding; a sample alone may have more than
    `max_tokens`.
    """
    parts: list[Part] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i] < 0, -abs(lengths[i]), i)):
        modality = MODALITIES[int(lengths[i] < 0)]
        count = len(parts[-1].samples) if parts and parts[-1].modality == modality else max_samples
        if count < max_samples and longest * (count + 1) <= max_tokens:
            parts[-1].samples.append(i)
        else:
            parts.append(Part(modality, [i]))
            longest = abs(int(lengths[i]))
    return parts


def assigned(parts: Sequence[Part], ranks: int) -> list[list[Part]]:
    """Every rank's micro-batches: the same number on all ranks, and in each place the same modality on all ranks.

    If there are too few for all ranks, the shortest sample is repeated without its targets, as the index `~index`.
    """
    of_rank: list[list[Part]] = [[] for _ in range(ranks)]
    for modality in MODALITIES:
        own = [part for part in parts if part.modality == modality]
        own += [part._replace(samples=[~part.samples[-1]]) for part in own[-1:]] * (-len(own) % ranks)
        for rank in range(ranks):
            of_rank[rank] += own[rank::ranks]
    return of_rank


class HeldOut:
    """The held-out samples of this rank and their loss.

    A micro-batch has at most `max_tokens` tokens, as in training, which also keeps them for a backward pass.
    """

    def __init__(
        self,
        dataset: LazySupervisedDataset,
        collator: Callable[[list[Sample]], Batch],
        args: TrainingArguments,
        max_tokens: int,
    ):
        self.dataset, self.device, self.is_first = dataset, args.device, args.process_index == 0
        lengths, batch_size = np.asarray(dataset.modality_lengths()).tolist(), args.per_device_eval_batch_size
        self.parts = assigned(parts_of(lengths, batch_size, max_tokens), args.world_size)[args.process_index]
        self.loader = DataLoader(
            MicroBatches(dataset, collator),
            sampler=[part.samples for part in self.parts],
            batch_size=None,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            generator=torch.Generator(),  # the state of the training's own must not change
        )

    @torch.no_grad()
    def totals(
        self, model: nn.Module, prepare: Callable[[Any], Any], at_batch: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Sum of the losses and number of targets of each of `MODALITIES` on this rank, fp64 [2, 2].

        `model` is as the training wraps it and computes without dropout; `prepare` brings a batch to its device;
        `at_batch` is called before every micro-batch.
        """
        totals = torch.zeros(len(MODALITIES), 2, dtype=torch.float64, device=self.device)
        training = model.training
        model.eval()
        with progress(len(self.parts), "evaluating", "micro-batches", hidden=not self.is_first) as bar:
            for part, batch in zip(self.parts, self.loader, strict=True):
                at_batch()
                del batch["indices"]
                own = totals[MODALITIES.index(part.modality)]
                own[1] += len(batch["layout"].targets)
                own[0] += model(**prepare(batch), num_items_in_batch=1, loss_only=True).loss  # the host does not wait
                bar.update()
        model.train(training)
        return totals

    def metrics(self, totals: torch.Tensor) -> dict[str, float]:
        """Mean losses by name, of `totals` summed over all ranks; ValueError if no sample has a target."""
        loss, targets = totals.sum(0).tolist()
        if not targets:
            raise ValueError(
                "--eval_data_path: no record has a target within --model_max_length "
                f"{self.dataset.model_max_length}; raise it, or take other records"
            )
        parts = zip(MODALITIES, totals.tolist(), strict=True)
        means = {f"eval_loss_{name}": own / count for name, (own, count) in parts if count}
        return {"eval_loss": loss / targets} | means
