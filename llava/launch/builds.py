"""Locks of the C++ ops that DeepSpeed builds on first use.

PyTorch (2.13, `torch.utils.file_baton`) makes a file `lock` in an op's folder, keeps it open while it builds, and then
removes it. A build that was killed leaves the file, and every later run would wait for it without end or message.
"""

import contextlib
import os
import time
from pathlib import Path

LONGEST = 300.0  # seconds; building an op takes one or two minutes


def release_left(began: float | None = None) -> None:
    """Removes the locks that killed builds have left, and prints a line for each.

    A process of this machine that builds holds its lock open. Another machine may share the folder, and its processes
    cannot be seen. So only a lock goes that is older than `LONGEST` seconds; others are named, with the remedy.

    Args:
        began: when this run began, in seconds since the epoch, once its ranks have ended: locks that were made since
            then are theirs and are removed too.
    """
    left = locks()
    held = _open_files() if left else set()
    for lock in left:
        with contextlib.suppress(FileNotFoundError):  # the build has just ended
            made = lock.stat().st_mtime
            if lock.resolve() in held:
                continue
            if time.time() - made > LONGEST or (began is not None and made >= began):
                lock.unlink()
                print(f"note: removed {lock}, which a build that was killed had left", flush=True)
            elif began is None:
                print(
                    f"note: {lock} says that an op is being built. If no other machine is building it, a build was "
                    "killed: remove the file, or this run will wait for it",
                    flush=True,
                )


def locks() -> list[Path]:
    """The locks where PyTorch builds ops: in TORCH_EXTENSIONS_DIR, by default in the home folder's cache."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    return sorted(Path(folder).expanduser().glob("**/lock"))


def _open_files() -> set[Path]:
    """What the processes of this machine have open, as far as this user may see it."""
    files = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            for number in os.listdir(folder):
                with contextlib.suppress(OSError):  # closed meanwhile
                    files.add(Path(os.readlink(folder / number)))
    return files
