"""Converted records and measured lengths: equal to what they were made from, made once, never stale, never half."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

import llava.data.records as records_module
from llava.constants import IMAGE_TOKEN_INDEX
from llava.data import dataset as dataset_module
from llava.data.dataset import LazySupervisedDataset
from llava.data.records import RecordTable, load_records


def record(index: int, text: str = "yes", image: object = None) -> dict:
    placeholders = "<image>" * (len(image) if isinstance(image, list) else image is not None)
    turns = [{"from": "human", "value": f"{placeholders}{index}?"}, {"from": "gpt", "value": text}]
    return {"id": index, "conversations": turns} | ({} if image is None else {"image": image})


def write(path: Path, records: list[dict]) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


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


def test_table_equals_the_json_and_a_second_start_converts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(records_module, "_ROWS", 3)
    path = write(tmp_path / "a.json", RECORDS)
    table = load_records(str(path))
    assert isinstance(table, RecordTable) and len(table) == len(RECORDS)
    assert list(table) == json.loads(path.read_text()) == RECORDS
    assert table[-1] == RECORDS[-1] and table[1:4] == RECORDS[1:4]
    monkeypatch.setattr(records_module, "_convert", lambda *paths: pytest.fail("converted again"))
    assert list(load_records(str(path))) == RECORDS


def test_a_changed_file_is_never_stale_even_with_its_old_size_and_time(tmp_path, files_count_as_old):
    path = write(tmp_path / "a.json", [record(1, "aaa")])
    before = path.stat()
    assert load_records(str(path))[0]["conversations"][1]["value"] == "aaa"
    write(path, [record(1, "bbb")])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert load_records(str(path))[0]["conversations"][1]["value"] == "bbb"


@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_a_damaged_cache_is_reported_and_made_again(tmp_path, tokenizer, caplog, damage):
    path = write(tmp_path / "a.json", RECORDS)
    expected = dataset(tokenizer, load_records(str(path))).modality_lengths().tolist()
    made = [*(tmp_path / ".llava_cache").glob("*.arrow"), *(tmp_path / ".llava_cache").glob("*.npy")]
    assert len(made) == 2
    for file in made:
        content = file.read_bytes()
        altered = content.replace(b"yes", b"not", 1) if b"yes" in content else content[:-1] + bytes([content[-1] ^ 1])
        file.write_bytes(content[:-5] if damage == "cut" else altered)
    table = load_records(str(path))
    assert list(table) == RECORDS
    assert dataset(tokenizer, table).modality_lengths().tolist() == expected
    for file in made:
        assert f"{file} is damaged" in caplog.text


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
            ids = data._cut(data.tokenized(index)[0], index, visual_tokens).input_ids
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
    dataset(tokenizer, table, version="v1").modality_lengths()
    dataset(tokenizer, table, label_masking="upstream", version="v1").modality_lengths()
    assert len(measured) == 3
