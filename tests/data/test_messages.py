"""Chat messages in the forms of TRL, ms-swift and LLaMA-Factory become LLaVA's records, and what cannot is named."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import BYTES, STRUCT
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.conversation import get_template
from llava.data.dataset import LazySupervisedDataset
from llava.data.images import ImageStore
from llava.data.preflight import Rules, preflight
from llava.data.records import load_records


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def human(value):
    return {"from": "human", "value": value}


def gpt(value, **more):
    return {"from": "gpt", "value": value, **more}


PICTURE, OTHER = {"type": "image"}, {"type": "image", "path": "b.png"}


def text(value):
    return {"type": "text", "text": value}


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


# --- what becomes what ------------------------------------------------------------------------------------------------

FORMS = {
    "images placed in front": (
        {"images": ["a.png", "b.png"], "messages": [user("q"), assistant("a")]},
        {"images": ["a.png", "b.png"], "conversations": [human("<image>\n<image>\nq"), gpt("a")]},
    ),
    "placed in front of the first question, not of the system's text": (
        {"image": "a.png", "messages": [system("s"), user("q"), assistant("a"), user("r"), assistant("b")]},
        {
            "image": "a.png",
            "conversations": [{"from": "system", "value": "s"}, human("<image>\nq"), gpt("a"), human("r"), gpt("b")],
        },
    ),
    "image part before the text": (
        {"images": ["a.png"], "messages": [user([PICTURE, text("q")]), assistant([text("a")])]},
        {"images": ["a.png"], "conversations": [human("<image>\nq"), gpt("a")]},
    ),
    "parts in any order": (
        {
            "images": ["a.png"] * 3,
            "messages": [user([text("q"), PICTURE, PICTURE, text("\nr"), PICTURE]), assistant("a")],
        },
        {"images": ["a.png"] * 3, "conversations": [human("q\n<image>\n<image>\nr\n<image>"), gpt("a")]},
    ),
    "parts with pictures of their own": (
        {"messages": [user([OTHER, text("q"), {"type": "image_url", "image_url": {"url": "c.png"}}]), assistant("a")]},
        {"conversations": [human("<image>\nq\n<image>"), gpt("a")], "image": ["b.png", "c.png"]},
    ),
    "columns that are null": (
        {
            "images": ["a.png"],
            "conversation": None,
            "messages": [user([PICTURE | {"text": None}, text("q") | {"url": None}], tools=None), assistant("a")],
        },
        {"images": ["a.png"], "conversation": None, "conversations": [human("<image>\nq"), gpt("a")]},
    ),
    "ShareGPT": (
        {
            "images": ["a.png"],
            "conversations": [{"from": "user", "value": "<image>q"}, {"from": "assistant", "value": "a"}],
        },
        {"images": ["a.png"], "conversations": [human("<image>q"), gpt("a")]},
    ),
    "conversation": (
        {"conversation": [human("q"), gpt("a")]}, {"conversations": [human("q"), gpt("a")]}
    ),
    "turns in a row": (
        {"messages": [user("q"), user("r"), assistant("a"), assistant("b")]},
        {"conversations": [human("q"), human("r"), gpt("a"), gpt("b")]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_messages_become_llavas_records(tmp_path, form):
    found, expected = FORMS[form]
    assert list(load_records(written(tmp_path / "a.jsonl", found))) == [expected]


FAULTS = {
    "tool calls": ([user("q"), assistant(None, tool_calls=[{}])], "turns", "turn 1: 'tool_calls': calls of tools"),
    "role": ([user("q"), {"role": "bot", "content": "x"}], "turns", "turn 1: 'role' is 'bot', expected one of user"),
    "video": ([user([{"type": "video"}])], "schema", "turn 0: part 0: expected .* found {'type': 'video'}"),
    "address": ([user([{"type": "image", "url": "http://x"}])], "schema", "part 0: expected a picture's path"),
    "some named": ([user([OTHER, PICTURE])], "schema", "2 image parts, but only 1 of them name a picture"),
    "empty": ([], "schema", r"a non-empty list under 'messages', found \[\]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_converted_is_named_with_its_record(tmp_path, fault):
    turns, kind, message = FAULTS[fault]
    good = {"id": "good", "messages": [user("q"), assistant("a")]}
    table = load_records(written(tmp_path / "a.jsonl", good, {"id": "bad", "messages": turns}), check=False)
    found, _ = preflight(table, ImageStore(None), Rules(get_template("chatml"), "assistant"), show_progress=False)
    assert list(found.faults) == [kind] and found.bad_records() == [1]
    assert re.match(f"{tmp_path / 'a.jsonl'}: record 1 .id 'bad'.: .*{message}", found.faults[kind][0][1])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [user("q")], "conversations": [human("q")]}, "under 'conversations' and under 'messages'; keep"),
        ({"image": "a.png", "messages": [user([OTHER])]}, "pictures in the turns and under 'image'; keep one"),
    ],
)  # fmt: skip
def test_a_record_with_two_meanings_is_refused(tmp_path, record, message):
    with pytest.raises(ValueError, match=f"record 0: .*{message}"):
        load_records(written(tmp_path / "a.jsonl", record))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def four_formats(tmp_path):
    """The same four records as (--data_path, image folder) in LLaVA's JSON, messages, ShareGPT and Parquet."""
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / f"images/{number}.png").write_bytes(BYTES[number])
    names = [["0.png"], ["1.png", "2.png"], [], ["3.png"]]
    llava, chat, sharegpt, rows = [], [], [], []
    for number, images in enumerate(names):
        question, answer = f"Which colour, {number}?", f"é {number}"
        front = "<image>\n" * len(images)
        beside = {"images": images} if images else {}
        llava.append({"id": number, "conversations": [human(front + question), gpt(answer)]} | beside)
        parts = [PICTURE] * len(images) + [text(question)]
        chat.append({"id": number, "messages": [user(parts), assistant(answer)]} | beside)
        speakers = [{"from": "user", "value": front + question}, {"from": "assistant", "value": answer}]
        sharegpt.append({"id": number, "conversations": speakers} | beside)
        rows.append([user(question), assistant(answer)])
    (tmp_path / "llava.json").write_text(json.dumps(llava))
    bytes_of = [[{"bytes": BYTES[int(name[0])], "path": None} for name in images] for images in names]
    table = pa.table({"id": range(4), "messages": rows, "images": pa.array(bytes_of, pa.list_(STRUCT))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    return {
        "llava": (str(tmp_path / "llava.json"), tmp_path / "images"),
        "messages": (written(tmp_path / "messages.jsonl", *chat), tmp_path / "images"),
        "sharegpt": (written(tmp_path / "sharegpt.jsonl", *sharegpt), tmp_path / "images"),
        "parquet": (str(tmp_path / "a.parquet"), None),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("version", "label_masking"), [("chatml", "assistant"), ("v1", "upstream")])
def test_four_formats_give_the_same_tokens_labels_and_pixels(four_formats, tokenizer, version, label_masking):
    processor = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    samples = {}
    for name, (path, folder) in four_formats.items():
        records, store = load_records(path), ImageStore(folder)
        dataset = LazySupervisedDataset(
            records, tokenizer, version, processor, store, "square", 2, 4096, label_masking, False
        )  # fmt: skip
        samples[name] = [dataset[index] for index in range(len(records))]
        assert dataset.modality_lengths().tolist()[2] < 0
    for name, found in samples.items():
        for sample, expected in zip(found, samples["llava"], strict=True):
            assert sample.keys() == expected.keys(), name
            for key in ("input_ids", "labels", "images"):
                assert key not in expected or torch.equal(sample[key], expected[key]), (name, key)
