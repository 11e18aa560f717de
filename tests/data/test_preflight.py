"""What the preflight lets through can be trained on, what it does not is named, counted and left out on every rank."""

import json
import random
import re
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import BYTES, GPT, HUMAN, STRUCT, TURNS, encoded, noise, shard
from training import flags, losses
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.conversation import get_template
from llava.data import parquet_files
from llava.data import preflight as command
from llava.data.dataset import LazySupervisedDataset
from llava.data.images import ImageStore
from llava.data.preflight import Rules, preflight, usable_records
from llava.data.records import RecordTable, load_records
from llava.train import train as train_module
from tests.nightly import fuzz_data

pytestmark = pytest.mark.usefixtures("files_count_as_old")

TEXT = [{"from": "human", "value": "?"}, GPT]


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(encoded(noise()))
    return ImageStore(tmp_path / "images")


def rules(version: str = "chatml", label_masking: str = "assistant", full_decode: bool = False) -> Rules:
    return Rules(get_template(version), label_masking, full_decode)


def jsonl(path: Path, lines: list[object]) -> RecordTable:
    """A table of records, or of lines as they are."""
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(data) + b"\n")
    return load_records(str(path), check=False)


def samples(table: RecordTable, store: ImageStore, tokenizer, version: str, masking: str) -> LazySupervisedDataset:
    processor = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    return LazySupervisedDataset(table, tokenizer, version, processor, store, "square", 2, 10_000, masking, False)


# --- kinds ------------------------------------------------------------------------------------------------------------

