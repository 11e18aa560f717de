"""A part of benchmarks/gpu_check.py while it runs: its files and rows, the commands that it starts, how it ends."""

import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write_result
from llava.utils.files import write_json


class NotRun(Exception):
    """A part cannot run on this machine; the message says what is missing."""


class Failed(Exception):
    """A part found something wrong; the message says what."""


@dataclass
class Setting:
    """A part's name, its files and folders, and what it finds."""

    name: str
    output_dir: Path
    cpu: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)  # files in `output_dir`

    @property
    def result(self) -> Path:
        return self.output_dir / f"gpu_{self.name}.json"

    @property
    def log(self) -> Path:
        return self.output_dir / "logs" / f"{self.name}.log"

    @property
    def work(self) -> Path:
        """Folder of models, data and runs, which is removed afterwards."""
        return self.output_dir / "work" / self.name

    @property
    def command(self) -> str:
        return f"bash benchmarks/gpu_check.sh{' --cpu' * self.cpu} --parts {self.name}"

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, and writes it where `measured_rows` finds it if the part is ended."""
        self.rows.append(row)
        write_json(self.work / "rows.json", {"rows": self.rows})

    def measured_rows(self) -> list[dict[str, Any]]:
        """The rows that the part's process, or benchmarks/train_step.py for it, has written so far."""
        files = [file for name in ("rows.json", "train_step.json") if (file := self.work / name).is_file()]
        return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]

    def write(self, status: str, reason: str, seconds: float) -> None:
        """Writes the result, from which the table is made."""
        if not self.cpu:
            import torch  # noqa: F401  (a result names the GPU only where it is loaded)
        meta = {"command": self.command, "on": "cpu" if self.cpu else "gpu", "figures": self.figures}
        meta |= {"status": status, "reason": " ".join(reason.split()), "seconds": round(seconds, 1)}
        write_result(self.result.stem, self.rows, folder=self.output_dir, **meta)


def need(*packages: str) -> None:
    """Raises NotRun if one of the packages cannot be found."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise NotRun(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")


def run_logged(setting: Setting, name: str, command: list[Any], variables: dict[str, Any] | None = None) -> str:
    """Runs a command, logs its output to its own file, and returns that text.

    Raises:
        Failed: the exit status is not 0; the message has the last error that was printed.
    """
    path = setting.log.with_name(f"{setting.name}-{name}.log")
    words = [str(word) for word in command]
    print(f"{' '.join(words)} (log: {path})", flush=True)
    environment = os.environ | {key: str(value) for key, value in (variables or {}).items()}
    with path.open("w") as log:
        code = subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    text = path.read_text(errors="replace")
    if code:
        raise Failed(f"{name} ended with {code}: {last_error(text)} (log: {path})")
    return text


def last_error(text: str) -> str:
    """The last line that says what went wrong, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\S+ )*error:|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]
