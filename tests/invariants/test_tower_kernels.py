"""A vision tower whose layers are compiled, or run on Liger's kernels, computes what the plain tower computes."""

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT
from tiny_towers import CONFIGS, SIDE
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from training import flags, losses
from triton_interpreter import let_triton_interpret

from llava.model.multimodal_encoder.towers import TOWERS
from llava.train import compilation, liger, run_checks
from llava.train import train as train_module
from llava.train.compilation import compile_tower


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
    compile_tower(model, backend="aot_eager")
    for pictures, graphs in ((2, 1), (5, 1), (1, 2)):  # several pictures share a graph
        assert_same(features_and_gradients(model, pictures), expected[pictures])
        assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductors_tower_equals_the_plain_one():
    model = model_with("siglip_vision_model")
    expected = {pictures: features_and_gradients(model, pictures) for pictures in (2, 5)}
    torch._dynamo.reset()
    compile_tower(model)
    for pictures in expected:
        assert_same(features_and_gradients(model, pictures), expected[pictures])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_with_a_compiled_tower_has_the_plain_ones_losses(tiny, tmp_path, monkeypatch, stage):
    monkeypatch.setattr(compilation, "compile_tower", partial(compile_tower, backend="aot_eager"))
    torch._dynamo.reset()
    for choice in ("False", "tower"):
        counters.clear()
        train_module.train(flags(tiny, tmp_path / choice, stage, max_steps=3, compile_layers=choice))
        assert bool(counters["stats"]) == (choice == "tower")
    plain, compiled = (losses(tmp_path / choice / "train_log.jsonl") for choice in ("False", "tower"))
    assert len(plain) == 3 and compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({}, None),
        ({"gpu": False}, ""),
        ({"zero3": True}, "ZeRO-3 gathers weights module by module"),
        ({"triton": None}, "Triton is not installed"),
        ({"compiler": None}, "needs a C compiler, and none was found"),
        ({"headers": "/nowhere"}, "Python.h was not found"),
    ],
)
def test_auto_compiles_the_tower_where_it_can_and_says_why_not(tmp_path, monkeypatch, caplog, machine, reason):
    (tmp_path / "Python.h").touch()
    machine = {"gpu": True, "zero3": False, "triton": "spec", "compiler": "gcc", "headers": str(tmp_path)} | machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine["gpu"])
    monkeypatch.setattr(compilation, "is_deepspeed_zero3_enabled", lambda: machine["zero3"])
    monkeypatch.setattr(compilation, "find_spec", lambda name: machine["triton"])
    monkeypatch.setattr(compilation.shutil, "which", lambda name: machine["compiler"])
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: machine["headers"])
    compiled, args = [], SimpleNamespace(compile_layers="auto")
    monkeypatch.setattr(compilation, "compile_tower", compiled.append)
    with caplog.at_level("INFO"):
        compilation.set_up_compilation("model", args)
    assert (args.compile_layers, compiled) == (("tower", ["model"]) if reason is None else (False, []))
    assert ("the vision tower is not compiled: " in caplog.text) == bool(reason) and (reason or "") in caplog.text


@pytest.mark.parametrize("choice", ["True", "tower"])
def test_compiling_layers_that_zero3_partitions_is_refused(tiny, tmp_path, monkeypatch, choice):
    monkeypatch.setattr(run_checks, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match=f"--compile_layers {choice}: ZeRO-3 gathers weights module by module"):
        train_module.train(flags(tiny, tmp_path, 1, compile_layers=choice))


# --- Liger ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOWERS)
def test_ligers_tower_kernels_get_every_norm_and_gated_mlp(monkeypatch, kind):
    calls = []

    def liger_layer_norm(X, W, B, eps):  # the names of liger-kernel 0.8.5
        calls.append("norm")
        return F.layer_norm(X, W.shape, W, B, eps)

    def liger_swiglu(a, b):
        calls.append("mlp")
        return F.silu(a) * b

    functional = SimpleNamespace(liger_layer_norm=liger_layer_norm, liger_swiglu=liger_swiglu)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace(functional=functional))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", functional)
    model = model_with(kind)
    expected = features_and_gradients(model, 2)
    liger.apply_liger_to_tower(model)
    assert_same(features_and_gradients(model, 2), expected)
    layers = model.get_vision_tower().layers
    norms = [m for m in layers.modules() if isinstance(m, nn.LayerNorm)]
    assert (calls.count("norm"), calls.count("mlp")) == (len(norms), 0)


@pytest.mark.parametrize(("compiled", "fused"), [(False, True), ("tower", False)])
def test_a_tower_is_compiled_or_runs_on_liger_but_not_both(monkeypatch, compiled, fused):
    towers = []
    monkeypatch.setattr(liger, "apply_liger", lambda model: None)
    monkeypatch.setattr(liger, "apply_liger_to_tower", towers.append)
    liger.set_up_liger("model", SimpleNamespace(use_liger_kernel=True, compile_layers=compiled))
    assert towers == ["model"] * fused


def compare_liger() -> None:
    """Runs in a process of its own, where Triton interprets its kernels on the CPU."""
    let_triton_interpret()
    for kind in TOWERS:
        model = model_with(kind)
        expected = features_and_gradients(model, 2)
        liger.apply_liger_to_tower(model)
        assert_same(features_and_gradients(model, 2), expected)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("liger_kernel") or not find_spec("triton"), reason="needs liger-kernel and triton")
def test_a_tower_on_ligers_kernels_equals_the_plain_one():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), *sys.path])
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_liger()