HIDDEN = {"from": "human", "value": "<imaQA_GT_caption_based_noisyge> <image>"}  # upstream takes that tag out
CASES = {
    "no json": (b'{"id": 1', "json", "line 1, column 9: not valid JSON: Expecting"),
    "no utf-8": (b'{"id": "\xff\xfe", "conversations": []}', "text", "not UTF-8, or half of"),
    "surrogate": ({"conversations": [HUMAN, {"from": "gpt", "value": "\ud83d"}]}, "text", "half of a surrogate pair"),
    "placeholders": ({"image": ["a.png", "a.png"], "conversations": TURNS}, "placeholders", "1 <image> .* 2 images"),
    "no answer": ({"image": "a.png", "conversations": [HUMAN]}, "turns", "nothing to learn"),
    "missing": ({"id": "m", "image": "b.png", "conversations": TURNS}, "image_missing", "id 'm'.*b.png does not exist"),
    "outside": ({"image": "../a.jsonl", "conversations": TURNS}, "image_outside", "is outside"),
    "tag": ({"image": "a.png", "conversations": [HIDDEN, GPT]}, "placeholders", "1 images, but 2 places"),
    "marker for a picture": (
        {"image": "a.png", "conversations": [{"from": "human", "value": "<img>?"}, GPT]},
        "placeholders", "0 <image> placeholders but 1 images; '<img>' is only text here: write <image> in its place",
    ),
    "marker alone": (
        {"conversations": [{"from": "human", "value": "<|image_pad|>?"}, GPT]}, "other_marker",
        "'<.image_pad.>' is only text here; write <image> where a picture belongs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_fault_has_its_kind_and_names_file_and_record(tmp_path, pictures, case):
    line, kind, message = CASES[case]
    table = jsonl(tmp_path / "a.jsonl", [line, {"id": "good", "image": "a.png", "conversations": TURNS}])
    masking = "upstream" if case == "tag" else "assistant"
    found, path = preflight(table, pictures, rules(label_masking=masking), show_progress=False)
    listed = found.faults | found.warnings
    assert list(listed) == [kind] and len(listed[kind]) == 1 and path.is_file()
    index, text = listed[kind][0]
    assert index == 0 and text.startswith(f"{tmp_path / 'a.jsonl'}: record 0")
    assert re.search(message, text)
    is_fault = kind in command.FAULTS
    assert len(usable_records(table, found, "skip", "")) == 2 - is_fault


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_processes_find_what_one_process_finds(tmp_path, pictures, monkeypatch):
    good = {"image": "a.png", "conversations": TURNS}
    lines = [good | {"id": i // 2} if i % 7 else {"id": i} for i in range(300)]
    table = jsonl(tmp_path / "a.jsonl", lines)
    monkeypatch.setattr(command, "_PIECE", 16)
    here, sizes = command._checked(table, pictures, rules(), False)
    monkeypatch.setattr(command, "_WORTH_PROCESSES", 1)
    again, same = command._checked(table, pictures, rules(), False)
    assert again == here and np.array_equal(sizes, same) and sizes[1].tolist() == [9, 7] and not sizes[7].any()
    assert here.bad_records() == list(range(0, 300, 7)) and here.counts["with_images"] == 300 - 43


def test_other_images_are_checked_again(tmp_path, pictures):
    table = jsonl(tmp_path / "a.jsonl", [{"image": "a.png", "conversations": TURNS}])
    assert preflight(table, pictures, rules(), show_progress=False)[0].bad_records() == []
    (tmp_path / "empty").mkdir()
    assert preflight(table, ImageStore(tmp_path / "empty"), rules(), show_progress=False)[0].bad_records() == [0]


def test_a_remembered_result_says_so_and_is_made_again_where_it_is_stale(tmp_path, pictures, capsys, monkeypatch):
    done, real = [], command._checked
    monkeypatch.setattr(command, "_checked", lambda *arguments: done.append(1) or real(*arguments))
    jsonl(tmp_path / "a.jsonl", [{"image": "a.png", "conversations": TURNS}])
    options = ["--data_path", str(tmp_path / "a.jsonl"), "--image_folder", str(tmp_path / "images")]
    good = (tmp_path / "images/a.png").read_bytes()

    def checked(*more):
        status, checks = command.main([*options, *more]), len(done)
        done.clear()
        return status, checks, ", remembered; remove " in capsys.readouterr().out

    assert checked() == (0, 1, False)
    assert checked() == (0, 0, True)
    (tmp_path / "images/a.png").write_bytes(good[:-60])  # which its header does not show, and no folder's stamp
    assert checked() == (0, 0, True)
    assert checked("--full_decode") == (1, 1, False)
    (tmp_path / "images/a.png").write_bytes(good)
    assert [checked(), checked("--full_decode")] == [(0, 1, False)] * 2
    assert checked() == (0, 0, True)  # the full one serves both


def test_a_table_without_records_is_another_table_and_keeps_other_names(tmp_path, pictures, tokenizer):
    lines = [{"id": i, "conversations": TEXT if i != 1 else []} for i in range(4)]
    lines.append({"id": "gone", "image": "b.png", "conversations": TURNS})
    table = jsonl(tmp_path / "a.jsonl", lines)
    kept = table.without([1])
    assert [record["id"] for record in kept] == [0, 2, 3, "gone"] and kept.left_out == 1
    assert len({table.key, kept.key, table.without([2]).key}) == 3 and table.without([]) is table
    with pytest.raises(FileNotFoundError, match="record 4 .id 'gone'"):
        samples(kept, pictures, tokenizer, "chatml", "assistant")[3]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_refuses_or_skips_faulty_records_and_says_where_they_are(tiny, tmp_path, caplog):
    records = json.loads((tiny / "data/finetune.json").read_text())
    bad = [
        dict(records[0], id="gone", image="gone.png"),
        dict(records[1], id="robot", conversations=[{"from": "robot"}]),
        {"image_path" if key == "image" else key: value for key, value in records[0].items()} | {"id": "renamed"},
    ]
    data = tmp_path / "data.json"
    data.write_text(json.dumps([bad[0], *records[:6], bad[1], *records[6:], bad[2]]))
    options = {"data_path": data, "max_steps": 2, "save_strategy": "no"}
    with pytest.raises(ValueError, match="(?s)3 of 27 records.*1 schema, 1 pl.*1 image_mi.*id 'gone'.*--list") as error:
        train_module.train(flags(tiny, tmp_path / "refused", 2, **options))
    assert "python -m llava.data.preflight --data_path" in str(error.value)
    train_module.train(flags(tiny, tmp_path / "skipped", 2, on_bad_record="skip", **options))
    lines = [json.loads(line) for line in (tmp_path / "skipped/quarantine.jsonl").read_text().splitlines()]
    assert sorted((line["record"], line["kind"]) for line in lines) == [
        (0, "image_missing"), (7, "schema"), (26, "placeholders")
    ]  # fmt: skip
    assert json.loads(lines[2]["text"])["id"] == "gone" and "the record has 'id', 'image_path'" in lines[1]["fault"]
    assert "3 records were left out" in caplog.text
    (tmp_path / "clean.json").write_text(json.dumps(records))
    options["data_path"] = tmp_path / "clean.json"
    train_module.train(flags(tiny, tmp_path / "clean", 2, **options))
    logs = [losses(tmp_path / name / "train_log.jsonl") for name in ("skipped", "clean")]
    assert logs[0] == logs[1]  # nothing stands in for what was left out


# --- Parquet ----------------------------------------------------------------------------------------------------------


LISTS = {
    "large lists": lambda names: (
        pa.large_list(STRUCT), names and [{"bytes": BYTES[int(name[0])], "path": None} for name in names]
    ),
    "bytes or paths": lambda names: (
        pa.list_(STRUCT),
        names and [{"bytes": BYTES[int(name[0])] if int(name[0]) % 2 else None, "path": name} for name in names],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "column"), list(zip(LISTS, ["image", "images"], strict=True)))
def test_a_column_of_lists_gives_every_picture_in_its_place(tmp_path, tokenizer, kind, column):
    (tmp_path / "images").mkdir()
    for number, data in enumerate(BYTES):
        (tmp_path / f"images/{number}.png").write_bytes(data)
    names = [["3.png"], None, ["1.png", "2.png", "0.png"], [], ["4.png", "4.png"], None, ["7.png"]]
    made = [LISTS[kind](row) for row in names]
    images = pa.array([row for _, row in made], made[0][0])
    counts = [[{"from": "human", "value": "<image>" * len(row or ()) + "?"}, GPT] for row in names]
    pq.write_table(pa.table({"conversations": counts, column: images}), tmp_path / "a.parquet", row_group_size=3)
    table, store = load_records(str(tmp_path / "a.parquet")), ImageStore(tmp_path / "images")
    assert not preflight(table, store, rules(full_decode=True), show_progress=False)[0].faults
    data = samples(table, store, tokenizer, "chatml", "assistant")
    plain = jsonl(tmp_path / "a.jsonl", [{"images": r, "conversations": t} for r, t in zip(names, counts, strict=True)])
    expected = samples(plain, store, tokenizer, "chatml", "assistant")
    for index in range(len(names)):
        assert len(data[index].get("images", [])) == len(names[index] or [])
        assert data[index].keys() == expected[index].keys()
        assert all(torch.equal(value, expected[index][key]) for key, value in data[index].items() if key != "index")


def test_changed_image_bytes_of_equal_size_are_checked_again(tmp_path):
    path, rows = tmp_path / "a.parquet", pa.table({"conversations": [TURNS], "image": [b"picture" * 9]})
    pq.write_table(rows, path, compression="none", use_dictionary=False, write_statistics=False)
    before = preflight(load_records(str(path), check=False), ImageStore(None), rules(), show_progress=False)[1]
    time.sleep(0.02)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"picture" * 9, b"another" * 9))
    assert path.read_bytes() != content
    assert preflight(load_records(str(path), check=False), ImageStore(None), rules(), show_progress=False)[1] != before


WRONG = {
    "two columns": (
        {"conversations": pa.array([TURNS]), "image": pa.array(["a"]), "images": pa.array([["a"]])},
        "columns 'image' and 'images'; keep the one",
    ),
    "no conversations": ({"id": pa.array([1])}, "no column 'conversations' or 'messages'; it has id"),
    "image struct": (
        {"conversations": pa.array([TURNS]), "image": pa.array([{"bytes": "text"}])}, "column 'image' is struct"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_missing_columns_and_wrong_types_are_named(tmp_path, case):
    columns, message = WRONG[case]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=f"(?s)a.parquet: .*{message}"):
        load_records(str(tmp_path / "a.parquet"))


@pytest.mark.slow
def test_faulty_rows_are_named_and_a_damaged_shard_is_refused(tmp_path, pictures):
    kind = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
    good, null = [tuple(turn.values()) for turn in TEXT], [("human", None), ("gpt", "x")]
    rows = [None, [], null, good]
    turns = pa.array([row and [dict(zip(("from", "value"), turn, strict=True)) for turn in row] for row in rows], kind)
    pq.write_table(pa.table({"conversations": turns}), tmp_path / "a.parquet")
    table = load_records(str(tmp_path / "a.parquet"), check=False)
    assert [table.problem(i) and table.problem(i).kind for i in range(4)] == ["schema", "schema", "schema", None]
    bad = pa.array([b"\xff\xfe", b"ok", b"ok", b"ok"]).view(pa.string())
    pq.write_table(pa.table({"conversations": turns, "id": bad}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="c.parquet: cannot be read as Parquet .*utf-8"):
        load_records(str(tmp_path / "c.parquet"), check=False)
    data = (tmp_path / "a.parquet").read_bytes()
    for damage in (data[:-20], b""):
        (tmp_path / "b.parquet").write_bytes(damage)
        with pytest.raises(ValueError, match="b.parquet: cannot be read as Parquet"):
            load_records(str(tmp_path / "b.parquet"))


def test_texts_are_read_without_the_images_bytes(tmp_path, monkeypatch):
    images = [[{"bytes": random.randbytes(200_000), "path": None}] for _ in range(19)]
    path = shard(tmp_path / "a.parquet", pa.array([*images, [], None], pa.list_(STRUCT)), 21, rows=7)
    asked = []
    real = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: asked.extend(k["columns"]) or real(*a, **k))
    assert len(list(parquet_files.read_rows(path))) == 21
    assert asked and not any(name == "image" or name.endswith("bytes") for name in asked)


# --- any record -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("target", "count"), [("bytes", 60), ("keys", 80)])
def test_what_is_let_through_of_damaged_data_becomes_a_sample(tmp_path, target, count):
    cases, outcomes = fuzz_data.run(tmp_path, seed=1, seconds=60, cases=count, target=target)
    assert cases == count and outcomes["samples"] and outcomes["refused"] and outcomes["faults"]
    assert target == "bytes" or outcomes["with_pictures"] > count // 2
