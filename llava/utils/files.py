"""Replacing a file on success: a reader sees the old content or the new one, even after a kill.

The new content is written beside its place, on the same file system, under a name that the next call on this host
overwrites; so what a killed process leaves does not pile up.
"""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, synced: bool = False, contended: bool = False) -> Iterator[Path]:
    """Yields a path beside `path`; the file that is written there replaces `path`, or is removed after an error.

    Args:
        synced: bring content and name to the disk itself first, so that they survive a power failure.
        contended: other processes may write the same file now, without a lock; each gets its own name.
    """
    process = f".{os.getpid()}" if contended else ""
    partial = path.with_name(f".{path.name}.{platform.node()}{process}.tmp")
    try:
        yield partial
        if synced:
            sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if synced:
        sync(path.parent)


def write_text(path: Path, text: str, **options: bool) -> None:
    """Replaces a file by `text` in UTF-8, half a surrogate pair as JSON escapes it; `options` are of `replacing`."""
    with replacing(path, **options) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, content: Any, **options: bool) -> None:
    """Replaces a file by `content` as JSON, indented by one; `options` are those of `replacing`."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n", **options)


def sync(path: Path) -> None:
    """Brings a file's content, or a folder's names, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
