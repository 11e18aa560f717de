"""Runs a long command with its output in a file and its progress bar on the terminal."""

import re
import sys
from pathlib import Path

from llava.utils.processes import start, tail, wait
from llava.utils.progress import EVERY, in_terminal

BAR = re.compile(r"([\w ]+): +(\d+)%\|[^|]*\| *(\S+) \[([^\]]*)\]")
EVERY_SECONDS = 1.0  # in a terminal


def run_logged(command: list[str], log: Path, cwd: Path, env: dict[str, str], title: str) -> int:
    """Runs `command` to its end and returns its exit status; the command and all its output go to `log`.

    The newest progress bar in the log is shown on stderr. When this process is stopped, the command and whatever it
    started are stopped too.
    """
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        process = start(command, env, output, cwd=cwd)
    terminal, shown = in_terminal(), ""

    def show() -> None:
        nonlocal shown
        line = progress(log)
        if line and line != shown:
            shown = line
            text = f"\r  {title}: {line} " if terminal else f"  {title}: {line}\n"
            print(text, end="", file=sys.stderr, flush=True)

    code = wait(process, show, EVERY_SECONDS if terminal else EVERY, group=True)  # accelerate passes no signals on
    if terminal and shown:
        print(file=sys.stderr)
    return code


def progress(log: Path, size: int = 20_000) -> str:
    """The newest progress bar in the last bytes of a log, as `Model Responding 12% 108/900 [00:10<01:13]`, or ''."""
    bars = BAR.findall(tail(log, size))
    return "{} {}% {} [{}]".format(*(part.strip() for part in bars[-1])) if bars else ""
