"""What the preflight lets through can be trained on, what it does not is named, counted and left out on every rank."""

import io
import json
import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from anyres_data import ANYRES, write_shapes
from data_files import BYTES, GPT, HUMAN, STRUCT, TURNS, encoded, noise, shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from training import build, flags, losses
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.conversation import conv_templates, get_template
from llava.data import parquet_files
from llava.data import preflight as command
from llava.data import preflight as manifest
from llava.data.checks import RowImage
from llava.data.dataset import LazySupervisedDataset
from llava.data.images import ImageStore
from llava.data.parallel import in_processes
from llava.data.preflight import Rules, preflight, usable_records
from llava.data.records import RecordTable, load_records
from llava.train import train as train_module

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
    "number": (b'{"id": ' + b"9" * 5000 + b"}", "json", "line 1, column 1: not valid JSON"),
    "no utf-8": (b'{"id": "\xff\xfe", "conversations": []}', "text", "not UTF-8, or half of"),
    "surrogate": ({"conversations": [HUMAN, {"from": "gpt", "value": "\ud83d"}]}, "text", "half of a surrogate pair"),
    "no object": ([1], "schema", "expected an object, found list"),
    "placeholders": ({"image": ["a.png", "a.png"], "conversations": TURNS}, "placeholders", "1 <image> .* 2 images"),
    "speaker": ({"image": "a.png", "conversations": [HUMAN, {"from": "robot", "value": ""}]}, "turns", "'robot'"),
    "no answer": ({"image": "a.png", "conversations": [HUMAN]}, "turns", "nothing to learn"),
    "missing": ({"id": "m", "image": "b.png", "conversations": TURNS}, "image_missing", "id 'm'.*b.png does not exist"),
    "outside": ({"image": "../a.jsonl", "conversations": TURNS}, "image_outside", "is outside"),
    "no picture": ({"image": "../images", "conversations": TURNS}, "image_unreadable", "not a regular file"),
    "no image": ({"image_path": "a.png", "conversations": TURNS}, "placeholders", "the record has 'image_path'"),
    "tag": ({"image": "a.png", "conversations": [HIDDEN, GPT]}, "placeholders", "1 images, but 2 places"),
    "marker for a picture": (
        {"image": "a.png", "conversations": [{"from": "human", "value": "<img>?"}, GPT]},
        "placeholders", "0 <image> placeholders but 1 images; '<img>' is only text here: write <image> in its place",
    ),
    "marker alone": (
        {"conversations": [{"from": "human", "value": "<|image_pad|>?"}, GPT]}, "other_marker",
        "'<.image_pad.>' is only text here; write <image> where a picture belongs",
    ),
    "picture as text": (
        {"conversations": [{"from": "human", "value": "data:image/png;base64,AAAA"}, GPT]}, "other_marker", "data",
    ),
    "empty path": ({"image": "", "conversations": TEXT}, "schema", "'' is not a path"),
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
    is_fault = kind in manifest.FAULTS
    assert len(usable_records(table, found, "skip", "")) == 2 - is_fault


