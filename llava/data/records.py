"""Reads LLaVA-format records from JSON, JSONL or Parquet, and shares them between processes.

`llava.data.checks` says what a record is. A file is converted once to an Arrow file beside it that holds each record's
JSON text and what is wrong with it; images stay where they are. Every process maps that file into memory, so that ranks
and workers share one copy, and parses a record when it is needed. Cost: reading, checking and writing once, with the
text of a JSON list in memory; after that nothing grows with the number of records.
"""

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import glob
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llava.data.cache import cache_folders, made_once
from llava.data.checks import (
    Element,
    PlacedImage,
    Problem,
    Record,
    image_keys,
    parsed_row,
    record_images,
    record_name,
    starts_from,
)
from llava.data.errors import DataError
from llava.data.messages import checked_element
from llava.data.mixture import MIXTURES, Mixture, entry_name, read_mixture
from llava.data.parallel import in_processes
from llava.data.parquet_files import OTHER_FORMS, parquet_digest, read_rows
from llava.utils.digests import bytes_digest, file_stamp
from llava.utils.progress import progress

DEFAULT_SEED = 42  # the trainer's default
_SHOWN_PROBLEMS = 10
_FORMAT = 9  # of the Arrow file; raised when checks or forms are added, since a file is converted once
_SCHEMA = pa.schema([("record", pa.binary()), ("kind", pa.string()), ("problem", pa.string())])
_ROWS = 1024  # of a piece of the Arrow file
_BEGIN = 1 << 12  # characters that tell a list from lines
_SUFFIXES = (".json", ".jsonl", ".parquet")
_LIKE_DATA = re.compile(r"\.(jsonl?|ndjson|parquet|arrow|csv|tsv)(\.(gz|bz2|xz|zst|lz4|br|zip))?$", re.IGNORECASE)
_OWN = re.compile(r"\.[0-9a-f]{16}\.records\d+\.arrow$")  # of `_arrow_name`: --data_cache_dir may be in the folder
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")  # for the `datasets` library; they hold no records
_WORTH_PROCESSES = 4  # files


def load_records(
    data_path: str,
    cache_dir: str | None = None,
    check: bool = True,
    show_progress: bool = False,
    seed: int = DEFAULT_SEED,
) -> "RecordTable":
    """All records of the files that `data_path` names, in order.

    Args:
        data_path: `.json` and `.jsonl` (a list, or one record per line) or `.parquet` files: one, several separated by
            commas, a pattern, or a folder of either; or a mixture of these, a `.yaml` file.
        cache_dir: where converted files are kept; by default `.llava_cache` beside each file.
        check: refuse malformed records, and return those of an epoch; False keeps malformed records, with their
            problems, and leaves the epoch to `RecordTable.epoch`.
        show_progress: show a bar if there are many files to convert.
        seed: of what a mixture draws.

    Raises:
        DataError: a file does not exist or cannot be read, or records are malformed; the message names file, record and
            fault.
        OSError: no cache folder can be written, or a damaged file ended the process that read it.
    """
    if data_path.endswith(MIXTURES) and "," not in data_path:
        mixture, tables = read_mixture(Path(data_path), seed), []
        for number, entry in enumerate(mixture.entries):
            try:
                tables.append(_table(entry.data_path, cache_dir, show_progress))
            except (DataError, OSError) as error:
                problem = f"json_path {error}" if isinstance(error, DataError) else str(error)
                raise DataError(entry_name(mixture.path, number, entry.name), problem) from error
        table = mixed_table(mixture, tables)
    else:
        table = _table(data_path, cache_dir, show_progress)
    if not check:
        return table
    if len(malformed := table.malformed()):
        problems = ((i, table.problem(i)) for i in malformed[:_SHOWN_PROBLEMS].tolist())
        shown = "\n  ".join(f"{table.named(i)}: {problem.message}" for i, problem in problems if problem)
        raise DataError(data_path, f"{len(malformed)} of {len(table)} records are malformed:\n  {shown}")
    return table.epoch()


