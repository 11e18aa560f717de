"""Chat messages in the forms of TRL, ms-swift and LLaMA-Factory become LLaVA's records, and what cannot is named."""

import json
import re

import pytest

from llava.conversation import get_template
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
    "placed in front of the first question, not of the system's text": (
        {"images": ["a.png", "b.png"], "messages": [system("s"), user("q"), user("r"), assistant("a")]},
        {
            "images": ["a.png", "b.png"],
            "conversations": [{"from": "system", "value": "s"}, human("<image>\n<image>\nq"), human("r"), gpt("a")],
        },
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
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_messages_become_llavas_records(tmp_path, form):
    found, expected = FORMS[form]
    assert list(load_records(written(tmp_path / "a.jsonl", found))) == [expected]


FAULTS = {
    "tool calls": ([user("q"), assistant(None, tool_calls=[{}])], "turns", "turn 1: 'tool_calls': calls of tools"),
    "role": ([user("q"), {"role": "bot", "content": "x"}], "turns", "turn 1: 'role' is 'bot', expected one of user"),
    "address": ([user([{"type": "image", "url": "http://x"}])], "schema", "part 0: expected a picture's path"),
    "some named": ([user([OTHER, PICTURE])], "schema", "2 image parts, but only 1 of them name a picture"),
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
        ({"image": "a.png", "messages": [user("q"), assistant("an <image> tag")]}, "2 <image> placeholders but 1"),
    ],
)  # fmt: skip
def test_a_record_with_two_meanings_is_refused(tmp_path, record, message):
    with pytest.raises(ValueError, match=f"record 0: .*{message}"):
        load_records(written(tmp_path / "a.jsonl", record))
