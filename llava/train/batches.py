"""Which samples make up an optimizer step, and in which micro-batches each rank computes them.

To the Trainer and DeepSpeed a rank's step is one batch, a list of micro-batches, and nothing is accumulated, since the
number of micro-batches may differ from step to step. `LLaVATrainer.training_step` runs them.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers.trainer_utils import seed_worker

from llava.data.dataset import Batch, LazySupervisedDataset, Sample
from llava.data.sampler import (
    ModalityLengthGroupedSampler,
    RandomOrder,
    StepSampler,
    assigned_by_length,
    assigned_in_order,
)
from llava.train.arguments import TrainingArguments

CPU_TOKENS = 2048
"""Tokens above which a micro-batch is split on a CPU. A step of 16 samples with 8,000 tokens is 1.3 times as fast in
micro-batches of 2,048, whose activations stay nearer to the caches, and takes half the memory."""

SampleOrder = RandomOrder | ModalityLengthGroupedSampler | SequentialSampler


def sample_order(dataset: LazySupervisedDataset, args: TrainingArguments) -> SampleOrder:
    """The order of samples that the flags ask for, the same on every rank."""
    seed = args.seed if args.data_seed is None else args.data_seed
    if args.group_by_modality_length:
        return ModalityLengthGroupedSampler(
            dataset.modality_lengths(), global_batch_size(args), seed=seed, window=args.length_group_window
        )
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    return RandomOrder(len(dataset), seed=seed)


def global_batch_size(args: TrainingArguments) -> int:
    """Samples per optimizer step over all ranks."""
    return args.train_batch_size * args.world_size * args.gradient_accumulation_steps


def balanced_by_length(args: TrainingArguments) -> bool:
    """Whether micro-batches are balanced by length; a mean of their means needs LLaVA's instead."""
    return args.padding_free and args.loss_reduction == "token_mean"


def assignment(dataset: LazySupervisedDataset, args: TrainingArguments) -> Callable[[list[int]], list[list[list[int]]]]:
    """The function that assigns a step's samples to the micro-batches of all ranks."""
    if not balanced_by_length(args):
        repeats = args.loss_reduction == "micro_batch_mean"
        return partial(assigned_in_order, ranks=args.world_size, batch_size=args.train_batch_size, repeats=repeats)
    return partial(
        assigned_by_length,
        lengths=np.asarray(dataset.modality_lengths()),
        ranks=args.world_size,
        micro_batches=1 if args.max_tokens_per_micro_batch else args.gradient_accumulation_steps,
        max_tokens=token_cap(args),
    )


def token_cap(args: TrainingArguments) -> int | None:
    """`--max_tokens_per_micro_batch` as a number, `auto` being resolved; without the flag a CPU has a cap too."""
    if args.max_tokens_per_micro_batch is not None:
        return int(args.max_tokens_per_micro_batch)
    return CPU_TOKENS if args.device.type == "cpu" else None


def largest_micro_batch(dataset: LazySupervisedDataset, args: TrainingArguments) -> int:
    """An upper bound of a micro-batch's tokens, with padding: by the cap, the first epoch, or the maximum lengths."""
    if not balanced_by_length(args):
        return args.train_batch_size * args.model_max_length
    lengths, cap = np.abs(dataset.modality_lengths()), token_cap(args)
    if cap is not None:
        return max(int(lengths.max()), min(cap, int(lengths.sum())))
    order, size = list(sample_order(dataset, args)), global_batch_size(args)
    heaviest = max(lengths[order[start : start + size]].sum() for start in range(0, len(order), size))
    # The longest samples go first, each to the micro-batch with the fewest tokens.
    return int(heaviest / (args.world_size * args.gradient_accumulation_steps) + lengths.max())


def most_crops(dataset: LazySupervisedDataset) -> float | None:
    """The largest number of crops per token of any sample; None where every picture has one crop."""
    crops = dataset.crops_per_image()
    if isinstance(crops, int):
        return None
    return float((crops * dataset.token_counts()[:, 1] / np.abs(dataset.modality_lengths())).max())


class MicroBatches(Dataset):
    """A data set of micro-batches: an index is a list of sample numbers, which the collator joins."""

    def __init__(self, samples: LazySupervisedDataset, collator: Callable[[list[Sample]], Batch]):
        self.samples, self.collator = samples, collator

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: list[int]) -> Batch:
        return self.collator([self.samples[i] for i in index])


class StepLoader(DataLoader):
    """This rank's optimizer steps, each a list of collated micro-batches; Accelerate must not split them again."""

    batch_sampler: StepSampler

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


def step_loader(
    order: SampleOrder,
    dataset: LazySupervisedDataset,
    collator: Callable[[list[Sample]], Batch],
    args: TrainingArguments,
) -> StepLoader:
    """The loader of this process's steps, which take their samples in `order`.

    A worker prepares whole steps. One step ahead per worker keeps it busy, without holding the many samples of a step
    several times over.
    """
    workers = args.dataloader_num_workers
    if args.dataloader_drop_last and len(dataset) < global_batch_size(args):
        raise ValueError(
            f"--dataloader_drop_last True leaves no step: a step has {global_batch_size(args)} samples, the data has "
            f"{len(dataset)}; leave the flag out"
        )
    sampler = StepSampler(
        order,
        global_batch_size(args),
        assignment(dataset, args),
        rank=args.process_index,
        drop_last=args.dataloader_drop_last,
    )
    return StepLoader(
        MicroBatches(dataset, collator),
        batch_sampler=sampler,
        collate_fn=list,
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor or (1 if workers else None),
        worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
    )
