"""The table of records: every record's JSON text and what is wrong with it, mapped from converted files.

`llava.data.records` converts the files. A pickled table holds their paths, not the records.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from llava.data.checks import PlacedImage, Problem, Record, image_keys, parsed_row, record_images, record_name
from llava.data.errors import DataError
from llava.data.mixture import Mixture, entry_name

_MAPPED = ("_tables", "_starts")


@dataclass(eq=False)
class RecordTable(Sequence[Record]):
    """The records of converted files, in order; `[i]` is the record as a dict.

    The table of a mixture has at first all records that the entries' sampling leaves, and after `epoch` those of an
    epoch.

    Args:
        sources: the files that were converted, and `paths` the converted ones.
        content: a hash of the content of all of them.
        folders: where files made from these records are cached.
        selected: by index, the positions in the files of the records that are used; by default all, in order.
        left_out: how many records are not used because something is wrong with them.
        mixture: what is mixed, and `starts`: position of each entry's first record, and the number of all.
        sizes: the preflight's manifest, where it has the pictures' sizes.
    """

    sources: list[Path]
    paths: list[Path]
    content: str
    folders: list[Path]
    selected: np.ndarray | None = None
    left_out: int = 0
    mixture: Mixture | None = None
    starts: tuple[int, ...] = ()
    sizes: Path | None = None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in _MAPPED}

    @cached_property
    def _tables(self) -> list[pa.Table]:
        tables = []
        for path in self.paths:
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                tables.append(reader.read_all())
        return tables

    @cached_property
    def _starts(self) -> list[int]:
        """Position of each file's first record, and the number of all."""
        return list(accumulate(map(len, self._tables), initial=0))

    @cached_property
    def key(self) -> str:
        """A hash of these records and their content."""
        if self.selected is None:
            return self.content
        return sha256(f"{self.content} {len(self.selected)}".encode() + self.selected.tobytes()).hexdigest()

    @property
    def used(self) -> np.ndarray:
        """The positions of the records that are used, in order."""
        return np.arange(self._starts[-1]) if self.selected is None else self.selected

    def __len__(self) -> int:
        return self._starts[-1] if self.selected is None else len(self.selected)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        text, (source, _) = self._value("record", index), self._place(index)
        record = (
            parsed_row(text, str(self.sources[source]))
            if self.sources[source].suffix == ".parquet"
            else json.loads(text)
        )
        folder = self.image_folders[bisect_right(self.starts, self._position(index)) - 1] if self.mixture else None
        return record if folder is None else _placed(record, folder)

    def text(self, index: int) -> str:
        """The JSON text of a record; bytes that are not UTF-8 are replaced."""
        return self._value("record", index).decode("utf-8", "replace")

    def problem(self, index: int) -> Problem | None:
        """What is wrong with a single record, as far as conversion checks it."""
        kind = self._value("kind", index)
        return None if kind is None else Problem(kind, self._value("problem", index))

    def named(self, index: int) -> str:
        """The name of a record in messages: its file, its index there, and its id."""
        try:
            record = json.loads(self.text(index))
        except (ValueError, RecursionError):
            record = None
        source, place = self._place(index)
        return f"{self.sources[source]}: {record_name(record, place)}"

    def _position(self, index: int) -> int:
        index = range(len(self))[index]
        return index if self.selected is None else int(self.selected[index])

    def _place(self, index: int) -> tuple[int, int]:
        """The number of a record's file, and its index there."""
        position = self._position(index)
        number = bisect_right(self._starts, position) - 1
        return number, position - self._starts[number]

    def _value(self, column: str, index: int) -> Any:
        number, place = self._place(index)
        return self._tables[number][column][place].as_py()

    def malformed(self) -> np.ndarray:
        """The indices of the records in which `problem` finds something."""
        kinds = pa.chunked_array([chunk for table in self._tables for chunk in table["kind"].chunks], pa.string())
        return np.flatnonzero(kinds.is_valid().to_numpy()[self.used])

    def without(self, indices: Sequence[int]) -> "RecordTable":
        """The table of the other records; its key differs from that of the whole table."""
        if not len(indices):
            return self
        return replace(self, selected=np.delete(self.used, indices), left_out=self.left_out + len(indices))

    def places(self) -> dict[Path, np.ndarray]:
        """By resolved file, the indices there of the records that are used; ascending, each once."""
        used = np.unique(self.used)
        by_file: dict[Path, list[np.ndarray]] = {}
        of_files = np.split(used, np.searchsorted(used, self._starts[1:-1]))
        for source, start, positions in zip(self.sources, self._starts, of_files, strict=False):
            by_file.setdefault(source.resolve(), []).append(positions - start)
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
        used, samples = (
            np.diff(np.searchsorted(np.sort(positions), self.starts)) for positions in (np.unique(self.used), self.used)
        )
        return [
            {"name": entry.name, "data_path": entry.data_path, "records": self.starts[i + 1] - self.starts[i],
             "used": int(used[i]), "samples": int(samples[i]), "share": float(samples[i] / max(len(self), 1))}
            for i, entry in enumerate(self.mixture.entries)
        ]  # fmt: skip

    def epoch(self) -> "RecordTable":
        """The table of an epoch's records: with a mixture's weights each entry's share, otherwise all that are left.

        If a share exceeds an entry's records, it consists of whole passes over them, and the rest is drawn.

        Raises:
            DataError: an entry has no record left, or its share is less than one sample.
        """
        mixture = self.mixture
        if mixture is None or mixture.entries[0].weight is None:
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
        return replace(self, selected=np.concatenate(drawn))


def mixed_table(mixture: Mixture, tables: list[RecordTable]) -> RecordTable:
    """The table of the records that the entries' sampling leaves of their `tables`, in order."""
    starts = tuple(accumulate((len(table) for table in tables), initial=0))
    selected = [
        start + entry.chosen(len(table), [mixture.seed, number, 0])
        for number, (entry, table, start) in enumerate(zip(mixture.entries, tables, starts, strict=False))
    ]
    sources = [source for table in tables for source in table.sources]
    paths = [path for table in tables for path in table.paths]
    content = sha256(" ".join(table.content for table in tables).encode()).hexdigest()
    files = (sources, paths, content, tables[0].folders)
    return RecordTable(*files, np.concatenate(selected), mixture=mixture, starts=starts)


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
    return [
        f"{source['name']}: {source['used']:,} of {source['records']:,} records, "
        f"{source['samples']:,} samples of an epoch ({source['share']:.1%})"
        for source in records.source_counts()
    ]


def name_of(records: Sequence[Record], index: int) -> str:
    """The name of the record `[index]` in messages: by file and index there in a table, by its index in a list."""
    if isinstance(records, RecordTable):
        return records.named(index)
    return record_name(records[index], index)
