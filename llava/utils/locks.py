"""Locks of files and folders; a process loses its locks when it ends, however it ends, so nothing is left after a kill.

They also hold between nodes, where the shared file system has locks: NFS has them, Lustre if it is mounted so.
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

TRAINING_LOCK = ".training.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUse(ValueError):
    """Another process holds the lock."""


@contextmanager
def locked(file: Path, busy: str, patience: float = 0, **options: Any) -> Iterator[None]:
    """Holds a file's lock, which forked children do not keep; without one, with a warning, if its file system has none.

    Args:
        busy: says what is in use.
        patience: seconds to wait for another process, unless `LOCK_SECONDS` says how many.
        options: of `FileLock`.

    Raises:
        InUse: another process still holds it.
        OSError: the file cannot be written.
    """
    lock = FileLock(file, thread_local=False, fallback_to_soft=False, **options)
    patience = float(os.environ.get("LOCK_SECONDS", patience))
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if patience:
                print(f"{busy}: waiting for its end", file=sys.stderr, flush=True)
            lock.acquire(timeout=patience)
    except Timeout:
        raise InUse(f"{busy}; wait for its end, or choose another place") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        problem = f"its file system has no locks ({error.strerror})"
        print(f"warning: {file.parent}: {problem}, so a second process there would not be noticed", file=sys.stderr)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def training_lock(folder: Path) -> Iterator[None]:
    """Holds a training's output folder, which it makes; the lock's file says who holds it, and is removed at the end.

    Raises: as `locked`.
    """
    file, made = folder / TRAINING_LOCK, not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    holder = file.read_text(errors="replace") if file.exists() else ""
    busy = f"--output_dir {folder}: another training writes there ({holder or 'it has just started'})"
    with locked(file, busy, patience=10):  # in which a killed training of the same folder is gone
        with suppress(OSError):  # a full disk
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # who waits for it finds that it has no name, and opens the next one
            if made:
                with suppress(OSError):
                    folder.rmdir()
