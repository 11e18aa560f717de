"""Locks of builds that were killed: old ones go, and no run waits for one in silence."""

import os
import time

import pytest

from llava.launch.supervise import LONGEST_BUILD, release_left


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    path = tmp_path / "ops/deepspeed_shm_comm/lock"
    path.parent.mkdir(parents=True)
    return path


def test_an_old_lock_is_removed(lock, capfd):
    lock.touch()
    os.utime(lock, (time.time() - LONGEST_BUILD - 1,) * 2)
    release_left()
    assert not lock.exists() and capfd.readouterr().out.startswith(f"note: removed {lock}")


def test_a_new_lock_may_be_another_run_s_and_is_named_with_the_remedy(lock, capfd):
    lock.touch()
    release_left()
    out = capfd.readouterr().out
    assert lock.exists() and out.startswith(f"note: {lock} says") and "remove the file" in out
