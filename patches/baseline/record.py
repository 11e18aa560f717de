"""Runs a tree's own train(), LLaVA's or this one's, and records what a comparison needs. Changes no arithmetic.

  PYTHONPATH=TREE python patches/baseline/record.py RUNS.json

RUNS.json is a list of {"argv": [flags of the trainer], "record": folder}. Each folder receives `record.json` (loss of
every micro-batch, unrounded, and when it was done, in seconds; record indices in the order read), and `initial/` (the
projector before the first step as
`mm_projector.bin`, with its `config.json`).
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Trainer

from llava.train import train as tree

try:
    from llava.train import build as parts  # this tree's, where the trainer is made
except ImportError:
    parts = tree  # LLaVA has everything in one module


def main(runs_file: str) -> None:
    if hasattr(tree, "maybe_zero_3"):
        adjust_upstream()
    trainer_class, read_sample = parts.LLaVATrainer, parts.LazySupervisedDataset.__getitem__
    for run in json.loads(Path(runs_file).read_text()):
        losses, times, order = [], [], []
        folder = Path(run["record"])
        parts.LLaVATrainer = recording_trainer(trainer_class, losses, times, folder / "initial")
        parts.LazySupervisedDataset.__getitem__ = recording_reader(read_sample, order)
        sys.argv = ["train.py", *run["argv"]]
        torch.manual_seed(0)  # upstream makes the projector before the Trainer sets a seed
        tree.train()
        (folder / "record.json").write_text(json.dumps({"losses": losses, "order": order, "times": times}))
        gc.collect()
        torch.cuda.empty_cache()  # nothing happens without a GPU


def recording_trainer(base: type, losses: list[float], times: list[float], initial: Path) -> type:
    """`base`, which also notes each micro-batch's loss and end, and writes the initial projector."""

    class RecordingTrainer(base):
        # LLaVA-NeXT df17966 has a copy of the framework's loop that ends in a NameError; LLaVA has none.
        _inner_training_loop = Trainer._inner_training_loop

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            initial.mkdir(parents=True, exist_ok=True)
            projector = self.model.get_model().mm_projector
            state = {f"model.mm_projector.{k}": v.detach().cpu().clone() for k, v in projector.state_dict().items()}
            torch.save(state, initial / "mm_projector.bin")
            self.model.config.save_pretrained(initial)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            times.append(time.perf_counter())
            return loss

    return RecordingTrainer


def recording_reader(read_sample: Callable, order: list[int]) -> Callable:
    """The dataset's `__getitem__`, which also notes each requested record."""

    def read(dataset, index):
        order.append(index)
        return read_sample(dataset, index)

    return read


def adjust_upstream() -> None:
    """What upstream's train() needs to run here, without DeepSpeed and in full precision."""
    from llava.model.multimodal_encoder.clip_encoder import CLIPVisionTower
    from llava.train import llava_trainer

    def copy_to_cpu(param, ignore_status=False, name=None):  # upstream's imports DeepSpeed even where nothing is split
        return param.detach().cpu().clone()

    def keep_fp32(tower, *args, dtype=None, **kwargs):  # upstream halves the tower unless --bf16 is given
        return super(CLIPVisionTower, tower).to(*args, dtype=None if dtype == torch.float16 else dtype, **kwargs)

    tree.maybe_zero_3 = llava_trainer.maybe_zero_3 = copy_to_cpu
    CLIPVisionTower.to = keep_fp32


if __name__ == "__main__":
    main(sys.argv[1])
