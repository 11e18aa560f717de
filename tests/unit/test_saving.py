"""A save that fails says what is left, and a checkpoint with other weights is not loaded."""

import errno

import pytest
from safetensors.torch import load_file, save_file
from training import flags

from llava.train import llava_trainer
from llava.train.checkpoint import SaveError, load_weights
from llava.train.train import build_model, parse_arguments, train


def test_failed_final_save_names_the_newest_checkpoint(tiny, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(llava_trainer, "finish_run", full_disk)
    run = tmp_path / "run"
    with pytest.raises(SaveError, match=f"{run} could not be written: .* {run}/checkpoint-2 is complete and untouched"):
        train(flags(tiny, run, 1, max_steps=2, save_strategy="steps", save_steps=1))


def test_checkpoint_that_lacks_a_weight_is_not_loaded(tiny, tmp_path):
    model = build_model(*parse_arguments(flags(tiny, tmp_path, 2)))
    model.save_pretrained(tmp_path)
    load_weights(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.mm_projector.0.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path} has the weights of another model: 1 names, model.mm_projector.0"):
        load_weights(tmp_path, model)
