"""Loss on held-out records during training: the sum over all their targets, divided by the number of targets.

A micro-batch holds samples of one source and one modality, so that the same passes give the loss of every part. The
data alone decides the micro-batches. Ranks take them in turn, and a rank that has none left repeats a sample without
its targets. So every sample counts once on any number of ranks, and since all ranks compute the same modality at a
time, ZeRO-3's collectives meet.

Logged keys: `eval/loss`; `eval/loss_text` and `eval/loss_image`; `eval/loss/<source>` for each file of
`--eval_data_path`; `eval/seconds`; those of `llava.train.questions`.
"""

import contextlib
import dataclasses
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerState
from transformers.trainer_utils import SchedulerType, seed_worker

from llava.data.checks import starts_from
from llava.data.collate import Batch
from llava.data.dataset import LazySupervisedDataset, Sample
from llava.data.records import RecordTable, data_files
from llava.train.arguments import DataArguments, TrainingArguments
from llava.train.batches import MicroBatches
from llava.train.questions import Questions
from llava.utils.progress import progress

logger = logging.getLogger(__name__)

MODALITIES = ("image", "text")


class Part(NamedTuple):
    """The samples of one micro-batch, all of one modality and one source."""

    modality: str
    source: str
    samples: list[int]


# --- flags ------------------------------------------------------------------------------------------------------------


def check_eval_flags(data_args: DataArguments, training_args: TrainingArguments) -> None:
    """Raises ValueError or FileNotFoundError if a flag about held-out data is wrong; the message says what to do."""
    evaluates = training_args.eval_strategy != "no" or training_args.eval_on_start
    if not data_args.eval_data_path:
        flags = ("eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model")
        passed = [flag for flag in flags if getattr(training_args, flag)]
        passed += ["eval_strategy"] * (training_args.eval_strategy != "no")
        passed = [] if training_args.eval_tasks else passed
        passed += ["eval_generate"] * bool(training_args.eval_generate)
        passed += ["eval_image_folder"] * bool(data_args.eval_image_folder)
        if passed:
            benchmarks = (
                "" if passed[-1] in ("eval_generate", "eval_image_folder") else ", or benchmarks by --eval_tasks"
            )
            raise ValueError(f"--{passed[-1]} needs held-out records; name them with --eval_data_path{benchmarks}")
        if not training_args.eval_tasks:
            return
    if not evaluates:
        flag = "eval_data_path" if data_args.eval_data_path else "eval_tasks"
        value = data_args.eval_data_path or training_args.eval_tasks
        raise ValueError(
            f"--{flag} {value}: nothing says when it is read; pass --eval_strategy steps "
            "--eval_steps N, --eval_strategy epoch, or --eval_on_start True"
        )
    if (folder := data_args.eval_image_folder) and not Path(folder).exists():
        raise FileNotFoundError(f"--eval_image_folder {folder}: no such folder or zip file{starts_from(folder)}")
    if training_args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        schedule = SchedulerType(training_args.lr_scheduler_type).value
        raise ValueError(
            f"--lr_scheduler_type {schedule} would let held-out data decide the learning rate; take "
            "one that follows the steps, such as cosine"
        )
    if (size := training_args.per_device_eval_batch_size) < 1:
        raise ValueError(f"--per_device_eval_batch_size: expected a positive number, found {size}")
    if (number := training_args.eval_generate) < 0:
        raise ValueError(f"--eval_generate: expected the number of questions to ask, or 0, found {number}")


def eval_data_arguments(data_args: DataArguments) -> DataArguments:
    """The flags about data, with the held-out records in place of the training's."""
    folder = data_args.eval_image_folder or data_args.image_folder
    return dataclasses.replace(data_args, data_path=data_args.eval_data_path, image_folder=folder)


def metric_key(args: TrainingArguments) -> str | None:
    """`--metric_for_best_model` without a prefix; None if it is not given."""
    return args.metric_for_best_model and re.sub("^eval[_/]", "", args.metric_for_best_model)


# --- which samples, and who computes them -----------------------------------------------------------------------------


def source_names(data_path: str, cache_dir: str | None) -> dict[Path, str]:
    """The name of each file's source: the stem of its part of `--eval_data_path`, or the part where stems repeat."""
    parts = [part.strip() for part in data_path.split(",") if part.strip()]
    stems = Counter(Path(part).stem for part in parts)
    names = {part: Path(part).stem if stems[Path(part).stem] == 1 else part for part in parts}
    return {file: name for part, name in names.items() for file in data_files(part, cache_dir)}


def sources_of(records: RecordTable, data_path: str, cache_dir: str | None = None) -> list[str]:
    """The source of every record that is used: a mixture's own names, or those of the files."""
    if own := records.source_names:
        return [own[records.source_number(index)] for index in range(len(records))]
    names = source_names(data_path, cache_dir)
    return [names[records.source(records.position(index))[0]] for index in range(len(records))]


