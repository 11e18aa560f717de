"""`run.json`: what decides a run's weights is in it, and an arm changes nothing but its own fields. `resume.json`."""

import json
import shutil

import pytest
import torch
from training import flags

from llava.train.run_record import weights_digests
from llava.train.train import build_model, parse_arguments, train
from llava.utils.provenance import RUN_FILE, differences, read_starts


def configuration(folder):
    return read_starts(folder / RUN_FILE)[-1]["configuration"]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Stage-1 folders of two arms, and of one with another seed."""
    root = tmp_path_factory.mktemp("runs")
    for name, norm, seed in (("none", "none", 42), ("norm", "gwc_layernorm", 42), ("seed", "none", 43)):
        train(flags(tiny, root / name, 1, norm=norm, max_steps=2, seed=seed, save_strategy="steps", save_steps=1))
    return root


def test_arms_differ_in_the_norm_alone(runs):
    none, norm = configuration(runs / "none"), configuration(runs / "norm")
    assert none["model"].pop("mm_projector_norm") == "none" and norm["model"].pop("mm_projector_norm") != "none"
    assert norm["initial_weights"].pop("mm_projector_norm")
    assert set(none["initial_weights"]) == {"mm_language_model", "mm_vision_tower", "mm_mlp_adapter"}
    assert none == norm


def test_another_seed_changes_order_and_projector_not_the_language_model(runs):
    first, second = configuration(runs / "none"), configuration(runs / "seed")
    assert first["order"] != second["order"]
    changed = {part for part, digest in first["initial_weights"].items() if second["initial_weights"][part] != digest}
    assert changed == {"mm_mlp_adapter"}


def test_a_resumed_run_adds_a_start(tiny, runs, tmp_path):
    shutil.rmtree(runs / "norm/checkpoint-2")
    (runs / "norm/complete.json").unlink()
    train(flags(tiny, runs / "norm", 1, max_steps=2, save_strategy="steps", save_steps=1))
    first, second = (start["configuration"] for start in read_starts(runs / "norm" / RUN_FILE))
    assert first == second


def test_a_library_preloaded_for_other_kernels_makes_another_configuration_an_allocator_does_not(
    tiny, runs, tmp_path, monkeypatch
):
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/libtcmalloc.so.4:/nowhere/libfakeintel.so")
    train(flags(tiny, tmp_path / "again", 1, norm="none", max_steps=2, save_strategy="steps", save_steps=1))
    changed = differences(configuration(runs / "none"), configuration(tmp_path / "again"))
    assert set(changed) == {"devices"} and changed["devices"][1]["preloaded"] == "libfakeintel.so"


def test_an_adapter_on_another_base_is_named(tiny, runs, tmp_path, caplog):
    adapter, base = runs / "none/mm_projector.bin", shutil.copytree(tiny / "llama", tmp_path / "base")
    for name, model in (("same", tiny / "llama"), ("other", base)):
        caplog.clear()
        train(flags(tiny, tmp_path / name, 2, model=model, norm="none", pretrain_mm_mlp_adapter=adapter, max_steps=1))
        assert ("trained on a base with other files" in caplog.text) == (name == "other")
        (base / "config.json").write_text((base / "config.json").read_text() + "\n")


def test_one_bit_of_a_weight_changes_the_digest(tiny, tmp_path):
    model = build_model(*parse_arguments(flags(tiny, tmp_path, 1)))
    before = weights_digests(model)
    with torch.no_grad():
        model.get_model().embed_tokens.weight.view(torch.int32)[0, 0] ^= 1
    assert {k for k, v in weights_digests(model).items() if before[k] != v} == {"mm_language_model"}


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"format": 2, "starts": [{}]})])
def test_a_record_that_cannot_be_used_is_refused_by_name(content, tmp_path):
    if content is not None:
        (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(ValueError, match=RUN_FILE):
        read_starts(tmp_path / RUN_FILE)
