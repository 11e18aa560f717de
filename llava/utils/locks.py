"""Locks of output folders; a process loses its locks when it ends, however it ends, so nothing is left after a kill.

They also hold between nodes, where the shared file system has locks: NFS has them, Lustre if it is mounted so.
"""

import errno
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

TRAINING_LOCK = ".training.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUse(ValueError):
    """Another process holds the lock."""


def take(lock: FileLock, busy: str, patience: float) -> None:
    """Acquires the lock within `LOCK_SECONDS`, or else `patience` seconds; `busy` says what is in use.

    Raises:
        InUse: another process still holds it.
        OSError: the file system has no locks.
    """
    patience = float(os.environ.get("LOCK_SECONDS", patience))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{busy}: waiting up to {patience:g} s for its end", file=sys.stderr, flush=True)
        try:
            lock.acquire(timeout=patience)
        except Timeout:
            raise InUse(f"{busy}; wait for its end") from None


class FolderLock:
    """The lock of a training's output folder. A forked child does not keep it."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / TRAINING_LOCK
        self._lock = FileLock(self.file, thread_local=False, fallback_to_soft=False)
        self._made = False

    def acquire(self) -> None:
        """Takes the lock and leaves in its file who holds it; makes the folder.

        Nothing happens where the folder cannot be written, which a training finds out itself.

        Raises:
            InUse: another training holds it; the message says which.
        """
        with suppress(PermissionError):
            self._made = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            holder = self.file.read_text(errors="replace") if self.file.exists() else ""
            busy = f"--output_dir {self.folder}: another training writes there ({holder or 'it has just started'})"
            try:
                take(self._lock, busy, patience=10)  # in which a killed training of the same folder is gone
            except InUse as error:
                raise InUse(f"{error}, or take another --output_dir") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(
                    f"warning: {self.folder}: its file system has no locks ({error.strerror}), so that a second "
                    "training there would not be noticed",
                    file=sys.stderr,
                )
            with suppress(OSError):  # a full disk
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                self.file.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")

    def release(self) -> None:
        """Removes the file, and the folder if it was made here and is empty, and lets the lock go."""
        if self._lock.is_locked:
            self.file.unlink(missing_ok=True)  # who waits for it finds that it has no name, and opens the next one
            self._lock.release()
            if self._made:
                with suppress(OSError):
                    self.folder.rmdir()