def parts_of(lengths: Sequence[int], sources: Sequence[str], max_samples: int, max_tokens: int) -> list[Part]:
    """All samples in micro-batches, samples with pictures first, and long ones before short ones.

    Args:
        lengths: length of every sample, negative without a picture.
        sources: source of every sample.
        max_samples, max_tokens: maximum samples and tokens per micro-batch, padding included; only a sample alone in
            its micro-batch may be longer.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i] < 0, sources[i], -abs(lengths[i]), i))
    parts: list[Part] = []
    longest = 0
    for i in order:
        kind = (MODALITIES[int(lengths[i] < 0)], sources[i])
        count = len(parts[-1].samples) if parts and parts[-1][:2] == kind else max_samples
        if count < max_samples and longest * (count + 1) <= max_tokens:
            parts[-1].samples.append(i)
        else:
            parts.append(Part(*kind, [i]))
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


# --- measuring --------------------------------------------------------------------------------------------------------


class HeldOut:
    """The held-out samples of this rank and their loss.

    Args:
        dataset: the held-out records.
        sources: the source of each record.
        collator: the training's collator.
        args: the training arguments.
        max_tokens: maximum tokens per micro-batch, as in training, which also keeps them for a backward pass.
        context: tokens that the model takes.

    Raises:
        ValueError: see `Questions`.
    """

    def __init__(
        self,
        dataset: LazySupervisedDataset,
        sources: Sequence[str],
        collator: Callable[[list[Sample]], Batch],
        args: TrainingArguments,
        max_tokens: int,
        context: int,
    ):
        self.dataset = dataset
        lengths = np.asarray(dataset.modality_lengths()).tolist()
        parts = parts_of(lengths, sources, args.per_device_eval_batch_size, max_tokens)
        present = {part.modality for part in parts}
        self.names = [f"_{name}" for name in MODALITIES if name in present] + [f"/{n}" for n in dict.fromkeys(sources)]
        self.questions = None
        if args.eval_generate:
            show = args.process_index == 0
            self.questions = Questions(dataset, args.eval_generate, args.per_device_eval_batch_size, context, show)
        self.keys = ["loss", *(f"loss{name}" for name in self.names), *["accuracy"] * (self.questions is not None)]
        self.parts = assigned(parts, args.world_size)[args.process_index]
        workers = args.dataloader_num_workers
        self.loader = DataLoader(
            MicroBatches(dataset, collator),
            sampler=[part.samples for part in self.parts],
            batch_size=None,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
            generator=torch.Generator(),  # the state of the training's own must not change
        )
        self.is_first = args.process_index == 0

    def totals(
        self, model: nn.Module, prepare: Callable[[Any], Any], at_batch: Callable[[], bool] = lambda: False
    ) -> torch.Tensor | None:
        """Sum of the losses and number of targets of each of `names` on this rank, fp64 [len(names), 2].

        Args:
            model: the model in evaluation mode, as the training wraps it.
            prepare: brings a batch to its device.
            at_batch: is called before every micro-batch and must return the same on all ranks; True stops.

        Returns:
            The sums, or None if `at_batch` stopped the evaluation.
        """
        sums = torch.zeros(len(self.names), 2, dtype=torch.float64)
        losses = []
        with progress(len(self.parts), "evaluating", "micro-batches", hidden=not self.is_first) as bar:
            for part, batch in zip(self.parts, self.loader, strict=True):
                if at_batch():
                    return None
                del batch["indices"]
                targets = len(batch["layout"].targets)
                loss = model(**prepare(batch), num_items_in_batch=1, loss_only=True).loss
                losses.append(loss.double())  # stays on its device, so that the host does not wait for it
                sums[self._rows(part), 1] += targets
                bar.update()
        for part, loss in zip(self.parts, torch.stack(losses).tolist() if losses else [], strict=True):
            sums[self._rows(part), 0] += loss
        return sums

    def _rows(self, part: Part) -> list[int]:
        return [self.names.index(f"_{part.modality}"), self.names.index(f"/{part.source}")]

    def metrics(self, totals: torch.Tensor) -> dict[str, float]:
        """Mean losses by name.

        Args:
            totals: the results of `totals`, summed over all ranks.

        Raises:
            ValueError: no sample has a target.
        """
        whole = totals[[name.startswith("/") for name in self.names]].sum(0)  # every sample has one source
        if not whole[1]:
            raise ValueError(
                "--eval_data_path: no record has a target within --model_max_length "
                f"{self.dataset.model_max_length}; raise it, or take other records"
            )
        named = zip(self.names, totals.tolist(), strict=True)
        parts = {f"eval_loss{name}": loss / count for name, (loss, count) in named if count}
        return {"eval_loss": (whole[0] / whole[1]).item()} | parts


# --- the best checkpoint ----------------------------------------------------------------------------------------------


def check_metric(args: TrainingArguments, keys: Sequence[str]) -> None:
    """Raises ValueError if `--metric_for_best_model` is none of `keys`, what the run's evaluations measure."""
    if (metric := metric_key(args)) and metric not in keys:
        raise ValueError(f"--metric_for_best_model {metric} is not measured; expected one of {', '.join(keys)}")


def note_best(state: TrainerState, metrics: dict[str, float], args: TrainingArguments) -> None:
    """Remembers the step if its `--metric_for_best_model` is the best so far."""
    if (name := metric_key(args)) is None:
        return
    if f"eval_{name}" not in metrics:
        raise ValueError(
            f"--metric_for_best_model {name}: none of its held-out records has a target within --model_max_length"
        )
    value, sign = metrics[f"eval_{name}"], 1 if args.greater_is_better else -1
    if sign * value > (-math.inf if state.best_metric is None else sign * state.best_metric):
        state.best_metric, state.best_global_step = value, state.global_step


def best_checkpoint(state: TrainerState, output_dir: str) -> Path | None:
    """The checkpoint with the best `--metric_for_best_model` so far; None if there is none."""
    return Path(output_dir, f"checkpoint-{state.best_global_step}") if state.best_global_step else None


# --- the model in evaluation mode -------------------------------------------------------------------------------------


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context without dropout and gradients; afterwards every module and the random states are as before."""
    modes = {module: module.training for module in model.modules()}
    with kept_random_states(), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """A context after which the random states of PyTorch, NumPy and Python are as before."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    kind = "cuda" if accelerator is None else accelerator.type
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
