"""SIGTERM, SIGUSR1 and Ctrl-C end a run after the current step, with a checkpoint; the same command then continues it.

A signal to one rank is enough. At the end of every step the ranks start to sum their flags over gloo, and they read the
sum one step later, when it has long arrived: all stop at the same step, and none waits for it. A process that is alone
ends at once if nothing is trained yet. A second Ctrl-C ends the run at once, whatever is lost.
"""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from llava.train.distributed import joined
from llava.utils.failures import REQUEUE_EXIT_CODE

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A terminal's Ctrl-C reaches every process, and launchers pass it on as well; within this many seconds it counts once.
_SAME_SECONDS = 1.0


class StoppedEarly(BaseException):
    """A signal came before the first step, when there is nothing to save."""


class StopSignal(TrainerCallback):
    """Saves and stops training when a signal has come; `stopped` says that it did, `step` after which step."""

    def __init__(self):
        self.received: int | None = None
        self.stopped = self.training = False
        self.step, self.steps = 0, 0
        self.process = os.getpid()
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def install(self) -> "StopSignal":
        """Takes over the signals; a Ctrl-C that a shell's `&` has made this process ignore stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def remove(self) -> None:
        """Restores the signals' handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if os.getpid() != self.process:  # a forked worker, which its parent ends by SIGTERM; others are not for it
            if number == signal.SIGTERM:
                self._end(number)
            return
        now = time.monotonic()
        if number == signal.SIGINT and self.received is not None and now - self._since > _SAME_SECONDS:
            self._end(number)
        if self.received is None:
            self.received, self._since = number, now
            if not self.training and not joined():
                self.stopped = True
                raise StoppedEarly
            if number == signal.SIGINT and int(os.environ.get("RANK", 0)) == 0:  # no buffered output in a handler
                os.write(2, b"\nCtrl-C: saving after the current step and stopping; Ctrl-C again ends at once\n")

    @staticmethod
    def _end(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def on_train_begin(self, args, state, control, **kwargs):
        self.training = True
        if joined():
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)  # of all ranks, so this one is in it
            self._group = group

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps and self.agreed():
            self.stopped, self.step, self.steps = True, state.global_step, state.max_steps
            control.should_save = control.should_training_stop = True  # if saving fails, it raises

    def agreed(self) -> bool:
        """Whether any rank had received a signal by the previous call; with one rank, by now. Every rank must call."""
        if self._group is None:
            return self.received is not None
        stop = self._take_sum() > 0
        flag = torch.tensor(int(self.received is not None))
        self._pending = (dist.all_reduce(flag, group=self._group, async_op=True), flag)
        return stop

    def _take_sum(self) -> int:
        if self._pending is None:
            return 0
        work, flag = self._pending
        work.wait()
        self._pending = None
        return int(flag)

    def on_train_end(self, args, state, control, **kwargs):
        self._take_sum()

    def report(self, output_dir: str) -> None:
        """On rank 0 of a run that a signal stopped, logs one line: after which step, and what is saved."""
        if not self.stopped or int(os.environ.get("RANK", 0)) != 0:
            return
        name = signal.Signals(self.received).name if self.received else "a signal to another rank"
        if self.step:
            logger.warning(
                "%s: stopped after step %d of %d, checkpoint %s; rerun the same command to resume",
                name, self.step, self.steps, Path(output_dir, f"checkpoint-{self.step}"),
            )  # fmt: skip
        else:
            logger.warning("%s: stopped before the first step, nothing is saved; rerun the same command to start", name)

    @staticmethod
    def exit_code() -> int:
        """The exit status of a stopped run: the request for another start, or 0 for a rank of a launcher's.

        With another status than 0 the launcher would start the ranks again; that nothing is finished shows in the
        output folder.
        """
        return 0 if "LOCAL_RANK" in os.environ else REQUEUE_EXIT_CODE
