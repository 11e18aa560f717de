"""A process and all that it starts: started apart from the terminal, waited for, asked to stop, killed."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from benchmarks.common import is_running
from llava.utils.processes import (
    end,
    last_lines,
    start,
    wait,
)

SAVES = "trap 'echo saved; exit 7' TERM; echo ready; while true; do sleep 0.05; done"


def shell(script: str, log: Path, **options: object) -> subprocess.Popen:
    """A shell that has printed its first line."""
    with log.open("w") as output:
        process = start(["bash", "-c", script], os.environ, output, **options)
    deadline = time.monotonic() + 20
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_a_started_process_has_its_own_session_log_and_no_input(tmp_path):
    lock = os.open(tmp_path, os.O_RDONLY)
    script = f"read line || echo no input; ls -d /proc/self/fd/{lock} >&2; pwd; echo $NAME; exit 3"
    with (tmp_path / "log").open("w") as output:
        environment = os.environ | {"NAME": "value"}
        process = start(["bash", "-c", script], environment, output, cwd=tmp_path, keep_open=[lock])
    os.close(lock)
    assert os.getpgid(process.pid) == process.pid
    assert wait(process) == 3
    assert (tmp_path / "log").read_text() == f"no input\n/proc/self/fd/{lock}\n{tmp_path}\nvalue\n"


def test_who_waits_ends_the_process_when_interrupted(tmp_path, capsys):
    process, here = shell(SAVES, tmp_path / "log"), threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, (here, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        wait(process)
    assert process.returncode == 7 and last_lines(tmp_path / "log", 1) == ["saved"]
    assert "a second Ctrl-C ends them at once" in capsys.readouterr().err


def test_a_group_is_asked_where_the_leader_passes_nothing_on(tmp_path):
    process = shell("sleep 60 & echo $!; wait", tmp_path / "log")
    child = int(last_lines(tmp_path / "log", 1)[0])
    end([process], group=True)
    assert process.returncode == -signal.SIGTERM and gone(child)


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds."""
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)
