"""Reads LLaVA-format records from JSON or JSONL and checks every one before training starts.

A record is `{"id", "image": str | [str], "conversations": [{"from", "value"}, ...]}`; `image` is absent for text only.
"""

import json
from pathlib import Path
from typing import Any

from llava.constants import DEFAULT_IMAGE_TOKEN

Record = dict[str, Any]
_SHOWN_PROBLEMS = 10


def load_records(data_path: str) -> list[Record]:
    """All records of one file, or of several separated by commas, in order, checked.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is not JSON/JSONL, or records are malformed; the message names file, record and fault.
    """
    records: list[Record] = []
    for name in data_path.split(","):
        path = Path(name.strip())
        if not path.is_file():
            raise FileNotFoundError(f"--data_path {path}: no such file; expected LLaVA-format .json or .jsonl")
        loaded = _read_jsonl(path) if path.suffix == ".jsonl" else _read_json(path)
        check_records(loaded, str(path))
        records += loaded
    return records


def _read_json(path: Path) -> list[Record]:
    with path.open(encoding="utf-8") as file:
        try:
            loaded = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--data_path {path}: not valid JSON ({error}); one record per line needs .jsonl"
            ) from error
    if not isinstance(loaded, list):
        raise ValueError(f"--data_path {path}: expected a JSON list of records, found {type(loaded).__name__}")
    return loaded


def _read_jsonl(path: Path) -> list[Record]:
    records = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"--data_path {path}, line {number}: not valid JSON ({error})") from error
    return records


def check_records(records: list[Record], source: str) -> None:
    """Raises ValueError that lists the malformed records of `source` (the first few, and how many there are)."""
    if not records:
        raise ValueError(f"--data_path {source}: holds no records")
    problems = []
    for index, record in enumerate(records):
        if problem := record_problem(record):
            problems.append(f"{record_name(record, index)}: {problem}")
    if problems:
        shown = "\n  ".join(problems[:_SHOWN_PROBLEMS])
        raise ValueError(f"{source}: {len(problems)} of {len(records)} records are malformed:\n  {shown}")


def record_name(record: Any, index: int) -> str:
    """How messages call a record."""
    identifier = record.get("id") if isinstance(record, dict) else None
    return f"record {index}" + (f" (id {identifier!r})" if identifier is not None else "")


def record_images(record: Record) -> list[str]:
    """The record's image paths, in the order of its placeholders."""
    image = record.get("image")
    if image is None:
        return []
    return [image] if isinstance(image, str) else image


def record_problem(record: Any) -> str | None:
    """What is wrong with a record, or None."""
    if not isinstance(record, dict):
        return f"expected an object, found {type(record).__name__}"
    conversations = record.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        return "expected a non-empty list under 'conversations'"
    for number, turn in enumerate(conversations):
        if not (isinstance(turn, dict) and isinstance(turn.get("from"), str) and isinstance(turn.get("value"), str)):
            return f"turn {number}: expected {{'from': str, 'value': str}}, found {turn!r:.80}"
    images = record_images(record)
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        return f"'image': expected a path or a list of paths, found {record['image']!r:.80}"
    placeholders = sum(turn["value"].count(DEFAULT_IMAGE_TOKEN) for turn in conversations)
    if images and placeholders != len(images):  # without an image the placeholder is a word like any other
        return f"{placeholders} {DEFAULT_IMAGE_TOKEN} placeholders but {len(images)} images"
    return None
