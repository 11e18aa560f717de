"""The lock of a training's folder: one process at a time, and free as soon as that process is gone."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from paths import ROOT

from llava.utils.locks import TRAINING_LOCK, FolderLock, InUse


def test_the_second_holder_is_told_who_the_first_is_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCK_SECONDS", "0")
    first, second = FolderLock(tmp_path / "run"), FolderLock(tmp_path / "run")
    first.acquire()
    with pytest.raises(InUse, match=rf"another training writes there \(process {os.getpid()} on \S+, since 2"):
        second.acquire()
    second.release()
    assert (tmp_path / "run" / TRAINING_LOCK).exists()
    first.release()
    assert not (tmp_path / "run").exists()


def test_who_waits_gets_the_lock_that_the_next_one_meets(tmp_path, monkeypatch):
    """The first holder removes the file, so that the waiting one holds a lock on a file without a name."""
    first, second, third = (FolderLock(tmp_path) for _ in range(3))
    first.acquire()
    waiting = threading.Thread(target=second.acquire)
    waiting.start()
    time.sleep(0.3)
    first.release()
    waiting.join()
    monkeypatch.setenv("LOCK_SECONDS", "0")
    with pytest.raises(InUse):
        third.acquire()
    second.release()
    third.acquire()
    third.release()


def test_a_killed_holders_lock_is_free_although_its_forked_worker_lives(tmp_path, monkeypatch):
    code = """
        import os, sys, time
        from pathlib import Path
        from llava.utils.locks import FolderLock
        lock = FolderLock(Path(sys.argv[1]))
        lock.acquire()
        if not os.fork():
            print(os.getpid(), flush=True)  # by the worker, once it runs
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker = int(holder.stdout.readline())
    monkeypatch.setenv("LOCK_SECONDS", "0")
    lock = FolderLock(tmp_path)
    try:
        with pytest.raises(InUse, match=f"process {holder.pid} on"):
            lock.acquire()
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # it lives
        lock.acquire()
        lock.release()
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)
        holder.stdout.close()


def test_a_file_system_without_locks_is_named_and_used(tmp_path, monkeypatch, capfd):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    lock = FolderLock(tmp_path)
    lock.acquire()
    lock.release()
    assert "its file system has no locks" in capfd.readouterr().err
