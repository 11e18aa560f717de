"""Scripts in an environment of which the test says every variable, what they call and how they are killed."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
from paths import ROOT


def only(**env: object) -> dict[str, str]:
    """An environment with nothing but these variables, so that the caller's cannot change the outcome."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    measured = {k: v for k, v in os.environ.items() if k.startswith("COVERAGE_")}
    if measured:  # by COVERAGE=1 bash scripts/test.sh; the machine's own Python has no such package
        environment |= measured | {"PYTHON": sys.executable}
    return environment | {k: str(v) for k, v in env.items()}


def bash(*command: str, cwd: Path = ROOT, path: str = os.environ["PATH"], **env: object) -> subprocess.CompletedProcess:
    """Runs a script with only the given variables."""
    variables = only(**env) | {"PATH": path}
    return subprocess.run(["bash", *command], cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)


def new_lines(path: Path) -> Callable[[], list[str]]:
    """A function that returns what a file has gained since the last call; the file need not exist yet."""
    seen = []

    def lines() -> list[str]:
        new = path.read_text().splitlines()[len(seen) :] if path.exists() else []
        seen.extend(new)
        return new

    return lines


def kill(family: list[psutil.Process]) -> None:
    """Kills those of the processes that still run."""
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
