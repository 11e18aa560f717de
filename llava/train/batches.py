"""Which samples make up an optimizer step, and in which micro-batches each rank computes them."""

import logging
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers.trainer_utils import seed_worker

from llava.data.dataset import LazySupervisedDataset
from llava.data.sampler import (
    BalancedBatchSampler,
    ModalityLengthGroupedSampler,
    RandomOrder,
    balanced_groups,
    micro_batches_for,
)

logger = logging.getLogger(__name__)


def sample_order(dataset: LazySupervisedDataset, args: Any) -> Sampler[int]:
    """The order of samples that the flags ask for, the same on every rank."""
    seed = args.seed if args.data_seed is None else args.data_seed
    if args.group_by_modality_length:
        return ModalityLengthGroupedSampler(
            dataset.modality_lengths(), global_batch_size(args), seed=seed, window=args.length_group_window
        )
    if args.train_sampling_strategy == "sequential":
        return SequentialSampler(dataset)
    return RandomOrder(len(dataset), seed=seed)


def global_batch_size(args: Any) -> int:
    """Samples per optimizer step over all ranks."""
    return args.train_batch_size * args.world_size * args.gradient_accumulation_steps


def deals_by_length(args: Any) -> bool:
    """Whether a step's samples are dealt to micro-batches of even length; a mean of their means needs LLaVA's own."""
    return args.padding_free and args.loss_reduction == "token_mean"


def fit_micro_batches(dataset: LazySupervisedDataset, args: Any) -> None:
    """Sets micro-batch size and accumulation of `args` to the fewest micro-batches that hold the flag's tokens.

    Samples per optimizer step stay what they were. Does nothing without `--max_tokens_per_micro_batch`. Call it before
    the Trainer, which hands both numbers to DeepSpeed, is made.
    """
    if args.max_tokens_per_micro_batch is None:
        return
    steps, step_size = [sum(step) for step in lengths_by_step(dataset, args)], global_batch_size(args)
    samples_per_rank = step_size // args.world_size
    micro_batches = micro_batches_for(steps, args.world_size, samples_per_rank, args.max_tokens_per_micro_batch)
    args.gradient_accumulation_steps = micro_batches
    args.per_device_train_batch_size = samples_per_rank // micro_batches
    if args.deepspeed:
        config = args.hf_deepspeed_config.config
        config["gradient_accumulation_steps"] = args.deepspeed_plugin.gradient_accumulation_steps = micro_batches
        config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
    logger.info(
        "--max_tokens_per_micro_batch %d: %d micro-batches per step and rank; a step has %d samples and %d tokens on "
        "average, %d at most",
        args.max_tokens_per_micro_batch,
        micro_batches,
        step_size,
        sum(steps) // len(steps),
        max(steps),
    )


def lengths_by_step(dataset: LazySupervisedDataset, args: Any) -> list[list[int]]:
    """Tokens of every sample of the first epoch, by optimizer step."""
    step_size = global_batch_size(args)
    tokens = np.abs(dataset.modality_lengths()[list(sample_order(dataset, args))]).tolist()
    return [tokens[start : start + step_size] for start in range(0, len(tokens), step_size)]


def largest_micro_batch(dataset: LazySupervisedDataset, args: Any) -> int:
    """Tokens, with padding, of the fullest micro-batch: the first epoch's, or where not dealt by length what could be.

    Only the steps with most tokens and with the longest samples are dealt out.
    """
    if not deals_by_length(args):
        return args.train_batch_size * args.model_max_length
    steps = lengths_by_step(dataset, args)
    candidates = [*sorted(steps, key=sum)[-4:], *sorted(steps, key=max)[-4:]]
    groups = args.world_size * args.gradient_accumulation_steps
    return max(sum(step[i] for i in group) for step in candidates for group in balanced_groups(step, groups))


class BalancedDataLoader(DataLoader):
    """This rank's micro-batches of `BalancedBatchSampler`; Accelerate must not share them out a second time."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


def balanced_dataloader(
    order: Sampler[int], dataset: LazySupervisedDataset, collator: Any, args: Any
) -> BalancedDataLoader:
    """The micro-batches of this process, of steps that take their samples in `order`."""
    sampler = BalancedBatchSampler(
        order,
        dataset.modality_lengths(),
        ranks=args.world_size,
        micro_batches=args.gradient_accumulation_steps,
        batch_size=args.train_batch_size,
        rank=args.process_index,
    )
    workers = args.dataloader_num_workers
    return BalancedDataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
    )
