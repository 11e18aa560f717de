"""What is wrong with a single record: its fields, its text, its placeholders.

A record is `{"id", "image": str | [str], "conversations": [{"from", "value"}, ...]}`; `images` is another name of
`image`, and text-only records have neither. Further fields are kept, not read. A row of a Parquet file may hold its
images itself: they are then `RowImage`s. Chat messages are converted to such records beforehand
(`llava.data.messages`).
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from llava.constants import DEFAULT_IMAGE_TOKEN

Record = dict[str, Any]
LONGEST_RECORD = 1 << 24
"""Characters of JSON. A longer record is a fault, since tokenising it would hold up a worker for minutes."""
IMAGE_KEYS = ("image", "images")
"""Names of the field that holds a record's images; both mean the same."""
TURN_KEYS = ("conversations", "messages", "conversation")
"""Names under which a file may hold a record's turns; the table of records holds them under the first."""
_READ = ("id", *TURN_KEYS, *IMAGE_KEYS)
_MARKER = re.compile(
    r"</?(?:img|Image|IMAGE)>|<image[_-](?:\d+|token|placeholder)>|<\|(?:image|image_pad|image_\d+|img|vision_start)\|>|\[IMG\]"
    r"|data:image/\w+;base64,"
)
_SURROGATE = re.compile("[\ud800-\udfff]")


class RowImage(NamedTuple):
    """An image whose bytes are in a row of a Parquet file; `number` is its index where the row holds a list."""

    shard: str
    row: int
    number: int | None = None

    def __str__(self) -> str:
        return f"in row {self.row} of {self.shard}" + ("" if self.number is None else f", number {self.number}")


class PlacedImage(NamedTuple):
    """An image below a folder, or in a zip file, that is not the run's `--image_folder`."""

    folder: str
    name: str

    def __str__(self) -> str:
        return f"{self.folder}/{self.name}"


ImagePlace = str | RowImage | PlacedImage
"""Where an image is: a path below `--image_folder`, a place in a Parquet file, a path below another folder."""


class Problem(NamedTuple):
    """A finding: its kind, by which the preflight counts it, and a message with the details."""

    kind: str
    message: str


class Element(NamedTuple):
    """A record's JSON text, what is wrong with it, and the row of the Parquet file where that holds its images."""

    text: str
    problem: Problem | None
    row: int | None = None


class RepeatedKeys(dict):
    """A JSON object in which a key occurs twice; programs differ in which of the values they take."""


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of a JSON parser: a dict, or a `RepeatedKeys` where a key occurs twice."""
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else RepeatedKeys(fields)


def record_name(record: object, index: int) -> str:
    """A record's name in messages: its index, and its id if it has one."""
    identifier = record.get("id") if isinstance(record, dict) else None
    return f"record {index}" + (f" (id {identifier!r:.100})" if identifier is not None else "")


def record_images(record: Record) -> list[ImagePlace]:
    """The record's images, in the order of its placeholders."""
    image = next((record[key] for key in image_keys(record)), [])
    return [image] if isinstance(image, ImagePlace) else image


def image_keys(record: Record) -> list[str]:
    """The names under which a record has images."""
    return [key for key in IMAGE_KEYS if record.get(key) is not None and record[key] != []]


def unread_keys(record: Record) -> list[str]:
    """The fields of a record that nothing here reads; those of its turns as `conversations.NAME`."""
    unread = [key for key, value in record.items() if key not in _READ and value is not None]
    turns = record.get("conversations")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and len(turn) > 2:
            unread += [f"conversations.{key}" for key in turn if key not in ("from", "value")]
    return list(dict.fromkeys(unread))


