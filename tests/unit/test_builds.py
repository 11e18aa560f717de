"""Locks of builds that were killed: those go that nobody can hold, and no run waits for one in silence."""

import os
import sys
import time

import pytest

from llava.launch.builds import LONGEST, release_left
from llava.launch.supervise import supervise


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    path = tmp_path / "ops/deepspeed_shm_comm/lock"
    path.parent.mkdir(parents=True)
    return path


def test_an_old_lock_that_no_process_holds_is_removed(lock, capfd):
    lock.touch()
    os.utime(lock, (time.time() - LONGEST - 1,) * 2)
    with lock.open():
        release_left()
        assert lock.exists() and not capfd.readouterr().out
    release_left()
    assert not lock.exists() and capfd.readouterr().out.startswith(f"note: removed {lock}")


def test_a_new_lock_may_be_another_machine_s_and_is_named_with_the_remedy(lock, capfd):
    lock.touch()
    release_left()
    out = capfd.readouterr().out
    assert lock.exists() and out.startswith(f"note: {lock} says") and "remove the file" in out


def test_a_rank_that_is_killed_while_it_builds_leaves_no_lock(lock, tmp_path, capfd):
    build = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); os.kill(os.getpid(), 9)"
    command = [sys.executable, "-c", build, str(lock)]
    assert supervise(command, os.environ, tmp_path, first_node=True, alone=True) == 137
    assert not lock.exists() and f"removed {lock}" in capfd.readouterr().out
