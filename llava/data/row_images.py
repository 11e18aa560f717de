"""Image bytes in rows of Parquet shards, read when a worker needs them.

A row's bytes cannot be reached without reading the pages before it in its row group, so shards for training should have
row groups of a few tens of MB at most (100 rows, the `datasets` library's choice for images).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from llava.data.checks import RowImage
from llava.data.parquet_files import image_leaf, lost_rows

_IMAGES = 8  # rows whose image bytes are held at a time
_BUFFER = 1 << 20
_OPEN_SHARDS = 8


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
                raise LostRows(f"{image.shard}: {lost_rows(group, self._first - starts[group], file)}")
            self._held = batch.column(0)
        return _bytes_of(self._held[image.row - self._first].as_py(), image.number)

    def _forget(self, path: str) -> None:
        """Closes a shard: after an error its reader goes on behind the damage, as if the rows there were the next."""
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


def _bytes_of(value: Any, number: int | None) -> bytes | None:
    """The bytes in a row's value: themselves, in a struct, or in a list of either."""
    value = value if number is None else value[number]
    return value.get("bytes") if isinstance(value, dict) else value
