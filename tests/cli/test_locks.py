"""The lock of a training's folder: one process at a time, and free as soon as that process is gone."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from paths import ROOT

from llava.utils.locks import TRAINING_LOCK, InUse, training_lock


def test_the_second_holder_is_told_who_the_first_is_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCK_SECONDS", "0")
    with training_lock(tmp_path / "run"):
        with pytest.raises(InUse, match=rf"another training writes there \(process {os.getpid()} on \S+, since 2"):
            with training_lock(tmp_path / "run"):
                pass
        assert (tmp_path / "run" / TRAINING_LOCK).exists()
    assert not (tmp_path / "run").exists()


def test_who_waits_gets_the_lock_that_the_next_one_meets(tmp_path, monkeypatch):
    """The first holder removes the file, so that the waiting one holds a lock on a file without a name."""
    held, ending = threading.Event(), threading.Event()

    def wait_for_it():
        with training_lock(tmp_path):
            held.set()
            ending.wait()

    waiting = threading.Thread(target=wait_for_it)
    with training_lock(tmp_path):
        waiting.start()
        assert not held.wait(0.3)
    assert held.wait(20)
    monkeypatch.setenv("LOCK_SECONDS", "0")
    with pytest.raises(InUse), training_lock(tmp_path):
        pass
    ending.set()
    waiting.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, capfd, number):
    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with training_lock(tmp_path):
        pass
    assert "its file system has no locks" in capfd.readouterr().err


def test_a_killed_holders_lock_is_free_although_its_forked_worker_lives(tmp_path, monkeypatch):
    code = """
        import os, sys, time
        from pathlib import Path
        from llava.utils.locks import training_lock
        lock = training_lock(Path(sys.argv[1]))
        lock.__enter__()
        if not os.fork():
            print(os.getpid(), flush=True)  # by the worker, once it runs
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker = int(holder.stdout.readline())
    monkeypatch.setenv("LOCK_SECONDS", "0")
    try:
        with pytest.raises(InUse, match=f"process {holder.pid} on"), training_lock(tmp_path):
            pass
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # it lives
        with training_lock(tmp_path):
            pass
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)
        holder.stdout.close()
