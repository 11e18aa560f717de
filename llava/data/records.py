"""Reads LLaVA-format records from JSON, JSONL or Parquet, and shares them between processes.

`llava.data.checks` says what a record is. A file is converted once to an Arrow file beside it that holds each record's
JSON text and what is wrong with it; images stay where they are. Every process maps that file into memory, so that ranks
and workers share one copy, and parses a record when it is asked for. Cost: reading, checking and writing once; then
nothing that grows with the number of records.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from glob import glob
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llava.data.cache import bytes_digest, cache_folders, cached_file, content_hash, file_stamp, known_hash, made_once
from llava.data.checks import Problem, Record, record_images, record_name, starts_from
from llava.data.json_files import Element, read_elements
from llava.data.parallel import in_processes
from llava.data.parquet_files import parquet_digest, read_rows, with_row_images
from llava.progress import progress

__all__ = ["Record", "RecordTable", "load_records", "record_images", "record_name"]

_SHOWN_PROBLEMS = 10
_FORMAT = 3  # of the Arrow file; to be raised when the checks find more, since converted files are not checked again
_SCHEMA = pa.schema([("record", pa.binary()), ("row", pa.int64()), ("kind", pa.string()), ("problem", pa.string())])
_ROWS, _CHARACTERS = 1024, 1 << 26  # of a piece of the Arrow file
_SUFFIXES = (".json", ".jsonl", ".parquet")
_WORTH_PROCESSES = 4  # files


class RecordTable(Sequence[Record]):
    """The records of one or more converted files, in order; `[i]` is the record as a dict.

    Pickling it takes the paths along, not the records.

    Args:
        sources: the files that were converted.
        paths: converted files.
        key: says the content of all of them.
        folders: where files made from these records are cached.
        kept: the records that are used, rising; default all.
    """

    def __init__(
        self, sources: list[Path], paths: list[Path], key: str, folders: list[Path], kept: np.ndarray | None = None
    ):
        self.sources, self.paths, self.key, self.folders, self.kept = sources, paths, key, folders, kept
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._starts: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": {}}

    @property
    def columns(self) -> dict[str, pa.ChunkedArray]:
        """Every record's JSON text and what is known about it, kept or not, mapped from the files."""
        if not self._columns:
            tables = [_map_rows(path) for path in self.paths]
            self._starts = list(accumulate(map(len, tables), initial=0))
            whole = pa.concat_tables(tables)
            self._columns = dict(zip(whole.column_names, whole.columns, strict=True))
        return self._columns

    @property
    def total(self) -> int:
        """How many records the files have, kept or not."""
        return len(self.columns["record"])

    def __len__(self) -> int:
        return self.total if self.kept is None else len(self.kept)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        index = index if self.kept is None else int(self.kept[index])
        record = json.loads(self.columns["record"][index].as_py())
        row = self.columns["row"][index].as_py()
        return record if row is None else with_row_images(record, str(self.source(index)[0]), row)

    def source(self, index: int) -> tuple[Path, int]:
        """The file of a record of all, kept or not, and its place there."""
        assert 0 <= index < self.total
        number = bisect_right(self._starts, index) - 1
        return self.sources[number], index - self._starts[number]

    def text(self, index: int) -> str:
        """The JSON text of a record of all, kept or not; bytes that are not UTF-8 are replaced."""
        return self.columns["record"][index].as_py().decode("utf-8", "replace")

    def problem(self, index: int) -> Problem | None:
        """What is wrong with a record of all by itself, as far as conversion checks it."""
        kind = self.columns["kind"][index].as_py()
        return None if kind is None else Problem(kind, self.columns["problem"][index].as_py())

    def named(self, index: int) -> str:
        """How messages call a record of all: by its file, its place there, and its id."""
        source, place = self.source(index)
        try:
            record = json.loads(self.text(index))
        except (ValueError, RecursionError):
            record = None
        return f"{source}: {record_name(record, place)}"

    def malformed(self) -> np.ndarray:
        """The indices, of all records, that `problem` finds something in."""
        kinds = self.columns["kind"]
        return np.flatnonzero(kinds.is_valid().to_numpy()) if kinds.null_count < self.total else np.zeros(0, np.int64)

    def without(self, indices: Sequence[int]) -> "RecordTable":
        """The same table without some records; its key tells it from the whole one."""
        if not len(indices):
            return self
        kept = np.delete(np.arange(self.total), indices)
        key = sha256(f"{self.key} {len(kept)}".encode() + kept.tobytes()).hexdigest()
        return RecordTable(self.sources, self.paths, key, self.folders, kept)

    @property
    def left_out(self) -> int:
        """How many records of the files are not used."""
        return self.total - len(self)


