"""Records from Parquet shards: text is read once into the table of records, image bytes only when a worker needs them.

Columns: `conversations` (list of structs with `from` and `value`) or chat messages (`llava.data.messages`); optionally
`id`, `image` (or `images`) and further columns of text, numbers or booleans. `image` is a struct of `bytes` and `path`
(as the `datasets` library writes it), bytes, a path, or a list of any of these; null or an empty list means text only.

A row's bytes cannot be reached without reading the pages before it in its row group: small groups are best.
"""

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from llava.data.checks import IMAGE_KEYS, TURN_KEYS, Element, RowImage
from llava.data.errors import DataError
from llava.data.messages import checked_element

OTHER_FORMS = "docs/data.md, Other forms, makes records of CSV files and of questions and answers"
_ROWS = 1024
_IMAGES = 8  # rows whose image bytes are held at a time
_BUFFER = 1 << 20
_OPEN_SHARDS = 8


def read_rows(path: Path, text_columns: list[str] | None = None) -> Iterator[Element]:
    """The records of a shard, in order, each checked separately; `text_columns` by default are what makes a record.

    Raises:
        DataError: the file is damaged or not Parquet, or a column is missing or of another type; the message names it.
    """
    with _parquet_file(path) as file:
        images = _image_columns(file, path)
        columns = _text_columns(file.schema_arrow, path) if text_columns is None else text_columns
        start = 0
        for group in range(file.num_row_groups):
            rows = yield from _group_rows(file, path, group, columns, images, start)
            if rows != file.metadata.row_group(group).num_rows:
                raise DataError(path, _lost_rows(group, rows, file))
            start += rows


def parquet_digest(path: Path) -> str:
    """SHA-256 of a shard's footer and of all columns except the images' bytes; of these the footer holds the sizes.

    Raises:
        DataError: see `read_rows`.
    """
    digest = sha256()
    with _parquet_file(path) as file, path.open("rb") as raw:
        images = _image_columns(file, path)
        raw.seek(-8, 2)
        footer = int.from_bytes(raw.read(4), "little") + 8
        raw.seek(-footer, 2)
        digest.update(raw.read(footer))
        for group in range(file.num_row_groups):
            for number in range(file.metadata.num_columns):
                column = file.metadata.row_group(group).column(number)
                if column.path_in_schema != images.bytes:
                    offsets = (column.dictionary_page_offset, column.data_page_offset)
                    raw.seek(min(offset for offset in offsets if offset is not None))
                    digest.update(raw.read(column.total_compressed_size))
    return digest.hexdigest()


