"""Reads LLaVA-format records from JSON or JSONL, checks every one before training starts, and shares them.

A record is `{"id", "image": str | [str], "conversations": [{"from", "value"}, ...]}`; `image` is absent for text only.
Further fields are kept.

A file is converted once to an Arrow file beside it that holds each record's JSON text. Every process maps that file
into memory, so that ranks and workers share one copy, and parses a record when it is asked for. Cost: reading, checking
and writing once; then nothing that grows with the number of records.
"""

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.cache import cache_folders, content_hash, file_stamp, made_once

Record = dict[str, Any]
_SHOWN_PROBLEMS = 10
_FORMAT = (
    1  # of the Arrow file; to be raised when `record_problem` finds more, since converted files are not checked again
)
_SCHEMA = pa.schema([("record", pa.binary())])
_ROWS = 1024
_PIECE = 1 << 22  # characters of a .json file that are read at a time
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"[ \t\n\r]*")


class RecordTable(Sequence[Record]):
    """The records of one or more converted files, in order; `[i]` is the record as a dict.

    Pickling it takes the paths along, not the records.

    Args:
        paths: converted files.
        key: says the content of all of them.
        folders: where files made from these records are cached.
    """

    def __init__(self, paths: list[Path], key: str, folders: list[Path]):
        self.paths, self.key, self.folders = paths, key, folders
        self._texts: pa.ChunkedArray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_texts": None}

    @property
    def texts(self) -> pa.ChunkedArray:
        """The JSON text of every record, mapped from the files."""
        if self._texts is None:
            chunks = [chunk for path in self.paths for chunk in _map_texts(path).chunks]
            self._texts = pa.chunked_array(chunks, pa.binary())
        return self._texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return json.loads(self.texts[range(len(self))[index]].as_py())


def load_records(data_path: str, cache_dir: str | None = None) -> RecordTable:
    """All records of one file, or of several separated by commas, in order, checked.

    Args:
        data_path: `.json` (a list) or `.jsonl` (one record per line).
        cache_dir: where converted files are kept; default `.llava_cache` beside each file.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is not JSON/JSONL, or records are malformed; the message names file, record and fault.
        OSError: no cache folder can be written.
    """
    paths, hashes, folders = [], [], []
    for name in data_path.split(","):
        source = Path(name.strip())
        if not source.is_file():
            raise FileNotFoundError(f"--data_path {source}: no such file; expected LLaVA-format .json or .jsonl")
        folders.append(cache_folders(source, cache_dir))
        path, content = _converted(source, folders[-1])
        paths.append(path)
        hashes.append(content)
    return RecordTable(paths, sha256(" ".join(hashes).encode()).hexdigest(), folders[0])


def _converted(source: Path, folders: list[Path]) -> tuple[Path, str]:
    """The Arrow file of `source` and the hash of its content."""
    stamp = file_stamp(source)
    content = content_hash(source, folders)

    def convert(target: Path) -> None:
        _convert(source, target)
        if file_stamp(source) != stamp:
            raise ValueError(f"--data_path {source}: changed while it was read; start again when it is complete")

    return made_once(f"{source.name}.{content[:16]}.records{_FORMAT}.arrow", folders, convert, _is_whole), content


def _convert(source: Path, target: Path) -> None:
    read = _read_jsonl if source.suffix == ".jsonl" else _read_json
    texts = checked_texts(read(source), str(source))
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        while rows := list(islice(texts, _ROWS)):
            writer.write_batch(pa.record_batch([pa.array(rows, pa.binary())], schema=_SCHEMA))


def _map_texts(path: Path) -> pa.ChunkedArray:
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        return reader.read_all().column("record")


def _is_whole(path: Path) -> bool:
    try:
        return len(_map_texts(path)) > 0
    except (pa.ArrowInvalid, OSError):  # the list of batches stands at the end: a cut file has none
        return False


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Iterator[tuple[Any, str]]:
    """The elements of a JSON list, each with its text, from a piece of the file at a time."""
    parse = json.JSONDecoder().raw_decode
    with path.open(encoding="utf-8") as file:
        text, position = file.read(_PIECE).lstrip(), 1
        if not text.startswith("["):
            return _explain_json(path)
        separator = None
        while separator != "]":
            begin = _SPACE.match(text, position).end()
            try:
                element, end = parse(text, begin)
                behind = _SPACE.match(text, end).end()
                separator = text[behind : behind + 1]
            except json.JSONDecodeError:
                separator = ""
            if separator in (",", "]"):
                yield element, text[begin:end]
                position = behind + 1
            elif piece := file.read(max(_PIECE, len(text) - position)):  # an element that goes on behind the piece
                text, position = text[position:] + piece, 0
            else:
                return _explain_json(path)
        if (text[position:] + file.read()).strip():
            return _explain_json(path)


def _explain_json(path: Path) -> None:
    """Raises what is wrong with a file that is not a list of elements; returns if the list is empty."""
    with path.open(encoding="utf-8") as file:
        try:
            loaded = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--data_path {path}: not valid JSON ({error}); one record per line needs .jsonl"
            ) from error
    if loaded != []:
        raise ValueError(f"--data_path {path}: expected a JSON list of records, found {type(loaded).__name__}")


def _read_jsonl(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line), line.strip()
            except json.JSONDecodeError as error:
                raise ValueError(f"--data_path {path}, line {number}: not valid JSON ({error})") from error


# --- checks -----------------------------------------------------------------------------------------------------------


def checked_texts(records: Iterator[tuple[Any, str]], source: str) -> Iterator[bytes]:
    """The texts of the well-formed records of `source`.

    Raises:
        ValueError: at the end, if records are malformed or there are none; lists the first ones and says how many.
    """
    problems: list[str] = []
    malformed = count = 0
    for index, (record, text) in enumerate(records):
        count += 1
        if problem := record_problem(record):
            malformed += 1
            if len(problems) < _SHOWN_PROBLEMS:
                problems.append(f"{record_name(record, index)}: {problem}")
        elif not malformed:
            yield text.encode()
    if not count:
        raise ValueError(f"--data_path {source}: holds no records")
    if malformed:
        shown = "\n  ".join(problems)
        raise ValueError(f"{source}: {malformed} of {count} records are malformed:\n  {shown}")


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
        if not turn["value"].isascii() and _SURROGATE.search(turn["value"]):
            return f"turn {number}: half of a surrogate pair in {turn['value']!r:.80}, which no tokenizer takes"
    images = record_images(record)
    if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
        return f"'image': expected a path or a list of paths, found {record['image']!r:.80}"
    placeholders = sum(turn["value"].count(DEFAULT_IMAGE_TOKEN) for turn in conversations)
    if images and placeholders != len(images):  # without an image the placeholder is a word like any other
        return f"{placeholders} {DEFAULT_IMAGE_TOKEN} placeholders but {len(images)} images"
    return None
