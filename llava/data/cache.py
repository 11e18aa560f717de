"""Files derived from the data and kept beside it: made once, by one process, never left half done, never outdated.

A cached file's name carries the hash of the content that it was made from, so a changed source has another name.
`NAME.sha256` beside it holds its own hash, so that a file that was altered or cut off is noticed and made again. Ranks
meet at a file lock: one makes the file, the others wait and open it; no process group is needed.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llava.utils.digests import bytes_digest
from llava.utils.files import replacing, write_text
from llava.utils.locks import locked

logger = logging.getLogger(__name__)


def cache_folders(source: Path, chosen: str | None = None) -> list[Path]:
    """Where files made from `source` are looked for and written, best first.

    They are beside the data, so that every run and user shares them; where that cannot be written, in the user's cache
    folder. `chosen` (`--data_cache_dir`) replaces both.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(chosen)] if chosen else [source.absolute().parent / ".llava_cache", home / "llava/data"]


def made_once(
    name: str, folders: list[Path], make: Callable[[Path], None], is_current: Callable[[Path], bool] = lambda _: True
) -> Path:
    """The file `name` in the first of `folders` that has it; otherwise it is made in the first that can be written.

    `make` writes the file to the path it is given; what it raises goes to the caller, and nothing is left behind. A
    cached file that is not `is_current` is made again too.

    Raises:
        OSError: no folder can be written.
    """
    if cached := cached_file(name, folders, is_current):
        return cached
    target = _writable_folder(folders) / name
    with locked(target.with_name(f"{name}.lock"), f"{target}: another process is making it", patience=math.inf):
        if not cached_file(name, [target.parent], is_current):
            with replacing(target) as partial:
                make(partial)
                write_text(_hash_file(target), bytes_digest(partial))
    return target


def cached_file(name: str, folders: list[Path], is_current: Callable[[Path], bool] = lambda _: True) -> Path | None:
    """The undamaged file `name` in the first of `folders` that has it."""
    for path in (folder / name for folder in folders if (folder / name).is_file()):
        if not _hash_file(path).is_file() or _hash_file(path).read_text() != bytes_digest(path):
            logger.warning("%s is damaged or was altered, and will be made again", path)
        elif is_current(path):
            return path
    return None


def _writable_folder(folders: list[Path]) -> Path:
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
        logger.info("%s cannot be written", folder)
    raise OSError(f"none of {', '.join(map(str, folders))} can be written; pass a folder that can as --data_cache_dir")


def _hash_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
