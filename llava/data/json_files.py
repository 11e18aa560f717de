"""Reads JSON and JSONL files element by element, a piece of the file at a time; faults stay with their element.

In JSONL a line that is no JSON is a fault of that line. In a `.json` file nothing can be read behind a syntax error,
so the file is refused as a whole. Bytes that are not UTF-8 are carried through (`surrogateescape`) to the checks.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llava.data.checks import Problem, json_object, record_problem, shown_text, text_problem

_PIECE = 1 << 22  # characters of a .json file that are read at a time
_LONGEST_ELEMENT = 1 << 28  # characters; what is longer is not a list of records
_SPACE = re.compile(r"[ \t\n\r]*")
_ENCODING = {"encoding": "utf-8", "errors": "surrogateescape"}


class Element(NamedTuple):
    """A record's JSON text, what is wrong with it, and the row of a Parquet file that holds its image, if one does."""

    text: str
    problem: Problem | None
    row: int | None = None


def read_elements(path: Path) -> Iterator[Element]:
    """The elements of a `.jsonl` or `.json` file, in order, each checked by itself.

    Raises:
        ValueError: the file is not JSON as a whole; the message names it.
    """
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
        return
    for element, text in read_json(path):
        yield Element(shown_text(text), text_problem(text) or record_problem(element))


def read_json(path: Path) -> Iterator[tuple[Any, str]]:
    """The elements of a JSON list, each with its text, from a piece of the file at a time."""
    parse = json.JSONDecoder(object_pairs_hook=json_object).raw_decode
    with path.open(**_ENCODING) as file:
        text, position = file.read(_PIECE).lstrip(), 1
        if not text.startswith("["):
            return _explain(path)
        separator = None
        while separator != "]":
            begin = _SPACE.match(text, position).end()
            try:
                element, end = parse(text, begin)
                behind = _SPACE.match(text, end).end()
                separator = text[behind : behind + 1]
            except (ValueError, RecursionError):
                separator = ""
            if separator in (",", "]"):
                yield element, text[begin:end]
                position = behind + 1
            elif len(text) - position > _LONGEST_ELEMENT:
                return _explain(path, f"an element of more than {_LONGEST_ELEMENT:,} characters, or a broken one")
            elif piece := file.read(max(_PIECE, len(text) - position)):  # an element that goes on behind the piece
                text, position = text[position:] + piece, 0
            else:
                return _explain(path)
        if (text[position:] + file.read(_PIECE)).strip():
            return _explain(path)


def _explain(path: Path, fault: str = "") -> None:
    """Raises what is wrong with a file that is not a list of elements; returns if the list is empty."""
    found: Any = None
    if not fault:
        with path.open(**_ENCODING) as file:
            try:
                found = json.load(file)
            except RecursionError:
                fault = "nested too deeply"
            except ValueError as error:
                fault = str(error)
    if fault:
        raise ValueError(f"--data_path {path}: not valid JSON ({fault}); one record per line needs .jsonl")
    if found != []:
        raise ValueError(f"--data_path {path}: expected a JSON list of records, found {type(found).__name__}")


def _read_jsonl(path: Path) -> Iterator[Element]:
    parse = json.JSONDecoder(object_pairs_hook=json_object).decode
    with path.open(**_ENCODING) as file:
        number = 0
        while line := file.readline(_LONGEST_ELEMENT):
            number += 1
            text = line.strip()
            if len(line) == _LONGEST_ELEMENT:
                raise ValueError(f"--data_path {path}, line {number}: more than {_LONGEST_ELEMENT:,} characters")
            if text:
                yield Element(shown_text(text), text_problem(text) or _line_problem(parse, text, number))


def _line_problem(parse: Any, text: str, number: int) -> Problem | None:
    try:
        return record_problem(parse(text))
    except (ValueError, RecursionError) as error:
        return Problem("json", f"line {number}: not valid JSON ({error})")
