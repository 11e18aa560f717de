"""Held-out data during training: the mean loss over all targets.

A micro-batch holds samples of one modality, so that the same passes give the loss of both. The data alone decides the
micro-batches. Ranks take them in turn, and a rank that has none left repeats a sample without its targets. So every
sample counts once on any number of ranks, and since all ranks compute the same modality at a time, ZeRO-3's
collectives meet.

Logged keys: `eval/loss`, `eval/loss_image`, `eval/loss_text`, `eval/seconds`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import SchedulerType

from llava.data.checks import starts_from
from llava.data.collate import Batch
from llava.data.dataset import LazySupervisedDataset, Sample
from llava.train.arguments import DataArguments, TrainingArguments
from llava.train.batches import MicroBatches
from llava.utils.progress import progress

MODALITIES = ("image", "text")


# --- flags ------------------------------------------------------------------------------------------------------------


def check_eval_flags(data_args: DataArguments, training_args: TrainingArguments) -> None:
    """Raises ValueError or FileNotFoundError if a flag about held-out data is wrong; the message says what to do."""
    path, folder = data_args.eval_data_path, data_args.eval_image_folder
    if not path:
        flags = ("eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model")
        passed = [flag for flag in flags if getattr(training_args, flag)]
        passed += ["eval_strategy"] * (training_args.eval_strategy != "no") + ["eval_image_folder"] * bool(folder)
        if passed:
            raise ValueError(f"--{passed[-1]} needs held-out records; name them with --eval_data_path")
        return
    if training_args.eval_strategy == "no" and not training_args.eval_on_start:
        raise ValueError(
            f"--eval_data_path {path}: nothing says when it is read; pass --eval_strategy steps --eval_steps N, "
            "--eval_strategy epoch, or --eval_on_start True"
        )
    if folder and not Path(folder).exists():
        raise FileNotFoundError(f"--eval_image_folder {folder}: no such folder or zip file{starts_from(folder)}")
    schedule = SchedulerType(training_args.lr_scheduler_type).value
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        raise ValueError(
            f"--lr_scheduler_type {schedule} would let held-out data decide the learning rate; take cosine"
        )


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

    Args:
        lengths: length of every sample, negative without an image.
        max_samples, max_tokens: maximum samples and tokens per micro-batch, padding included; only a sample alone in
            its micro-batch may be longer.
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
        self, model: nn.Module, prepare: Callable[[Any], Any], at_batch: Callable[[], bool] = lambda: False
    ) -> torch.Tensor | None:
        """Sum of the losses and number of targets of each of `MODALITIES` on this rank, fp64 [2, 2]; None if stopped.

        Args:
            model: as the training wraps it; it computes without dropout.
            prepare: brings a batch to its device.
            at_batch: is called before every micro-batch and must return the same on all ranks; True stops.
        """
        totals = torch.zeros(len(MODALITIES), 2, dtype=torch.float64, device=self.device)
        training, stopped = model.training, False
        model.eval()
        with progress(len(self.parts), "evaluating", "micro-batches", hidden=not self.is_first) as bar:
            for part, batch in zip(self.parts, self.loader, strict=True):
                if stopped := at_batch():
                    break
                del batch["indices"]
                own = totals[MODALITIES.index(part.modality)]
                own[1] += len(batch["layout"].targets)
                own[0] += model(**prepare(batch), num_items_in_batch=1, loss_only=True).loss  # the host does not wait
                bar.update()
        model.train(training)
        return None if stopped else totals

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
