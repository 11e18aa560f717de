"""`prepare` uses what is there, fetches what is missing, refuses what is incomplete; training needs no conversion."""

import json
import platform
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import BYTES, STRUCT, TURNS, encoded, noise, shard
from training import flags, losses

from llava.data import prepare, row_groups
from llava.train import train as train_module

pytestmark = pytest.mark.usefixtures("files_count_as_old")


def pretrain_layout(folder: Path, extracted: bool = False) -> Path:
    """LLaVA-558K as its repository has it, in small."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:05d}/{i}.jpg" for i in range(4)]
    records = [{"id": str(i), "image": name, "conversations": TURNS} for i, name in enumerate(names)]
    (folder / "blip_laion_cc_sbu_558k.json").write_text(json.dumps(records))
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for i, name in enumerate(names):
            archive.writestr(name, encoded(noise(seed=i), "JPEG"))
        if extracted:
            archive.extractall(folder / "images")
    if extracted:
        (folder / "images.zip").unlink()
    return folder


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
    small = replace(prepare.SOURCES["llava-next"], layouts=(prepare.Layout("data/*.parquet", rows=18),))
    small = replace(small, layouts=(*small.layouts, prepare.SOURCES["llava-next"].layouts[1]))
    monkeypatch.setitem(prepare.SOURCES, "llava-next", small)
    return calls


@pytest.mark.parametrize("extracted", [False, True])
def test_what_is_there_is_used_as_it_is(tmp_path, hub, capsys, extracted):
    folder = pretrain_layout(tmp_path / "it is here", extracted)
    before = set(folder.rglob("*"))
    assert prepare.main(["llava-558k", "--folder", str(folder)]) == 0
    out = capsys.readouterr().out
    images = folder / ("images" if extracted else "images.zip")
    assert f"DATA_PATH='{folder}/blip_laion_cc_sbu_558k.json' IMAGE_FOLDER='{images}'" in out
    assert "bash scripts/pretrain.sh" in out and "4 with images" in out and "PROMPT_VERSION" not in out
    assert not hub
    assert all(".llava_cache" in str(path) for path in set(folder.rglob("*")) - before)


def test_missing_files_are_downloaded_by_the_same_command(tmp_path, hub, capsys):
    next_layout(tmp_path / "hub")
    assert prepare.main(["llava-next", "--folder", str(tmp_path / "new"), "--local_only"]) == 2
    assert "missing data/*.parquet; or llava_next_raw_format" in capsys.readouterr().err and not hub
    assert prepare.main(["llava-next", "--folder", str(tmp_path / "new")]) == 0
    assert hub == [("lmms-lab/LLaVA-NeXT-Data", "dataset", ["data/*.parquet"])]
    out = capsys.readouterr().out
    assert f"DATA_PATH={tmp_path}/new/data IMAGE_FOLDER='' PRESET" in out and "18: 12 with images, 6 text only" in out
    assert prepare.main(["llava-next", "--folder", str(tmp_path / "new")]) == 0 and len(hub) == 1


def test_a_missing_shard_is_fetched_and_a_damaged_or_short_set_is_refused(tmp_path, hub, capsys):
    next_layout(tmp_path / "hub")
    folder = next_layout(tmp_path / "there")
    (folder / "data/train-00001-of-00003.parquet").unlink()
    assert prepare.main(["llava-next", "--folder", str(folder), "--local_only"]) == 2
    assert "train-00001-of-00003.parquet" in capsys.readouterr().err
    assert prepare.main(["llava-next", "--folder", str(folder)]) == 0 and len(hub) == 1
    cut = folder / "data/train-00002-of-00003.parquet"
    cut.write_bytes(cut.read_bytes()[:-100])
    assert prepare.main(["llava-next", "--folder", str(folder)]) == 2
    assert "train-00002-of-00003.parquet: damaged" in capsys.readouterr().err
    shard(cut, None, 2)
    assert prepare.main(["llava-next", "--folder", str(folder)]) == 2
    assert "3 shards hold 14 rows, expected 18" in capsys.readouterr().err


def test_the_raw_layout_is_found(tmp_path, hub, capsys):
    raw = tmp_path / "llava_next_raw_format"
    (raw / "sub").mkdir(parents=True)
    (raw / "sub/a.png").write_bytes(encoded(noise()))
    record = {"id": "a", "image": "sub/a.png", "conversations": TURNS}
    (raw / "llava_next_raw_format_processed.json").write_text(json.dumps([record]))
    assert prepare.main(["llava-next", "--folder", str(tmp_path)]) == 0
    assert f"IMAGE_FOLDER={raw} " in capsys.readouterr().out and not hub


def test_a_download_that_fails_says_that_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fails(*_, **__):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    assert prepare.main(["llava-558k", "--folder", str(tmp_path)]) == 2
    assert "liuhaotian/LLaVA-Pretrain cannot be downloaded" in capsys.readouterr().err


def test_own_data_with_faults_gives_status_1(tmp_path, capsys):
    path = shard(tmp_path / "own.parquet", None, 2, turns=[{"from": "robot", "value": "?"}])
    assert prepare.main(["folder", "--data_path", str(path), "--version", "v1"]) == 1
    out = capsys.readouterr().out
    assert "2 turns" in out and "scripts/finetune.sh" in out and "PROMPT_VERSION=v1" in out
    assert prepare.main(["folder"]) == 2 and prepare.main(["llava-558k", "--data_path", "x"]) == 2


@pytest.mark.slow
def test_zip_and_parquet_train_like_a_json_with_a_folder(tiny, tmp_path):
    records = json.loads((tiny / "data/finetune.json").read_text())
    images = tiny / "data/images"
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for record in records:
            if "image" in record:
                archive.write(images / record["image"], record["image"])
    column = [
        {"bytes": (images / r["image"]).read_bytes(), "path": r["image"]} if "image" in r else None for r in records
    ]
    turns = pa.array([record["conversations"] for record in records])
    for number in range(2):
        half = slice(12 * number, 12 * number + 12)
        shard(tmp_path / f"rows/{number}.parquet", pa.array(column[half], STRUCT), 12, conversations=turns[half])
    runs = {
        "folder": {},
        "zip": {"image_folder": tmp_path / "images.zip"},
        "rows": {"data_path": tmp_path / "rows", "image_folder": None, "dataloader_num_workers": 2},
    }
    found = {}
    for name, options in runs.items():
        train_module.train(flags(tiny, tmp_path / name, 2, max_steps=3, save_strategy="no", **options))
        found[name] = losses(tmp_path / name / "train_log.jsonl")
    assert found["folder"] == found["zip"] == found["rows"] and len(found["folder"]) == 3


# --- row groups -------------------------------------------------------------------------------------------------------


@pytest.fixture
def large_groups(tmp_path, monkeypatch):
    """Two shards with one large row group each, of several types and with a NaN, and one shard with small groups."""
    monkeypatch.setattr("llava.data.row_groups.LARGE_GROUP", 2000)
    monkeypatch.setattr("llava.data.row_groups._GROUP", 600)
    for number in range(3):
        images = pa.array([{"bytes": b, "path": None} if i % 3 else None for i, b in enumerate(BYTES * 3)], STRUCT)
        score = pa.array([float("nan") if i == 5 else i / 7 for i in range(24)])
        shard(tmp_path / f"data/{number}.parquet", images, 24, rows=24 if number else 2, score=score)
    return tmp_path / "data"


def contents(folder: Path) -> dict[str, str]:
    return {file.name: repr(pq.read_table(file).to_pylist()) for file in sorted(folder.glob("[0-9]*"))}


def groups(file: Path) -> int:
    return pq.read_metadata(file).num_row_groups


def test_shards_are_rewritten_with_small_groups_and_the_same_rows(large_groups, capsys):
    before, small = contents(large_groups), (large_groups / "0.parquet").stat()
    schema = pq.read_schema(large_groups / "1.parquet")
    arguments = ["folder", "--data_path", str(large_groups), "--rewrite_shards"]
    assert prepare.main(arguments) == 0
    assert "2 rewritten with small row groups" in capsys.readouterr().out
    assert contents(large_groups) == before
    assert pq.read_schema(large_groups / "1.parquet").equals(schema, check_metadata=True)
    assert [groups(large_groups / f"{i}.parquet") > 6 for i in range(3)] == [True] * 3
    assert (large_groups / "0.parquet").stat() == small
    assert prepare.main(arguments) == 0
    assert "0 rewritten" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["_write", "_compare", "shutil.copymode"])
def test_rewriting_that_is_cut_off_leaves_every_row_and_goes_on(large_groups, monkeypatch, capsys, at):
    before, calls = contents(large_groups), []

    def cut_off(*_):
        calls.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"llava.data.row_groups.{at}", cut_off)
        assert prepare.main(["folder", "--data_path", str(large_groups), "--rewrite_shards"]) == 130
    assert capsys.readouterr().err.endswith("interrupted: rerun the same command to resume\n")
    assert calls and contents(large_groups) == before
    (large_groups / f".1.parquet.{platform.node()}.tmp").write_bytes(b"half of it, left by a process that was killed")
    assert len(row_groups.rewrite_shards(str(large_groups))) == 2
    assert contents(large_groups) == before


def test_rewriting_refuses_what_it_cannot_do(large_groups, tmp_path, monkeypatch, capsys):
    before = contents(large_groups)
    (tmp_path / "a.json").write_text("[]")
    assert prepare.main(["folder", "--data_path", str(tmp_path / "a.json"), "--rewrite_shards"]) == 2
    assert "a.json has no Parquet file; leave the flag out" in capsys.readouterr().err
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing")
    assert prepare.main(["folder", "--data_path", str(tmp_path / "b.parquet"), "--rewrite_shards"]) == 2
    assert "b.parquet cannot be read as Parquet" in capsys.readouterr().err
    arguments = ["folder", "--data_path", str(large_groups), "--rewrite_shards"]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
        assert prepare.main(arguments) == 2
    assert "has 0 MiB free" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(row_groups, "_is_same", lambda *_: False)
        assert prepare.main(arguments) == 2
    assert "1.parquet does not read back the same; the shard is unchanged" in capsys.readouterr().err
    assert contents(large_groups) == before