@contextmanager
def _parquet_file(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # a ValueError also where text is not UTF-8
        raise DataError(path, f"cannot be read as Parquet ({error})") from error


def _text_columns(schema: pa.Schema, path: Path) -> list[str]:
    """The columns that make up the records' text, without the images; those of turns come first."""
    if not (turns := turn_columns(schema)):
        columns = ", ".join(schema.names) or "none"
        raise DataError(path, f"no column 'conversations' or 'messages'; it has {columns}: {OTHER_FORMS}")
    further = [field for field in schema if field.name not in (*turns, *IMAGE_KEYS)]
    return turns + [field.name for field in further if types.is_primitive(field.type) or _is_text(field.type)]


def turn_columns(schema: pa.Schema) -> list[str]:
    """The columns that hold turns, or should."""
    return [name for name in TURN_KEYS if name in schema.names and not types.is_null(schema.field(name).type)]


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


class _ImageColumns(NamedTuple):
    """The column of a shard's images, and in it those of their bytes and paths, such as `image.bytes`; or None."""

    name: str = ""
    bytes: str | None = None
    paths: str | None = None


def _image_columns(file: pq.ParquetFile, path: Path) -> _ImageColumns:
    """Where a shard has its images, if it has any.

    Raises:
        DataError: the images' column has a type that cannot hold images, or there are two such columns.
    """
    schema = file.schema_arrow
    names = [name for name in IMAGE_KEYS if name in schema.names and not types.is_null(schema.field(name).type)]
    if len(names) > 1:
        raise DataError(path, "columns 'image' and 'images'; keep the one that holds the images")
    if not names:
        return _ImageColumns()
    name, kind = names[0], schema.field(names[0]).type
    image = kind.value_type if _is_list(kind) else kind
    if _is_text(image) or types.is_null(image):
        return _ImageColumns(name, None, name)
    fields = {field.name: field.type for field in image} if types.is_struct(image) else {"": image}
    end = ".bytes" if types.is_struct(image) else ""
    held = fields.get(end[1:])
    if held is None or not (types.is_binary(held) or types.is_large_binary(held)):
        expected = "a struct of 'bytes' and 'path', bytes, a path, or a list of these"
        raise DataError(path, f"column {name!r} is {kind}; expected {expected}")
    every = [file.schema.column(number).path for number in range(len(file.schema))]
    leaves = [leaf for leaf in every if f"{leaf}.".startswith(f"{name}.")]
    paths = next((leaf for leaf in leaves if "path" in fields and leaf.endswith(".path")), None)
    return _ImageColumns(name, next(leaf for leaf in leaves if leaf.endswith(end)), paths)


def _group_rows(
    file: pq.ParquetFile, path: Path, group: int, columns: list[str], images: _ImageColumns, start: int
) -> Generator[Element, None, int]:
    """Yields the records of a row group, and returns how many rows were read."""
    has_bytes = _with_bytes(file, group, images) if images.bytes else None
    if has_bytes is not None and len(has_bytes) != file.metadata.row_group(group).num_rows:
        return len(has_bytes)
    done = 0
    read = columns + ([images.paths] if images.paths else [])
    for batch in file.iter_batches(_ROWS, row_groups=[group], columns=read, use_threads=False):
        for record in batch.to_pylist():
            paths = record.pop(images.name, None)
            places = _places(paths, has_bytes and has_bytes[done], str(path), start + done)
            yield checked_element(record if places is None else record | {"image": places})
            done += 1
    return done


def _places(paths: Any, has_bytes: Any, shard: str, row: int, number: int | None = None) -> Any:
    """Where a row's images are, or one of them: a `RowImage` for bytes, else its path; None if the row has none."""
    if isinstance(images := paths or has_bytes, list):
        each = zip(paths or [None] * len(images), has_bytes or [False] * len(images), strict=True)
        return [_places(*image, shard, row, number) for number, image in enumerate(each)]
    if has_bytes:
        return RowImage(shard, row, number)
    return paths.get("path") if isinstance(paths, dict) else paths


def _with_bytes(file: pq.ParquetFile, group: int, images: _ImageColumns) -> list[Any]:
    """Which images of a row group are bytes, True or False, or a list of these; bytes are read only if need be."""

    def held(leaf: str | None, field: str, rows: int) -> list[Any]:
        batches = file.iter_batches(rows, row_groups=[group], columns=[leaf], use_threads=False)
        return [_is_there(row, field) for batch in batches for row in batch.column(0).to_pylist()]

    metadata = file.metadata.row_group(group)
    columns = (metadata.column(number) for number in range(metadata.num_columns))
    statistics = next(column.statistics for column in columns if column.path_in_schema == images.bytes)
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
    if nulls is not None and images.paths:
        # Null structs and empty lists count as null bytes. If these account for all nulls, every other image has bytes.
        there = held(images.paths, "", _ROWS)
        if sum(row.count(False) or not row if isinstance(row, list) else not row for row in there) == nulls:
            return there
    return held(images.bytes, "bytes", _IMAGES)


def _is_there(value: Any, field: str) -> bool | list[Any]:
    """Whether an image is not null, or the `field` of its struct; for a list, whether each of its images is."""
    if isinstance(value, list):
        return [_is_there(image, field) for image in value]
    return (value.get(field) if field and isinstance(value, dict) else value) is not None


def _lost_rows(group: int, rows: int, file: pq.ParquetFile) -> str:
    """The problem of a row group that has fewer rows than the footer says: a damaged page was passed over."""
    expected = f"the footer says {file.metadata.row_group(group).num_rows}"
    return f"row group {group} has {rows} rows, but {expected}; the file is damaged: fetch or write it again"


class LostRows(ValueError):
    """A row group has fewer rows than its footer says, so that a row may have come in the place of another."""


class RowReader:
    """Reads image bytes of rows; rows that follow each other in a shard are read in one go.

    Keeps some shards open, and holds the bytes of a few rows. Pickling keeps neither.
    """

    def __init__(self) -> None:
        self._shards: dict[str, tuple[pq.ParquetFile, str, list[int]]] = {}  # the one used last comes last
        self._forget()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RowReader, ()

    def _forget(self) -> None:
        self._group: tuple[str, int] | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._held: Sequence[Any] = ()
        self._first = 0  # row of the first held value

    def read(self, image: RowImage) -> bytes:
        """The bytes of the image in its row.

        Raises:
            OSError: the shard cannot be read, or the row holds no bytes.
            LostRows: rows are missing in its row group.
        """
        try:
            value = self._find(image)
        except Exception as error:  # pyarrow raises whatever damaged bytes lead it to
            # After an error a reader continues past the damage, as if the rows there were the next: it is closed.
            self._forget()
            if image.shard in self._shards:
                self._shards.pop(image.shard)[0].close()
            if isinstance(error, (OSError, LostRows)):
                raise
            raise OSError(str(error) or "the shard has changed") from error
        if value is None:
            raise OSError("the row holds no bytes")
        return value

    def _find(self, image: RowImage) -> bytes | None:
        file, leaf, starts = self._shard(image.shard)
        group = bisect_right(starts, image.row) - 1
        if self._group != (image.shard, group) or image.row < self._first:
            self._batches = file.iter_batches(_IMAGES, row_groups=[group], columns=[leaf], use_threads=False)
            self._group, self._held, self._first = (image.shard, group), (), starts[group]
        while image.row - self._first >= len(self._held):
            self._first += len(self._held)
            batch = next(self._batches, None)
            if batch is None:
                raise LostRows(f"{image.shard}: {_lost_rows(group, self._first - starts[group], file)}")
            self._held = batch.column(0)
        value = self._held[image.row - self._first].as_py()
        value = value if image.number is None else value[image.number]
        return value.get("bytes") if isinstance(value, dict) else value

    def _shard(self, path: str) -> tuple[pq.ParquetFile, str, list[int]]:
        """The open shard, the column of its images' bytes, and the first row of each row group."""
        if path not in self._shards:
            # Pages are read one after the other: a whole row group of images may exceed a worker's share of memory.
            file = pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            rows = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
            leaf = _image_columns(file, Path(path)).bytes or "image"
            self._shards[path] = file, leaf, list(accumulate(rows, initial=0))
            if len(self._shards) > _OPEN_SHARDS:
                self._shards.pop(next(iter(self._shards)))[0].close()
        self._shards[path] = self._shards.pop(path)
        return self._shards[path]
