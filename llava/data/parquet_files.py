"""Records from Parquet shards: text is read once into the table of records, image bytes only when a worker needs them.

Columns: `conversations` (list of structs with `from` and `value`) or chat messages (`llava.data.messages`); optionally
`id`, `image` (or `images`) and further columns of text, numbers or booleans. `image` is a struct of `bytes` and `path`
(as the `datasets` library writes it), bytes, a path, or a list of any of these; null or an empty list means text only.
"""

import json
from collections.abc import Callable, Generator, Iterator
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from llava.data.checks import IMAGE_KEYS, TURN_KEYS, Record, RowImage, record_problem, shown_text, text_problem
from llava.data.errors import DataError
from llava.data.json_files import Element
from llava.data.messages import TURN_PAIR, as_record

LARGE_GROUP = 1 << 26  # bytes of images in a row group, above which reading at random is slow
Value = TypeVar("Value")
_TURN_FIELDS = (("from", "value"), ("role", "content"))
_ROWS = 1024
_IMAGES = 8  # rows whose image bytes are held at a time


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
            unread = dict.fromkeys(_unread(file.schema_arrow), "a column of another type")
            start = 0
            for group in range(file.num_row_groups):
                rows = yield from _group_rows(file, group, columns, image, start, unread)
                if rows != file.metadata.row_group(group).num_rows:
                    raise DataError(path, lost_rows(group, rows, file))
                start += file.metadata.row_group(group).num_rows
    except (pa.ArrowException, OSError) as error:
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
            for group in range(file.num_row_groups):
                for number in range(file.metadata.num_columns):
                    column = file.metadata.row_group(group).column(number)
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
        groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
        columns = (group.column(number) for group in groups for number in range(file.metadata.num_columns))
        return max((c.total_uncompressed_size for c in columns if c.path_in_schema == image), default=0)


def unread_columns(path: Path) -> tuple[list[str], int]:
    """The columns of a shard that nothing reads, also those within `conversations`, and the number of its rows."""
    with pq.ParquetFile(path) as file:
        return _unread(file.schema_arrow), file.metadata.num_rows


def lost_rows(group: int, rows: int, file: pq.ParquetFile) -> str:
    """The problem of a row group that has fewer rows than the footer says: a damaged page was passed over."""
    expected = file.metadata.row_group(group).num_rows
    return (
        f"row group {group} has {rows} rows, but the footer says {expected}; the file is damaged: fetch or write it "
        "again"
    )


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
        raise DataError(path, f"no column 'conversations' or 'messages'; it has {columns}")
    for name in turns:
        fields = _turn_fields(schema, name)
        if not any(_is_text(fields.get(role)) and _is_content(fields.get(text)) for role, text in _TURN_FIELDS):
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
    kind = schema.field(name).type
    turn = kind.value_type if _is_list(kind) else None
    if turn is None or not types.is_struct(turn):
        return {}
    return {turn.field(i).name: turn.field(i).type for i in range(turn.num_fields)}


def _is_content(kind: pa.DataType | None) -> bool:
    """Whether a turn's field holds texts, or lists of parts."""
    return _is_text(kind) or kind is not None and _is_list(kind) and types.is_struct(kind.value_type)


def _is_llavas(schema: pa.Schema, name: str) -> bool:
    """Whether a column holds turns in LLaVA's form; of such turns further fields are not read."""
    fields = _turn_fields(schema, name)
    texts = _is_text(fields.get("from")) and _is_text(fields.get("value"))
    return name == "conversations" and texts and "role" not in fields


def _unread(schema: pa.Schema) -> list[str]:
    turns = turn_columns(schema)
    named = [f.name for f in schema if f.name not in (*turns, *IMAGE_KEYS) and not types.is_null(f.type)]
    fields = [name for turn in turns if _is_llavas(schema, turn) for name in _turn_fields(schema, turn)]
    return [name for name in named if not _is_simple(schema.field(name).type)] + [
        f"conversations.{name}" for name in fields if name not in ("from", "value")
    ]


def _is_text(kind: pa.DataType | None) -> bool:
    return kind is not None and (types.is_string(kind) or types.is_large_string(kind))