def load_records(
    data_path: str, cache_dir: str | None = None, check: bool = True, show_progress: bool = False
) -> RecordTable:
    """All records of the files that `data_path` names, in order.

    Args:
        data_path: `.json` and `.jsonl` (a list, or one record per line) or `.parquet` files: one, several separated by
            commas, a pattern, or a folder of Parquet shards.
        cache_dir: where converted files are kept; default `.llava_cache` beside each file.
        check: refuse malformed records; False keeps them, with their problems.
        show_progress: a bar where there are many files to convert.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file cannot be read, or records are malformed; the message names file, record and fault.
        OSError: no cache folder can be written, or a damaged file ended the process that read it.
    """
    sources = data_files(data_path)
    ready = {source: found for source in sources if (found := _ready(source, cache_folders(source, cache_dir)))}
    waiting = sorted({source for source in sources if source not in ready})
    # Parquet in other processes always: a damaged footer can end the process that reads it.
    apart = len(waiting) >= _WORTH_PROCESSES or any(source.suffix == ".parquet" for source in waiting)
    made = in_processes(_converted, cache_dir, waiting, worth=apart)
    hidden = not show_progress or len(waiting) < _WORTH_PROCESSES
    ready |= zip(waiting, progress(made, "reading records", "files", total=len(waiting), hidden=hidden), strict=True)
    paths, hashes = zip(*(ready[source] for source in sources), strict=True)
    key = sha256(" ".join(hashes).encode()).hexdigest()
    table = RecordTable(sources, list(paths), key, cache_folders(sources[0], cache_dir))
    if check and len(found := table.malformed()):
        shown = "\n  ".join(f"{table.named(i)}: {table.problem(i).message}" for i in found[:_SHOWN_PROBLEMS].tolist())
        raise ValueError(f"--data_path {data_path}: {len(found)} of {len(table)} records are malformed:\n  {shown}")
    return table


def data_files(data_path: str) -> list[Path]:
    """The files that `--data_path` names, in order; those of a folder or pattern by name.

    Raises:
        FileNotFoundError: there is none; the message says of which name.
        ValueError: a file is of another kind.
    """
    files: list[Path] = []
    for name in filter(None, (part.strip() for part in data_path.split(","))):
        matches = [Path(name)] if Path(name).exists() else sorted(map(Path, glob(name, recursive=True)))
        found = [file for match in matches for file in (_shards(match) if match.is_dir() else [match])]
        if not found:
            raise FileNotFoundError(
                f"--data_path {name}: no such file{starts_from(name)}; expected {', '.join(_SUFFIXES)}, or a folder of "
                "*.parquet"
            )
        if wrong := next((file for file in found if file.suffix not in _SUFFIXES or not file.is_file()), None):
            raise ValueError(f"--data_path {wrong}: expected a file that ends in {', '.join(_SUFFIXES)}")
        files += found
    if not files:
        raise FileNotFoundError("--data_path is empty: no such file")
    return files


def _shards(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.parquet") if not file.name.startswith("."))


# --- conversion -------------------------------------------------------------------------------------------------------


def _ready(source: Path, folders: list[Path]) -> tuple[Path, str] | None:
    """The Arrow file of `source` and the hash of its content, if both are known."""
    content = known_hash(source, folders)
    path = content and cached_file(_arrow_name(source, content), folders, _is_whole)
    return (path, content) if path else None


def _converted(cache_dir: str | None, source: Path) -> tuple[Path, str]:
    """The Arrow file of `source` and the hash of its content."""
    folders = cache_folders(source, cache_dir)
    stamp = file_stamp(source)
    content = content_hash(source, folders, parquet_digest if source.suffix == ".parquet" else bytes_digest)

    def convert(target: Path) -> None:
        _convert(source, target)
        if file_stamp(source) != stamp:
            raise ValueError(f"--data_path {source}: changed while it was read; start again when it is complete")

    return made_once(_arrow_name(source, content), folders, convert, _is_whole), content


def _arrow_name(source: Path, content: str) -> str:
    return f"{source.name}.{content[:16]}.records{_FORMAT}.arrow"


def _convert(source: Path, target: Path) -> None:
    elements = read_rows(source) if source.suffix == ".parquet" else read_elements(source)
    count = 0
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for piece in _pieces(elements):
            writer.write_batch(_batch(piece))
            count += len(piece)
    if not count:
        raise ValueError(f"--data_path {source}: holds no records")


def _pieces(elements: Iterator[Element]) -> Iterator[list[Element]]:
    """Lists of at most `_ROWS` elements that together are not much longer than `_CHARACTERS`."""
    piece: list[Element] = []
    characters = 0
    for element in elements:
        piece.append(element)
        characters += len(element.text)
        if len(piece) == _ROWS or characters > _CHARACTERS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece


def _batch(elements: list[Element]) -> pa.RecordBatch:
    problems = [element.problem or (None, None) for element in elements]
    columns = [
        [element.text.encode("utf-8", "surrogateescape") for element in elements],
        [element.row for element in elements],
        [kind for kind, _ in problems],
        [message and message.encode("utf-8", "replace").decode() for _, message in problems],
    ]
    return pa.record_batch(
        [pa.array(values, field.type) for values, field in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
    )


def _map_rows(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        return reader.read_all()


def _is_whole(path: Path) -> bool:
    try:
        table = _map_rows(path)
        return table.schema == _SCHEMA and len(table) > 0
    except (pa.ArrowInvalid, OSError):  # the list of batches stands at the end: a cut file has none
        return False
