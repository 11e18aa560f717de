"""What a record is, where its images are, and what is wrong with a single one: its fields, text, placeholders.

A record is `{"id", "image": str | [str], "conversations": [{"from", "value"}, ...]}`; `images` is another name of
`image`, and text-only records have neither. Further fields are kept, not read. A row of a Parquet file may hold its
images itself: they are then `RowImage`s. Chat messages are converted to such records beforehand
(`llava.data.messages`).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llava.constants import DEFAULT_IMAGE_TOKEN

Record = dict[str, Any]
IMAGE_KEYS = ("image", "images")
"""Names of the field that holds a record's images; both mean the same."""
TURN_KEYS = ("conversations", "messages", "conversation")
"""Names under which a file may hold a record's turns; the table of records holds them under the first."""
_MARKER = re.compile(
    r"</?(?:img|Image|IMAGE)>|<image[_-](?:\d+|token|placeholder)>|<\|(?:image|image_pad|image_\d+|img|vision_start)\|>|\[IMG\]"
    r"|data:image/\w+;base64,"
)
_NO_PATH = ("data:", "http://", "https://")


@dataclass(frozen=True)
class RowImage:
    """An image whose bytes are in a row of a Parquet file; `number` is its index where the row holds a list."""

    shard: str
    row: int
    number: int | None = None

    def __str__(self) -> str:
        return f"in row {self.row} of {self.shard}" + ("" if self.number is None else f", number {self.number}")


def row_image_fields(value: object) -> object:
    """The `default` of `json.dumps` for a row's record, which `parsed_row` reads."""
    return {"row": value.row, "number": value.number} if isinstance(value, RowImage) else f"<{type(value).__name__}>"


def parsed_row(text: str | bytes, shard: str) -> Record:
    """The record of a shard's row, from its JSON text."""
    record = json.loads(text)
    images = record.get("image")
    if isinstance(images, list):
        record["image"] = [RowImage(shard, **image) if isinstance(image, dict) else image for image in images]
    elif isinstance(images, dict):
        record["image"] = RowImage(shard, **images)
    return record


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
    """A record's JSON text, and what is wrong with it."""

    text: str
    problem: Problem | None


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


def record_problem(record: object) -> Problem | None:
    """What is wrong with a record, or None."""
    if not isinstance(record, dict):
        return Problem("schema", f"expected an object, found {type(record).__name__}")
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        key = next((key for key in TURN_KEYS if key in record), None)
        found = (
            f"'conversations' or 'messages'; {_fields(record)}"
            if key is None
            else f"{key!r}, found {record[key]!r:.80}"
        )
        return Problem("schema", f"expected a non-empty list under {found}")
    for number, turn in enumerate(turns):
        if not (isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)):
            forms = "{'from': str, 'value': str} or {'role': str, 'content': str or parts}"
            return Problem("schema", f"turn {number}: expected {forms}, found {turn!r:.80}")
    keys, images = image_keys(record), record_images(record)
    if len(keys) > 1:
        return Problem("schema", "images under 'image' and under 'images'; keep one of the two")
    if not isinstance(images, list) or not all(isinstance(image, ImagePlace) for image in images):
        return Problem("schema", f"{keys[0]!r}: expected a path or a list of paths, found {record[keys[0]]!r:.80}")
    for image in images:
        if isinstance(image, str) and (not image.strip() or image.startswith(_NO_PATH)):
            advice = "save the picture below --image_folder, or leave the field out"
            return Problem("schema", f"{keys[0]!r}: {image!r:.80} is not a path; {advice}")
    return placeholder_problem(record, images)


def placeholder_problem(record: Record, images: list[ImagePlace]) -> Problem | None:
    """What is wrong with the number of placeholders in a record that is well-formed otherwise, or None.

    Args:
        images: `record_images(record)`.
    """
    count = sum(turn["value"].count(DEFAULT_IMAGE_TOKEN) for turn in record["conversations"])
    if count == len(images):
        return None
    advice = ""
    if count < len(images) and (marker := other_marker(record)):
        advice = f"; {marker!r} is only text here: write {DEFAULT_IMAGE_TOKEN} in its place"
    elif not images:
        advice = f" under 'image'; {_fields(record)}: add the picture, or write {DEFAULT_IMAGE_TOKEN} otherwise"
    return Problem("placeholders", f"{count} {DEFAULT_IMAGE_TOKEN} placeholders but {len(images)} images{advice}")


def other_marker(record: Record) -> str | None:
    """The first marker of other programs for a picture, which is only text here; or None."""
    return next((match.group() for turn in record["conversations"] if (match := _MARKER.search(turn["value"]))), None)


def _fields(record: Record) -> str:
    return f"the record has {', '.join(f'{name!r:.40}' for name in list(record)[:8]) or 'no keys'}"


def starts_from(path: str | Path) -> str:
    """What messages append to a path that does not exist: the folder that it starts from, if it is relative."""
    return "" if Path(path).is_absolute() else f" (from {Path.cwd()})"