def _is_simple(kind: pa.DataType) -> bool:
    return _is_text(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind)


def image_leaf(file: pq.ParquetFile, path: Path) -> str | None:
    """The column that holds the images' bytes, such as `image`, `image.bytes` or `images.list.element.bytes`, or None.

    Raises:
        ValueError: the images' column has a type that cannot hold images, or there are two such columns.
    """
    name = _image_column(file.schema_arrow, path)
    if name is None:
        return None
    kind = file.schema_arrow.field(name).type
    single = kind.value_type if _is_list(kind) else kind
    if _is_bytes(single):
        return _leaf(file, name, "")
    if types.is_struct(single) and _has_field(single, "bytes", _is_bytes):
        return _leaf(file, name, ".bytes")
    if _is_text(single) or types.is_null(single):
        return None
    expected = "a struct of 'bytes' and 'path', bytes, a path, or a list of these"
    raise DataError(path, f"column {name!r} is {kind}; expected {expected}")


def _image_column(schema: pa.Schema, path: Path | str) -> str | None:
    names = [name for name in IMAGE_KEYS if name in schema.names and not types.is_null(schema.field(name).type)]
    if len(names) > 1:
        raise DataError(path, "columns 'image' and 'images'; keep the one that holds the images")
    return names[0] if names else None


def _leaf(file: pq.ParquetFile, name: str, end: str) -> str:
    leaves = (file.schema.column(number).path for number in range(len(file.schema)))
    return next(leaf for leaf in leaves if (leaf == name or leaf.startswith(f"{name}.")) and leaf.endswith(end))


def _path_leaf(file: pq.ParquetFile, name: str) -> str | None:
    kind = file.schema_arrow.field(name).type
    single = kind.value_type if _is_list(kind) else kind
    return _leaf(file, name, ".path") if types.is_struct(single) and _has_field(single, "path", _is_text) else None


def _has_field(struct: pa.StructType, name: str, is_right: Callable[[pa.DataType], bool]) -> bool:
    return struct.get_field_index(name) >= 0 and is_right(struct.field(name).type)


# --- rows -------------------------------------------------------------------------------------------------------------


def _group_rows(
    file: pq.ParquetFile, group: int, columns: list[str], image: str | None, start: int, unread: dict[str, str]
) -> Generator[Element, None, int]:
    """Yields the records of a row group, and returns how many rows were read."""
    name = _image_column(file.schema_arrow, "")
    names_leaf = _path_leaf(file, name) if name and image else name
    held = _with_bytes(file, group, name, image) if name and image else None
    if held is not None and len(held) != file.metadata.row_group(group).num_rows:
        return len(held)
    read = columns + ([names_leaf] if names_leaf else [])
    turns = [column for column in columns if column in turn_columns(file.schema_arrow)]
    done = 0
    for batch in file.iter_batches(_ROWS, row_groups=[group], columns=read, use_threads=False):
        fields = {column: _values(batch.column(column)) for column in columns if column not in turns}
        fields |= {column: _conversations(batch.column(column), column, file.schema_arrow) for column in turns}
        names = _names(batch.column(name)) if names_leaf else [None] * len(batch)
        for index in range(len(batch)):
            row = done + index
            record = {column: values[index] for column, values in fields.items()}
            images, with_bytes = _row_images(names[index], held and held[row])
            if images is not None:
                record["image"] = images
            yield _element(record, start + row if with_bytes else None, unread)
        done += len(batch)
    return done


