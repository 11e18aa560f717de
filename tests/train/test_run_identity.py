"""What a run's files hold is part of its identity, wherever they are: pictures, models, adapter, held-out data."""

import json
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import STRUCT, encoded, noise, shard
from safetensors.torch import load_file, save_file
from training import flags

from llava.data.images import ImageStore
from llava.data.records import load_records
from llava.train import run_record as module
from llava.train.build import training_tokenizer
from llava.train.checkpoint import check_settings
from llava.train.run_record import pictures_digest, run_settings, write_settings
from llava.train.train import parse_arguments

CONTENTS = ("pictures", "language_model_files", "vision_tower_files", "adapter_file", "eval_pictures")
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


def identity(root: Path, **overrides):
    """The identity of a stage-1 run whose files are all below `root`."""
    model_args, data_args, training_args = parse_arguments(flags(root, root / "run", 1, **overrides))
    records = load_records(data_args.data_path)
    eval_records = load_records(data_args.eval_data_path) if data_args.eval_data_path else None
    tokenizer = training_tokenizer(model_args.model_name_or_path, training_args.model_max_length, None)
    return run_settings(model_args, data_args, training_args, records, tokenizer, eval_records)


def write_pictures(root: Path, kind: str, seed: int) -> dict[str, object]:
    """Writes pictures that have equal sizes for every seed; returns the flags of a run on them."""
    pictures = {f"{i}.png": encoded(noise(size=(40, 40), seed=seed + i), "BMP") for i in range(24)}
    if kind in ("folder", "held out"):
        folder = root / ("data/images" if kind == "folder" else "heldout")
        folder.mkdir(exist_ok=True)
        for name, data in pictures.items():
            (folder / name).write_bytes(data)
        held_out = {"eval_data_path": root / "data/finetune.json", "eval_image_folder": folder}
        return {} if kind == "folder" else held_out | EVALUATION
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
    return {"vision_tower": None}


EXCHANGED = {
    "folder": (write_pictures, "pictures"),
    "zip": (write_pictures, "pictures"),
    "rows": (write_pictures, "pictures"),
    "held out": (write_pictures, "eval_pictures"),
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


def test_of_many_records_some_pictures_are_read(tiny, monkeypatch):
    records, store = load_records(str(tiny / "data/pretrain.json")), ImageStore(tiny / "data/images")
    monkeypatch.setattr(module, "_SAMPLE", 3)
    opened = []
    monkeypatch.setattr(store, "content", lambda images, _: opened.extend(images))
    pictures_digest(store, records)
    assert opened == ["0.png", "8.png", "16.png"]
