"""Records from Parquet shards: text is read once into the table of records, image bytes only when a worker needs them.

Columns: `conversations` (list of structs with `from` and `value`) or chat messages (`llava.data.messages`); optionally
`id`, `image` (or `images`) and further columns of text, numbers or booleans. `image` is a struct of `bytes` and `path`
(as the `datasets` library writes it), bytes, a path, or a list of any of these; null or an empty list means text only.

A row's bytes cannot be reached without reading the pages before it in its row group, so shards for training should have
row groups of a few tens of MB at most (100 rows, the `datasets` library's choice for images).
"""

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Iterator
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from llava.data.checks import IMAGE_KEYS, TURN_KEYS, Element, Record, RowImage, record_problem, shown_text, text_problem
from llava.data.errors import DataError
from llava.data.messages import TURN_PAIR, as_record

OTHER_FORMS = "docs/data.md, Other forms, makes records of CSV files and of questions and answers"
LARGE_GROUP = 1 << 26  # bytes of images in a row group, above which reading at random is slow
_ROWS = 1024
_IMAGES = 8  # rows whose image bytes are held at a time
_BUFFER = 1 << 20
_OPEN_SHARDS = 8


def read_rows(path: Path, text_columns: list[str] | None = None) -> Iterator[Element]:
    """The records of a shard, in order, each checked separately.

    Args:
        path: the shard.
        text_columns: what is read besides the images; by default what makes a record.

    Raises:
        ValueError: the file is not Parquet, or a column is missing or of another type; the message names it.
    """
    try:
        with pq.ParquetFile(path) as file:
            image = image_leaf(file, path)
            columns = _text_columns(file.schema_arrow, path) if text_columns is None else text_columns
            start = 0
            for group in range(file.num_row_groups):
                rows = yield from _group_rows(file, group, columns, image, start)
                if rows != file.metadata.row_group(group).num_rows:
                    raise DataError(path, _lost_rows(group, rows, file))
                start += rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"cannot be read as Parquet ({error})") from error


def parquet_digest(path: Path) -> str:
    """SHA-256 of a shard's footer and of all columns except the images' bytes; of these the footer holds the sizes.

    Raises:
        ValueError: see `read_rows`.
    """
    digest = sha256()
    try:
        with pq.ParquetFile(path) as file, path.open("rb") as raw:
            image = image_leaf(file, path)
            raw.seek(-8, 2)
            footer = int.from_bytes(raw.read(4), "little") + 8
            raw.seek(-footer, 2)
            digest.update(raw.read(footer))
            for column in _column_chunks(file):
                if column.path_in_schema != image:
                    offsets = (column.dictionary_page_offset, column.data_page_offset)
                    raw.seek(min(offset for offset in offsets if offset is not None))
                    digest.update(raw.read(column.total_compressed_size))
    except DataError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(path, f"cannot be read as Parquet ({error})") from error
    return digest.hexdigest()


def largest_image_group(path: Path) -> int:
    """Bytes of the images in the row group of a shard that has most of them; 0 without images."""
    with pq.ParquetFile(path) as file:
        image = image_leaf(file, path)
        return max((c.total_uncompressed_size for c in _column_chunks(file) if c.path_in_schema == image), default=0)


def _column_chunks(file: pq.ParquetFile) -> Iterator[pq.ColumnChunkMetaData]:
    for group in range(file.num_row_groups):
        for number in range(file.metadata.num_columns):
            yield file.metadata.row_group(group).column(number)


def unread_columns(path: Path) -> tuple[list[str], int]:
    """The columns of a shard whose type nothing reads, and the number of its rows."""
    with pq.ParquetFile(path) as file:
        read = (*turn_columns(file.schema_arrow), *IMAGE_KEYS)
        odd = [f.name for f in file.schema_arrow if f.name not in read and not _is_simple(f.type)]
        return odd, file.metadata.num_rows


def with_row_images(record: Record, shard: str, row: int) -> Record:
    """`record` with `RowImage`s for the images whose bytes are in its row; in a list of images these are null."""
    names = record.get("image")
    if not isinstance(names, list):
        return record | {"image": RowImage(shard, row)}
    return record | {"image": [RowImage(shard, row, i) if name is None else name for i, name in enumerate(names)]}


# --- columns ----------------------------------------------------------------------------------------------------------


def _text_columns(schema: pa.Schema, path: Path) -> list[str]:
    """The columns that make up the records' text, without the images; those of turns come first."""
    turns = turn_columns(schema)
    if not turns:
        columns = ", ".join(schema.names) or "none"
        raise DataError(path, f"no column 'conversations' or 'messages'; it has {columns}: {OTHER_FORMS}")
    for name in turns:
        fields = _turn_fields(schema, name)
        if not ({"from", "value"} <= fields.keys() or {"role", "content"} <= fields.keys()):
            raise DataError(
                path,
                f"column {name!r} is {schema.field(name).type}; expected a list of structs of the texts 'from' and "
                "'value', or 'role' and 'content'",
            )
    return turns + [f.name for f in schema if f.name not in (*turns, *IMAGE_KEYS) and _is_simple(f.type)]


