"""Lanes of steps: the steps of a lane run in order, lanes run in parallel, and each step has its own log."""

import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llava.compare.runs import Run, check_present, check_runs, is_finished, last_step
from llava.launch.devices import memory_quota
from llava.utils.digests import revision
from llava.utils.paths import ROOT
from llava.utils.processes import end, last_lines, start
from llava.utils.provenance import DONE
from llava.utils.versions import ANALYSIS, code_digest

POLL_SECONDS = 0.1
SHOWN_LINES = 12  # of a failed step's log
MEMORY_OF_RUN = 3.5  # GiB that a training of the demo takes


class StepError(RuntimeError):
    """A step failed; the message says which, and names its log where it has one."""


@dataclass
class Step:
    """A command whose output goes to `log`.

    Attributes:
        settings: additional environment variables.
        is_done: whether the step can be skipped.
    """

    title: str
    command: Sequence[str]
    log: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    is_done: Callable[[], bool] = lambda: False

    def start(self, keep_open: Sequence[int], place: Mapping[str, str]) -> subprocess.Popen:
        """Starts the command with the variables of its lane's place."""
        env = {**os.environ, **self.settings, **place}
        with self.log.open("w") as output:
            return start(self.command, env, output, cwd=ROOT, keep_open=keep_open)

    def succeeded(self, seconds: float) -> None:
        """Called when the command ends with status 0."""

    def failed(self, code: int) -> None:
        """Called when the command ends with another status, which is a StepError."""
        cause = f"was ended by signal {-code}" if code < 0 else f"failed with status {code}"
        lines = [f"  | {line}" for line in last_lines(self.log, SHOWN_LINES)]
        command = f"{self.title} {cause}: {shlex.join(self.command)}"
        raise StepError("\n".join([command, *lines, f"its log: {self.log}", "rerun the same command to resume"]))

    def progress(self) -> str:
        """The last line that the command printed; of a progress bar the numbers alone."""
        (line,) = last_lines(self.log, 1)
        return re.sub(r"\|[^|]*\|", "", line).strip()[:100] or "starting"


@dataclass
class StageStep(Step):
    """One training stage of an arm, into `folder`.

    Attributes:
        steps: number of optimizer steps; 0 where its length is given in epochs.
        batch: samples in a step.
        compared: runs that must equal this one in everything but the arm, checked before and after the stage.
    """

    folder: Path = Path()
    steps: int = 0
    batch: int = 0
    compared: Sequence[Run] = ()

    def __post_init__(self) -> None:
        self.is_done = lambda: is_finished(self.folder)

    def start(self, keep_open: Sequence[int], place: Mapping[str, str]) -> subprocess.Popen:
        check_present(self.compared)
        (self.folder / DONE).unlink(missing_ok=True)
        return super().start(keep_open, place)

    def succeeded(self, seconds: float) -> None:
        (self.folder / DONE).write_text(f"{seconds:.1f}\n")
        part = self.folder.name
        if finished := [run for run in self.compared if run.has_finished(part)]:
            check_runs(finished, part)

    def progress(self) -> str:
        line = last_step(self.folder)
        if line is None:
            return "starting"
        rate = line["samples_per_second"]
        text = f"step {line['step']:3d}" + (f"/{self.steps}" if self.steps else "")
        text += f"  loss {line['loss']:.3f}  {rate:.1f} samples/s"
        if not self.steps or not rate:
            return text
        minutes, seconds = divmod(round((self.steps - line["step"]) * self.batch / rate), 60)
        return f"{text}  {minutes}:{seconds:02d} left"


@dataclass
class Measurement(Step):
    """Measurements of `llava.analysis`.

    Attributes:
        models: folders of the models by their names.
        mark: file that records what decided them.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    mark: Path = Path()

    def __post_init__(self) -> None:
        self.is_done = self.is_measured

    def is_measured(self) -> bool:
        """Whether these models were measured with their current weights, by the current code."""
        return self.mark.is_file() and self.mark.read_text() == self.origin()

    def origin(self) -> str:
        """What decides the measurement."""
        named = [f"{name}={folder}" for name, folder in self.models.items()]
        weights = [revision(folder) or "" for folder in self.models.values()]
        return "\n".join([*named, *weights, code_digest(ANALYSIS)])

    def succeeded(self, seconds: float) -> None:
        self.mark.write_text(self.origin())


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
    width: int,
    keep_open: Sequence[int] = (),
    places: Sequence[Mapping[str, str]] = (),
    ended: Callable[[str], object] = lambda lane: None,
) -> dict[str, float]:
    """Runs every lane's steps in order, at most `width` lanes in parallel; returns each step's seconds by its title.

    Args:
        keep_open: file descriptors that the commands inherit, such as a lock's.
        places: for each of the `width` parallel lanes, its own variables, such as its GPU.
        ended: called with a lane's name when all its steps are done.

    Raises:
        StepError: a step failed; the other running steps were asked to save and stop.
    """
    waiting = [Lane(name, list(steps)) for name, steps in lanes.items()]
    active: list[Lane] = []
    free = list(places or [{}] * width)
    times: dict[str, float] = {}
    shown, between = time.monotonic(), float(os.environ.get("WATCH_SECONDS", "20"))
    try:
        while waiting or active:
            while waiting and len(active) < width:
                active.append(waiting.pop(0))
                active[-1].place = free.pop(0)
            for lane in list(active):
                if not _advance(lane, times, keep_open):
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
    return times


def _advance(lane: Lane, times: dict[str, float], keep_open: Sequence[int]) -> bool:
    """Starts the lane's next step if none runs; returns False when the lane has finished."""
    if lane.process is not None:
        code = lane.process.poll()
        if code is None:
            return True
        seconds = times[lane.running.title] = time.monotonic() - lane.since
        lane.process = None
        if code:
            lane.running.failed(code)
        else:
            lane.running.succeeded(seconds)
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
    print(f"  {lane.running.title:<28} {text}", flush=True)


def runs_at_once(runs: int, cores: int) -> int:
    """Number of demo runs that train in parallel on a CPU: each needs a core and the memory of a training."""
    free = min(psutil.virtual_memory().available, memory_quota() or math.inf)
    return max(1, min(runs, cores, int(free / 2**30 / MEMORY_OF_RUN)))