def _element(record: Record, row: int | None, unread: dict[str, str]) -> Element:
    """The element of a row's record, in LLaVA's form; `row` is the row's number if it holds images itself."""
    whole, problem = as_record(record if row is None else with_row_images(record, "", row))
    if problem is None:
        record = whole if row is None else {k: v for k, v in whole.items() if k != "image"} | _without_bytes(record)
    text = json.dumps(record, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
    problem = problem or text_problem(text) or record_problem(whole | unread if unread else whole)
    return Element(shown_text(text), problem, row)


def _without_bytes(record: Record) -> Record:
    """The images' field as the table holds it for a row that holds their bytes."""
    return {"image": record["image"]} if "image" in record else {}


def _row_images(names: Any, held: Any) -> tuple[Any, bool]:
    """The images as the record's text names them, with null for bytes in a list; and whether the row holds bytes."""
    if isinstance(held, list):
        names = names or [None] * len(held)
        return [None if there else name for name, there in zip(names, held, strict=True)], any(held)
    return (None, True) if held else (names, False)


def _names(column: pa.Array) -> list[Any]:
    """The paths of every row's images: one, a list of them, or None."""
    if _is_list(column.type):
        return _lists(_names(column.flatten()), column)
    return _values(pc.struct_field(column, "path") if types.is_struct(column.type) else column)


def _lists(values: list[Value], column: pa.Array) -> list[list[Value] | None]:
    """The flat values of a column of lists, as lists."""
    ends = accumulate((length or 0 for length in pc.list_value_length(column).to_pylist()), initial=0)
    spans = zip(pairwise(ends), column.is_valid().to_pylist(), strict=True)
    return [values[start:stop] if valid else None for (start, stop), valid in spans]


def _with_bytes(file: pq.ParquetFile, group: int, name: str, image: str) -> list[bool | list[bool] | None]:
    """Which images of a row group are bytes; the bytes are read only if the footer leaves that open.

    Returns:
        Per row, whether it holds bytes; where the column holds lists, a list of this, or None for null.
    """
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(number) for number in range(file.metadata.num_columns))
    statistics = next(column.statistics for column in columns if column.path_in_schema == image)
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
    is_list = _is_list(file.schema_arrow.field(name).type)
    if not is_list and nulls in (0, metadata.num_rows):
        return [nulls == 0] * metadata.num_rows
    if nulls is not None and (path := _path_leaf(file, name)):
        # Null structs and empty lists count as null bytes. If these account for all nulls, every other image has bytes.
        valid = _valid(file.read_row_group(group, columns=[path], use_threads=False).column(name).combine_chunks())
        if sum(row.count(False) or not row if isinstance(row, list) else not row for row in valid) == nulls:
            return valid
    valid: list[bool | list[bool] | None] = []
    for batch in file.iter_batches(_IMAGES, row_groups=[group], columns=[image], use_threads=False):
        valid += _valid(batch.column(0), "bytes")
    return valid


def _valid(column: pa.Array, field: str = "") -> list[bool | list[bool] | None]:
    """Which values of a column, or of its lists, are not null; of structs, in which of them `field` is not null."""
    if _is_list(column.type):
        valid: list[Any] = _lists(_valid(column.flatten(), field), column)
        return valid
    return (pc.struct_field(column, field) if field and types.is_struct(column.type) else column).is_valid().to_pylist()


def _conversations(column: pa.Array, name: str, schema: pa.Schema) -> list[list[dict[str, str]] | None]:
    """The turns of every row; flat lists of texts are ten times as fast as nested ones."""
    if not _is_llavas(schema, name):
        return _values(column)
    turns = column.flatten()
    speakers, texts = (_values(pc.struct_field(turns, name)) for name in ("from", "value"))
    flat = [{"from": speaker, "value": text} for speaker, text in zip(speakers, texts, strict=True)]
    return _lists(flat, column)


def _values(column: pa.Array) -> list[Any]:
    """The column's values; texts that are not UTF-8 come as the JSON reader gives them."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return _decoded(column.cast(_with_bytes_for_text(column.type)).to_pylist())


def _with_bytes_for_text(kind: pa.DataType) -> pa.DataType:
    """The same type with bytes in place of all texts."""
    if _is_text(kind):
        return pa.large_binary() if types.is_large_string(kind) else pa.binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_with_bytes_for_text(field.type)) for field in kind])
    if _is_list(kind):
        item = kind.value_field.with_type(_with_bytes_for_text(kind.value_type))
        return pa.large_list(item) if types.is_large_list(kind) else pa.list_(item)
    return kind


def _decoded(value: Any) -> Any:
    """`value` with all bytes in it as text; bytes that are not UTF-8 come as the JSON reader gives them."""
    if isinstance(value, dict):
        return {name: _decoded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
