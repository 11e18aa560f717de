"""Digests of files by all their bytes; a file is read again only when its stamp has changed since.

A stamp holds inode, size and both times. As in git, it is trusted only where a later change would give another stamp.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from llava.utils.code_folders import user_cache_home
from llava.utils.files import write_json

_LARGE = 64 << 20  # bytes from which a digest is worth keeping
_CLOCK_STEP = 2.0  # seconds; the coarsest time stamps that file systems keep
_THREADS = 4  # hashing releases the interpreter
_SAMPLED = 1 << 16  # bytes of a block of `sampled_digest`
# The files of a model's folder from which training takes weights, code and settings; its tokenizer is not among them.
_MODEL_FILES = ("*.safetensors", "*.bin", "*.py", "config.json", "preprocessor_config.json", "processor_config.json")
_SNAPSHOT = re.compile(r"(models|datasets)--[^/]+/snapshots/[0-9a-f]{40}")


def user_cache(kind: str) -> Path:
    """The folder of this user's derived files of one kind."""
    return user_cache_home() / "llava" / kind


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

    Hidden files do not count. The digests of large files are kept.

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
        for name, content in zip(places, pool.map(remembered_digest, files), strict=True):
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


def remembered_digest(file: Path) -> str:
    """SHA-256 of all bytes of a file; that of a large file is kept."""
    return content_hash(file) if file.stat().st_size >= _LARGE else bytes_digest(file)


# --- kept digests -----------------------------------------------------------------------------------------------------


def file_stamp(path: Path) -> list[int]:
    """What changes whenever a file's content does: inode, size, and the times of last write and last change.

    Programs cannot set the last of them, so that even a copy with the same size and time has another stamp.
    """
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def is_settled(stamp: list[int], now: float) -> bool:
    """Whether a file that changes after `now` (seconds since the epoch) is sure to get another stamp than this."""
    return now - stamp[-1] / 1e9 > _CLOCK_STEP


def settled_stamp(source: Path) -> list[int]:
    """The file's stamp, once any later change would give another stamp."""
    while not is_settled(file_stamp(source), time.time()):
        time.sleep(_CLOCK_STEP / 20)
    return file_stamp(source)


def known_hash(source: Path) -> str | None:
    """The hash that `content_hash` has kept for the file; None if the file's stamp has changed since."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(_kept(source).read_text())
        if kept["stamp"] == file_stamp(source):
            return str(kept["sha256"])
    return None


def content_hash(source: Path, digest: Callable[[Path], str] = bytes_digest) -> str:
    """SHA-256 of a file, by `digest`, which runs only if the file's stamp is not the one it had at the last time.

    It is kept in the user's cache folder.
    """
    if known := known_hash(source):
        return known
    stamp, started = file_stamp(source), time.time()
    computed = digest(source)
    if is_settled(stamp, started) and file_stamp(source) == stamp:
        with suppress(OSError):  # the kept hash only saves time
            _kept(source).parent.mkdir(parents=True, exist_ok=True)
            write_json(_kept(source), {"stamp": stamp, "sha256": computed}, contended=True)
    return computed


def _kept(source: Path) -> Path:
    place = hashlib.sha256(str(source.absolute()).encode()).hexdigest()[:8]
    return user_cache("digests") / f"{source.name}.{place}.stamp"


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
