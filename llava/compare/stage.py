"""One stage of one run by its script: skipped when its folder is complete, watched while it trains."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from llava.launch.settings import ROOT, Refusal
from llava.provenance import DONE

STEPS = "train_log.jsonl"


def train_stage(stage: str, folder: Path, log: Path, settings: Mapping[str, str], seconds: float = 3.0) -> None:
    """Trains by `scripts/<stage>.sh` with these variables; its own messages go to `log`.

    A signal to this process lets the training save and stop, and is waited for.

    Raises:
        Refusal: training failed; the end of the log has been shown.
    """
    if (folder / DONE).is_file() and list(folder.glob("model*.safetensors")):
        print(f"{folder} is complete, skipped (remove it to train again)", flush=True)
        return
    print(f"log: {log}", flush=True)
    (folder / DONE).unlink(missing_ok=True)
    variables = {**os.environ, **settings, "OUTPUT_DIR": str(folder)}
    with log.open("w") as output:
        # Ctrl-C reaches the whole group; the training hears of it from here alone.
        options = {"stdout": output, "stderr": subprocess.STDOUT, "close_fds": False, "preexec_fn": _ignore_interrupt}
        process = subprocess.Popen(["bash", f"scripts/{stage}.sh"], cwd=ROOT, env=variables, **options)
        try:
            code = _watch(process, folder / STEPS, seconds)
        finally:
            if process.poll() is None:
                process.terminate()
                print(f"\n{stage} is asked to stop", file=sys.stderr, flush=True)
                process.wait()
    if code:
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-30:]), file=sys.stderr)
        raise Refusal(f"{stage} failed, see {log}")
    (folder / DONE).touch()


def _watch(process: subprocess.Popen, steps: Path, seconds: float) -> int:
    """Shows the newest optimizer step now and then until the process ends; its exit status."""
    before = _last_line(steps)  # of an earlier, interrupted run
    while True:
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        line = _last_line(steps)
        if line != before and (text := _progress(line)):
            print(f"\r  {text} ", end="", flush=True)
        if code is not None:
            print(flush=True)
            return code


def _last_line(file: Path) -> str:
    try:
        return file.read_text().splitlines()[-1]
    except (OSError, IndexError):
        return ""


def _progress(line: str) -> str:
    try:
        found = json.loads(line)
        return f"step {found['step']:4d}  loss {found['loss']:.3f}  {found['samples_per_second']:4.1f} samples/s"
    except (ValueError, KeyError):  # half a line, or the summary at the end
        return ""


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
