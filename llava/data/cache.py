"""Files derived from the data, kept beside it: made once, by one process, never half, and never taken for newer data.

A cached file's name carries the hash of the content that it was made from, so a changed source has another name. Ranks
meet at a file lock: one makes the file, the others wait and open it; no process group is needed.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_BLOCK = 1 << 20
_CLOCK_STEP = 2.0  # seconds; the coarsest time stamps that file systems keep


def cache_folders(source: Path, chosen: str | None = None) -> list[Path]:
    """Where files made from `source` are looked for and written, best first.

    Beside the data, so that every run and user shares them; where that cannot be written, in the user's cache folder.
    `chosen` (`--data_cache_dir`) replaces both.
    """
    if chosen:
        return [Path(chosen)]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [source.absolute().parent / ".llava_cache", home / "llava" / "data"]


def made_once(
    name: str,
    folders: list[Path],
    make: Callable[[Path], None],
    is_whole: Callable[[Path], bool],
    since: float = 0.0,
) -> Path:
    """The file `name` in the first of `folders` that has it; else made in the first that can be written.

    Args:
        name: says content, version and kind of the file.
        folders: from `cache_folders`.
        make: writes the file to the path it is given; what it raises goes to the caller, and nothing is left behind.
        is_whole: whether a file found is undamaged; one that is not is made again.
        since: a file that was written before (seconds since the epoch) is made again too.

    Raises:
        OSError: no folder can be written.
    """
    if found := cached_file(name, folders, is_whole, since):
        return found
    folder = _writable(folders)
    target = folder / name
    with _Waiting(folder / f"{name}.lock"):
        if not _usable(target, is_whole, since):
            # The host's name, not a random one: what a killed process leaves is overwritten by the next.
            temporary = folder / f"{name}.{platform.node()}.tmp"
            try:
                make(temporary)
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
    return target


def cached_file(name: str, folders: list[Path], is_whole: Callable[[Path], bool], since: float = 0.0) -> Path | None:
    """The undamaged file `name`, written at or after `since`, in the first of `folders` that has it."""
    return next((folder / name for folder in folders if _usable(folder / name, is_whole, since)), None)


def _usable(path: Path, is_whole: Callable[[Path], bool], since: float) -> bool:
    if not path.is_file() or path.stat().st_mtime < since:
        return False
    if is_whole(path):
        return True
    logger.warning("%s is damaged and will be made again", path)
    return False


def _writable(folders: list[Path]) -> Path:
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
        logger.info("%s cannot be written", folder)
    raise OSError(f"none of {', '.join(map(str, folders))} can be written; pass a folder that can as --data_cache_dir")


class _Waiting:
    """A file lock that says so when another process holds it."""

    def __init__(self, path: Path):
        self.path, self.lock = path, FileLock(path)

    def __enter__(self) -> None:
        try:
            self.lock.acquire(timeout=1)
        except Timeout:
            logger.info("waiting for another process that makes %s", self.path.with_suffix(""))
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def file_stamp(path: Path) -> list[int]:
    """What changes whenever a file's content does: inode, size, and the times of last write and last change."""
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def is_settled(stamp: list[int], now: float) -> bool:
    """Whether whatever changes after `now` (seconds since the epoch) has another stamp than this."""
    return now - stamp[-1] / 1e9 > _CLOCK_STEP


def stamped_name(source: Path) -> str:
    """Of a file made from `source` that is too large to be read at every start: of its place and its stamp.

    Returns only when a later change would have another time stamp.
    """
    while (age := time.time() - file_stamp(source)[-1] / 1e9) <= _CLOCK_STEP:
        time.sleep(min(_CLOCK_STEP, max(_CLOCK_STEP - age, 0.01)))
    stamp = json.dumps([str(source.absolute()), *file_stamp(source)])
    return f"{source.name}.{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"


def known_hash(source: Path, folders: list[Path]) -> str | None:
    """What `content_hash` found when the file had the stamp that it has now; None if it has another."""
    stamp = file_stamp(source)
    for folder in folders:
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads((folder / _stamp_file(source)).read_text())
            if saved["stamp"] == stamp:
                return str(saved["sha256"])
    return None


def content_hash(source: Path, folders: list[Path], digest: Callable[[Path], str] | None = None) -> str:
    """SHA-256 of a file, read again only if its stamp is not the one it had when it was last read.

    The stamp has the time of last change, which programs cannot set: a copy that keeps size and modification time has
    another. It is trusted, as git does it, only if the file was not written in the clock's step in which it was read.

    Args:
        source: the file.
        folders: from `cache_folders`; hash and stamp are kept there.
        digest: gives the hash; default that of all bytes.
    """
    if known := known_hash(source, folders):
        return known
    stamp, started = file_stamp(source), time.time()
    found = (digest or bytes_digest)(source)
    if is_settled(stamp, started) and file_stamp(source) == stamp:
        with suppress(OSError):  # it only saves time
            folder, name = _writable(folders), _stamp_file(source)
            temporary = folder / f"{name}.{platform.node()}.{os.getpid()}.tmp"
            temporary.write_text(json.dumps({"stamp": stamp, "sha256": found}))
            os.replace(temporary, folder / name)
    return found


def _stamp_file(source: Path) -> str:
    return f"{source.name}.{hashlib.sha256(str(source.absolute()).encode()).hexdigest()[:8]}.stamp"


def bytes_digest(source: Path) -> str:
    """SHA-256 of all bytes of a file."""
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
