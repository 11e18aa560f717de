"""Starting, watching and ending a process with everything that it starts.

Needs Python alone, since the launcher runs before packages are there: `/proc` is read in place of psutil.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from llava.utils.paths import ROOT


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    output: IO | None = None,
    *,
    cwd: Path = ROOT,
    keep_open: Sequence[int] = (),
) -> subprocess.Popen:
    """Starts a command in its own session, without input.

    Args:
        output: gets what the command prints; None is the caller's output.
        keep_open: file descriptors that the command inherits, such as a lock's.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT if output else None}
    return subprocess.Popen(command, cwd=cwd, env=env, pass_fds=keep_open, start_new_session=True, **streams)


def wait(process: subprocess.Popen, *, group: bool = False) -> int:
    """Waits for a process and returns its exit status; on Ctrl-C `end` ends it first, and gets `group`."""
    try:
        return process.wait()
    finally:
        end([process], group=group)


def end(processes: Iterable[subprocess.Popen], *, group: bool = False) -> None:
    """Asks processes by SIGTERM to save and stop, and waits; a second interruption kills them and all they started.

    Args:
        group: ask the whole process group, where the process does not pass signals on.
    """
    running = [process for process in processes if process.poll() is None]
    if not running:
        return
    message = "stopping: waiting for the running steps to end; a second Ctrl-C ends them at once"
    print(message, file=sys.stderr, flush=True)
    try:
        for process in running:
            (send_group if group else send)(process.pid, signal.SIGTERM)
        for process in running:
            process.wait()
    except BaseException:
        for process in running:
            if process.poll() is None:
                kill(process.pid)
                process.wait()


def kill(pid: int) -> None:
    """Kills a process and its group first, so that they start and save nothing more; then its descendants."""
    rest = descendants(pid)
    send_group(pid, signal.SIGKILL)
    for other in rest:
        send(other, signal.SIGKILL)


def send(pid: int, number: int) -> bool:
    """Sends a signal to a process; returns whether there is such a process. Id 0 stands for none."""
    if pid <= 0:  # a whole group, for kill(2)
        return False
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def send_group(pid: int, number: int) -> None:
    """Sends a signal to the group that a process leads, or to the process alone where it leads none."""
    try:
        os.killpg(pid, number)
    except OSError:
        send(pid, number)


def descendants(pid: int) -> set[int]:
    """All processes that `pid` started, and those that they started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _status(int(folder.name)):
            parents[int(folder.name)] = int(fields[1])
    started = {pid}
    while new := {child for child, parent in parents.items() if parent in started} - started:
        started |= new
    return started - {pid}


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, as Linux lists it."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


def _status(pid: int) -> list[str]:
    """State, parent and more of a process, as Linux lists them; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines that a command printed; of a progress bar that was redrawn, its last state."""
    with log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 2**20))
        lines = stream.read().decode(errors="replace").rstrip().split("\n")
    return [next((state for state in reversed(line.split("\r")) if state.strip()), "") for line in lines][-count:]
