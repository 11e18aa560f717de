"""A compiled tower, Liger's kernels and the kernels of GPUs compute what the plain layers compute."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from decoder_families import NAMES, write_families
from tiny_models import STAGE_1, trained
from tiny_towers import CONFIGS, SIDE
from torch._dynamo.utils import counters
from training import flags, losses

from llava.model import attention
from llava.model.language_model.families import DECODERS
from llava.model.multimodal_encoder.towers import TOWERS
from llava.train import kernels
from llava.train import train as train_module
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
    expected = {pictures: features_and_gradients(tower, pictures) for pictures in (2, 5, 1)}
    torch._dynamo.reset()
    counters.clear()
    compile_layers(tower.layers, backend="aot_eager")
    for pictures, graphs in ((2, 1), (5, 1), (1, 2)):  # several pictures share a graph
        actual = features_and_gradients(tower, pictures)
        assert actual.keys() == expected[pictures].keys()
        for name in actual:
            torch.testing.assert_close(actual[name], expected[pictures][name], rtol=1e-5, atol=1e-5, msg=name)
        assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_stage_with_a_compiled_tower_has_the_plain_ones_losses(tiny, tmp_path, monkeypatch):
    """Also where activations are computed again."""
    monkeypatch.setattr(kernels, "compile_layers", partial(compile_layers, backend="aot_eager"))
    torch._dynamo.reset()
    for choice in ("False", "True"):
        counters.clear()
        options = {"max_steps": 2, "compile_layers": choice, "gradient_checkpointing": choice}
        train_module.train(flags(tiny, tmp_path / choice, 2, **options))
        assert bool(counters["stats"]) == (choice == "True")
    plain, compiled = (losses(tmp_path / choice / "train_log.jsonl") for choice in ("False", "True"))
    assert len(plain) == 2 and compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("machine", "compiles"),
    [
        ({}, True),
        ({"zero3": True}, False),
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
    parts = SimpleNamespace(vision_tower=SimpleNamespace(layers=["tower's"]))
    monkeypatch.setattr(kernels, "compile_layers", compiled.extend)
    kernels.set_up_kernels(SimpleNamespace(get_model=lambda: parts), args)
    assert (args.compile_layers, compiled) == ((True, ["tower's"]) if compiles else (False, []))


def test_compiling_layers_that_zero3_partitions_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="--compile_layers True: ZeRO-3 gathers weights module by module"):
        train_module.train(flags(tiny, tmp_path, 1, compile_layers=True))


# --- what kernels that need a GPU are given --------------------------------------------------------------------------


def test_only_a_flash_attention_with_kernels_for_the_gpu_is_chosen(monkeypatch):
    machine = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: machine["capability"])
    for version in "234":
        there = partial(lambda version: version in machine["installed"], version)
        monkeypatch.setattr(attention, f"is_flash_attn_{version}_available", there)
    for capability, installed, chosen in (
        ((9, 0), "234", "flash_attention_4"),
        ((9, 0), "23", "flash_attention_3"),
        ((10, 0), "23", "flash_attention_2"),
        ((12, 0), "34", None),
        ((7, 5), "234", None),
    ):
        machine |= {"capability": capability, "installed": installed}
        assert attention.installed_flash() == chosen


# --- Liger ------------------------------------------------------------------------------------------------------------


def test_liger_without_a_gpu_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="--use_liger_kernel True needs an NVIDIA GPU, liger-kernel "):
        train_module.train(flags(tiny, tmp_path, 1, use_liger_kernel=True))


@pytest.mark.parametrize(
    ("gpu", "installed", "known", "runs"),
    [(False, True, True, False), (True, False, True, False), (True, True, False, False), (True, True, True, True)],
)
def test_auto_takes_liger_where_it_runs(tiny, monkeypatch, gpu, installed, known, runs):
    applied = []
    fake = SimpleNamespace(**({"apply_liger_kernel_to_llama": print} if known else {}))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=fake))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(kernels, "has_liger", lambda: installed)
    monkeypatch.setattr(kernels, "has_compiler", lambda: True)
    monkeypatch.setattr(kernels, "apply_liger", applied.append)
    model = trained(tiny, STAGE_1)
    args = SimpleNamespace(use_liger_kernel="auto", compile_layers=False)
    kernels.set_up_kernels(model, args)
    assert args.use_liger_kernel is runs and applied == [model] * runs


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
    kernels.apply_liger(model)
    assert calls["model"] is model.get_model()
    assert calls["rope"] == (name != "Phi3")  # the tiny Phi-3 rotates half of each head, which Liger does not know
    assert calls["rms_norm"] and calls["geglu" if name == "Gemma3" else "swiglu"]
    assert not calls["cross_entropy"] and not calls["fused_linear_cross_entropy"]
    delattr(fake, function)
    with pytest.raises(ValueError, match=f"--use_liger_kernel: Liger has no kernels for {plain_type} decoders"):
        kernels.apply_liger(model)
