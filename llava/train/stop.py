"""SIGTERM, SIGUSR1 and Ctrl-C end a training after the current step, with a checkpoint; the same command continues it.

A signal to one rank is enough: at the end of every step the ranks add up their flags over gloo. Before the training a
signal ends the process at once, as it ends any other: nothing is lost.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from llava.train.distributed import joined

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignal(TrainerCallback):
    """Saves and stops training when a signal has come; `stopped` then says after which step, for the log."""

    def __init__(self):
        self.received: int | None = None
        self.stopped = ""
        self.process = os.getpid()
        self._before: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None

    def install(self) -> None:
        """Takes over the signals; a Ctrl-C that a shell's `&` has made this process ignore stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)

    def on_train_begin(self, args, state, control, **kwargs):
        if joined():
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)  # of all ranks, so this one is in it
            self._group = group

    def remove(self) -> None:
        """Restores the signals' handlers; until then a final save goes on to its end."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        # Forked workers inherit this; PyTorch gives them a handler of their own for SIGTERM.
        if os.getpid() == self.process and self.received is None:
            self.received = number
            if number == signal.SIGINT and int(os.environ.get("RANK", 0)) == 0:  # no buffered output in a handler
                os.write(2, b"\nCtrl-C: saving after the current step and stopping; Ctrl-\\ ends at once\n")

    def on_step_end(self, args, state, control, **kwargs):
        stops = self.received is not None
        if self._group is not None:
            flag = torch.tensor(int(stops))
            dist.all_reduce(flag, group=self._group)
            stops = bool(flag)
        if stops and state.global_step < state.max_steps:
            name = signal.Signals(self.received).name if self.received else "a signal to another rank"
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            self.stopped = (
                f"{name}: stopped after step {state.global_step} of {state.max_steps}, checkpoint {checkpoint}; "
                "rerun the same command to resume"
            )
            control.should_save = control.should_training_stop = True  # if saving fails, it raises

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.stopped and state.global_step % len(kwargs["train_dataloader"]):  # the library ends the epoch early
            control.should_log = control.should_evaluate = control.should_save = False
