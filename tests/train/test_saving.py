"""A checkpoint with other weights is not loaded."""

import pytest
from safetensors.torch import load_file, save_file
from training import flags

from llava.train.checkpoint import load_weights
from llava.train.train import build_model, parse_arguments


def test_checkpoint_that_lacks_a_weight_is_not_loaded(tiny, tmp_path):
    model = build_model(*parse_arguments(flags(tiny, tmp_path, 2)))
    model.save_pretrained(tmp_path)
    load_weights(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.mm_projector.0.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path} does not hold .*weights: 1 differ, model.mm_projector.0"):
        load_weights(tmp_path, model)
