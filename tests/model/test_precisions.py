"""A model trained in one precision can be saved, loaded and asked in every other."""

import copy

import pytest
import torch
from training import fit, flags, greedy_tokens, loaded

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.numeric
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 2), ("bf16", 1), ("fp16", 2)])
def test_a_saved_folder_equals_the_trained_model_in_each_precision(tiny, tmp_path, precision, stage):
    """In stage 1 what is trained is fp32 beside 16-bit weights; loaded, all of it has the one type asked for."""
    options = {} if precision == "fp32" else {precision: True}
    trained = fit(flags(tiny, tmp_path, stage, **options))
    assert len(set(greedy_tokens(trained))) > 3  # in its own mix of types
    stored = next(trained.get_model().layers.parameters()).dtype
    for requested, dtype in [*NAMES.items(), (None, torch.float32), ("auto", stored)]:
        model = loaded(tmp_path, requested)
        assert {p.dtype for p in model.parameters()} == {dtype} and model.get_vision_tower().dtype == dtype
        assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}  # rotary frequencies
        assert greedy_tokens(model) == greedy_tokens(in_precision(trained, dtype))


def in_precision(model, dtype):
    """A copy with all parameters in the type; rotary frequencies stay fp32."""
    model = copy.deepcopy(model)
    vars(model).pop("forward", None)  # the trainer's, under autocast
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
