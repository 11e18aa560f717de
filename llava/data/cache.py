"""Files derived from the data and kept beside it: made once, by one process, never left half done, and never outdated.

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

    They lie beside the data, so that every run and user shares them; where that cannot be written, in the user's cache
    folder. `chosen` (`--data_cache_dir`) replaces both.
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
    """The file `name` in the first of `folders` that has it; otherwise it is made in the first that can be written.

    Args:
        name: the file's name, which carries content, version and kind.
        folders: from `cache_folders`.
        make: writes the file to the path it is given; what it raises goes to the caller, and nothing is left behind.
        is_whole: whether a file that is found is undamaged; a damaged one is made again.
        since: a file written before this time (seconds since the epoch) is made again too.

    Raises:
        OSError: no folder can be written.
    """
    if found := cached_file(name, folders, is_whole, since):
        return found
    folder = _writable(folders)
    target = folder / name
    with _Waiting(folder / f"{name}.lock"):
        if not _usable(target, is_whole, since):
            # The host's name and not a random one, so that the next process overwrites what a killed one leaves.
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
    """A file lock that logs when it has to wait for another process."""

    def __init__(self, path: Path):
        self.path, self.lock = path, FileLock(path)

    def __enter__(self) -> None:
        try:
            self.lock.acquire(timeout=1)
        except Timeout:
            logger.info("waiting for another process, which is making %s", self.path.with_suffix(""))
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def file_stamp(path: Path) -> list[int]:
    """What changes whenever a file's content does: inode, size, and the times of last write and last change."""
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def is_settled(stamp: list[int], now: float) -> bool:
    """Whether a file that changes after `now` (seconds since the epoch) is sure to get another stamp than this."""
    return now - stamp[-1] / 1e9 > _CLOCK_STEP


def stamped_name(source: Path) -> str:
    """A name, from path and stamp, for a file made from a `source` that is too large to be read at every start.

    Returns only when a later change would have another time stamp.
    """
    while (age := time.time() - file_stamp(source)[-1] / 1e9) <= _CLOCK_STEP:
        time.sleep(min(_CLOCK_STEP, max(_CLOCK_STEP - age, 0.01)))
    stamp = json.dumps([str(source.absolute()), *file_stamp(source)])
    return f"{source.name}.{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"


def known_hash(source: Path, folders: list[Path]) -> str | None:
    """The hash that `content_hash` has stored for the file; None if the file's stamp has changed since."""
    stamp = file_stamp(source)
    for folder in folders:
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads((folder / _stamp_file(source)).read_text())
            if saved["stamp"] == stamp:
                return str(saved["sha256"])
    return None


def content_hash(source: Path, folders: list[Path], digest: Callable[[Path], str] | None = None) -> str:
    """SHA-256 of a file, which is read again only if its stamp is not the one it had when it was last read.

    The stamp holds the time of the last change, which programs cannot set: a copy that keeps size and modification time
    still has another stamp. As in git, a stamp is not trusted if the file was written in the same step of the clock in
    which it was read.

    Args:
        source: the file.
        folders: from `cache_folders`; hash and stamp are kept there.
        digest: computes the hash; by default that of all bytes.
    """
    if known := known_hash(source, folders):
        return known
    stamp, started = file_stamp(source), time.time()
    found = (digest or bytes_digest)(source)
    if is_settled(stamp, started) and file_stamp(source) == stamp:
        with suppress(OSError):  # the stored hash only saves time
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
