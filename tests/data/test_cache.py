"""Converted records and measured lengths: equal to what they were made from, made once, never stale, never half."""

import json
import logging
import os
import pickle
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

import llava.data.records as records_module
from llava.constants import IMAGE_TOKEN_INDEX
from llava.data import dataset as dataset_module
from llava.data.dataset import LazySupervisedDataset
from llava.data.records import RecordTable, load_records


def record(index: int, text: str = "yes", image: object = None) -> dict:
    placeholders = "<image>" * (len(image) if isinstance(image, list) else image is not None)
    turns = [{"from": "human", "value": f"{placeholders}{index}?"}, {"from": "gpt", "value": text}]
    return {"id": index, "conversations": turns} | ({} if image is None else {"image": image})


def write(path: Path, records: list[dict], **options) -> Path:
    path.write_text(json.dumps(records, **options), encoding="utf-8")
    return path


@pytest.fixture
def old_clock(files_count_as_old):
    return lambda: time.sleep(0.02)


def dataset(tokenizer, records, **options) -> LazySupervisedDataset:
    settings = {"version": "chatml", "image_processor": None, "image_folder": None, "image_aspect_ratio": "square"}
    settings |= {"num_visual_tokens": 4, "model_max_length": 60, "show_progress": False} | options
    return LazySupervisedDataset(records, tokenizer, **settings)


RECORDS = [
    record(0),
    record(1, 'é 图片 \U0001f600 \\ " \u2028 \x00', image="a b.png"),
    record(2, image=["a.png", "b.png"]),
    {"extra": {"kept": [1, 2.5, None, True]}} | record(3),
    {k: v for k, v in record(4).items() if k != "id"},
    record(5) | {"id": "text", "image": None},
    record(6, "last"),
]


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"separators": (",", ":")}], ids=["plain", "indented", "dense"])
def test_table_equals_the_json(tmp_path, monkeypatch, options):
    monkeypatch.setattr(records_module, "_ROWS", 3)
    path = write(tmp_path / "a.json", RECORDS, **options)
    table = load_records(str(path))
    assert isinstance(table, RecordTable) and len(table) == len(RECORDS)
    assert list(table) == json.loads(path.read_text()) == RECORDS
    assert table[-1] == RECORDS[-1] and table[1:4] == RECORDS[1:4]
    with pytest.raises(IndexError):
        table[len(RECORDS)]


def test_files_keep_their_order_and_pickling_takes_only_paths_along(tmp_path):
    first, second = write(tmp_path / "a.json", RECORDS[:3]), tmp_path / "b.jsonl"
    second.write_text("".join(json.dumps(r) + "\n" for r in RECORDS[3:]))
    table = load_records(f"{first}, {second}")
    assert list(table) == RECORDS
    packed = pickle.dumps(table)
    assert len(packed) < 1000 and list(pickle.loads(packed)) == RECORDS


def test_a_second_start_converts_nothing(tmp_path, monkeypatch, old_clock):
    path = write(tmp_path / "a.json", RECORDS)
    old_clock()
    load_records(str(path))
    monkeypatch.setattr(records_module, "_convert", None)
    assert list(load_records(str(path))) == RECORDS


def test_a_changed_file_is_never_stale_even_with_its_old_size_and_time(tmp_path, old_clock):
    path = write(tmp_path / "a.json", [record(1, "aaa")])
    old_clock()
    before = path.stat()
    assert load_records(str(path))[0]["conversations"][1]["value"] == "aaa"
    write(path, [record(1, "bbb")])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert load_records(str(path))[0]["conversations"][1]["value"] == "bbb"
    path.unlink()
    write(path, [record(1, "aaa")])
    assert load_records(str(path))[0]["conversations"][1]["value"] == "aaa"


@pytest.mark.parametrize("damage", ["cut", "emptied", "overwritten", "altered"])
def test_a_damaged_cache_is_reported_and_made_again(tmp_path, tokenizer, caplog, damage):
    path = write(tmp_path / "a.json", RECORDS)
    expected = dataset(tokenizer, load_records(str(path))).modality_lengths().tolist()
    made = [*(tmp_path / ".llava_cache").glob("*.arrow"), *(tmp_path / ".llava_cache").glob("*.npy")]
    assert len(made) == 2
    for file in made:
        content = file.read_bytes()
        altered = content.replace(b"yes", b"not", 1) if b"yes" in content else content[:-1] + bytes([content[-1] ^ 1])
        changed = {"cut": content[:-5], "emptied": b"", "overwritten": b"x" * 100, "altered": altered}
        file.write_bytes(changed[damage])
    table = load_records(str(path))
    assert list(table) == RECORDS
    assert dataset(tokenizer, table).modality_lengths().tolist() == expected
    for file in made:
        assert f"{file} is damaged" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_conversion_leaves_nothing_half(tmp_path, monkeypatch, error):
    path = write(tmp_path / "a.json", RECORDS)
    read = records_module.read_json

    def stops(*arguments):
        yield next(read(*arguments))
        raise error("stop")

    monkeypatch.setattr(records_module, "read_json", stops)
    with pytest.raises(error):
        load_records(str(path))
    left = {file.suffix for file in (tmp_path / ".llava_cache").iterdir()}
    assert left <= {".lock"}
    monkeypatch.undo()
    assert list(load_records(str(path))) == RECORDS


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.json", RECORDS)
    convert = records_module._convert

    def convert_slowly(source, target):
        convert(source, target)
        write(path, RECORDS[:2])

    monkeypatch.setattr(records_module, "_convert", convert_slowly)
    with pytest.raises(ValueError, match="a.json: changed while it was read"):
        load_records(str(path))
    assert not list((tmp_path / ".llava_cache").glob("*.arrow"))


