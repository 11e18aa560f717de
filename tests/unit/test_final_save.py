"""A final folder that cannot be written: what the message says is left."""

import errno

import pytest
from training import flags

from llava.train import llava_trainer
from llava.train.checkpoint import SaveError
from llava.train.train import train


def test_failed_final_save_names_the_newest_checkpoint(tiny, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(llava_trainer, "commit_final", full_disk)
    run = tmp_path / "run"
    with pytest.raises(SaveError, match=f"{run} could not be written: .* {run}/checkpoint-2 is complete and untouched"):
        train(flags(tiny, run, 1, max_steps=2, save_strategy="steps", save_steps=1))
