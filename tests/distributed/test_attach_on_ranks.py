"""A norm of `llava.attach` under ZeRO-3 and FSDP on two CPU ranks: the same weights as on one process."""

from pathlib import Path

import attach_on_ranks
import pytest
import saved_models
import torch
from saved_models import SAVED
from two_ranks import run_on_ranks

from llava.attach import load_attached

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", ["zero3", "fsdp"])
def test_an_attached_norm_is_partitioned_and_trained_as_on_one_process(way, tmp_path):
    model, output = tmp_path / "model", tmp_path / "output"
    saved_models.write(SAVED["llava"], model)
    run_on_ranks(2, Path(attach_on_ranks.__file__), [way, str(model), str(output)], 600)
    state = load_attached(str(output)).state_dict() if way == "zero3" else torch.load(output / "state.pt")
    expected = attach_on_ranks.alone(way, str(model), str(tmp_path / "alone"))
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    gain = "model.multi_modal_projector.mm_norm.weight"
    assert not torch.equal(expected[gain], attach_on_ranks.attached(str(model)).state_dict()[gain])
