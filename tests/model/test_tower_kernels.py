"""A vision tower whose layers are compiled computes what the plain tower computes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny_towers import CONFIGS, SIDE
from torch._dynamo.utils import counters
from training import flags, losses

from llava.model.multimodal_encoder.towers import TOWERS
from llava.train import kernels
from llava.train import train as train_module
from llava.train.kernels import compile_layers


def model_with(kind: str) -> SimpleNamespace:
    """A model that is nothing but a tower with random weights, in training mode."""
    torch.manual_seed(0)
    tower = TOWERS[kind](TOWERS[kind].config_class(**CONFIGS[kind]))
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return SimpleNamespace(get_vision_tower=tower.train, get_model=lambda: SimpleNamespace(vision_tower=tower))


def features_and_gradients(model, pictures: int) -> dict[str, torch.Tensor]:
    tower, generator = model.get_vision_tower(), torch.Generator().manual_seed(pictures)
    tower.zero_grad()
    features = tower(torch.randn(pictures, 3, SIDE, SIDE, generator=generator))
    (features * torch.randn(features.shape, generator=generator)).mean().backward()
    gradients = {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}
    return gradients | {"features": features.detach()}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5, msg=name)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOWERS)
def test_a_compiled_tower_equals_the_plain_one_for_any_number_of_pictures(kind):
    model = model_with(kind)
    expected = {pictures: features_and_gradients(model, pictures) for pictures in (2, 5, 1)}
    torch._dynamo.reset()
    counters.clear()
    compile_layers(model.get_model().vision_tower.layers, backend="aot_eager")
    for pictures, graphs in ((2, 1), (5, 1), (1, 2)):  # several pictures share a graph
        assert_same(features_and_gradients(model, pictures), expected[pictures])
        assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductors_tower_equals_the_plain_one():
    model = model_with("siglip_vision_model")
    expected = {pictures: features_and_gradients(model, pictures) for pictures in (2, 5)}
    torch._dynamo.reset()
    compile_layers(model.get_model().vision_tower.layers)
    for pictures in expected:
        assert_same(features_and_gradients(model, pictures), expected[pictures])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_with_a_compiled_tower_has_the_plain_ones_losses(tiny, tmp_path, monkeypatch, stage):
    monkeypatch.setattr(kernels, "compile_layers", partial(compile_layers, backend="aot_eager"))
    torch._dynamo.reset()
    for choice in ("False", "True"):
        counters.clear()
        train_module.train(flags(tiny, tmp_path / choice, stage, max_steps=3, compile_layers=choice))
        assert bool(counters["stats"]) == (choice == "True")
    plain, compiled = (losses(tmp_path / choice / "train_log.jsonl") for choice in ("False", "True"))
    assert len(plain) == 3 and compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("machine", "compiles"),
    [
        ({}, True),
        ({"gpu": False}, False),
        ({"zero3": True}, False),
        ({"triton": None}, False),
        ({"compiler": None}, False),
        ({"headers": "/nowhere"}, False),
    ],
)
def test_auto_compiles_the_tower_where_it_can(tmp_path, monkeypatch, machine, compiles):
    (tmp_path / "Python.h").touch()
    machine = {"gpu": True, "zero3": False, "triton": "spec", "compiler": "gcc", "headers": str(tmp_path)} | machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine["gpu"])
    monkeypatch.setattr(kernels, "is_deepspeed_zero3_enabled", lambda: machine["zero3"])
    monkeypatch.setattr(kernels, "find_spec", lambda name: machine["triton"])
    monkeypatch.setattr(kernels.shutil, "which", lambda name: machine["compiler"])
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name: machine["headers"])
    compiled, args = [], SimpleNamespace(compile_layers="auto", use_liger_kernel=False)
    parts = SimpleNamespace(layers=["decoder's"], vision_tower=SimpleNamespace(layers=["tower's"]))
    monkeypatch.setattr(kernels, "compile_layers", compiled.extend)
    kernels.set_up_kernels(SimpleNamespace(get_model=lambda: parts), args)
    assert (args.compile_layers, compiled) == ((True, ["tower's"]) if compiles else (False, []))


def test_compiling_layers_that_zero3_partitions_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="--compile_layers True: ZeRO-3 gathers weights module by module"):
        train_module.train(flags(tiny, tmp_path, 1, compile_layers=True))
