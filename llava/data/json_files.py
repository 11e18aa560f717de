"""Reads JSON and JSONL files element by element, a piece of the file at a time; faults stay with their element.

The content shows whether a file holds a list or one record per line, since names are often wrong. In JSONL, a line that
is not JSON is a fault of that line. In a list, nothing can be read after a syntax error, so the file is refused as a
whole. Bytes that are not UTF-8 are carried through (`surrogateescape`) to the checks.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from llava.data.checks import Problem, json_object, record_problem, shown_text, text_problem
from llava.data.errors import DataError
from llava.data.messages import as_record, holds_turns

_PIECE = 1 << 22  # characters of a .json file that are read at a time
_LONGEST_ELEMENT = 1 << 28  # characters; a longer element is no record
_SPACE = re.compile(r"[ \t\n\r]*")
_PYTHON_WORD = re.compile(r"(None|True|False)\b")
_LONGEST_TOKEN = 16  # characters; a fault this near to the end of a piece may only come from the cut
_QUOTES = "'`‘’“”"


class Element(NamedTuple):
    """A record's JSON text, what is wrong with it, and the row of the Parquet file where that holds its images."""

    text: str
    problem: Problem | None
    row: int | None = None


def read_elements(path: Path) -> Iterator[Element]:
    """The elements of a `.jsonl` or `.json` file, in order, each checked separately.

    Raises:
        ValueError: the file as a whole is not JSON, or not UTF-8 text; the message names it, the line and the column.
    """
    if _has_lines(path):
        yield from _read_jsonl(path)
        return
    for element, text in read_json(path):
        problem = text_problem(text)
        yield Element(shown_text(text), problem) if problem else _checked(element, text)


def _checked(value: object, text: str) -> Element:
    """The element of a value, parsed from `text`: converted to LLaVA's form if it has another, and checked."""
    record, problem = as_record(value)
    problem = problem or record_problem(record)
    return Element(text if problem or record is value else json.dumps(record), problem)


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        begin = file.read(4)
    if not begin:
        raise DataError(path, "the file is empty")
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in begin:
        expected = f"expected UTF-8, which iconv -f UTF-16 -t UTF-8 {path.name} makes of UTF-16"
        raise DataError(f"{path}, line 1, column 1", f"UTF-16, or no text; {expected}")
    return path.open(encoding="utf-8-sig", errors="surrogateescape")


def _has_lines(path: Path) -> bool:
    """Whether a file holds one record per line; its name decides only where the content does not."""
    with _open(path) as file:
        line = ""
        while not line.strip() and (read := file.readline(_PIECE)):
            line = read
        line = line.lstrip()
        if path.suffix == ".jsonl":
            return not (line.startswith("[") and line[1:].lstrip()[:1] in ("", "{"))
        if not line.startswith("{"):
            return False
        try:
            element = json.loads(line if line.endswith("\n") else line + file.readline(_LONGEST_ELEMENT))
        except (ValueError, RecursionError):
            return False
        return holds_turns(element) or any(map(str.strip, file))


# --- a list -----------------------------------------------------------------------------------------------------------


class _Window:
    """The part of a file that is held in memory as text, and its place in the file."""

    def __init__(self, path: Path, file: TextIO):
        self.path, self.file = path, file
        self.text, self.line, self.column = "", 1, 1  # where the text begins

    def place(self, position: int) -> tuple[int, int]:
        """Line and column of a position in the text."""
        if lines := self.text.count("\n", 0, position):
            return self.line + lines, position - self.text.rfind("\n", 0, position)
        return self.line, self.column + position

    def grow(self, position: int) -> bool:
        """Drops the text before `position` and reads on; False at the end of the file."""
        piece = self.file.read(max(_PIECE, len(self.text) - position))
        if piece:
            (self.line, self.column), self.text = self.place(position), self.text[position:] + piece
        return bool(piece)

    def error(self, position: int, fault: str) -> DataError:
        line, column = self.place(position)
        return DataError(f"{self.path}, line {line}, column {column}", fault)


def read_json(path: Path) -> Iterator[tuple[object, str]]:
    """Yields the elements of a JSON list, each with its text; holds only a piece of the file at a time.

    Raises:
        ValueError: the file is not a JSON list; the message names it, the line and the column.
    """
    parse = json.JSONDecoder(object_pairs_hook=json_object).raw_decode
    with _open(path) as file:
        window = _Window(path, file)
        position = _begin_of_list(window)
        separator = "["
        while separator != "]":
            begin = _after_space(window.text, position)
            if separator == "[" and window.text.startswith("]", begin):
                position = begin + 1
                break
            element, end = None, begin
            try:
                element, end = parse(window.text, begin)
                after = _after_space(window.text, end)
                fault = (after, "Expecting ',' delimiter")
            except json.JSONDecodeError as error:
                after, fault = len(window.text), (error.pos, error.msg)
            except (ValueError, RecursionError) as error:
                raise window.error(begin, f"not valid JSON: {_words(error)}") from None
            if window.text[after : after + 1] in (",", "]"):
                yield element, window.text[begin:end]
                separator, position = window.text[after], after + 1
            elif fault[0] < len(window.text) - _LONGEST_TOKEN and not fault[1].startswith("Unterminated string"):
                raise window.error(*_syntax_fault(window.text, *fault))
            elif len(window.text) - position > _LONGEST_ELEMENT:
                what = f"an element of more than {_LONGEST_ELEMENT:,} characters, or a broken element"
                raise window.error(begin, f"not valid JSON: {what}")
            elif window.grow(position):  # an element that continues after the piece
                position = 0
            else:
                raise window.error(*_syntax_fault(window.text, *fault))
        while not window.text[position:].strip():
            if not window.grow(position):
                return
            position = 0
        begin = position + len(window.text[position:]) - len(window.text[position:].lstrip())
        rest = window.text[begin : begin + 20]
        raise window.error(begin, f"the list has ended, but the file continues with {rest!r}")


