"""Locks of builds that were killed: old ones go, and no run waits for one in silence."""

import os
import time

from llava.launch.supervise import LONGEST_BUILD, release_left


def test_an_old_lock_is_removed_and_a_new_one_is_named_with_the_remedy(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    lock = tmp_path / "ops/deepspeed_shm_comm/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    release_left()
    out = capfd.readouterr().out
    assert lock.exists() and out.startswith(f"note: {lock} says") and "remove the file" in out
    os.utime(lock, (time.time() - LONGEST_BUILD - 1,) * 2)
    release_left()
    assert not lock.exists() and capfd.readouterr().out.startswith(f"note: removed {lock}")
