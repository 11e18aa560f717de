"""Lanes of steps: the steps of a lane run in order, lanes run in parallel, and each step has its own log."""

import math
import os
import re
import shlex
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from llava.compare.runs import Run, check_present, check_runs, is_finished
from llava.launch.devices import memory_quota
from llava.utils.paths import ROOT
from llava.utils.processes import end, last_lines, start
from llava.utils.provenance import DONE

POLL_SECONDS = 0.1
SHOWN_LINES = 12  # of a failed step's log
TITLE_WIDTH, LINE_WIDTH = 28, 90
MEMORY_OF_RUN = 3.5  # GiB that a training of the demo takes


class StepError(RuntimeError):
    """A step failed; the message says which, and names its log where it has one."""


@dataclass
class Step:
    """A command whose output goes to `log`.

    Attributes:
        settings: additional environment variables.
        is_done: whether the step can be skipped.
        before: called when it starts.
        after: called with its seconds when the command ends with status 0.
    """

    title: str
    command: Sequence[str]
    log: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    is_done: Callable[[], bool] = lambda: False
    before: Callable[[], object] = lambda: None
    after: Callable[[float], object] = lambda seconds: None

    def start(self, keep_open: Sequence[int], place: Mapping[str, str]) -> subprocess.Popen:
        """Starts the command with the variables of its lane's place."""
        self.before()
        env = {**os.environ, **self.settings, **place}
        with self.log.open("w") as output:
            return start(self.command, env, output, cwd=ROOT, keep_open=keep_open)

    def failed(self, code: int) -> None:
        """Raises the StepError of a command that ended with another status."""
        cause = f"was ended by signal {-code}" if code < 0 else f"failed with status {code}"
        lines = [f"  | {line}" for line in last_lines(self.log, SHOWN_LINES)]
        command = f"{self.title} {cause}: {shlex.join(self.command)}"
        raise StepError("\n".join([command, *lines, f"its log: {self.log}", "rerun the same command to resume"]))

    def progress(self) -> str:
        """The beginning of the last line that the command printed; of a progress bar the numbers alone."""
        (line,) = last_lines(self.log, 1)
        return textwrap.shorten(re.sub(r"\|[^|]*\|", "", line), LINE_WIDTH, placeholder=" ...") or "starting"


def training(title: str, stage: str, folder: Path, settings: Mapping[str, str], runs: Sequence[Run]) -> Step:
    """A stage into `folder`; before and after it, `runs` must be equal in everything but the arm."""

    def before() -> None:
        check_present(runs)
        (folder / DONE).unlink(missing_ok=True)

    def after(seconds: float) -> None:
        (folder / DONE).write_text(f"{seconds:.1f}\n")
        if finished := [run for run in runs if run.has_finished(folder.name)]:
            check_runs(finished, folder.name)

    command, log = ["bash", f"scripts/{stage}.sh"], folder.with_suffix(".log")
    return Step(title, command, log, settings, partial(is_finished, folder), before, after)


@dataclass
class Lane:
    """A running lane: its remaining steps, the running step with its process and start time, and its place."""

    name: str
    steps: list[Step]
    place: Mapping[str, str] = field(default_factory=dict)
    running: Step = field(init=False, repr=False, compare=False)  # from the first step's start on
    process: subprocess.Popen | None = None
    since: float = 0.0


def run_lanes(
    lanes: Mapping[str, Sequence[Step]],
    places: Sequence[Mapping[str, str]],
    keep_open: Sequence[int] = (),
    ended: Callable[[str], object] = lambda lane: None,
) -> None:
    """Runs every lane's steps in order, a lane in each place at a time.

    Args:
        places: the variables of each place, such as its GPU.
        keep_open: file descriptors that the commands inherit, such as a lock's.
        ended: called with a lane's name when all its steps are done.

    Raises:
        StepError: a step failed; the other running steps were asked to save and stop.
    """
    waiting = [Lane(name, list(steps)) for name, steps in lanes.items()]
    active: list[Lane] = []
    free = list(places)
    shown, between = time.monotonic(), float(os.environ.get("WATCH_SECONDS", "20"))
    try:
        while waiting or active:
            while waiting and free:
                active.append(waiting.pop(0))
                active[-1].place = free.pop(0)
            for lane in list(active):
                if not _advance(lane, keep_open):
                    active.remove(lane)
                    free.append(lane.place)
                    ended(lane.name)
            if time.monotonic() - shown > between:
                shown = time.monotonic()
                for lane in active:
                    _show(lane, lane.running.progress())
            time.sleep(POLL_SECONDS if active else 0)
    finally:  # a failure, Ctrl-C or SIGTERM; nothing is left to end otherwise
        end([lane.process for lane in active if lane.process])


def _advance(lane: Lane, keep_open: Sequence[int]) -> bool:
    """Starts the lane's next step if none runs; returns False when the lane has finished."""
    if lane.process is not None:
        code = lane.process.poll()
        if code is None:
            return True
        seconds = time.monotonic() - lane.since
        lane.process = None
        if code:
            lane.running.failed(code)
        else:
            lane.running.after(seconds)
            _show(lane, f"done in {seconds:.0f} s")
    while lane.steps:
        lane.running = lane.steps.pop(0)
        if lane.running.is_done():
            _show(lane, "is complete, skipped")
            continue
        lane.running.log.parent.mkdir(parents=True, exist_ok=True)
        lane.since = time.monotonic()
        lane.process = lane.running.start(keep_open, lane.place)
        _show(lane, f"log: {lane.running.log}")
        return True
    return False


def _show(lane: Lane, text: str) -> None:
    print(f"  {lane.running.title:<{TITLE_WIDTH}} {text}", flush=True)


def runs_at_once(runs: int, cores: int) -> int:
    """Number of demo runs that train in parallel on a CPU: each needs a core and the memory of a training."""
    free = min(psutil.virtual_memory().available, memory_quota() or math.inf)
    return max(1, min(runs, cores, int(free / 2**30 / MEMORY_OF_RUN)))