def _after_space(text: str, position: int) -> int:
    """The position of the next character that is not white space."""
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _begin_of_list(window: _Window) -> int:
    """The position after the opening bracket.

    Raises:
        ValueError: the file holds something else.
    """
    while (begin := _after_space(window.text, 0)) == len(window.text) and window.grow(0):
        pass
    if window.text.startswith("[", begin):
        return begin + 1
    if begin == len(window.text):
        raise DataError(window.path, "holds no records")
    window.text += window.file.read()
    try:
        value, end = json.JSONDecoder().raw_decode(window.text, begin)
    except json.JSONDecodeError as error:
        raise window.error(*_syntax_fault(window.text, error.pos, error.msg)) from None
    except (ValueError, RecursionError) as error:
        raise window.error(begin, f"not valid JSON: {_words(error)}") from None
    if isinstance(value, dict) and window.text[end:].strip():
        raise window.error(begin, "a record over several lines; expected one per line, or a JSON list of all")
    names = ", ".join(map(repr, list(value)[:8])) if isinstance(value, dict) else ""
    what = f"an object with the keys {names}" if names else f"{window.text[begin : begin + 40]!r}"
    raise window.error(begin, f"expected a JSON list of records, found {what}")


# --- lines ------------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[Element]:
    parse = json.JSONDecoder(object_pairs_hook=json_object).decode
    with _open(path) as file:
        number = 0
        while line := file.readline(_LONGEST_ELEMENT):
            number += 1
            text = line.strip()
            if len(line) == _LONGEST_ELEMENT:
                raise DataError(f"{path}, line {number}", f"more than {_LONGEST_ELEMENT:,} characters")
            if text:
                if number == 1 and _continues(text, file):
                    expected = f"expected one per line, which jq -c . {path.name} writes, or a JSON list of all"
                    raise DataError(f"{path}, line 1", f"a record over several lines; {expected}")
                indent = len(line) - len(line.lstrip())
                yield _line_element(parse, text, number, indent)


def _continues(text: str, file: TextIO) -> bool:
    """Whether a record begins with the line `text` and ends on a later one; `file` stays where it is."""
    if not text.startswith("{") or text.endswith("}"):
        return False
    place = file.tell()
    try:
        json.JSONDecoder().raw_decode(text + "\n" + file.read(_PIECE))
    except (ValueError, RecursionError):
        return False
    finally:
        file.seek(place)
    return True


def _line_element(parse: Callable[[str], object], text: str, number: int, indent: int) -> Element:
    if problem := text_problem(text):
        return Element(shown_text(text), problem)
    try:
        return _checked(parse(text), text)
    except json.JSONDecodeError as error:
        position, fault = _syntax_fault(text, error.pos, error.msg)
        return Element(text, Problem("json", f"line {number}, column {indent + position + 1}: {fault}"))
    except (ValueError, RecursionError) as error:
        return Element(text, Problem("json", f"line {number}: not valid JSON: {_words(error)}"))


# --- what is wrong ----------------------------------------------------------------------------------------------------


def _words(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _syntax_fault(text: str, position: int, message: str) -> tuple[int, str]:
    """Where the JSON is wrong, and how: the usual mistakes in our words, others in the parser's.

    Args:
        text: the text that was parsed.
        position: where the parser stopped.
        message: the parser's message.
    """
    character, before = text[position : position + 1], text[:position].rstrip()
    if message.startswith("Unterminated string"):
        fault = "the string that begins here never ends: the text was cut off, or a quotation mark is missing"
    elif not text[position:].strip():
        fault = "the text ends here, in the middle of a record or list: was it cut off?"
    elif character in _QUOTES:
        fault = f'{character} as a quotation mark; JSON has only "'
    elif character in "]}" and before.endswith(","):
        position, fault = len(before) - 1, "a comma before the closing bracket; take it out"
    elif message.startswith("Illegal trailing comma"):  # Python 3.13's parser finds it itself
        fault = "a comma before the closing bracket; take it out"
    elif word := _PYTHON_WORD.match(text, position):
        fault = f"{word[0]} as Python writes it; JSON has null, true and false"
    elif text.startswith(("//", "/*", "#"), position):
        fault = "a comment; JSON has none"
    else:
        fault = f"{message[:1].lower()}{message[1:]}, found {text[position : position + 20]!r}"
    return position, f"not valid JSON: {fault}"
