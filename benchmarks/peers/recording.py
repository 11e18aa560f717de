"""What every peer's script shares. It runs in the peer's own environment, so it needs only the Hugging Face Trainer.

A job is a JSON file: {"model", "records", "stage", "batch", "micro_batch", "steps", "learning_rate", "warmup_steps",
"options", "output"}. `records` has a line {"messages": [{"role", "content"}], "images": [path]} for every
sample, in the order in which steps take them. `record.json` in the folder `output` gets the steps' losses and times of
their ends (seconds).
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback


def run(main: Callable[[dict[str, Any]], None]) -> None:
    """Runs a peer's `main` with the job that the command line names, and writes what its Trainer did."""
    job = json.loads(Path(sys.argv[1]).read_text())
    recorder = Recorder()
    recorder.install()
    main(job)
    (Path(job["output"]) / "record.json").write_text(json.dumps({"losses": recorder.losses, "times": recorder.times}))


def training_flags(job: dict[str, Any]) -> dict[str, Any]:
    """`TrainingArguments` that make every peer do the same work: those of the job, nothing saved, nothing reported."""
    return {
        "output_dir": f"{job['output']}/run",
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": job["batch"] // job["micro_batch"],
        "max_steps": job["steps"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "cosine",
        "warmup_steps": job["warmup_steps"],
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "adam_beta2": 0.999,  # ms-swift's own default is 0.95
        "optim": "adamw_torch_fused",
        "bf16": job["options"].get("bf16", False),
        "fp16": False,
        "use_cpu": True,  # the Trainer wants to be told before it takes bf16 there
        "gradient_checkpointing": False,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "remove_unused_columns": False,
    }


class Recorder(TrainerCallback):
    """Notes every optimizer step's loss, the mean over its targets, and when it ended."""

    def __init__(self):
        self.losses: list[float] = []
        self.times: list[float] = []
        self.shares: list[tuple[float, int, bool]] = []  # of the step's micro-batches: see step_loss

    def install(self) -> None:
        """Makes every Trainer that is built from now on report here."""
        init, step = Trainer.__init__, Trainer.training_step

        @functools.wraps(init)  # peers look at its parameters
        def recorded_init(trainer, *args, **kwargs):
            init(trainer, *args, **kwargs)
            trainer.add_callback(self)

        def recorded_step(trainer, model, inputs, *args, **kwargs):
            targets = (inputs["labels"][:, 1:] != -100).sum().item()
            loss = step(trainer, model, inputs, *args, **kwargs)
            self.shares.append((loss.item(), targets, trainer.model_accepts_loss_kwargs))
            return loss

        Trainer.__init__, Trainer.training_step = recorded_init, recorded_step

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter())
        self.losses.append(step_loss(self.shares))
        self.shares.clear()


def step_loss(shares: list[tuple[float, int, bool]]) -> float:
    """The mean loss over a step's targets.

    A Trainer whose losses are not divided by the step's targets follows the mean of the micro-batches' means. Here
    these are weighted by their targets, so that the same work gives the same loss.

    Args:
        shares: of each micro-batch the loss from `training_step`, the number of targets, and whether that loss is
            divided by the targets of the whole step.
    """
    if all(by_targets for *_, by_targets in shares):
        return sum(loss for loss, *_ in shares)
    return sum(loss * len(shares) * targets for loss, targets, _ in shares) / sum(targets for _, targets, _ in shares)
