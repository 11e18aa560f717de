"""One training stage as a step of longer work: skipped when finished, watched while it runs, ended with its caller."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from llava.utils.locks import take
from llava.utils.processes import last_lines, start, tail, wait
from llava.utils.provenance import DONE

LOG_FILE = "train_log.jsonl"
STAGES = ("pretrain", "finetune")
_BETWEEN_LINES = 60.0  # seconds, where there is no terminal to write over


class StepError(RuntimeError):
    """A step failed; the message says which, and names its log where it has one."""


WHOLE_RUNS = {"DRY_RUN": "", "CHECK": ""}
"""Variables of every run of a larger command: a stage that trains nothing would count as finished."""
_DECIDED_BY = {
    "PRESET": "--preset decides it",
    "DEMO_DATA": "--preset, or the quickstart's --data, decides it",
    "SEED": "--seeds decides it",
    "NORM": "--arms decides it",
    "NORM_INIT": "--arms decides it, as in layernorm@4x",
    "NORM_LEARNABLE": "--arms decides it, as in layernorm-fixed",
    "PRETRAIN_ADAPTER": "every stage 2 takes the adapter of its own stage 1",
    "OUTPUT_DIR": "--output-dir, or the quickstart's OUTPUT_ROOT, decides it",
    "RUN_NAME": "every run has a name of its own",
    "DRY_RUN": "only a stage alone can be shown: bash scripts/pretrain.sh",
    "CHECK": "only a stage alone can be checked: bash scripts/pretrain.sh",
}


def refuse_ignored(runs: Iterable[Mapping[str, str]]) -> None:
    """Refuses variables of the recipe that the caller set to something else than some run will get.

    Args:
        runs: the variables that each run's script is called with, besides the caller's.

    Raises:
        ValueError: there is one; the message names it.
    """
    for settings in runs:
        for name, reason in _DECIDED_BY.items():
            if name in settings and os.environ.get(name, settings[name]) != settings[name]:
                raise ValueError(f"{name}={os.environ[name]}: {reason}; leave the variable out")


def interpreter() -> str:
    """Python for a step of its own: the caller's, or else the one that runs this."""
    return os.environ.get("LLAVA_PYTHON") or sys.executable


def is_finished(folder: Path) -> bool:
    """Whether the stage in `folder` ended, and its model is there."""
    return (folder / DONE).is_file() and any(folder.glob("*model*.safetensors"))  # LORA=1: adapter_model.safetensors


def train_stage(
    stage: str, folder: Path, log: Path, settings: Mapping[str, str], keep_open: Sequence[int] = ()
) -> None:
    """Runs `scripts/<stage>.sh` into `folder` unless it is finished there.

    Args:
        settings: variables of the script.
        log: gets what the script prints.
        keep_open: file descriptors that the training inherits, such as a lock's.

    Raises:
        StepError: the script failed.
    """
    if is_finished(folder):
        print(f"{folder} is complete, skipped (remove it to train again)")
        return
    print(f"log: {log}", flush=True)
    if code := _watch(start_stage(stage, folder, log, settings, keep_open), folder):
        raise StepError("\n".join([*last_lines(log, 30), f"{stage} failed with status {code}, see {log}"]))
    (folder / DONE).touch()


def start_stage(
    stage: str, folder: Path, log: Path, settings: Mapping[str, str], keep_open: Sequence[int] = ()
) -> subprocess.Popen:
    """Starts `scripts/<stage>.sh` into `folder`; see `train_stage`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)
    settings = {**settings, "OUTPUT_DIR": str(folder.resolve())}
    return start_logged(["bash", f"scripts/{stage}.sh"], log, settings, keep_open)


def start_logged(
    command: Sequence[str], log: Path, settings: Mapping[str, str], keep_open: Sequence[int] = ()
) -> subprocess.Popen:
    """Starts a command from the repository's root, in a session of its own: a signal reaches it once, from here."""
    with log.open("w") as output:
        return start(command, os.environ | dict(settings), output, keep_open=keep_open)


def _watch(process: subprocess.Popen, folder: Path) -> int:
    """Shows the newest optimizer step until the process ends; returns its exit status."""
    before, shown, terminal = last_step(folder), time.monotonic(), sys.stdout.isatty()

    def show() -> None:
        nonlocal before, shown
        line = last_step(folder)
        if line is None or line == before or (not terminal and time.monotonic() - shown < _BETWEEN_LINES):
            return
        before, shown = line, time.monotonic()
        text = f"  step {line['step']:4d}  loss {line['loss']:.3f}  {line['samples_per_second']:.1f} samples/s"
        print(f"\r{text} " if terminal else text, end="" if terminal else "\n", flush=True)

    code = wait(process, show, float(os.environ.get("WATCH_SECONDS", "3")))
    print(flush=True)
    return code


def last_step(folder: Path) -> dict | None:
    """The newest line about an optimizer step, or None; a line that is still being written is left out."""
    try:
        lines = tail(folder / LOG_FILE).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if re.search(r'"loss": .*"samples_per_second": .*}$', line):
            return json.loads(line)
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Holds the folder's lock. A training that outlives this process keeps it, so that no second one writes there.

    Raises:
        ValueError: another call, or a training that it left, still holds it.
    """
    patience = float(os.environ.get("LOCK_SECONDS", "60"))
    busy = f"{folder} is in use by another call or by a training that it left"
    with (folder / ".lock").open("w") as file:
        take(file.fileno(), busy, patience)
        yield file.fileno()
