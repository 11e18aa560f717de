"""What is wrong with a record taken by itself: its fields, its text, its placeholders.

A record is `{"id", "image": str | [str], "conversations": [{"from", "value"}, ...]}`; `image` is absent for text only.
Further fields are kept. A row of a Parquet file may hold the image itself: `image` is then a `RowImage`.
"""

import re
from typing import Any, NamedTuple

from llava.constants import DEFAULT_IMAGE_TOKEN

Record = dict[str, Any]
LONGEST_RECORD = 1 << 24
"""Characters of JSON: a longer record is a fault, since tokenising it would hold up a worker for minutes."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class RowImage(NamedTuple):
    """An image whose bytes stand in a row of a Parquet file."""

    shard: str
    row: int

    def __str__(self) -> str:
        return f"in row {self.row} of {self.shard}"


class Problem(NamedTuple):
    """A kind of finding, as the preflight counts it, and what exactly was found."""

    kind: str
    message: str


class RepeatedKeys(dict):
    """A JSON object in which a key occurs twice; which of the values counts differs between programs."""


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of a JSON parser: a dict that knows whether keys were repeated."""
    found = dict(pairs)
    return found if len(found) == len(pairs) else RepeatedKeys(found)


def record_name(record: Any, index: int) -> str:
    """How messages call a record."""
    identifier = record.get("id") if isinstance(record, dict) else None
    return f"record {index}" + (f" (id {identifier!r:.100})" if identifier is not None else "")


def record_images(record: Record) -> list[str | RowImage]:
    """The record's images, in the order of its placeholders: paths, or a place in a Parquet file."""
    image = record.get("image")
    if image is None:
        return []
    return [image] if isinstance(image, (str, RowImage)) else image


def record_problem(record: Any) -> Problem | None:
    """What is wrong with a record, or None."""
    if not isinstance(record, dict):
        return Problem("schema", f"expected an object, found {type(record).__name__}")
    if isinstance(record, RepeatedKeys):
        return Problem("json", "a key occurs twice; write every key once")
    conversations = record.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        return Problem("schema", "expected a non-empty list under 'conversations'")
    for number, turn in enumerate(conversations):
        if problem := _turn_problem(turn):
            return Problem(problem.kind, f"turn {number}: {problem.message}")
    images = record_images(record)
    if not isinstance(images, list) or not all(isinstance(name, (str, RowImage)) for name in images):
        return Problem("schema", f"'image': expected a path or a list of paths, found {record['image']!r:.80}")
    placeholders = sum(turn["value"].count(DEFAULT_IMAGE_TOKEN) for turn in conversations)
    if images and placeholders != len(images):  # without an image the placeholder is a word like any other
        return Problem("placeholders", f"{placeholders} {DEFAULT_IMAGE_TOKEN} placeholders but {len(images)} images")
    return None


def _turn_problem(turn: Any) -> Problem | None:
    if not (isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)):
        return Problem("schema", f"expected {{'from': str, 'value': str}}, found {turn!r:.80}")
    if isinstance(turn, RepeatedKeys):
        return Problem("json", "a key occurs twice; write every key once")
    if not turn["value"].isascii() and _SURROGATE.search(turn["value"]):
        return Problem("text", f"half of a surrogate pair in {turn['value']!r:.80}, which no tokenizer takes")
    return None


def shown_text(text: str) -> str:
    """The text that is kept of a record: of one that is too long only the beginning."""
    return text if len(text) <= LONGEST_RECORD else text[:1000]


def text_problem(text: str) -> Problem | None:
    """What is wrong with a record's JSON text, read with `errors="surrogateescape"`, or None."""
    if len(text) > LONGEST_RECORD:
        return Problem("text", f"{len(text):,} characters of JSON; expected at most {LONGEST_RECORD:,}")
    if not text.isascii() and (found := _SURROGATE.search(text)):
        byte = ord(found.group()) & 0xFF
        return Problem(
            "text", f"not UTF-8: byte 0x{byte:02x} behind {text[max(0, found.start() - 30) : found.start()]!r}"
        )
    return None
