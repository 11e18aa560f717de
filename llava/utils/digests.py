"""Digests of files by all their bytes, and what a model on disk or on the hub is."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

_CLOCK_STEP = 2.0  # seconds; the coarsest time stamps that file systems keep
_THREADS = 4  # hashing releases the interpreter
_SAMPLED = 1 << 16  # bytes of a block of `sampled_digest`
# The files of a model's folder from which training takes weights, code and settings; its tokenizer is not among them.
_MODEL_FILES = ("*.safetensors", "*.bin", "*.py", "config.json", "preprocessor_config.json", "processor_config.json")
_SNAPSHOT = re.compile(r"(models|datasets)--[^/]+/snapshots/[0-9a-f]{40}")


def bytes_digest(source: Path) -> str:
    """SHA-256 of all bytes of a file."""
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_digest(source: Path, blocks: int) -> str:
    """SHA-256 of a file's size and of at most `blocks` blocks of 64 KiB, spread evenly from its start; or all bytes."""
    size = source.stat().st_size
    whole = -(-size // _SAMPLED)
    count = min(whole, blocks)
    digest = hashlib.sha256(f"{size};".encode())
    with source.open("rb") as file:
        for number in range(count):
            file.seek(_SAMPLED * (whole * number // count))
            digest.update(file.read(_SAMPLED))
    return digest.hexdigest()


def fingerprint(path: Path, deep: bool = False, names: Sequence[str] = ("*",)) -> str:
    """16 hexadecimal digits of a SHA-256 over names and all bytes of a file or of a folder's files.

    Hidden files do not count.

    Args:
        path: the file or folder.
        deep: also the files of its subfolders.
        names: patterns of the names of the files in a folder that count.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in _files(path, deep) if any(fnmatch(file.name, name) for name in names))
    places = [str(file.relative_to(path)) if path.is_dir() else "" for file in files]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, content in zip(places, pool.map(bytes_digest, files), strict=True):
            digest.update(f"{name}:{content};".encode())
    return digest.hexdigest()[:16]


def _files(folder: Path, deep: bool) -> Iterator[Path]:
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [name for name in folders if not name.startswith(".")] if deep and real not in seen else []
        if real not in seen:
            yield from (file for name in names if not name.startswith(".") and (file := Path(place, name)).is_file())
        seen.add(real)  # a link may lead back to a folder above


def file_stamp(path: Path) -> list[int]:
    """What changes whenever a file's content does: inode, size, and the times of last write and last change.

    Programs cannot set the last of them, so that even a copy with the same size and time has another stamp.
    """
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def settled_stamp(source: Path) -> list[int]:
    """The file's stamp, once any later change would give another stamp."""
    while time.time() - (stamp := file_stamp(source))[-1] / 1e9 <= _CLOCK_STEP:
        time.sleep(_CLOCK_STEP / 20)
    return stamp


# --- models -----------------------------------------------------------------------------------------------------------


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


def model_digest(path: str, cache_dir: str | None = None) -> str | None:
    """What a training loads from a model's folder or hub id: a digest of weights, code and settings, or the commit.

    None if nothing is there; loading it raises an error that names it.
    """
    from huggingface_hub import hf_hub_download

    place = Path(path)
    if place.exists():
        commit = _cached_commit(place.resolve())
        return f"commit {commit}" if commit else f"SHA-256 {fingerprint(place, names=_MODEL_FILES)}"
    try:
        return f"commit {Path(hf_hub_download(path, 'config.json', cache_dir=cache_dir)).parent.name}"
    except (OSError, ValueError):
        return None


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