def record_problem(record: object) -> Problem | None:
    """What is wrong with a record, or None."""
    if not isinstance(record, dict):
        return Problem("schema", f"expected an object, found {type(record).__name__}")
    if isinstance(record, RepeatedKeys):
        return Problem("json", "a key occurs twice; write every key once")
    conversations = record.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        key = next((key for key in TURN_KEYS if key in record), None)
        names = f"'conversations' or 'messages'; the record has {_listed(list(record)) or 'no keys'}"
        found = names if key is None else f"{key!r}, found {record[key]!r:.80}"
        return Problem("schema", f"expected a non-empty list under {found}")
    for number, turn in enumerate(conversations):
        if problem := _turn_problem(turn):
            return Problem(problem.kind, f"turn {number}: {problem.message}")
    if len(keys := image_keys(record)) > 1:
        return Problem("schema", "images under 'image' and under 'images'; keep one of the two")
    images = record_images(record)
    if not isinstance(images, list) or not all(isinstance(name, ImagePlace) for name in images):
        return Problem("schema", f"{keys[0]!r}: expected a path or a list of paths, found {record[keys[0]]!r:.80}")
    if fault := next(filter(None, map(_path_fault, images)), None):
        return Problem("schema", f"{keys[0]!r}: {fault}")
    return placeholder_problem(record, images)


def _turn_problem(turn: object) -> Problem | None:
    if not (isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)):
        forms = "{'from': str, 'value': str} or {'role': str, 'content': str or parts}"
        return Problem("schema", f"expected {forms}, found {turn!r:.80}")
    if isinstance(turn, RepeatedKeys):
        return Problem("json", "a key occurs twice; write every key once")
    if not turn["value"].isascii() and _SURROGATE.search(turn["value"]):
        return Problem("text", f"half of a surrogate pair in {turn['value']!r:.80}, which no tokenizer accepts")
    return None


def _path_fault(image: ImagePlace) -> str | None:
    """What keeps a text from being a picture's path, or None."""
    if not isinstance(image, str):
        return None
    if not image.strip():
        return "an empty path; name the picture, or leave the field out of a record without one"
    if image.startswith("data:"):
        return f"{image:.40}... is the picture itself; write it to a file below --image_folder and name that"
    if image.startswith(("http://", "https://")):
        return f"{image:.80} is an address; pictures are not downloaded: fetch it to --image_folder and name its path"
    return None


def other_marker(text: str) -> str | None:
    """A marker of other programs for a picture, which is only text here; the first in `text`, or None."""
    match = _MARKER.search(text)
    return match and match.group()


def placeholder_problem(record: Record, images: list[ImagePlace]) -> Problem | None:
    """What is wrong with the number of placeholders in a record that is well-formed otherwise, or None.

    Args:
        images: `record_images(record)`.
    """
    count = sum(turn["value"].count(DEFAULT_IMAGE_TOKEN) for turn in record["conversations"])
    if count == len(images):
        return None
    advice = ""
    markers = (marker for turn in record["conversations"] if (marker := other_marker(turn["value"])))
    if count < len(images) and (marker := next(markers, None)):
        advice = f"; {marker!r} is only text here: write {DEFAULT_IMAGE_TOKEN} in its place"
    elif not images:
        unread = f" (not read: {_listed(names)})" if (names := unread_keys(record)) else ""
        advice = (
            f" under 'image'{unread}; add the picture, or write {DEFAULT_IMAGE_TOKEN} otherwise where it is only a word"
        )
    return Problem("placeholders", f"{count} {DEFAULT_IMAGE_TOKEN} placeholders but {len(images)} images{advice}")


def _listed(names: list[str]) -> str:
    return ", ".join(f"{name!r:.40}" for name in names[:8]) + (", ..." if len(names) > 8 else "")


def starts_from(path: str | Path) -> str:
    """What messages append to a path that does not exist: the folder that it starts from, if it is relative."""
    return "" if Path(path).is_absolute() else f" (from {Path.cwd()})"


def shown_text(text: str) -> str:
    """The text that is kept of a record; of a record that is too long, only the beginning."""
    return text if len(text) <= LONGEST_RECORD else text[:1000]


def text_problem(text: str) -> Problem | None:
    """What is wrong with a record's JSON text, read with `errors="surrogateescape"`, or None."""
    if len(text) > LONGEST_RECORD:
        return Problem("text", f"{len(text):,} characters of JSON; expected at most {LONGEST_RECORD:,}")
    if not text.isascii() and (surrogate := _SURROGATE.search(text)):
        byte, before = ord(surrogate.group()) & 0xFF, text[max(0, surrogate.start() - 30) : surrogate.start()]
        return Problem("text", f"not UTF-8: byte 0x{byte:02x} after {before!r}")
    return None
