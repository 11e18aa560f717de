"""A compiled tower, Liger's kernels and the kernels of GPUs compute what the plain layers compute."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from decoder_families import NAMES, write_families
from tiny_models import STAGE_1, trained
from tiny_towers import CONFIGS, SIDE
from torch._dynamo.utils import counters

from llava.model.language_model.families import DECODERS
from llava.model.multimodal_encoder.towers import TOWERS
from llava.train import kernels
from llava.train.kernels import compile_layers

# --- torch.compile ----------------------------------------------------------------------------------------------------


def features_and_gradients(tower, pictures: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(pictures)
    tower.zero_grad()
    features = tower(torch.randn(pictures, 3, SIDE, SIDE, generator=generator))
    (features * torch.randn(features.shape, generator=generator)).mean().backward()
    gradients = {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}
    return gradients | {"features": features.detach()}


@pytest.mark.slow
def test_a_compiled_tower_equals_the_plain_one_for_any_number_of_pictures():
    tower_class = TOWERS["clip_vision_model"]
    torch.manual_seed(0)
    tower = tower_class(tower_class.config_class(**CONFIGS["clip_vision_model"])).train()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = {pictures: features_and_gradients(tower, pictures) for pictures in (2, 5)}
    torch._dynamo.reset()
    counters.clear()
    compile_layers(tower.layers, backend="aot_eager")
    for pictures in (2, 5):
        actual = features_and_gradients(tower, pictures)
        assert actual.keys() == expected[pictures].keys()
        for name in actual:
            torch.testing.assert_close(actual[name], expected[pictures][name], rtol=1e-5, atol=1e-5, msg=name)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


# --- Liger ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Phi3"])
def test_liger_is_applied_to_the_decoder_of_every_kind(tiny, monkeypatch, name):
    calls = {}

    def swiglu(*, model, rope, rms_norm, swiglu, cross_entropy, fused_linear_cross_entropy):
        calls.update(vars())

    def geglu(*, model, rope, rms_norm, geglu, cross_entropy, fused_linear_cross_entropy):
        calls.update(vars())

    plain_type = DECODERS[NAMES.index(name)].config.model_type
    function = f"apply_liger_kernel_to_{plain_type}"
    fake = SimpleNamespace(**{function: geglu if name == "Gemma3" else swiglu})
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=fake))
    model = trained(write_families(tiny), STAGE_1, language_model=f"families/{name}")
    monkeypatch.delenv("LIGER_KERNEL_IMPL_ROPE", raising=False)
    kernels.apply_liger(model)
    assert os.environ["LIGER_KERNEL_IMPL_ROPE"] == "triton"  # its other kernel compiles for every length
    assert calls["model"] is model.get_model()
    assert calls["rope"] == (name != "Phi3")  # the tiny Phi-3 rotates half of each head, which Liger does not know
    assert calls["rms_norm"] and calls["geglu" if name == "Gemma3" else "swiglu"]
    assert not calls["cross_entropy"] and not calls["fused_linear_cross_entropy"]
    delattr(fake, function)
    with pytest.raises(ValueError, match=f"--use_liger_kernel: Liger has no kernels for {plain_type} decoders"):
        kernels.apply_liger(model)
