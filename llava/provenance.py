"""Where numbers come from: the tree's commit, versions of packages, and the record that a training run leaves."""

import hashlib
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = "run.json"
"""Beside `train_log.jsonl`: what a run was made from. `llava.train.run_record` writes it and describes its content."""
RUN_FORMAT = 1
TRAINING = ("data", "model", "train")  # folders of the package


def git_commit() -> str | None:
    """The commit of this tree, with `+changes` where tracked files differ from it; None outside a git checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest() -> str:
    """SHA-256 of the source files that training may run, which also tells uncommitted changes apart."""
    digest = hashlib.sha256()
    files = [*(ROOT / "llava").glob("*.py"), *(f for name in TRAINING for f in (ROOT / "llava" / name).rglob("*.py"))]
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a `run.json`.

    Raises:
        ValueError: there is no such file, or not of this format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == RUN_FORMAT and content["starts"]:
            return content["starts"]
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; the run was trained without recording it, train it again") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a record of a run ({error!r}); train the run again") from error
    raise ValueError(f"{path}: format {content['format']!r}, expected {RUN_FORMAT}; train the run again")
