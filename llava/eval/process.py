"""Runs a long command with its output in a file and its progress bar on the terminal."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from llava.utils.progress import EVERY, FIRST, in_terminal

BAR = re.compile(r"([\w ]+): +(\d+)%\|[^|]*\| *(\S+) \[([^\]]*)\]")
EVERY_SECONDS = 1.0  # in a terminal


def run_logged(command: list[str], log: Path, cwd: Path, env: dict[str, str], title: str) -> int:
    """Runs `command` to its end and returns its exit status; the command and all its output go to `log`.

    The newest progress bar in the log is shown on stderr. When this process is stopped, the command and whatever it
    started are stopped too.
    """
    with open(log, "w", encoding="utf-8") as stream:
        stream.write(f"$ {' '.join(command)}\n")
        stream.flush()
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, cwd=cwd, env=env, start_new_session=True
        )
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        _watch(process, log, title)
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _watch(process: subprocess.Popen, log: Path, title: str) -> None:
    terminal = in_terminal()
    shown, due = "", time.monotonic() + (EVERY_SECONDS if terminal else FIRST)
    while process.poll() is None:
        time.sleep(0.2)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + (EVERY_SECONDS if terminal else EVERY)
        line = progress(log)
        if line and line != shown:
            print(
                f"\r  {title}: {line} " if terminal else f"  {title}: {line}",
                end="" if terminal else "\n",
                file=sys.stderr,
            )
            sys.stderr.flush()
            shown = line
    if terminal and shown:
        print(file=sys.stderr)


def progress(log: Path, tail: int = 20_000) -> str:
    """The newest progress bar in the last bytes of a log, as `Model Responding 12% 108/900 [00:10<01:13]`, or ''."""
    with open(log, "rb") as stream:
        stream.seek(max(0, log.stat().st_size - tail))
        found = BAR.findall(stream.read().decode("utf-8", errors="replace"))
    return "{} {}% {} [{}]".format(*(part.strip() for part in found[-1])) if found else ""
