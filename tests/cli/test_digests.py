"""What makes a kept result invalid: any byte of weights, data or pictures, and this tree's code."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

from llava.compare.answers import SOURCES
from llava.data.checks import PlacedImage
from llava.data.images import ImageStore
from llava.utils import versions
from llava.utils.digests import fingerprint, model_digest, revision
from llava.utils.versions import code_digest


def weights(gain: float) -> dict[str, torch.Tensor]:
    return {"embed": torch.zeros((17 << 20) + 100_000), "gain": torch.full((1000,), gain), "head": torch.zeros(1 << 20)}


@pytest.mark.parametrize(
    "write",
    [
        lambda folder, gain: save_file(weights(gain), folder / "model.safetensors"),
        lambda folder, gain: (folder / "chat_template.jinja").write_text(f"{gain}"),
    ],
    ids=["safetensors", "template"],
)
def test_a_norms_gain_in_a_file_of_72_mib_changes_the_fingerprint(tmp_path, write):
    """A checkpoint with one small tensor between large ones, and one with a text file of unchanged length."""
    found = []
    for gain in (0.2, 3.2, 0.2):
        (tmp_path / "model").mkdir(exist_ok=True)
        write(tmp_path / "model", gain)
        found.append(fingerprint(tmp_path / "model"))
    assert found[0] == found[2] != found[1]


def test_an_unedited_snapshot_in_the_hubs_cache_alone_goes_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "0123456789" * 4
    snapshot = tmp_path / f"hub/models--a--b/snapshots/{commit}"
    ours = [tmp_path / "snapshots" / "model", tmp_path / f"models--a--b/snapshots/{commit}"]
    for folder in (*ours, snapshot):
        folder.mkdir(parents=True)
    (blobs := tmp_path / "hub/models--a--b/blobs").mkdir()
    for name, kind, content in (("config.json", "sha1", b"{}"), ("model.safetensors", "sha256", b"weights")):
        head = b"blob %d\0" % len(content) if kind == "sha1" else b""
        blob = blobs / hashlib.new(kind, head + content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    assert (revision(str(snapshot)), model_digest(str(snapshot))) == (commit, f"commit {commit}")
    blob.write_bytes(b"Weights")
    assert revision(str(snapshot)) == fingerprint(snapshot)
    assert model_digest(str(snapshot)).removeprefix("SHA-256 ") == fingerprint(snapshot)
    for folder in ours:
        (folder / "config.json").write_text("{}")
        before = revision(str(folder))
        (folder / "config.json").write_text("[]")
        assert before != revision(str(folder)) == fingerprint(folder)


def test_a_checkpoints_revision_follows_what_it_is_completed_from(tmp_path):
    """A LoRA's base; the tower of LLaVA-1.5's form, of stage 1 and of a LoRA's base, but not that of a whole folder."""
    for name in ("base", "lora", "tower", "llava-1.5", "stage-1", "whole"):
        (tmp_path / name / "shards").mkdir(parents=True)
        (tmp_path / name / "shards/model.safetensors").write_text("a")
    outside, inside = {"mm_vision_tower": str(tmp_path / "tower")}, {"mm_vision_config": {"model_type": "clip"}}
    for name, config in {
        "llava-1.5": outside,
        "base": outside,
        "stage-1": outside | inside,
        "whole": outside | inside,
    }.items():
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "stage-1/mm_projector.bin").touch()
    (tmp_path / "whole/preprocessor_config.json").touch()
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))

    def changed_by(file: str) -> set[str]:
        before = {place.name: revision(str(place)) for place in tmp_path.iterdir()}
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("b")
        return {place.name for place in tmp_path.iterdir() if revision(str(place)) != before[place.name]}

    assert changed_by("base/shards/model.safetensors") == {"base", "lora"}
    assert changed_by("tower/shards/model.safetensors") == {"tower", "llava-1.5", "stage-1", "base", "lora"}
    assert changed_by("whole/shards/model.safetensors") == {"whole"}
    assert changed_by("whole/checkpoint-10/model.safetensors") == set()


def test_pictures_are_known_by_their_bytes_and_not_by_their_folder(tmp_path):
    def content(place: Path, colour: str) -> str:
        for folder in ("own", "other"):
            (place / folder).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4), colour).save(place / folder / "a.png")
        other = str(place / "other")
        return ImageStore(place / "own", others=[other]).content(["a.png", PlacedImage(other, "a.png"), "none.png"])

    first = content(tmp_path / "one", "red")
    assert content(tmp_path / "two", "red") == first != content(tmp_path / "one", "grey")


def test_a_mended_line_changes_the_digests_of_what_it_decides_alone(tmp_path, monkeypatch):
    for name in ("asking.py", "model/norm.py", "eval/score.py", "train/train.py", "analysis/probe.py", "serve/web.py"):
        (tmp_path / "llava" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "llava" / name).write_text("x = 1\n")
    monkeypatch.setattr(versions, "CODE", tmp_path)
    kinds = {name: getattr(versions, name) for name in ("TRAINING", "EVALUATION", "ANALYSIS")} | {"ANSWERS": SOURCES}

    def changed_by(name: str) -> set[str]:
        before = {kind: code_digest(sources) for kind, sources in kinds.items()}
        (tmp_path / "llava" / name).write_text("x = 2\n")
        return {kind for kind, sources in kinds.items() if code_digest(sources) != before[kind]}

    assert changed_by("asking.py") == changed_by("model/norm.py") == set(kinds)
    assert changed_by("eval/score.py") == {"EVALUATION"} and changed_by("train/train.py") == {"TRAINING"}
    assert changed_by("analysis/probe.py") == {"ANALYSIS", "ANSWERS"} and not changed_by("serve/web.py")
