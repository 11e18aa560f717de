"""The table of records: every record's JSON text and what is wrong with it, mapped from converted files.

`llava.data.records` converts the files. Pickling a table takes the paths along, not the records.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llava.data.checks import Problem, Record, record_name
from llava.data.parquet_files import with_row_images


class RecordTable(Sequence[Record]):
    """The records of one or more converted files, in order; `[i]` is the record as a dict.

    "Of all" means the records of the files, whether they are used or not.

    Args:
        sources: the files that were converted.
        paths: converted files.
        content: says the content of all of them.
        folders: where files made from these records are cached.
        kept: the records of all that are used; default every one, in order.
        left_out: how many were not taken because something is wrong with them.
    """

    def __init__(
        self,
        sources: list[Path],
        paths: list[Path],
        content: str,
        folders: list[Path],
        kept: np.ndarray | None = None,
        left_out: int = 0,
    ):
        self.sources, self.paths, self.content, self.folders = sources, paths, content, folders
        self.kept, self.left_out = kept, left_out
        self.checked_at: float | None = None  # when the preflight opened the pictures, in seconds since the epoch
        self.key = content  # says which records these are, of which content
        if kept is not None:
            self.key = sha256(f"{content} {len(kept)}".encode() + kept.tobytes()).hexdigest()
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._starts: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": {}}

    @property
    def columns(self) -> dict[str, pa.ChunkedArray]:
        """Every record's JSON text and what is known about it, kept or not, mapped from the files."""
        if not self._columns:
            tables = [map_rows(path) for path in self.paths]
            self._starts = list(accumulate(map(len, tables), initial=0))
            whole = pa.concat_tables(tables)
            self._columns = dict(zip(whole.column_names, whole.columns, strict=True))
        return self._columns

    @property
    def total(self) -> int:
        """How many records the files have, kept or not."""
        return len(self.columns["record"])

    @property
    def used(self) -> np.ndarray:
        """Where, of all, the records stand that are used, in order."""
        return np.arange(self.total) if self.kept is None else self.kept

    def __len__(self) -> int:
        return self.total if self.kept is None else len(self.kept)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.record(self.position(index))

    def position(self, index: int) -> int:
        """Where, of all, the record `[index]` of the table is."""
        index = range(len(self))[index]
        return index if self.kept is None else int(self.kept[index])

    def record(self, index: int) -> Record:
        """A record of all."""
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
        """Those records of all that are used and that `problem` finds something in."""
        kinds = self.columns["kind"]
        found = np.flatnonzero(kinds.is_valid().to_numpy()) if kinds.null_count < self.total else np.zeros(0, np.int64)
        return found if self.kept is None else found[np.isin(found, self.kept)]

    def without(self, indices: Sequence[int]) -> "RecordTable":
        """The same table without some records of all; its key tells it from the whole one."""
        if not len(indices):
            return self
        return self.of(self.used[~np.isin(self.used, indices)], self.left_out + len(indices))

    def of(self, kept: np.ndarray, left_out: int) -> "RecordTable":
        """The same files' table with other records of all."""
        return RecordTable(self.sources, self.paths, self.content, self.folders, kept, left_out)

    @property
    def checked(self) -> int:
        """How many records were used before some were left out."""
        return len(self) + self.left_out

    def places(self) -> dict[Path, np.ndarray]:
        """The places in each file, resolved, of the records that are used; rising, each once."""
        every = np.arange(self.total)  # also maps the files, which says where they start
        kept = every if self.kept is None else np.unique(self.kept)
        found: dict[Path, list[np.ndarray]] = {}
        for source, start, stop in zip(self.sources, self._starts[:-1], self._starts[1:], strict=True):
            places = kept[np.searchsorted(kept, start) : np.searchsorted(kept, stop)] - start
            found.setdefault(source.resolve(), []).append(places)
        return {source: np.unique(np.concatenate(places)) for source, places in found.items()}

    # --- what a mixture has more ---

    @property
    def source_names(self) -> list[str]:
        """The names of the data sets of a mixture; without one there are none."""
        return []

    def source_number(self, index: int) -> int:
        """Which data set of a mixture the record `[index]` of the table is from."""
        raise TypeError(f"{self.sources[0]} is no mixture")

    def source_counts(self) -> list[dict[str, Any]]:
        """Of every data set of a mixture its name, file, records, how many are used, and samples of an epoch."""
        return []

    @property
    def image_folders(self) -> list[str | None]:
        """The image folder of each data set of a mixture that has one of its own, else None."""
        return []

    def epoch(self) -> "RecordTable":
        """The table of what an epoch has."""
        return self


def name_of(records: Sequence[Record], index: int) -> str:
    """How messages call the record `[index]`: a table's by its file and place there, a list's by its place."""
    if isinstance(records, RecordTable):
        return records.named(records.position(index))
    return record_name(records[index], index)


def map_rows(path: Path) -> pa.Table:
    """A converted file, mapped into memory.

    Raises:
        ArrowInvalid, OSError: it cannot be read.
    """
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        return reader.read_all()
