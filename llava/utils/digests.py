"""Digests of files by all their bytes, and what a model on disk or on the hub is."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_CLOCK_STEP = 2.0  # seconds; the coarsest time stamps that file systems keep
_THREADS = 4  # hashing releases the interpreter
_SAMPLED = 1 << 16  # bytes of a block of `sampled_digest`
# The files of a model's folder from which training takes weights, code and settings; its tokenizer is not among them.
_MODEL_FILES = ("*.safetensors", "*.bin", "*.py", "config.json", "preprocessor_config.json", "processor_config.json")
_TOKENIZER_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt", "*tokens*.json", "*.jinja")
_LOADED_FILES = (*_MODEL_FILES, *_TOKENIZER_FILES, "*config.json", "chat_template.json", "*.index.json")
_LEFT_OUT = re.compile(r"\..*|__pycache__|checkpoint-\d+")  # folders
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


def fingerprint(path: Path, names: Sequence[str] = ("*",)) -> str:
    """16 hexadecimal digits of a SHA-256 over names and all bytes of a file, or of the files in and below a folder.

    Of a folder those count whose names fit one of the patterns `names`; hidden files and a run's `checkpoint-N` do not.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in _files(path) if any(fnmatch(file.name, name) for name in names))
    places = [str(file.relative_to(path)) if path.is_dir() else "" for file in files]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, content in zip(places, pool.map(bytes_digest, files), strict=True):
            digest.update(f"{name}:{content};".encode())
    return digest.hexdigest()[:16]


def _files(folder: Path) -> Iterator[Path]:
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [name for name in folders if not _LEFT_OUT.fullmatch(name)] if real not in seen else []
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
    """The commit of a hub model in the local cache, or the fingerprint of a file, folder or edited snapshot, else None.

    Of a folder those files count that a model is loaded from; results may be written there.
    What a folder loads from elsewhere follows: a LoRA's base, and a vision tower or its image processor.
    """
    if (place := _place(path, local_files_only=True)) is None:
        return None
    own = _commit(place) or fingerprint(place, _LOADED_FILES)
    # The config of a part that is not here yet is fetched, so that loading the part changes nothing.
    return "-".join([own, *(str(_place(part) and revision(part)) for part in _outer_parts(place))])


def model_digest(path: str, cache_dir: str | None = None) -> str | None:
    """What a training loads from a model's folder or hub id: a digest of weights, code and settings, or the commit.

    None if nothing is there; loading it raises an error that names it.
    """
    if (place := _place(path, cache_dir=cache_dir)) is None:
        return None
    commit = _commit(place, cache_dir)
    return f"commit {commit}" if commit else f"SHA-256 {fingerprint(place, names=_MODEL_FILES)}"


def warn_of_other_base(folder: str, base: str, digest: object = None, part: str = "language_model_files") -> None:
    """Logs a warning if `base` is not, by its files, what the LoRA or adapter in a folder was trained on.

    Args:
        folder: or a file in it.
        digest: of `base`, where it is known.
        part: what `base` is: language_model_files or vision_tower_files.
    """
    folder = folder if Path(folder).is_dir() else str(Path(folder).parent)
    try:
        settings = json.loads(Path(folder, "resume.json").read_text(encoding="utf-8"))["settings"]
        recorded = settings[part]
    except (OSError, ValueError, KeyError, TypeError):
        logger.warning(
            "%s: its resume.json names no base, so whether %s is the right one was not checked", folder, base
        )
        return
    if (digest := digest or model_digest(base)) != recorded:
        logger.warning(
            "%s was trained on a base with other files (%s) than %s (%s): unless these are the same weights, saved "
            "again, its numbers are wrong; pass the base that it was trained on", folder, recorded, base, digest,
        )  # fmt: skip


def _place(path: str, **options: Any) -> Path | None:
    """A file or folder, or the snapshot of a hub id, whose config is fetched if need be; None if there is none."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(path) if Path(path).exists() else Path(hf_hub_download(path, "config.json", **options)).parent
    except (OSError, ValueError):  # not the form of a hub id, or not there
        return None


def _commit(folder: Path, cache_dir: str | None = None) -> str | None:
    """The commit of a snapshot in the hub's cache whose files are as fetched; None for any other folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder, cache = folder.resolve(), Path(cache_dir or HF_HUB_CACHE).resolve()
    if not folder.is_relative_to(cache) or not _SNAPSHOT.fullmatch(folder.relative_to(cache).as_posix()):
        return None
    with ThreadPoolExecutor(_THREADS) as pool:
        return folder.name if all(pool.map(_is_as_fetched, _files(folder))) else None


def _is_as_fetched(file: Path) -> bool:
    """Whether a file of a snapshot is a blob whose name is its SHA-256 or, if it is small, git's SHA-1."""
    blob = file.resolve()
    if len(blob.name) == 64:
        return bytes_digest(blob) == blob.name
    return hashlib.sha1(b"blob %d\0%b" % (blob.stat().st_size, blob.read_bytes())).hexdigest() == blob.name


def _outer_parts(folder: Path) -> list[str]:
    """The models outside a checkpoint's folder from which it is completed."""
    config, adapter = (_read_fields(folder / name) for name in ("config.json", "adapter_config.json"))
    parts = [adapter.get("base_model_name_or_path"), config.get("mm_vision_tower")]
    is_whole = not adapter and not (folder / "mm_projector.bin").exists() and config.get("mm_vision_config")
    if is_whole and any(folder.glob("*processor_config.json")):
        parts.pop()
    return [part for part in parts if part]


def _read_fields(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return fields if isinstance(fields, dict) else {}
    except (OSError, ValueError):
        return {}
