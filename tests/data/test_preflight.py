"""What the preflight lets through can be trained on, what it does not is named, counted and left out on every rank."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import GPT, HUMAN, TURNS, encoded, noise
from paths import ROOT
from training import flags, losses

from llava.conversation import get_template
from llava.data import preflight as command
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


# --- kinds ------------------------------------------------------------------------------------------------------------

HIDDEN = {"from": "human", "value": "<imaQA_GT_caption_based_noisyge> <image>"}  # upstream takes that tag out
CASES = {
    "no json": (b'{"id": 1', "json", "line 1, column 9: not valid JSON: Expecting"),
    "no utf-8": (b'{"id": "\xff\xfe", "conversations": []}', "text", "not UTF-8, or half of"),
    "placeholders": ({"image": ["a.png", "a.png"], "conversations": TURNS}, "placeholders", "1 <image> .* 2 images"),
    "no answer": ({"image": "a.png", "conversations": [HUMAN]}, "turns", "nothing to learn"),
    "system": ({"conversations": [{"from": "system", "value": "Hi"}, *TEXT]}, "turns", "no place for a system turn"),
    "missing": ({"id": "m", "image": "b.png", "conversations": TURNS}, "image_missing", "id 'm'.*b.png does not exist"),
    "tag": ({"image": "a.png", "conversations": [HIDDEN, GPT]}, "placeholders", "1 images, but 2 places"),
    "marker alone": (
        {"conversations": [{"from": "human", "value": "<|image_pad|>?"}, GPT]}, "other_marker",
        "'<.image_pad.>' is only text here; write <image> where a picture belongs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_fault_has_its_kind_and_names_file_and_record(tmp_path, pictures, case):
    line, kind, message = CASES[case]
    table = jsonl(tmp_path / "a.jsonl", [line, {"id": "good", "image": "a.png", "conversations": TURNS}])
    masking, version = "upstream" if case == "tag" else "assistant", "gemma_instruct" if case == "system" else "chatml"
    found, path = preflight(table, pictures, rules(version, masking), show_progress=False)
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


def test_a_remembered_result_says_so_and_is_made_again_where_it_is_stale(tmp_path, pictures, capsys, monkeypatch):
    done, real = [], command._checked
    monkeypatch.setattr(command, "_checked", lambda *arguments: done.append(1) or real(*arguments))
    jsonl(tmp_path / "a.jsonl", [{"image": "a.png", "conversations": TURNS}])
    options = ["--data_path", str(tmp_path / "a.jsonl"), "--image_folder", str(tmp_path / "images")]

    def checked(*more):
        status, checks = command.main([*options, *more]), len(done)
        done.clear()
        return status, checks, ", remembered; remove " in capsys.readouterr().out

    assert checked() == (0, 1, False)
    assert checked() == (0, 0, True)
    (tmp_path / "images/a.png").write_bytes(encoded(noise())[:-60])  # seen neither in its header nor in the folder
    assert checked() == (0, 0, True)
    assert checked("--full_decode") == (1, 1, False)


def test_a_table_without_records_is_another_table(tmp_path):
    table = jsonl(tmp_path / "a.jsonl", [{"id": i, "conversations": TEXT if i != 1 else []} for i in range(4)])
    kept = table.without([1])
    assert [record["id"] for record in kept] == [0, 2, 3] and kept.left_out == 1
    assert len({table.key, kept.key, table.without([2]).key}) == 3 and table.without([]) is table


# --- the command ------------------------------------------------------------------------------------------------------


def test_labels_that_the_template_lacks_are_refused_before_the_data_is_read(capsys):
    options = ["--data_path", "/nowhere.json", "--version", "qwen_3", "--label_masking", "upstream"]
    assert command.main(options) == 2 and "pass --label_masking assistant" in capsys.readouterr().err


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
    logs = [losses(tmp_path / name) for name in ("skipped", "clean")]
    assert logs[0] == logs[1]  # nothing stands in for what was left out


# --- Parquet ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_faulty_rows_are_named_and_a_damaged_or_unknown_shard_is_refused(tmp_path):
    turns = pa.array([None, [], [{"from": "human", "value": None}, GPT], TEXT])
    pq.write_table(pa.table({"conversations": turns}), tmp_path / "a.parquet")
    table = load_records(str(tmp_path / "a.parquet"), check=False)
    assert [table.problem(i) and table.problem(i).kind for i in range(4)] == ["schema", "schema", "schema", None]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match="b.parquet: cannot be read as Parquet"):
        load_records(str(tmp_path / "b.parquet"))
    for columns, message in (
        ({"conversations": turns, "image": ["a"] * 4, "images": [["a"]] * 4}, "columns 'image' and 'images'; keep the"),
        ({"id": [1]}, "no column 'conversations' or 'messages'; it has id: docs/data.md, Other forms"),
    ):
        pq.write_table(pa.table(columns), tmp_path / "c.parquet")
        with pytest.raises(ValueError, match=f"(?s)c.parquet: .*{message}"):
            load_records(str(tmp_path / "c.parquet"))


# --- any record -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("target", "count"), [("bytes", 60), ("keys", 80)])
def test_what_is_let_through_of_damaged_data_becomes_a_sample(tmp_path, target, count):
    cases, outcomes = fuzz_data.run(tmp_path, seed=1, seconds=60, cases=count, target=target)
    assert cases == count and outcomes["samples"] and outcomes["refused"] and outcomes["faults"]
    assert target == "bytes" or outcomes["with_pictures"] > count // 2


# --- processes --------------------------------------------------------------------------------------------------------

WORKING = """
import os
import time
from llava.data.parallel import in_processes

def work(state, piece):
    print(os.getpid(), flush=True)
    time.sleep(600 * (piece > 1))

list(in_processes(work, None, range(4)))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_one_that_started_them(number):
    command = [sys.executable, "-u", "-c", WORKING]
    parent = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    parent.stdout.readline()
    children = psutil.Process(parent.pid).children()
    parent.send_signal(number)
    parent.wait()
    assert children and not psutil.wait_procs(children, timeout=30)[1]