def data_files(data_path: str) -> list[Path]:
    """The files that `data_path` names, in order; those of a folder or pattern by name, and once.

    Raises:
        DataError: a name has no file, or a file is of another kind; the message says which.
    """
    files: list[Path] = []
    for name in filter(None, (part.strip() for part in data_path.split(","))):
        matches = [Path(name)] if Path(name).exists() else sorted(map(Path, glob(name, recursive=True)))
        named = [file for match in matches for file in (_folder_files(match) if match.is_dir() else [match])]
        once = {file.parent.resolve() / file.name: file for file in named}  # `**` names folders too, links lead there
        named = list(once.values())
        if not named:
            expected = f"expected {', '.join(_SUFFIXES)}, or a folder of such files"
            raise DataError(name, f"no such file{starts_from(name)}; {expected}")
        if wrong := next((file for file in named if file.suffix not in _SUFFIXES or not file.is_file()), None):
            raise DataError(wrong, f"expected a file that ends in {', '.join(_SUFFIXES)}; {OTHER_FORMS}")
        files += named
    if not files:
        raise DataError("''", "expected the name of a file or folder")
    return files


def _folder_files(folder: Path) -> list[Path]:
    """The records' files below a folder, by path: all Parquet, or all JSON; hidden files and folders do not count.

    Raises:
        DataError: there are none, or there is also data that would not be read; the message names it.
    """
    below: list[Path] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        here = Path(parent).resolve()  # a link may lead back up
        folders[:] = [n for n in folders if n[0] != "." and not here.is_relative_to(Path(parent, n).resolve())]
        below += [Path(parent, n) for n in names if n[0] != "." and n not in _DESCRIPTIONS and not _OWN.search(n)]
    files = sorted(file for file in below if file.suffix in _SUFFIXES)
    if other := next((file for file in below if file not in files and _LIKE_DATA.search(file.name)), None):
        advice = f"unpack or convert it to one of {', '.join(_SUFFIXES)} (docs/data.md), or name the files to read"
        raise DataError(folder, f"{other} would not be read; {advice}")
    if not files:
        raise DataError(folder, f"the folder has no file that ends in {', '.join(_SUFFIXES)}")
    rows = sum(file.suffix == ".parquet" for file in files)
    if 0 < rows < len(files):
        both = f"{rows} Parquet files and {len(files) - rows} of JSON, which may be the same records twice"
        raise DataError(folder, f"the folder has {both}; name one, as in '{folder}/**/*.parquet'")
    return files


# --- conversion -------------------------------------------------------------------------------------------------------


def _table(data_path: str, cache_dir: str | None, show_progress: bool) -> "RecordTable":
    """The table of all records that `data_path` names, not checked."""
    sources = data_files(data_path)
    files = sorted(set(sources))
    # Parquet is always read in other processes: a damaged footer can end the process that reads it.
    apart = len(files) >= _WORTH_PROCESSES or any(file.suffix == ".parquet" for file in files)
    made = in_processes(_converted, cache_dir, files, worth=apart)
    hidden = not show_progress or len(files) < _WORTH_PROCESSES
    ready = dict(zip(files, progress(made, "reading records", "files", total=len(files), hidden=hidden), strict=True))
    paths, hashes = zip(*(ready[source] for source in sources), strict=True)
    content = sha256(" ".join(hashes).encode()).hexdigest()
    return RecordTable(sources, list(paths), content, cache_folders(sources[0], cache_dir))


def _converted(cache_dir: str | None, source: Path) -> tuple[Path, str]:
    """The Arrow file of `source` and the hash of its content."""
    stamp = file_stamp(source)
    content = parquet_digest(source) if source.suffix == ".parquet" else bytes_digest(source)

    def convert(target: Path) -> None:
        _convert(source, target)
        if file_stamp(source) != stamp:
            raise DataError(source, "changed while it was read; start again when it is complete")

    return made_once(_arrow_name(source, content), cache_folders(source, cache_dir), convert), content


def _arrow_name(source: Path, content: str) -> str:
    return f"{source.name}.{content[:16]}.records{_FORMAT}.arrow"


def _convert(source: Path, target: Path) -> None:
    elements = read_rows(source) if source.suffix == ".parquet" else read_json(source)
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        while piece := list(islice(elements, _ROWS)):
            texts = [element.text.encode("utf-8", "surrogateescape") for element in piece]
            problems = zip(*(element.problem or (None, None) for element in piece), strict=True)
            columns = zip((texts, *problems), _SCHEMA, strict=True)
            writer.write_batch(pa.record_batch([pa.array(values, field.type) for values, field in columns], _SCHEMA))
        if not writer.stats.num_record_batches:
            raise DataError(source, "holds no records")


