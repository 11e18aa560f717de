"""The table of records: every record's JSON text and what is wrong with it, mapped from converted files.

`llava.data.records` converts the files. A pickled table holds their paths, not the records.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from llava.data.checks import PlacedImage, Problem, Record, image_keys, record_images, record_name
from llava.data.errors import DataError
from llava.data.mixture import Mixture, entry_name
from llava.data.parquet_files import with_row_images


class RecordTable(Sequence[Record]):
    """The records of converted files, in order; `[i]` is the record as a dict.

    A record has two indices: its index `[i]` in the table, and its *position* among all records of the files, whether
    they are used or not. Methods that speak of a record "of all" take its position.

    The table of a mixture has at first all records that the entries' sampling leaves, and after `epoch` those of an
    epoch.

    Args:
        sources: the files that were converted.
        paths: the converted files.
        content: a hash of the content of all of them.
        folders: where files made from these records are cached.
        selected: positions of the records that are used; by default all, in order.
        left_out: how many records are not used because something is wrong with them.
        mixture: what is mixed, and `starts`: position of each entry's first record, and the number of all.
    """

    def __init__(
        self,
        sources: list[Path],
        paths: list[Path],
        content: str,
        folders: list[Path],
        selected: np.ndarray | None = None,
        left_out: int = 0,
        mixture: Mixture | None = None,
        starts: tuple[int, ...] = (),
    ):
        self.sources, self.paths, self.content, self.folders = sources, paths, content, folders
        self.selected, self.left_out, self.mixture, self.starts = selected, left_out, mixture, starts
        self.sizes: Path | None = None  # where the preflight kept the pictures' sizes
        self.drawn_from: int | None = None  # how many records this epoch was drawn from
        self.key = content  # identifies these records and their content
        if selected is not None:
            self.key = sha256(f"{content} {len(selected)}".encode() + selected.tobytes()).hexdigest()
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._files: list[int] = []  # position of each file's first record, and the number of all

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_columns": {}}

    @property
    def columns(self) -> dict[str, pa.ChunkedArray]:
        """Every record's JSON text and what is known about it, used or not, mapped from the files."""
        if not self._columns:
            tables = [map_rows(path) for path in self.paths]
            self._files = list(accumulate(map(len, tables), initial=0))
            whole = pa.concat_tables(tables)
            self._columns = dict(zip(whole.column_names, whole.columns, strict=True))
        return self._columns

    @property
    def total(self) -> int:
        """Number of records in the files, used or not."""
        return len(self.columns["record"])

    @property
    def used(self) -> np.ndarray:
        """The positions of the records that are used, in order."""
        return np.arange(self.total) if self.selected is None else self.selected

    def __len__(self) -> int:
        return self.total if self.selected is None else len(self.selected)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.record(self.position(index))

    def position(self, index: int) -> int:
        """The position, among all records, of the table's record `[index]`."""
        index = range(len(self))[index]
        return index if self.selected is None else int(self.selected[index])

    def record(self, index: int) -> Record:
        """A record of all, by its position."""
        record = json.loads(self.columns["record"][index].as_py())
        row = self.columns["row"][index].as_py()
        record = record if row is None else with_row_images(record, str(self.source(index)[0]), row)
        folder = self.image_folders[bisect_right(self.starts, index) - 1] if self.mixture else None
        return record if folder is None else _placed(record, folder)

    def source(self, index: int) -> tuple[Path, int]:
        """The file of a record of all, used or not, and its index in that file."""
        assert 0 <= index < self.total
        number = bisect_right(self._files, index) - 1
        return self.sources[number], index - self._files[number]

    def text(self, index: int) -> str:
        """The JSON text of a record of all, used or not; bytes that are not UTF-8 are replaced."""
        return self.columns["record"][index].as_py().decode("utf-8", "replace")

    def problem(self, index: int) -> Problem | None:
        """What is wrong with a single record of all, as far as conversion checks it."""
        kind = self.columns["kind"][index].as_py()
        return None if kind is None else Problem(kind, self.columns["problem"][index].as_py())

    def named(self, index: int) -> str:
        """The name of a record of all in messages: its file, its index there, and its id."""
        source, place = self.source(index)
        try:
            record = json.loads(self.text(index))
        except (ValueError, RecursionError):
            record = None
        return f"{source}: {record_name(record, place)}"

    def malformed(self) -> np.ndarray:
        """The positions of the records that are used and in which `problem` finds something."""
        kinds = self.columns["kind"]
        some = kinds.null_count < self.total
        positions = np.flatnonzero(kinds.is_valid().to_numpy()) if some else np.zeros(0, np.int64)
        return positions if self.selected is None else positions[np.isin(positions, self.selected)]

    def without(self, indices: Sequence[int]) -> "RecordTable":
        """The same table without the records of all at `indices`; its key differs from that of the whole table."""
        left_out = self.left_out + len(indices)
        return self.of(self.used[~np.isin(self.used, indices)], left_out) if len(indices) else self

    def of(self, selected: np.ndarray, left_out: int) -> "RecordTable":
        """A table of the same files that uses the records of all at `selected`."""
        files = (self.sources, self.paths, self.content, self.folders)
        return RecordTable(*files, selected, left_out, self.mixture, self.starts)

    @property
    def checked(self) -> int:
        """Number of records before some were left out."""
        return (len(self) if self.drawn_from is None else self.drawn_from) + self.left_out

    def places(self) -> dict[Path, np.ndarray]:
        """By resolved file, the indices there of the records that are used; ascending, each once."""
        every = np.arange(self.total)  # `total` also maps the files, and so fills `_files`
        selected = every if self.selected is None else np.unique(self.selected)
        by_file: dict[Path, list[np.ndarray]] = {}
        for source, start, stop in zip(self.sources, self._files[:-1], self._files[1:], strict=True):
            places = selected[np.searchsorted(selected, start) : np.searchsorted(selected, stop)] - start
            by_file.setdefault(source.resolve(), []).append(places)
        return {source: np.unique(np.concatenate(places)) for source, places in by_file.items()}

    # --- of a mixture ---

    @property
    def source_names(self) -> list[str]:
        """The names of the data sets of a mixture; empty for other tables."""
        return [entry.name for entry in self.mixture.entries] if self.mixture else []

    @property
    def image_folders(self) -> list[str | None]:
        """The image folder of each data set of a mixture that has its own, else None."""
        return [entry.image_folder for entry in self.mixture.entries] if self.mixture else []

    def source_counts(self) -> list[dict[str, Any]]:
        """Of every data set of a mixture: name, path, records in its files and used, samples of an epoch, and share."""
        if self.mixture is None:
            return []
        records, (used, samples) = np.diff(self.starts), map(self._counts, (np.unique(self.used), self.used))
        return [
            {"name": entry.name, "data_path": entry.data_path, "records": int(records[i]), "used": int(used[i]),
             "samples": int(samples[i]), "share": float(samples[i] / max(len(self), 1))}
            for i, entry in enumerate(self.mixture.entries)
        ]  # fmt: skip

    def _counts(self, indices: np.ndarray) -> np.ndarray:
        """How many of the records `indices` each data set has."""
        return np.bincount(np.searchsorted(self.starts, indices, side="right") - 1, minlength=len(self.starts) - 1)

    def epoch(self) -> "RecordTable":
        """The table of an epoch's records: with a mixture's weights each entry's share, otherwise all that are left.

        If a share exceeds an entry's records, it consists of whole passes over them, and the rest is drawn.

        Raises:
            ValueError: an entry has no record left, or its share is less than one sample.
        """
        mixture = self.mixture
        if mixture is None or mixture.entries[0].weight is None or self.drawn_from is not None:
            return self
        own = np.split(self.used, np.searchsorted(self.used, self.starts[1:-1]))
        total = len(self) if mixture.epoch_samples is None else mixture.epoch_samples
        shares = _shares([entry.weight or 0.0 for entry in mixture.entries], total)
        drawn = []
        for number, (entry, records, share) in enumerate(zip(mixture.entries, own, shares, strict=True)):
            if not len(records) or not share:
                what = "has no record that can be used" if share else f"has no sample of an epoch of {total}"
                named = entry_name(mixture.path, number, entry.name)
                raise DataError(named, f"{what}; leave it out or change 'weight'")
            passes, rest = divmod(share, len(records))
            some = np.random.default_rng([mixture.seed, number, 1]).permutation(len(records))[:rest]
            drawn += [records] * passes + [records[np.sort(some)]]
        table = self.of(np.concatenate(drawn), self.left_out)
        table.drawn_from = len(self)
        return table