def turn_columns(schema: pa.Schema) -> list[str]:
    """The columns that hold turns, or should."""
    turns = [name for name in TURN_KEYS if name in schema.names and not types.is_null(schema.field(name).type)]
    parts = [name for name in TURN_PAIR if name in schema.names and _turn_fields(schema, name)]
    return turns or (parts if len(parts) == 2 else [])


def _turn_fields(schema: pa.Schema, name: str) -> dict[str, pa.DataType]:
    """The fields of a column's turns that hold texts or lists of parts; empty if it is not a list of structs."""
    kind = schema.field(name).type
    if not _is_list(kind) or not types.is_struct(kind.value_type):
        return {}
    return {field.name: field.type for field in kind.value_type if _is_text(field.type) or _is_list(field.type)}


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)


def _is_simple(kind: pa.DataType) -> bool:
    return _is_text(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


def _image_column(schema: pa.Schema, path: Path) -> tuple[str, pa.DataType] | None:
    """The name of the images' column, and the type of an image in it.

    Raises:
        ValueError: there are two such columns.
    """
    names = [name for name in IMAGE_KEYS if name in schema.names and not types.is_null(schema.field(name).type)]
    if len(names) > 1:
        raise DataError(path, "columns 'image' and 'images'; keep the one that holds the images")
    if not names:
        return None
    kind = schema.field(names[0]).type
    return names[0], kind.value_type if _is_list(kind) else kind


def image_leaf(file: pq.ParquetFile, path: Path) -> str | None:
    """The column that holds the images' bytes, such as `image`, `image.bytes` or `images.list.element.bytes`, or None.

    Raises:
        ValueError: the images' column has a type that cannot hold images, or there are two such columns.
    """
    column = _image_column(file.schema_arrow, path)
    if column is None or _is_text(column[1]) or types.is_null(column[1]):
        return None
    name, kind = column
    holder = kind.field("bytes").type if types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    if not (types.is_binary(holder) or types.is_large_binary(holder)):
        expected = "a struct of 'bytes' and 'path', bytes, a path, or a list of these"
        raise DataError(path, f"column {name!r} is {file.schema_arrow.field(name).type}; expected {expected}")
    return _leaf(file, name, "" if holder is kind else ".bytes")


def _leaf(file: pq.ParquetFile, name: str, end: str) -> str:
    leaves = (file.schema.column(number).path for number in range(len(file.schema)))
    return next(leaf for leaf in leaves if (leaf == name or leaf.startswith(f"{name}.")) and leaf.endswith(end))


def _path_leaf(file: pq.ParquetFile, name: str, kind: pa.DataType) -> str | None:
    """The column of the images' paths beside their bytes."""
    return _leaf(file, name, ".path") if types.is_struct(kind) and kind.get_field_index("path") >= 0 else None


# --- rows -------------------------------------------------------------------------------------------------------------


def _group_rows(
    file: pq.ParquetFile, group: int, columns: list[str], image: str | None, start: int
) -> Generator[Element, None, int]:
    """Yields the records of a row group, and returns how many rows were read."""
    name, kind = _image_column(file.schema_arrow, Path()) or ("", pa.null())
    paths = _path_leaf(file, name, kind) if image else name
    held = _with_bytes(file, group, name, image, paths) if image else None
    if held is not None and len(held) != file.metadata.row_group(group).num_rows:
        return len(held)
    done = 0
    read = columns + ([paths] if paths else [])
    for batch in file.iter_batches(_ROWS, row_groups=[group], columns=read, use_threads=False):
        for record in batch.to_pylist():
            images, with_bytes = _row_images(_paths(record.pop(name, None)), held and held[done])
            if images is not None:
                record["image"] = images
            yield _element(record, start + done if with_bytes else None)
            done += 1
    return done


def _element(record: Record, row: int | None) -> Element:
    """The element of a row's record, in LLaVA's form; `row` is the row's number if it holds images itself."""
    whole, problem = as_record(record if row is None else with_row_images(record, "", row))
    if problem is None:
        images = {"image": record["image"]} if "image" in record else {}
        record = whole if row is None else {k: v for k, v in whole.items() if k != "image"} | images
    text = json.dumps(record, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
    return Element(shown_text(text), problem or text_problem(text) or record_problem(whole), row)


def _paths(value: Any) -> Any:
    """The paths of a row's images: one, a list of them, or None."""
    if isinstance(value, list):
        return [_paths(image) for image in value]
    return value.get("path") if isinstance(value, dict) else value


def _row_images(names: Any, held: Any) -> tuple[Any, bool]:
    """The images as the record's text names them, with null for bytes in a list; and whether the row holds bytes."""
    if isinstance(held, list):
        names = names or [None] * len(held)
        return [None if there else name for name, there in zip(names, held, strict=True)], any(held)
    return (None, True) if held else (names, False)


def _with_bytes(file: pq.ParquetFile, group: int, name: str, image: str, paths: str | None) -> list[Any]:
    """Which images of a row group are bytes, True or False, or a list of these; bytes are read only if need be."""
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(number) for number in range(metadata.num_columns))
    statistics = next(column.statistics for column in columns if column.path_in_schema == image)
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
    if not _is_list(file.schema_arrow.field(name).type) and nulls in (0, metadata.num_rows):
        return [nulls == 0] * metadata.num_rows
    if nulls is not None and paths:
        # Null structs and empty lists count as null bytes. If these account for all nulls, every other image has bytes.
        table = file.read_row_group(group, columns=[paths], use_threads=False)
        there = [_is_there(row) for row in table.column(name).to_pylist()]
        if sum(row.count(False) or not row if isinstance(row, list) else not row for row in there) == nulls:
            return there
    batches = file.iter_batches(_IMAGES, row_groups=[group], columns=[image], use_threads=False)
    return [_is_there(row, "bytes") for batch in batches for row in batch.column(0).to_pylist()]


def _is_there(value: Any, field: str = "") -> bool | list[Any]:
    """Whether an image is not null, or the `field` of its struct; for a list, whether each of its images is."""
    if isinstance(value, list):
        return [_is_there(image, field) for image in value]
    return (value.get(field) if field and isinstance(value, dict) else value) is not None


def _lost_rows(group: int, rows: int, file: pq.ParquetFile) -> str:
    """The problem of a row group that has fewer rows than the footer says: a damaged page was passed over."""
    expected = f"the footer says {file.metadata.row_group(group).num_rows}"
    return f"row group {group} has {rows} rows, but {expected}; the file is damaged: fetch or write it again"


# --- images -----------------------------------------------------------------------------------------------------------


class LostRows(ValueError):
    """A row group has fewer rows than its footer says, so that a row may have come in the place of another."""


class RowReader:
    """Reads image bytes of rows; rows that follow each other in a shard are read in one go.

    Keeps some shards open, and holds the bytes of a few rows. Pickling keeps neither.
    """

    def __init__(self) -> None:
        self._shards: OrderedDict[str, tuple[pq.ParquetFile, str, list[int]]] = OrderedDict()
        self._group: tuple[str, int] | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._held: pa.Array | None = None
        self._first = 0  # row of the first held value

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, _: dict[str, object]) -> None:
        self.__init__()

    def read(self, image: RowImage) -> bytes:
        """The bytes of the image in its row.

        Raises:
            OSError: the shard cannot be read, or the row holds no bytes.
            LostRows: rows are missing in its row group.
        """
        try:
            value = self._find(image)
        except Exception as error:  # pyarrow raises whatever damaged bytes lead it to
            self._forget(image.shard)
            if isinstance(error, (OSError, LostRows)):
                raise
            raise OSError(str(error) or "the shard has changed") from error
        if value is None:
            raise OSError("the row holds no bytes")
        return value

    def _find(self, image: RowImage) -> bytes | None:
        file, leaf, starts = self._shard(image.shard)
        group = bisect_right(starts, image.row) - 1
        behind = self._group == (image.shard, group) and image.row >= self._first
        if not behind:
            self._batches = file.iter_batches(_IMAGES, row_groups=[group], columns=[leaf], use_threads=False)
            self._group, self._held, self._first = (image.shard, group), None, starts[group]
        while self._held is None or image.row - self._first >= len(self._held):
            self._first += 0 if self._held is None else len(self._held)
            batch = next(self._batches, None)
            if batch is None:
                raise LostRows(f"{image.shard}: {_lost_rows(group, self._first - starts[group], file)}")
            self._held = batch.column(0)
        value = self._held[image.row - self._first].as_py()
        value = value if image.number is None else value[image.number]
        return value.get("bytes") if isinstance(value, dict) else value

    def _forget(self, path: str) -> None:
        """Closes a shard: after an error its reader continues past the damage, as if the rows there were the next."""
        self._group, self._held, self._batches = None, None, iter(())
        if path in self._shards:
            self._shards.pop(path)[0].close()

    def _shard(self, path: str) -> tuple[pq.ParquetFile, str, list[int]]:
        if path not in self._shards:
            # Pages are read one after the other: a whole row group of images may exceed a worker's share of memory.
            file = pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            rows = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
            self._shards[path] = file, image_leaf(file, Path(path)) or "image", list(accumulate(rows, initial=0))
            if len(self._shards) > _OPEN_SHARDS:
                self._shards.popitem(last=False)[1][0].close()
        self._shards.move_to_end(path)
        return self._shards[path]
