"""Records from Parquet shards: text is read once into the table of records, image bytes only when a worker needs them.

Columns: `conversations` (list of structs with `from` and `value`), and where there are any `id`, `image` and further
columns of text, numbers or booleans. `image` is a struct of `bytes` and `path` (as the `datasets` library writes it),
bytes, a path, or a list of paths; null for text only.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from llava.data.checks import RowImage, record_problem, shown_text, text_problem
from llava.data.json_files import Element

_ROWS = 1024
_IMAGES = 8  # rows whose image bytes are held at a time


def read_rows(path: Path) -> Iterator[Element]:
    """The records of a shard, in order, each checked by itself.

    Raises:
        ValueError: the file is no Parquet file, or a column is missing or of another type; the message names it.
    """
    try:
        with pq.ParquetFile(path) as file:
            image = image_leaf(file, path)
            columns = _text_columns(file.schema_arrow, path)
            start = 0
            for group in range(file.num_row_groups):
                yield from _group_rows(file, group, columns, image, start)
                start += file.metadata.row_group(group).num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"--data_path {path}: cannot be read as Parquet ({error})") from error


def parquet_digest(path: Path) -> str:
    """SHA-256 of a shard's footer and of all columns but the images' bytes, which stand for themselves by their sizes.

    Raises:
        ValueError: as `read_rows`.
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
    except (pa.ArrowException, OSError, ValueError) as error:
        named = str(error).startswith("--data_path")
        raise ValueError(str(error) if named else f"--data_path {path}: cannot be read as Parquet ({error})") from error
    return digest.hexdigest()


def largest_image_group(path: Path) -> int:
    """Bytes of the images of a shard's largest row group; 0 without images."""
    with pq.ParquetFile(path) as file:
        image = image_leaf(file, path)
        groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
        columns = (group.column(number) for group in groups for number in range(file.metadata.num_columns))
        return max((c.total_uncompressed_size for c in columns if c.path_in_schema == image), default=0)


# --- columns ----------------------------------------------------------------------------------------------------------


def _text_columns(schema: pa.Schema, path: Path) -> list[str]:
    """The columns that the records' text is made of, without `image`."""
    if "conversations" not in schema.names:
        raise ValueError(f"--data_path {path}: no column 'conversations'; it has {', '.join(schema.names) or 'none'}")
    found = schema.field("conversations").type
    turn = found.value_type if types.is_list(found) or types.is_large_list(found) else None
    fields = {turn.field(i).name: turn.field(i).type for i in range(turn.num_fields)} if turn else {}
    if not all(_is_text(fields.get(name)) for name in ("from", "value")):
        raise ValueError(
            f"--data_path {path}: column 'conversations' is {found}; expected a list of structs of the texts 'from' "
            "and 'value'"
        )
    return ["conversations", *(field.name for field in schema if field.name != "image" and _is_simple(field.type))]


def _is_text(kind: pa.DataType | None) -> bool:
    return kind is not None and (types.is_string(kind) or types.is_large_string(kind))


def _is_simple(kind: pa.DataType) -> bool:
    return _is_text(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def image_leaf(file: pq.ParquetFile, path: Path) -> str | None:
    """The column that holds the images' bytes: `image.bytes`, `image`, or None."""
    schema = file.schema_arrow
    if "image" not in schema.names:
        return None
    kind = schema.field("image").type
    if _is_bytes(kind):
        return "image"
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and _is_bytes(kind.field("bytes").type):
        return "image.bytes"
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if _is_text(kind) or types.is_null(kind) or (is_list and _is_text(kind.value_type)):
        return None
    raise ValueError(
        f"--data_path {path}: column 'image' is {kind}; expected a struct of 'bytes' and 'path', bytes, a path, or a "
        "list of paths"
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind)


# --- rows -------------------------------------------------------------------------------------------------------------


def _group_rows(
    file: pq.ParquetFile, group: int, columns: list[str], image: str | None, start: int
) -> Iterator[Element]:
    has_names = "image" in file.schema_arrow.names and (image is None or _has_path(file))
    held = [] if image is None else _rows_with_bytes(file, group, image)
    wanted = columns + ([] if not has_names else ["image.path"] if image else ["image"])
    done = 0
    for batch in file.iter_batches(_ROWS, row_groups=[group], columns=wanted, use_threads=False):
        fields = {name: _values(batch.column(name)) for name in columns[1:]}
        names = _values(_path_column(batch, image)) if has_names else [None] * len(batch)
        for index, turns in enumerate(_conversations(batch.column("conversations"))):
            row = done + index
            record = {name: values[index] for name, values in fields.items()}
            with_bytes = bool(held) and held[row]
            if not with_bytes and names[index] is not None:
                record["image"] = names[index]
            record["conversations"] = turns
            text = json.dumps(record, ensure_ascii=False)
            if with_bytes:
                record["image"] = RowImage("", start + row)
            yield Element(
                shown_text(text), text_problem(text) or record_problem(record), start + row if with_bytes else None
            )
        done += len(batch)


def _has_path(file: pq.ParquetFile) -> bool:
    kind = file.schema_arrow.field("image").type
    return types.is_struct(kind) and kind.get_field_index("path") >= 0 and _is_text(kind.field("path").type)


def _path_column(batch: pa.RecordBatch, image: str | None) -> pa.Array:
    column = batch.column("image")
    return pc.struct_field(column, "path") if image else column


def _rows_with_bytes(file: pq.ParquetFile, group: int, image: str) -> list[bool]:
    """Which rows of a group hold image bytes; the bytes are read only where the footer leaves it open."""
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(number) for number in range(file.metadata.num_columns))
    statistics = next(column.statistics for column in columns if column.path_in_schema == image)
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
    if nulls in (0, metadata.num_rows):
        return [nulls == 0] * metadata.num_rows
    if image != "image" and nulls is not None and _has_path(file):
        # A struct that is null has null bytes; if there are no more null bytes than null structs, these are all.
        read = file.read_row_group(group, columns=["image.path"], use_threads=False)
        valid = read.column("image").is_valid().to_pylist()
        if valid.count(False) == nulls:
            return valid
    found: list[bool] = []
    for batch in file.iter_batches(_IMAGES, row_groups=[group], columns=[image], use_threads=False):
        column = batch.column(0)
        found += (column if image == "image" else pc.struct_field(column, "bytes")).is_valid().to_pylist()
    return found


def _conversations(column: pa.Array) -> Iterator[list[dict[str, Any]] | None]:
    """The turns of every row; flat lists of texts are ten times as fast as nested ones."""
    turns = column.flatten()
    speakers, texts = (_values(pc.struct_field(turns, name)) for name in ("from", "value"))
    lengths = pc.list_value_length(column).to_pylist()
    start = 0
    for length in lengths:
        if length is None:
            yield None
            continue
        stop = start + length
        yield [
            {"from": speaker, "value": text}
            for speaker, text in zip(speakers[start:stop], texts[start:stop], strict=True)
        ]
        start = stop


def _values(column: pa.Array) -> list[Any]:
    """The column's values; texts that are not UTF-8 as the JSON reader gives them."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pa.large_binary() if types.is_large_string(column.type) else pa.binary()).to_pylist()
        return [None if value is None else value.decode("utf-8", "surrogateescape") for value in values]