# --- JSON -------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Iterator[Element]:
    """The elements of a JSON list, or of one record per line, each checked separately; the content decides which it is.

    In a list, nothing can be read after a syntax error; of lines, the fault is that record's. Bytes that are not UTF-8
    are carried through (`surrogateescape`) to the checks.

    Raises:
        DataError: the file is not a JSON list of records and not one record per line; the message names the line.
    """
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        begin = file.read(_BEGIN).lstrip()
        if "\0" in begin:
            raise DataError(f"{path}, line 1, column 1", "UTF-16, or no text; expected UTF-8")
        file.seek(0)
        if begin.startswith("[") and (path.suffix != ".jsonl" or begin[1:].lstrip()[:1] in ("", "{")):
            try:
                yield from map(checked_element, _parsed(file.read()))
            except json.JSONDecodeError as error:
                place = f"{path}, line {error.lineno}, column {error.colno}"
                raise DataError(place, f"not valid JSON: {error.msg}") from None
            return
        for number, line in enumerate(file, 1):
            if not (text := line.rstrip()):
                continue
            try:
                yield checked_element(_parsed(text))
            except json.JSONDecodeError as error:
                where = f"line {number}, column {error.colno}"
                if number == 1 and path.suffix == ".json":
                    what = f"not valid JSON: {error.msg}; expected a list of records, or one record per line"
                    raise DataError(f"{path}, {where}", what) from None
                yield Element(text, Problem("json", f"{where}: not valid JSON: {error.msg}"))


def _parsed(text: str) -> Any:
    """The value of a JSON text; raises JSONDecodeError, whatever is wrong."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise json.JSONDecodeError(str(error), text, 0) from None


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RecordTable(Sequence[Record]):
    """The records of converted files, in order; `[i]` is the record as a dict.

    The table of a mixture has at first all records that the entries' sampling leaves, and after `epoch` those of an
    epoch. A pickled table holds the files' paths, not the records.
    """

    sources: list[Path]
    paths: list[Path]  # the converted files
    content: str  # a hash of the content of all of them
    folders: list[Path]  # where files made from these records are cached
    selected: np.ndarray | None = None  # by index, the positions in the files of the records that are used
    left_out: int = 0  # how many records are not used because something is wrong with them
    mixture: Mixture | None = None
    starts: tuple[int, ...] = ()  # of a mixture: position of each entry's first record, and the number of all
    sizes: Path | None = None  # the preflight's manifest, which has the pictures' sizes

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tables", "_starts")}

    @cached_property
    def _tables(self) -> list[pa.Table]:
        return [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in self.paths]

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

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source, text = self.sources[self._place(index)[0]], self._value("record", index)
        record = parsed_row(text, str(source)) if source.suffix == ".parquet" else json.loads(text)
        folder = self.image_folders[bisect_right(self.starts, self._position(index)) - 1] if self.mixture else None
        keys, images = image_keys(record), record_images(record)
        if folder is None or not keys:
            return record
        return record | {keys[0]: [PlacedImage(folder, i) if isinstance(i, str) else i for i in images]}

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
    def image_folders(self) -> list[str | None]:
        """The image folder of each data set of a mixture that has its own, else None."""
        return [entry.image_folder for entry in self.mixture.entries] if self.mixture else []

    def source_counts(self) -> list[dict[str, Any]]:
        """Of every data set of a mixture: name, path, records in its files and used, samples of an epoch, and share."""
        counts, entries = [], self.mixture.entries if self.mixture else ()
        for entry, start, stop in zip(entries, self.starts, self.starts[1:], strict=False):
            samples = self.used[(self.used >= start) & (self.used < stop)]
            numbers = {"records": stop - start, "used": len(np.unique(samples)), "samples": len(samples)}
            share = len(samples) / max(len(self), 1)
            counts.append({"name": entry.name, "data_path": entry.data_path, **numbers, "share": share})
        return counts

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


def mixed_table(mixture: Mixture, tables: list[RecordTable]) -> "RecordTable":
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


def source_lines(records: RecordTable) -> list[str]:
    """A line per data set of a mixture: how many of its records are used, and their samples and share of an epoch."""
    return [
        f"{source['name']}: {source['used']:,} of {source['records']:,} records, "
        f"{source['samples']:,} samples of an epoch ({source['share']:.1%})"
        for source in records.source_counts()
    ]
