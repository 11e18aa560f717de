"""Rewrites Parquet shards so that a row group holds few images: to read one image means to read its whole row group."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from llava.data.parquet_files import LARGE_GROUP, largest_image_group
from llava.data.records import data_files
from llava.utils.files import replacing
from llava.utils.progress import progress

_GROUP = 1 << 21  # bytes of a group that is written; one row may be more
_READ = 8  # rows that are read at a time


def rewrite_shards(data_path: str) -> list[Path]:
    """Rewrites the shards of `--data_path` that have large row groups with small ones, in place; returns these shards.

    Rows, their order, columns, types and compression stay. Each shard is written beside the old one, read back and
    compared, and only then takes its place. After an interruption the next call starts the unfinished shard again, and
    leaves finished ones alone.

    Raises:
        ValueError: there are no shards, or one cannot be read; the message names it.
        OSError: a folder cannot be written, or its disk has no room for a second copy of one shard.
    """
    shards = [file for file in data_files(data_path) if file.suffix == ".parquet"]
    if not shards:
        raise ValueError(f"--rewrite_shards: --data_path {data_path} has no Parquet file; leave the flag out")
    large = [shard for shard in shards if _can_be_split(shard)]
    for shard in progress(large, "rewriting shards", "shards"):
        lock = shard.with_name(f".{shard.name}.rewriting.lock")  # no pattern for shards matches it
        with FileLock(lock):  # another call may be rewriting the same shard
            if _can_be_split(shard):
                _rewrite(shard)
        lock.unlink(missing_ok=True)
    return large


def _can_be_split(shard: Path) -> bool:
    try:
        with pq.ParquetFile(shard) as file:
            rows = max((file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)), default=0)
        return rows > 1 and largest_image_group(shard) > LARGE_GROUP
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"--rewrite_shards: {shard} cannot be read as Parquet ({error})") from error


def _rewrite(shard: Path) -> None:
    size, free = shard.stat().st_size, shutil.disk_usage(shard.parent).free
    if free < 1.1 * size:
        raise OSError(
            f"--rewrite_shards: {shard.parent} has {free >> 20} MiB free, and a copy of {shard.name} takes "
            f"{size >> 20}; make room"
        )
    try:
        with replacing(shard, synced=True) as written:
            with pq.ParquetFile(shard) as old:
                _write(old, written)
                with pq.ParquetFile(written) as new:
                    _compare(old, new, shard)
            shutil.copymode(shard, written)
    except pa.ArrowException as error:
        raise ValueError(f"--rewrite_shards: {shard} cannot be rewritten ({error}); the shard is unchanged") from error


def _write(old: pq.ParquetFile, target: Path) -> None:
    columns = (old.metadata.row_group(0).column(i) for i in range(old.metadata.num_columns))
    codecs = {column.path_in_schema: column.compression.replace("UNCOMPRESSED", "NONE") for column in columns}
    with pq.ParquetWriter(target, old.schema_arrow, compression=codecs) as writer:
        group: list[pa.RecordBatch] = []
        held = 0
        for row in _rows(old):
            if group and held + row.nbytes > _GROUP:
                writer.write_table(pa.Table.from_batches(group).combine_chunks())
                group, held = [], 0
            group.append(row)
            held += row.nbytes
        writer.write_table(pa.Table.from_batches(group).combine_chunks())


def _rows(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    for batch in file.iter_batches(_READ, use_threads=False):
        for row in range(batch.num_rows):
            yield batch.slice(row, 1)


def _compare(old: pq.ParquetFile, new: pq.ParquetFile, shard: Path) -> None:
    same = old.schema_arrow.equals(new.schema_arrow, check_metadata=True)
    same = same and old.metadata.num_rows == new.metadata.num_rows
    if not same or not all(_is_same(*rows) for rows in zip(_rows(old), _rows(new), strict=True)):
        raise ValueError(f"--rewrite_shards: the rewritten {shard} does not read back the same; the shard is unchanged")


def _is_same(row: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    return row.equals(other) or repr(row.to_pylist()) == repr(other.to_pylist())  # NaN does not equal itself
