"""What `--model [NAME=]PATH_OR_ID` means, and which weights stand behind it."""

import argparse
import hashlib
from pathlib import Path
from typing import NamedTuple

WEIGHT_FILES = {".json", ".safetensors", ".bin", ".parquet"}
_WHOLE, _STRIDE, _BLOCK = 64 << 20, 1 << 20, 4 << 10


class NamedModel(NamedTuple):
    """A model on the command line: its name in tables and figures, and its folder or hub id."""

    name: str
    path: str


def named_model(text: str) -> NamedModel:
    """Parses `NAME=PATH_OR_ID`; without a name, a checkpoint is called by the last two parts of its path."""
    name, found, path = text.partition("=")
    if not found:
        path = text
        parts = [part for part in Path(text).parts if part != "/"]
        name = "/".join(parts[-2:]) if Path(text).is_dir() else text
    if not (name and path):
        raise argparse.ArgumentTypeError(f"expected [NAME=]PATH_OR_ID, found {text!r}")
    return NamedModel(name, path)


def required_models(models: list[NamedModel], at_least: int = 1) -> list[NamedModel]:
    """`models`, at least that many and no name twice.

    Raises:
        ValueError: fewer, or two models of one name.
    """
    if len(models) < at_least:
        raise ValueError(f"--model: give at least {at_least} checkpoint folder or hub id, found {len(models)}")
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--model: {', '.join(twice)} stands for two models; name them, as in --model aligned=PATH")
    return models


def revision(path: str) -> str | None:
    """The commit of a hub model in the local cache, or the fingerprint of a file or folder, else None."""
    from huggingface_hub import try_to_load_from_cache

    if Path(path).exists():
        resolved = Path(path).resolve()
        return resolved.name if resolved.parent.name == "snapshots" else fingerprint(Path(path))
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not the form of a hub id
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def fingerprint(path: Path) -> str:
    """16 hexadecimal digits of a SHA-256 over names, sizes and contents of a file or of a folder's files.

    Weights, records and configs are read, other files count by name and size. Of a file over 64 MiB 4 KiB of every MiB
    are read, so that a 7B model costs a second and still every large tensor counts.
    """
    digest = hashlib.sha256()
    for file in sorted(f for f in path.iterdir() if f.is_file()) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size};".encode())
        if path.is_dir() and file.suffix not in WEIGHT_FILES:
            continue
        with open(file, "rb") as stream:
            if size <= _WHOLE:
                digest.update(stream.read())
                continue
            for offset in range(0, size, _STRIDE):
                stream.seek(offset)
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()[:16]
