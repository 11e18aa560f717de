"""Where numbers come from: the tree's commit, versions of packages, and the record that a training run leaves."""

import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llava.digests import fingerprint

CODE = Path(__file__).resolve().parents[1]
"""The folder that holds the package: the repository, or where pip has installed it."""
IS_CHECKOUT = (CODE / "scripts/lib.sh").is_file()
NEEDS_CHECKOUT = "this calls the repository's scripts, which an installed package does not have; run it in a clone"
ROOT = CODE if IS_CHECKOUT else Path(__file__).resolve().parent / "recipes"
"""Holds `scripts` and `deepspeed_configs`: the repository, or the copies of them in an installed package."""
WORK = ROOT if IS_CHECKOUT else Path()
"""Where prepared data and outputs go by default: the repository, or else the working directory."""
RUN_FILE = "run.json"
"""Beside `train_log.jsonl`: what a run was made from. `llava.train.run_record` writes it."""
RUN_FORMAT = 1
DONE = "done"  # in the folder of a stage that a comparison or the quickstart has trained to its end
_SNAPSHOT = re.compile(r"(models|datasets)--[^/]+/snapshots/[0-9a-f]{40}")
_SHARED = ("llava/*.py", "llava/data/**/*.py", "llava/model/**/*.py")
TRAINING = (*_SHARED, "llava/train/**/*.py")
EVALUATION = (*_SHARED, "llava/eval/**/*.py")
ANALYSIS = (*_SHARED, "llava/analysis/**/*.py")
PLAYGROUND = (*ANALYSIS, *(f"playground/{name}.py" for name in ("answers", "controls", "records")))
"""The source files that may decide trained weights, scores of benchmarks, measurements, and the playground's scores."""
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "deepspeed", "peft", "numpy", "pillow", "liger-kernel")
"""The packages that training computes with."""


def git_commit(ignored: Sequence[str] = ()) -> str | None:
    """The commit of this tree, with `+changes` where tracked files differ from it; None outside a git checkout.

    Args:
        ignored: folders in which differences do not count.
    """
    if not IS_CHECKOUT:  # the repository around an installed package is another one
        return None
    places = [".", *(f":!{folder}" for folder in ignored)]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno", "--", *places) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def shipped(path: str) -> str:
    """`path`, or, if nothing is there, the file of that name that ships with this tree."""
    inside = ROOT / path
    return str(inside) if path and not Path(path).exists() and inside.is_file() else path


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest(sources: Sequence[str] = TRAINING) -> str:
    """SHA-256 of source files; unlike the commit it also tells uncommitted changes apart."""
    digest = hashlib.sha256()
    for path in sorted(file for pattern in sources for file in CODE.glob(pattern)):
        digest.update(f"{path.relative_to(CODE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def software(packages: Sequence[str] = PACKAGES) -> dict[str, dict[str, str | None]]:
    """The code and the versions that run here, as `run.json` holds them."""
    return {
        "code": {"digest": code_digest(), "commit": git_commit()},
        "versions": {name: version_of(name) for name in packages} | {"python": platform.python_version()},
    }


def differences(first: Mapping[str, Any], second: Mapping[str, Any], absent: Any = None) -> dict[str, tuple[Any, Any]]:
    """The names whose values differ, sorted, each with both values; `absent` stands for a value that is not there."""
    pairs = {name: (first.get(name, absent), second.get(name, absent)) for name in sorted({**first, **second})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a `run.json`: one entry for each time that the run was started or resumed.

    Raises:
        ValueError: the file does not exist or has another format.
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


def checkpoint_name(path: str) -> str:
    """What a checkpoint is called in tables: the last two parts of a folder's path, or the hub id as it is."""
    parts = [part for part in Path(path).parts if part != "/"]
    return "/".join(parts[-2:]) if Path(path).is_dir() else path


def revision(path: str) -> str | None:
    """The commit of a hub model in the local cache, or the fingerprint of a file or folder, else None.

    That of a LoRA's folder also holds its base's.
    """
    from huggingface_hub import try_to_load_from_cache

    place = Path(path)
    if place.exists():
        own = _cached_commit(place.resolve()) or fingerprint(place)
        base = _lora_base(place)
        return f"{own}-{revision(base)}" if base else own
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not the form of a hub id
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def _cached_commit(folder: Path) -> str | None:
    """The commit that a snapshot's folder in the hub's cache is named after; None for any other folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE).resolve()
    if not folder.is_relative_to(cache) or not _SNAPSHOT.fullmatch(folder.relative_to(cache).as_posix()):
        return None
    return folder.name


def _lora_base(folder: Path) -> str | None:
    try:
        return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
