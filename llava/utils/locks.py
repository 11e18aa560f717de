"""Locks that their process loses when it ends, however it ends; so no file has to be cleared away after a kill.

`flock` also works between nodes, where the shared file system has locks: NFS has them, Lustre if it is mounted so.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

TRAINING_LOCK = ".training.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PATIENCE = 10.0  # seconds in which a killed training of the same folder is gone


class InUse(ValueError):
    """Another process holds the lock."""


def take(descriptor: int, busy: str, patience: float) -> None:
    """Locks an open file, waiting up to `patience` seconds for another process's end; `busy` says what is in use.

    Raises:
        InUse: the other process still holds it.
        OSError: the file system has no locks.
    """
    end = None
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if end is None:
                end = time.monotonic() + patience
                print(f"{busy}: waiting up to {patience:g} s for its end", file=sys.stderr, flush=True)
            elif time.monotonic() > end:
                raise InUse(f"{busy}; wait for its end") from None
            time.sleep(min(0.2, patience))


class FolderLock:
    """The lock of a training's output folder. A forked child does not keep it."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / TRAINING_LOCK
        self._descriptor: int | None = None
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
            while self._descriptor is None:
                descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    self._take(descriptor)
                    if self._is_current(descriptor):
                        self._descriptor = descriptor
                finally:
                    if self._descriptor is None:
                        os.close(descriptor)
            with suppress(OSError):  # a full disk
                os.truncate(self._descriptor, 0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode())
            os.register_at_fork(after_in_child=self._close)

    def _take(self, descriptor: int) -> None:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
        busy = f"--output_dir {self.folder}: another training writes there ({holder or 'it has just started'})"
        try:
            take(descriptor, busy, float(os.environ.get("LOCK_SECONDS", _PATIENCE)))
        except InUse as error:
            raise InUse(f"{error}, or take another --output_dir") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"warning: {self.folder}: its file system has no locks ({error.strerror}), so that a second training "
                "there would not be noticed",
                file=sys.stderr,
            )

    def _is_current(self, descriptor: int) -> bool:
        """Whether the locked file is still the one that the next process opens; its last holder may have removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.file))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Removes the file, and the folder if it was made here and is empty, and lets the lock go."""
        if self._descriptor is not None:
            self.file.unlink(missing_ok=True)
            self._close()
            if self._made:
                with suppress(OSError):
                    self.folder.rmdir()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def refuse_in_use(folder: Path) -> None:
    """Raises InUse if another training holds the folder."""
    if (folder / TRAINING_LOCK).exists():
        lock = FolderLock(folder)
        lock.acquire()
        lock.release()
