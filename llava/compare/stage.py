"""One training stage as a step of longer work: skipped when finished, watched while it runs, ended with its caller."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llava.provenance import DONE, ROOT

LOG_FILE = "train_log.jsonl"
_BETWEEN_LINES = 60.0  # seconds, where there is no terminal to write over


class StageError(RuntimeError):
    """The training failed; the message names its log."""


def is_finished(folder: Path) -> bool:
    """Whether the stage in `folder` ended, and its model is there."""
    return (folder / DONE).is_file() and any(folder.glob("model*.safetensors"))


def train_stage(
    stage: str, folder: Path, log: Path, settings: Mapping[str, str], keep_open: Sequence[int] = ()
) -> None:
    """Runs `scripts/<stage>.sh` into `folder` unless it is finished there.

    Args:
        settings: variables of the script.
        log: gets what the script prints.
        keep_open: file descriptors that the training inherits, such as a lock's.

    Raises:
        StageError: the script failed.
    """
    if is_finished(folder):
        print(f"{folder} is complete, skipped (remove it to train again)")
        return
    print(f"log: {log}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)
    command = ["bash", f"scripts/{stage}.sh"]
    env = os.environ | dict(settings) | {"OUTPUT_DIR": str(folder.resolve())}
    with log.open("w") as output:
        # A session of its own: a signal reaches it once, from here.
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, start_new_session=True, pass_fds=list(keep_open), **options
        )
        try:
            code = _watch(process, folder / LOG_FILE)
        except BaseException:
            _end(process)
            raise
    if code:
        lines = log.read_text(errors="replace").splitlines()[-30:]
        raise StageError("\n".join([*lines, f"{stage} failed with status {code}, see {log}"]))
    (folder / DONE).touch()


def _watch(process: subprocess.Popen, log: Path) -> int:
    """Shows the newest optimizer step until the process ends; returns its exit status."""
    before, shown, terminal = _last_step(log), time.monotonic(), sys.stdout.isatty()
    seconds = float(os.environ.get("WATCH_SECONDS", "3"))
    while True:
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            line = _last_step(log)
            if line == before or (not terminal and time.monotonic() - shown < _BETWEEN_LINES):
                continue
            before, shown = line, time.monotonic()
            text = f"  step {line['step']:4d}  loss {line['loss']:.3f}  {line['samples_per_second']:.1f} samples/s"
            print(f"\r{text} " if terminal else text, end="" if terminal else "\n", flush=True)
        else:
            print(flush=True)
            return code


def _last_step(log: Path) -> dict | None:
    """The newest line about an optimizer step, or None; a line that is still being written counts as none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if re.search(r'"loss": .*"samples_per_second": .*}$', line):
            return json.loads(line)
    return None


def _end(process: subprocess.Popen) -> None:
    """Asks the training to save and stop, and waits; a second interruption ends it at once."""
    if process.poll() is not None:
        return
    print("stopping: the training ends first; once more ends it at once", file=sys.stderr, flush=True)
    try:
        process.terminate()
        process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
