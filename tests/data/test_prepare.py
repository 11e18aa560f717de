"""`prepare` uses what is there, fetches what is missing, refuses what is incomplete; training needs no conversion."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from data_files import BYTES, STRUCT, TURNS, encoded, noise, shard

from llava.data import prepare

pytestmark = pytest.mark.usefixtures("files_count_as_old")


def next_layout(folder: Path, shards: int = 3) -> Path:
    """LLaVA-NeXT's shards, in small: every third row is text only."""
    images = pa.array([{"bytes": b, "path": None} if i % 3 else None for i, b in enumerate(BYTES[:6])], STRUCT)
    text = pa.array([TURNS if i % 3 else [{"from": "human", "value": "hi"}, TURNS[1]] for i in range(6)])
    for number in range(shards):
        shard(folder / f"data/train-{number:05d}-of-{shards:05d}.parquet", images, 6, conversations=text)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that copies from a folder by patterns; its calls are recorded."""
    calls = []

    def snapshot_download(repository, *, repo_type, allow_patterns, local_dir):
        calls.append((repository, repo_type, allow_patterns))
        for pattern in allow_patterns:
            for file in (tmp_path / "hub").glob(pattern):
                target = Path(local_dir) / file.relative_to(tmp_path / "hub")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def test_missing_files_are_downloaded_by_the_same_command_and_a_damaged_one_is_refused(tmp_path, hub, capsys):
    next_layout(tmp_path / "hub")
    command = ["llava-next", "--folder", str(tmp_path / "new")]
    assert prepare.main(command) == 0 and hub == [("lmms-lab/LLaVA-NeXT-Data", "dataset", ["data/*.parquet"])]
    out = capsys.readouterr().out
    assert f"DATA_PATH={tmp_path}/new/data IMAGE_FOLDER='' PRESET" in out and "18: 12 with images, 6 text only" in out
    assert prepare.main(command) == 0 and len(hub) == 1
    first, second, _ = sorted((tmp_path / "new/data").glob("*.parquet"))
    first.unlink()
    assert prepare.missing(prepare.SOURCES["llava-next"], tmp_path / "new") == [first.name]
    assert prepare.main(command) == 0 and len(hub) == 2
    second.write_bytes(second.read_bytes()[:-100])
    assert prepare.main(command) == 2
    assert f"{second.name}: cannot be read as Parquet" in capsys.readouterr().err


def test_each_picture_set_is_counted_with_what_is_missing_and_where_it_comes_from(tmp_path, capsys):
    names = [f"{folder}/{i}.jpg" for folder in ("coco/train2017", "ocr_vqa/images", "own") for i in range(2)]
    records = [{"id": name, "image": name, "conversations": TURNS} for name in names]
    (tmp_path / "llava_v1_5_mix665k.json").write_text(json.dumps(records))
    for name in names[:3]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded(noise(), "JPEG"))
    assert prepare.main(["llava-665k", "--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "coco/train2017: 2 of 2 there\n" in out and "gqa/images: 0 of 0 there\n" in out
    assert "ocr_vqa/images: 1 of 2 there, 1 missing (1.jpg, ...); put them there from https://github.com/" in out
    assert "own: 0 of 2 there, 2 missing" in out and "3 image_missing" in out
