"""Files derived from the data and kept beside it: made once, by one process, never left half done, and never outdated.

A cached file's name carries the hash of the content that it was made from, so a changed source has another name. Ranks
meet at a file lock: one makes the file, the others wait and open it; no process group is needed.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from llava.utils.digests import settled_stamp, user_cache
from llava.utils.files import replacing

logger = logging.getLogger(__name__)


def cache_folders(source: Path, chosen: str | None = None) -> list[Path]:
    """Where files made from `source` are looked for and written, best first.

    They are beside the data, so that every run and user shares them; where that cannot be written, in the user's cache
    folder. `chosen` (`--data_cache_dir`) replaces both.
    """
    if chosen:
        return [Path(chosen)]
    return [source.absolute().parent / ".llava_cache", user_cache("data")]


def writable_folder(folders: list[Path]) -> Path:
    """The first of `folders` that can be written, made if it is missing.

    Raises:
        OSError: none can.
    """
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
        logger.info("%s cannot be written", folder)
    raise OSError(f"none of {', '.join(map(str, folders))} can be written; pass a folder that can as --data_cache_dir")


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
        is_whole: whether a cached file is undamaged; a damaged file is made again.
        since: a file written before this time (seconds since the epoch) is made again too.

    Raises:
        OSError: no folder can be written.
    """
    if cached := cached_file(name, folders, is_whole, since):
        return cached
    folder = writable_folder(folders)
    target = folder / name
    with _Waiting(folder / f"{name}.lock"):
        if not _usable(target, is_whole, since):
            with replacing(target) as partial:
                make(partial)
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


def stamped_name(source: Path) -> str:
    """A name, from path and stamp, for a file made from a `source` that is too large to be read at every start."""
    stamp = json.dumps([str(source.absolute()), *settled_stamp(source)])
    return f"{source.name}.{hashlib.sha256(stamp.encode()).hexdigest()[:16]}"