def mixed_table(mixture: Mixture, tables: list[RecordTable]) -> RecordTable:
    """The table of the records that the entries' sampling leaves of their `tables`, in order."""
    starts = np.cumsum([0, *(table.total for table in tables)])
    selected = [
        start + entry.sampling.chosen(table.total, [mixture.seed, number, 0])
        for number, (entry, table, start) in enumerate(zip(mixture.entries, tables, starts[:-1], strict=True))
    ]
    sources = [source for table in tables for source in table.sources]
    paths = [path for table in tables for path in table.paths]
    content = sha256(" ".join(table.content for table in tables).encode()).hexdigest()
    files = (sources, paths, content, tables[0].folders)
    return RecordTable(*files, np.concatenate(selected), mixture=mixture, starts=tuple(starts.tolist()))


def _shares(weights: list[float], total: int) -> list[int]:
    """How many of `total` samples each weight has: rounded down, plus one where the remainders are the largest."""
    exact = np.array(weights, dtype=float) / sum(weights) * total
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: total - shares.sum()]] += 1
    return shares.tolist()


def _placed(record: Record, folder: str) -> Record:
    """`record` with its images below `folder` in place of the run's image folder."""
    keys, images = image_keys(record), record_images(record)
    placed = [PlacedImage(folder, image) if isinstance(image, str) else image for image in images]
    return record | {keys[0]: placed} if keys else record


def source_lines(records: RecordTable) -> list[str]:
    """A line per data set of a mixture: how many of its records are used, and their samples and share of an epoch."""
    counts = records.source_counts()
    width = max((len(source["name"]) for source in counts), default=0)
    return [
        f"{source['name']:<{width}}  {source['used']:,} of {source['records']:,} records, "
        f"{source['samples']:,} samples of an epoch ({source['share']:.1%})"
        for source in counts
    ]


def name_of(records: Sequence[Record], index: int) -> str:
    """The name of the record `[index]` in messages: by file and index there in a table, by its index in a list."""
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
