"""`run.json` and `resume.json`: what decides a run's weights is in them, wherever its files are."""

import json
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import STRUCT, encoded, noise, shard
from safetensors.torch import load_file, save_file
from training import flags

from llava.data.records import load_records
from llava.train.build import training_tokenizer
from llava.train.checkpoint import check_settings
from llava.train.run_record import run_settings, weights_digests, write_settings
from llava.train.train import build_model, parse_arguments, train
from llava.utils.provenance import RUN_FILE, differences, read_starts


def configuration(folder):
    return read_starts(folder / RUN_FILE)[-1]["configuration"]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Stage-1 folders of two arms."""
    root = tmp_path_factory.mktemp("runs")
    for name, norm in (("none", "none"), ("norm", "gwc_layernorm")):
        train(flags(tiny, root / name, 1, norm=norm, max_steps=2, save_strategy="steps", save_steps=1))
    return root


def test_arms_differ_in_the_norm_alone(runs):
    none, norm = configuration(runs / "none"), configuration(runs / "norm")
    assert none["model"].pop("mm_projector_norm") == "none" and norm["model"].pop("mm_projector_norm") != "none"
    assert norm["initial_weights"].pop("mm_projector_norm")
    assert set(none["initial_weights"]) == {"mm_language_model", "mm_vision_tower", "mm_mlp_adapter"}
    assert none == norm


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


@pytest.mark.parametrize(("part", "flag"), [("llama", "model_name_or_path"), ("siglip", "vision_tower")])
def test_an_adapter_on_another_base_or_tower_is_named(tiny, runs, tmp_path, caplog, part, flag):
    adapter, copy = runs / "none/mm_projector.bin", shutil.copytree(tiny / part, tmp_path / part)
    for name in ("same", "other"):
        caplog.clear()
        train(
            flags(tiny, tmp_path / name, 2, norm="none", pretrain_mm_mlp_adapter=adapter, max_steps=1, **{flag: copy})
        )
        assert ("trained on a base with other files" in caplog.text) == (name == "other")
        (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")


def test_one_bit_of_a_weight_changes_the_digest(tiny, tmp_path):
    model = build_model(*parse_arguments(flags(tiny, tmp_path, 1)))
    before = weights_digests(model)
    with torch.no_grad():
        model.get_model().embed_tokens.weight.view(torch.int32)[0, 0] ^= 1
    assert {k for k, v in weights_digests(model).items() if before[k] != v} == {"mm_language_model"}


# --- the same files elsewhere, and others in their place --------------------------------------------------------------

CONTENTS = ("pictures", "language_model_files", "vision_tower_files", "adapter_file")


def identity(root: Path, **overrides):
    """The identity of a stage-1 run whose files are all below `root`."""
    model_args, data_args, training_args = parse_arguments(flags(root, root / "run", 1, **overrides))
    records = load_records(data_args.data_path)
    tokenizer = training_tokenizer(model_args.model_name_or_path, training_args.model_max_length, None)
    return run_settings(model_args, data_args, training_args, records, tokenizer)


def write_pictures(root: Path, kind: str, seed: int) -> dict[str, object]:
    """Writes pictures that have equal sizes for every seed; returns the flags of a run on them."""
    pictures = {f"{i}.png": encoded(noise(size=(40, 40), seed=seed + i), "BMP") for i in range(24)}
    if kind == "folder":
        for name, data in pictures.items():
            (root / "data/images" / name).write_bytes(data)
        return {}
    if kind == "zip":
        with zipfile.ZipFile(root / "images.zip", "w") as archive:
            for name, data in pictures.items():
                archive.writestr(name, data)
        return {"image_folder": root / "images.zip"}
    place = root / "rows/train.parquet"
    shard(place, pa.array([{"bytes": data, "path": None} for data in pictures.values()], STRUCT), 24)
    pq.write_table(pq.read_table(place), place, compression="none", write_statistics=False)  # an equal footer
    return {"data_path": place, "image_folder": None}


def write_model(root: Path, kind: str, seed: int) -> dict[str, object]:
    """Moves one weight of a base model, tower or adapter by 1e-3 if `seed` is not 0; returns the run's flags."""
    if kind == "adapter":
        (root / "adapter.bin").write_bytes(bytes([seed]))
        return {"pretrain_mm_mlp_adapter": root / "adapter.bin"}
    file = root / ("llama" if kind == "language model" else "siglip") / "model.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[0] += 1e-3 * seed
    save_file(weights, file, {"format": "pt"})
    if kind != "tower that a checkpoint names":
        return {}
    config = json.loads((root / "llama/config.json").read_text()) | {"mm_vision_tower": str(root.parent / "one/siglip")}
    (root / "llama/config.json").write_text(json.dumps(config))
    return {"vision_tower": "not read"}


EXCHANGED = {
    "folder": (write_pictures, "pictures"),
    "zip": (write_pictures, "pictures"),
    "rows": (write_pictures, "pictures"),
    "language model": (write_model, "language_model_files"),
    "tower": (write_model, "vision_tower_files"),
    "tower that a checkpoint names": (write_model, "vision_tower_files"),
    "adapter": (write_model, "adapter_file"),
}


@pytest.mark.parametrize("kind", EXCHANGED)
def test_exchanged_files_are_another_run_and_moved_ones_are_not(tiny, tmp_path, files_count_as_old, kind):
    write, setting = EXCHANGED[kind]

    def at(root: Path, seed: int):
        for name in ("llama", "siglip", "data"):
            shutil.copytree(tiny / name, root / name, dirs_exist_ok=True)
        return identity(root, **write(root, kind, seed))

    before = at(tmp_path / "one", 0)
    write_settings(tmp_path / "one", before)
    moved = at(tmp_path / "two", 0)
    assert {name: moved[name] for name in CONTENTS if name in moved} == {
        name: before[name] for name in CONTENTS if name in before
    }
    exchanged = at(tmp_path / "one", 1)
    with pytest.raises(ValueError) as refusal:
        check_settings(tmp_path / "one", exchanged)
    assert f"  {setting}: there {before[setting]!r}, now {exchanged[setting]!r}" in str(refusal.value)
    assert [line.split(":")[0].strip() for line in str(refusal.value).splitlines()[1:-1]] == [setting]