def test_where_the_data_folder_cannot_be_written_the_users_cache_is_used(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / ".llava_cache").write_text("a file, so that the folder cannot be made")
    path = write(folder / "a.json", RECORDS)
    assert list(load_records(str(path))) == RECORDS
    assert list((tmp_path / "home/llava/data").glob("a.json.*.arrow"))
    assert f"{folder / '.llava_cache'} cannot be written" in caplog.text
    with pytest.raises(OSError, match="--data_cache_dir"):
        load_records(str(path), cache_dir=str(folder / ".llava_cache"))
    load_records(str(path), cache_dir=str(tmp_path / "chosen"))
    assert list((tmp_path / "chosen").glob("a.json.*.arrow"))


CONVERTS = """
    import sys, time
    from pathlib import Path
    from llava.data import records
    convert = records._convert
    def slowly(source, target):
        Path(sys.argv[2], str(time.time_ns())).touch()
        time.sleep(1.5)
        convert(source, target)
    records._convert = slowly
    print(len(records.load_records(sys.argv[1])))
"""


def test_of_two_processes_one_converts_and_the_other_waits(tmp_path):
    path = write(tmp_path / "a.json", RECORDS)
    (tmp_path / "conversions").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(CONVERTS), str(path), str(tmp_path / "conversions")]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == [str(len(RECORDS))] * 2
    assert len(list((tmp_path / "conversions").iterdir())) == 1


# --- lengths ----------------------------------------------------------------------------------------------------------


def mixed_records(count: int) -> list[dict]:
    rng = random.Random(0)
    images = (None, "a.png", ["a.png", "b.png"])
    return [record(i, "word " * rng.randrange(30), image=rng.choice(images)) for i in range(count)]


@pytest.mark.parametrize("worth", [1, 10**9], ids=["processes", "one process"])
def test_lengths_equal_those_of_the_samples(tmp_path, tokenizer, monkeypatch, worth):
    monkeypatch.setattr(dataset_module, "_WORTH_PROCESSES", worth)
    monkeypatch.setattr(dataset_module, "_PIECE", 16)
    data = dataset(tokenizer, load_records(str(write(tmp_path / "a.json", mixed_records(70)))))
    for visual_tokens, limit in ((4, 60), (9, 20), (1, 10_000)):
        data.num_visual_tokens, data.model_max_length, data._lengths = visual_tokens, limit, None
        for index, length in enumerate(data.modality_lengths()):
            ids = data._cut(data.tokenize(index), index, visual_tokens).input_ids
            images = int((ids == IMAGE_TOKEN_INDEX).sum())
            assert abs(length) == min(len(ids) + images * (visual_tokens - 1), limit)
            assert (length > 0) == (images > 0)


def test_lengths_are_measured_once_per_template_for_all_maxima(tmp_path, tokenizer, monkeypatch):
    table = load_records(str(write(tmp_path / "a.json", mixed_records(20))))
    measured = []
    count = dataset_module._counts
    monkeypatch.setattr(dataset_module, "_counts", lambda *arguments: measured.append(1) or count(*arguments))
    first = dataset(tokenizer, table).modality_lengths()
    again = dataset(tokenizer, table, model_max_length=10**6, num_visual_tokens=400).modality_lengths()
    assert len(measured) == 1 and (np.abs(again) >= np.abs(first)).all()
    other = dataset(tokenizer, table, model_max_length=10**6, num_visual_tokens=400, version="v1").modality_lengths()
    assert len(measured) == 2 and (other != again).any()
    dataset(tokenizer, table, label_masking="upstream", version="v1").modality_lengths()
    dataset(tokenizer, load_records(str(write(tmp_path / "a.json", mixed_records(21))))).modality_lengths()
    assert len(measured) == 4


def test_a_record_that_cannot_be_measured_is_named_and_nothing_is_kept(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(dataset_module, "_WORTH_PROCESSES", 1)
    wrong = record(7) | {"id": "wrong"}
    wrong["conversations"] = wrong["conversations"] + [{"from": "robot", "value": "?"}]
    data = dataset(tokenizer, load_records(str(write(tmp_path / "a.json", [*mixed_records(5), wrong]))))
    with pytest.raises(ValueError, match="record 5 .id 'wrong'.*'robot'"):
        data.modality_lengths()
    assert not list((tmp_path / ".llava_cache").glob("*.npy*.tmp")) and not list(
        (tmp_path / ".llava_cache").glob("*.npy")
    )


def test_a_text_only_record_under_plain_is_named(tokenizer):
    with pytest.raises(ValueError, match="record 0 .id 3.*the plain template needs an image"):
        dataset(tokenizer, [record(3, image=None)], version="plain").tokenize(0)


def test_a_placeholder_without_an_image_never_becomes_a_sample(tokenizer):
    text_only = record(0)
    text_only["conversations"][0]["value"] = "what does <image> mean?"
    with pytest.raises(ValueError, match="record 0 .id 0.: 1 <image> placeholders but 0 images"):
        dataset(tokenizer, [text_only], model_max_length=500).tokenize(0)


def test_a_worker_gets_paths_and_no_lengths(tmp_path, tokenizer):
    data = dataset(tokenizer, load_records(str(write(tmp_path / "a.json", mixed_records(300)))))
    before = len(pickle.dumps(data))
    data.modality_lengths()
    assert len(pickle.dumps(data)) < before + 100
    assert pickle.loads(pickle.dumps(data)).tokenize(299).input_ids.tolist() == data.tokenize(299).input_ids.tolist()