def test_a_json_file_that_is_not_utf8_is_read_and_the_record_named(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[{"id": "ok", "conversations": [1]}, {"id": "caf\xe9", "conversations": [1]}]')
    table = load_records(str(tmp_path / "a.json"), check=False)
    assert [table.problem(i).kind for i in range(2)] == ["schema", "text"]
    with pytest.raises(ValueError, match="a.json: record 1 .id 'caf.*not UTF-8, or half"):
        load_records(str(tmp_path / "a.json"))


def test_messages_about_several_files_say_which(tmp_path, pictures, tokenizer):
    gone = {"id": "x", "image": "b.png", "conversations": TURNS}
    jsonl(tmp_path / "a.jsonl", [{"id": "x", "conversations": TEXT}])
    jsonl(tmp_path / "b.jsonl", [{"id": "y", "conversations": TEXT}, gone])
    table = load_records(f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}", check=False)
    second = f"{tmp_path / 'b.jsonl'}: record 1 (id 'x'): "
    with pytest.raises(FileNotFoundError, match=re.escape(second)):
        samples(table, pictures, tokenizer, "chatml", "assistant")[2]


def test_the_template_decides_which_order_of_speakers_is_a_fault(tmp_path, pictures):
    twice = {"image": "a.png", "conversations": [HUMAN, GPT, GPT]}
    table = jsonl(tmp_path / "a.jsonl", [twice, {"conversations": TEXT}])
    for version, masking, expected in (
        ("chatml", "assistant", []),
        ("v1", "assistant", [0]),
        ("plain", "upstream", [0, 1]),
        ("qwen_1_5", "upstream", []),
        ("llava_llama_3", "upstream", []),
    ):
        found, _ = preflight(table, pictures, rules(version, masking), show_progress=False)
        assert found.bad_records() == expected, version


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_processes_find_what_one_process_finds(tmp_path, pictures, monkeypatch):
    good = {"image": "a.png", "conversations": TURNS}
    lines = [good | {"id": i // 2} if i % 7 else {"id": i} for i in range(300)]
    table = jsonl(tmp_path / "a.jsonl", lines)
    monkeypatch.setattr(manifest, "_PIECE", 16)
    here, sizes = manifest._checked(table, pictures, rules(), False)
    monkeypatch.setattr(manifest, "_WORTH_PROCESSES", 1)
    again, same = manifest._checked(table, pictures, rules(), False)
    assert again == here and np.array_equal(sizes, same) and sizes[1].tolist() == [9, 7] and not sizes[7].any()
    assert here.bad_records() == list(range(0, 300, 7)) and here.counts["with_images"] == 300 - 43


def test_a_second_preflight_reads_no_picture_and_a_full_one_serves_both(tmp_path, pictures, monkeypatch):
    table = jsonl(tmp_path / "a.jsonl", [{"image": "a.png", "conversations": TURNS}])
    first = preflight(table, pictures, rules(full_decode=True), show_progress=False)
    monkeypatch.setattr(manifest, "_checked", lambda *_: pytest.fail("checked again"))
    again = load_records(str(tmp_path / "a.jsonl"), check=False)
    assert preflight(again, ImageStore(tmp_path / "images"), rules(), show_progress=False) == first


@pytest.mark.parametrize("change", ["data", "folder", "damage"])
def test_other_data_other_images_or_a_damaged_manifest_are_checked_again(tmp_path, pictures, change):
    table = jsonl(tmp_path / "a.jsonl", [{"image": "a.png", "conversations": TURNS}])
    _, path = preflight(table, pictures, rules(), show_progress=False)
    if change == "data":
        table = jsonl(tmp_path / "a.jsonl", [{"image": "b.png", "conversations": TURNS}])
    elif change == "folder":
        (tmp_path / "empty").mkdir()
        pictures = ImageStore(tmp_path / "empty")
    else:
        path.write_bytes(path.read_bytes()[:-20])
    found, again = preflight(table, pictures, rules(), show_progress=False)
    assert (again == path) == (change == "damage")
    assert found.bad_records() == ([] if change == "damage" else [0])


def counted(monkeypatch) -> list[int]:
    """A list that grows by one at every check."""
    done = []
    real = manifest._checked
    monkeypatch.setattr(manifest, "_checked", lambda *arguments: done.append(1) or real(*arguments))
    return done


def test_a_remembered_result_says_so_and_can_be_asked_for_again(tmp_path, pictures, capsys, monkeypatch):
    done = counted(monkeypatch)
    jsonl(tmp_path / "a.jsonl", [{"image": "a.png", "conversations": TURNS}])
    options = ["--data_path", str(tmp_path / "a.jsonl"), "--image_folder", str(tmp_path / "images")]
    assert command.main(options) == 0
    first = re.search(r"checked   (.+\d\d:\d\d:\d\d \d{4})\n", capsys.readouterr().out)
    assert first and command.main(options) == 0
    assert (
        f"checked   {first[1]}, remembered; remove {tmp_path}/.llava_cache/" in capsys.readouterr().out
        and len(done) == 1
    )
    (tmp_path / "images/a.png").write_bytes(b"broken in its place")  # which no folder's stamp shows
    assert command.main(options) == 0
    assert "remembered" in capsys.readouterr().out
    for file in (tmp_path / ".llava_cache").glob("*.preflight.npz"):
        file.unlink()
    assert command.main(options) == 1
    again = capsys.readouterr().out
    assert "1 image_unreadable" in again and ", remembered" not in again
    assert command.main(options) == 1 and len(done) == 2


def test_a_picture_repaired_in_its_place_is_noticed(tmp_path, pictures):
    good = (tmp_path / "images/a.png").read_bytes()
    (tmp_path / "images/a.png").write_bytes(b"broken")
    lines = [{"image": "a.png", "conversations": TURNS}, {"conversations": TEXT}]
    table = jsonl(tmp_path / "a.jsonl", lines)
    assert preflight(table, pictures, rules(), show_progress=False)[0].bad_records() == [0]
    (tmp_path / "images/a.png").write_bytes(good)
    assert preflight(table, pictures, rules(), show_progress=False)[0].bad_records() == []


def test_a_table_without_records_is_another_table_and_keeps_other_names(tmp_path, pictures, tokenizer):
    lines = [{"id": i, "conversations": TEXT if i != 1 else []} for i in range(4)]
    lines.append({"id": "gone", "image": "b.png", "conversations": TURNS})
    table = jsonl(tmp_path / "a.jsonl", lines)
    kept = table.without([1])
    assert [record["id"] for record in kept] == [0, 2, 3, "gone"] and kept.left_out == 1
    assert len({table.key, kept.key, table.without([2]).key}) == 3 and table.without([]) is table
    with pytest.raises(FileNotFoundError, match="record 4 .id 'gone'"):
        samples(kept, pictures, tokenizer, "chatml", "assistant")[3]
    counted = samples(kept, pictures, tokenizer, "chatml", "assistant").modality_lengths()
    assert len(counted) == 4


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_lists_every_fault_and_says_so_by_its_status(tmp_path, pictures, capsys):
    lines = [{"id": f"n{i}", "image": f"{i}.png", "conversations": TURNS} for i in range(25)]
    jsonl(tmp_path / "a.jsonl", [*lines, {"image": "a.png", "conversations": TURNS}])
    data = ["--data_path", str(tmp_path / "a.jsonl"), "--image_folder", str(tmp_path / "images")]
    assert command.main([*data, "--version", "chatml"]) == 1
    short = capsys.readouterr().out
    assert "26: 26 with images" in short and "25 image_missing" in short and short.count("does not exist") == 10
    assert command.main([*data, "--version", "chatml", "--list"]) == 1
    assert capsys.readouterr().out.count("does not exist; check") == 25
    assert command.main(["--data_path", str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json: no such file" in capsys.readouterr().err


def test_rotated_pictures_are_counted_or_trained_as_if_upright(tmp_path, tiny, capsys):
    upright, turned = (write_shapes(tmp_path / name) for name in ("upright", "turned"))
    exif = Image.Exif()
    exif[274] = 6
    files = sorted(Path(turned["image_folder"]).iterdir())
    for file in files:
        with Image.open(file) as picture:
            picture.transpose(Image.Transpose.ROTATE_90).save(file, exif=exif)
    data = [word for name, value in turned.items() for word in (f"--{name}", str(value))]
    assert command.main([*data, "--version", "chatml"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"warnings  10 turned\n  turned:\n.*--image_orientation exif turns it upright", out)
    assert command.main([*data, "--version", "chatml", "--image_orientation", "exif"]) == 0
    assert "warnings  none" in capsys.readouterr().out
    options = {"version": "chatml", "image_orientation": "exif", **ANYRES}
    (model, here), (_, there) = (
        build(flags(tiny, tmp_path / "run", 2, **shapes, **options)) for shapes in (turned, upright)
    )
    assert model.config.image_orientation == "exif"
    here, there = here.train_dataset, there.train_dataset
    assert here.whole_lengths().tolist() == there.whole_lengths().tolist()
    for index in range(len(here)):
        found, expected = (list(data[index].get("images", [])) for data in (here, there))
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))


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


SOME = [BYTES[0], None, BYTES[2], BYTES[3], None, None, BYTES[6]]
COLUMNS = {
    "struct": pa.array([b and {"bytes": b, "path": f"{i}.png"} for i, b in enumerate(SOME)], STRUCT),
    "struct without paths": pa.array([b and {"bytes": b, "path": None} for b in SOME], STRUCT),
    "struct of nulls": pa.array([{"bytes": b, "path": None} for b in SOME], STRUCT),
    "only bytes in a struct": pa.array([b and {"bytes": b} for b in SOME], pa.struct([("bytes", pa.binary())])),
    "bytes": pa.array(SOME, pa.binary()),
    "large bytes": pa.array(SOME, pa.large_binary()),
}


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
def test_rows_with_bytes_are_told_from_text_only_rows(tmp_path, column):
    path = shard(tmp_path / "a.parquet", COLUMNS[column], 7)
    table = load_records(str(path))
    images = [record.get("image") for record in table]
    assert images == [RowImage(str(path), i) if data else None for i, data in enumerate(SOME)]
    store = ImageStore(None)
    for image, data in zip(images, SOME, strict=True):
        if data:
            assert np.array_equal(np.asarray(store.open(image)), np.asarray(Image.open(io.BytesIO(data))))
    assert table[0] == {"id": "a-0", "data_source": "x", "conversations": TURNS, "image": images[0]}
    assert not preflight(table, store, rules(), show_progress=False)[0].faults
    assert sum(p.stat().st_size for p in table.paths) < 10_000


@pytest.mark.slow
def test_rows_may_name_their_images(tmp_path):
    by_path = pa.array([{"bytes": None, "path": "a.png"}, {"bytes": BYTES[0], "path": "b.png"}, None], STRUCT)
    table = load_records(str(shard(tmp_path / "a.parquet", by_path, 3)))
    assert [record.get("image") for record in table] == ["a.png", RowImage(str(tmp_path / "a.parquet"), 1), None]
    for kind, names in ((pa.string(), ["a.png", None]), (pa.list_(pa.string()), [["a.png"], None])):
        table = load_records(str(shard(tmp_path / "b.parquet", pa.array(names, kind), 2)))
        assert [record.get("image") for record in table] == names


LISTS = {
    "paths": lambda names: (pa.list_(pa.string()), names),
    "structs": lambda names: (
        pa.list_(STRUCT), names and [{"bytes": BYTES[int(name[0])], "path": name} for name in names]
    ),
    "structs without paths": lambda names: (
        pa.list_(pa.struct([("bytes", pa.binary())])), names and [{"bytes": BYTES[int(name[0])]} for name in names]
    ),
    "large lists": lambda names: (
        pa.large_list(STRUCT), names and [{"bytes": BYTES[int(name[0])], "path": None} for name in names]
    ),
    "bytes": lambda names: (pa.list_(pa.binary()), names and [BYTES[int(name[0])] for name in names]),
    "bytes or paths": lambda names: (
        pa.list_(STRUCT),
        names and [{"bytes": BYTES[int(name[0])] if int(name[0]) % 2 else None, "path": name} for name in names],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("column", ["image", "images"])
@pytest.mark.parametrize("kind", LISTS)
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


def test_shards_of_a_folder_or_pattern_are_one_table_in_order(tmp_path, tokenizer, monkeypatch):
    for number in range(6):
        images = pa.array([{"bytes": data, "path": None} for data in BYTES[:4]], STRUCT)
        shard(tmp_path / f"data/train-{number:05d}-of-00006.parquet", images, 4)
    tables = [
        load_records(name)
        for name in (str(tmp_path / "data"), str(tmp_path / "data/*.parquet"), str(tmp_path / "d*"))
    ]  # fmt: skip
    assert len({table.key for table in tables}) == 1 and len(tables[0]) == 24
    assert tables[0][13]["id"] == "train-00003-of-00006-1" and tables[0][13]["image"].row == 1
    found, _ = preflight(tables[0], ImageStore(None), rules(full_decode=True), show_progress=False)
    assert not found.faults and found.counts["images"] == 24
    data = samples(tables[0], ImageStore(None), tokenizer, "chatml", "assistant")
    assert data[23]["images"].shape == (1, 3, 8, 8) and (data.modality_lengths() > 0).all()


def test_changed_image_bytes_of_equal_size_are_checked_again(tmp_path):
    images = pa.array([BYTES[0]], pa.binary())
    path = shard(tmp_path / "a.parquet", images, 1)
    table = load_records(str(path), check=False)
    _, before = preflight(table, ImageStore(None), rules(), show_progress=False)
    content = path.read_bytes()
    time.sleep(0.02)
    path.write_bytes(content.replace(BYTES[0][:30], b"x" * 30) if BYTES[0][:30] in content else content)
    table = load_records(str(path), check=False)
    _, after = preflight(table, ImageStore(None), rules(), show_progress=False)
    assert before != after


WRONG = {
    "two columns": (
        {"conversations": pa.array([TURNS]), "image": pa.array(["a"]), "images": pa.array([["a"]])},
        "columns 'image' and 'images'; keep the one",
    ),
    "no conversations": ({"id": pa.array([1])}, "no column 'conversations' or 'messages'; it has id"),
    "image of numbers": ({"conversations": pa.array([TURNS]), "image": pa.array([1])}, "column 'image' is int64"),
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
    for damage in (data[:-20], data[:100], b"", b"PAR1" + data[4:60]):
        (tmp_path / "b.parquet").write_bytes(damage)
        with pytest.raises(ValueError, match="b.parquet: cannot be read as Parquet"):
            load_records(str(tmp_path / "b.parquet"))


@pytest.mark.parametrize("column", ["structs", "lists"])
def test_texts_are_read_without_the_images_bytes(tmp_path, monkeypatch, column):
    found = [{"bytes": random.randbytes(200_000), "path": None} for _ in range(20)]
    images = pa.array([*found, None], STRUCT)
    if column == "lists":
        images = pa.array([*([one] for one in found[1:]), [], None], pa.list_(STRUCT))
    path = shard(tmp_path / "a.parquet", images, 21, rows=7)
    asked = []
    real = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: asked.extend(k["columns"]) or real(*a, **k))
    assert len(list(parquet_files.read_rows(path))) == 21
    assert asked and not any(name == "image" or name.endswith("bytes") for name in asked)


def _ends_at_3(_: None, piece: int) -> int:
    if piece == 3:
        os._exit(9)
    return piece


def test_a_killed_process_is_reported_with_what_it_was_working_on():
    with pytest.raises(ChildProcessError, match="a process working on [0-3], or shortly after it, was killed"):
        list(in_processes(_ends_at_3, None, range(8)))


# --- any record -------------------------------------------------------------------------------------------------------

words = st.sampled_from(
    ["", " ", "hi", "<image>", "<image>\n", "\x00", "é 😀", "<|im_end|>", "</s>", "[/INST] ", "\n\n"]
)
texts = st.lists(words, max_size=4).map("".join)
turns = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "system", "bot"]), "value": texts})
odd = st.recursive(st.none() | st.integers() | texts, lambda inner: st.lists(inner, max_size=2))
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "image", "video"])}, optional={"text": texts | odd, "path": texts | odd}
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "assistant", "tool"]) | odd,
        "content": texts | st.lists(parts) | odd,
    },
    optional={"from": odd, "tool_calls": odd, "weight": odd},
)
records = st.fixed_dictionaries(
    {"conversations": st.lists(turns | turns | messages | odd, max_size=5) | odd},
    optional={
        "messages": st.none() | st.lists(messages, max_size=3),
        "id": odd,
        "image": st.sampled_from(["a.png", ["a.png"], ["a.png", "a.png"], "b.png", [], "", "a\0"]) | odd,
    },
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some=st.lists(records | odd, min_size=1, max_size=4),
    version=st.sampled_from(sorted(conv_templates)),
    data=st.data(),
)
def test_what_is_let_through_becomes_a_sample_under_every_template(tmp_path_factory, tokenizer, some, version, data):
    folder = tmp_path_factory.getbasetemp() / "any"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "images/a.png").write_bytes(encoded(noise()))
    store = ImageStore(folder / "images")
    masking = data.draw(st.sampled_from(["assistant", "upstream"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llava.utils.digests._CLOCK_STEP", 1e9)  # no stamps: the file is written again at once
        table = jsonl(folder / "any.jsonl", some)
        found, _ = manifest._checked(table, store, rules(version, masking, full_decode=True), False)
    if len(found.bad_records()) == len(table):
        return
    kept = usable_records(table, found, "skip", "")
    dataset = samples(kept, store, tokenizer, version, masking)
    if masking == "upstream" and version_is_not_upstreams(version):
        return
    for index in range(len(kept)):
        assert len(dataset[index]["input_ids"])


def version_is_not_upstreams(version: str) -> bool:
    from llava.data.preprocess import _UPSTREAM_STYLES

    return get_template(version).sep_style not in _UPSTREAM_STYLES


@pytest.mark.slow
@pytest.mark.parametrize(("target", "count"), [("bytes", 60), ("keys", 80)])
def test_the_fuzz_targets_find_nothing_in_their_first_cases(tmp_path, target, count):
    import fuzz_data

    cases, outcomes = fuzz_data.run(tmp_path, seed=1, seconds=60, cases=count, target=target)
    assert cases == count and outcomes["samples"] and outcomes["refused"] and outcomes["faults"]
    assert target == "bytes" or outcomes["with_pictures"] > count // 2


def test_a_shard_that_ends_the_process_that_reads_it_is_named(tmp_path, monkeypatch):
    path = shard(tmp_path / "a.parquet", None, 2)
    monkeypatch.setattr("llava.data.records.parquet_digest", lambda _: os._exit(134))
    with pytest.raises(ChildProcessError, match="a.parquet"):
        load_records(str(path))
