"""Reads LLaVA-format records from JSON, JSONL or Parquet, and shares them between processes.

`llava.data.checks` says what a record is. A file is converted once to an Arrow file beside it that holds each record's
JSON text and what is wrong with it; images stay where they are. Every process maps that file into memory, so that ranks
and workers share one copy, and parses a record when it is needed. Cost: reading, checking and writing once, with the
text of a JSON list in memory; after that nothing grows with the number of records.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from hashlib import sha256
from itertools import islice
from pathlib import Path

import pyarrow as pa

from llava.data.cache import cache_folders, cached_file, made_once
from llava.data.checks import Element, Problem, Record, json_object, record_images, record_name, starts_from
from llava.data.errors import DataError
from llava.data.messages import checked_element
from llava.data.mixture import MIXTURES, Mixture, entry_name, read_mixture
from llava.data.parallel import in_processes
from llava.data.parquet_files import OTHER_FORMS, parquet_digest, read_rows
from llava.data.table import RecordTable, mixed_table
from llava.utils.digests import bytes_digest, content_hash, file_stamp, known_hash
from llava.utils.progress import progress

__all__ = ["Record", "RecordTable", "load_records", "record_images", "record_name"]

DEFAULT_SEED = 42
"""The trainer's default."""
_SHOWN_PROBLEMS = 10
_FORMAT = 8  # of the Arrow file; raised when checks or forms are added, since a file is converted once
_SCHEMA = pa.schema([("record", pa.binary()), ("kind", pa.string()), ("problem", pa.string())])
_ROWS = 1024  # of a piece of the Arrow file
_BEGIN = 1 << 12  # characters that tell a list from lines
_SUFFIXES = (".json", ".jsonl", ".parquet")
_LIKE_DATA = re.compile(r"\.(jsonl?|ndjson|parquet|arrow|csv|tsv)(\.(gz|bz2|xz|zst|lz4|br|zip))?$", re.IGNORECASE)
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")  # for the `datasets` library; they hold no records
_WORTH_PROCESSES = 4  # files


def load_records(
    data_path: str,
    cache_dir: str | None = None,
    check: bool = True,
    show_progress: bool = False,
    seed: int = DEFAULT_SEED,
) -> RecordTable:
    """All records of the files that `data_path` names, in order.

    Args:
        data_path: `.json` and `.jsonl` (a list, or one record per line) or `.parquet` files: one, several separated by
            commas, a pattern, or a folder of either; or a mixture of these, a `.yaml` file.
        cache_dir: where converted files are kept; by default `.llava_cache` beside each file.
        check: refuse malformed records, and return those of an epoch; False keeps malformed records, with their
            problems, and leaves the epoch to `RecordTable.epoch`.
        show_progress: show a bar if there are many files to convert.
        seed: seed of what a mixture draws.

    Raises:
        DataError: a file does not exist or cannot be read, or records are malformed; the message names file, record and
            fault.
        OSError: no cache folder can be written, or a damaged file ended the process that read it.
    """
    if mixture := _mixture(data_path, seed):
        tables = []
        for number, entry in enumerate(mixture.entries):
            with _in_messages(mixture, number):
                tables.append(_table(entry.data_path, cache_dir, show_progress))
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
    """The files that `data_path` names, in order; those of a folder or pattern by name.

    Raises:
        DataError: a name has no file, or a file is of another kind; the message says which.
    """
    files: list[Path] = []
    for name in filter(None, (part.strip() for part in data_path.split(","))):
        matches = [Path(name)] if Path(name).exists() else sorted(map(Path, glob(name, recursive=True)))
        named = [file for match in matches for file in (_folder_files(match) if match.is_dir() else [match])]
        if not named:
            expected = f"expected {', '.join(_SUFFIXES)}, or a folder of such files"
            raise DataError(name, f"no such file{starts_from(name)}; {expected}")
        if wrong := next((file for file in named if file.suffix not in _SUFFIXES or not file.is_file()), None):
            raise DataError(wrong, f"expected a file that ends in {', '.join(_SUFFIXES)}; {OTHER_FORMS}")
        files += named
    if not files:
        raise DataError("''", "expected the name of a file or folder")
    return files


def _mixture(data_path: str, seed: int) -> Mixture | None:
    """The mixture that `data_path` names, or None if it names files."""
    parts = [part.strip() for part in data_path.split(",") if part.strip()]
    if not any(part.endswith(MIXTURES) for part in parts):
        return None
    if len(parts) > 1:
        raise DataError(data_path, "a mixture cannot be joined with other files; list them in it")
    return read_mixture(Path(parts[0]), seed)


@contextmanager
def _in_messages(mixture: Mixture, number: int) -> Iterator[None]:
    """Names the mixture and its entry in the messages of errors."""
    try:
        yield
    except (DataError, OSError) as error:
        problem = f"json_path {error}" if isinstance(error, DataError) else str(error)
        raise DataError(entry_name(mixture.path, number, mixture.entries[number].name), problem) from error


def _folder_files(folder: Path) -> list[Path]:
    """The records' files below a folder, by path: all Parquet, or all JSON; hidden files and folders do not count.

    Raises:
        DataError: there are none, or there is also data that would not be read; the message names it.
    """
    below: list[Path] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        here = Path(parent).resolve()  # a link may lead back up
        folders[:] = [n for n in folders if n[0] != "." and not here.is_relative_to(Path(parent, n).resolve())]
        below += [Path(parent, name) for name in names if name[0] != "." and name not in _DESCRIPTIONS]
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


def _table(data_path: str, cache_dir: str | None, show_progress: bool) -> RecordTable:
    """The table of all records that `data_path` names, not checked."""
    sources = data_files(data_path)
    ready = {source: converted for source in sources if (converted := _ready(source, cache_folders(source, cache_dir)))}
    waiting = sorted({source for source in sources if source not in ready})
    # Parquet is always read in other processes: a damaged footer can end the process that reads it.
    apart = len(waiting) >= _WORTH_PROCESSES or any(source.suffix == ".parquet" for source in waiting)
    made = in_processes(_converted, cache_dir, waiting, worth=apart)
    hidden = not show_progress or len(waiting) < _WORTH_PROCESSES
    ready |= zip(waiting, progress(made, "reading records", "files", total=len(waiting), hidden=hidden), strict=True)
    paths, hashes = zip(*(ready[source] for source in sources), strict=True)
    content = sha256(" ".join(hashes).encode()).hexdigest()
    return RecordTable(sources, list(paths), content, cache_folders(sources[0], cache_dir))


def _ready(source: Path, folders: list[Path]) -> tuple[Path, str] | None:
    """The Arrow file of `source` and the hash of its content, if both are known."""
    content = known_hash(source)
    path = content and cached_file(_arrow_name(source, content), folders)
    return (path, content) if path else None


def _converted(cache_dir: str | None, source: Path) -> tuple[Path, str]:
    """The Arrow file of `source` and the hash of its content."""
    stamp = file_stamp(source)
    content = content_hash(source, parquet_digest if source.suffix == ".parquet" else bytes_digest)

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
        total = 0
        while piece := list(islice(elements, _ROWS)):
            rows = [
                {
                    "record": element.text.encode("utf-8", "surrogateescape"),
                    "kind": element.problem and element.problem.kind,
                    "problem": element.problem and element.problem.message.encode("utf-8", "replace").decode(),
                }
                for element in piece
            ]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, _SCHEMA))
            total += len(rows)
    if not total:
        raise DataError(source, "holds no records")


# --- JSON -------------------------------------------------------------------------------------------------------------

_decode = json.JSONDecoder(object_pairs_hook=json_object).raw_decode
_MARK = re.compile(r"[ \t\n\r]*([\[\],]?)[ \t\n\r]*")


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
                yield from _list_elements(path.read_bytes().decode("utf-8-sig", "surrogateescape"))
            except json.JSONDecodeError as error:
                place = f"{path}, line {error.lineno}, column {error.colno}"
                raise DataError(place, f"not valid JSON: {error.msg}") from None
            return
        for number, line in enumerate(file, 1):
            if text := line.strip():
                yield _line_element(text, number, line.index(text[0]))


def _list_elements(text: str) -> Iterator[Element]:
    _, _, position = _mark(text, 0)
    mark, _, end = _mark(text, position)
    while mark != "]":
        value, end = _parsed(text, position)
        yield checked_element(value, text[position:end])
        mark, place, end = _mark(text, end)
        position = end
        if mark not in ("]", ","):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
    if end < len(text):
        raise json.JSONDecodeError("The list has ended, but the file continues", text, end)


def _mark(text: str, position: int) -> tuple[str, int, int]:
    """The bracket or comma that follows, or an empty text; where it is; and where the next value begins."""
    match = _MARK.match(text, position)
    assert match  # as the pattern takes any text
    return match[1], match.start(1), match.end()


def _line_element(text: str, number: int, indent: int) -> Element:
    try:
        value, end = _parsed(text, 0)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        where = f"line {number}, column {indent + error.pos + 1}"
        return checked_element(None, text, Problem("json", f"{where}: not valid JSON: {error.msg}"))
    return checked_element(value, text)


def _parsed(text: str, position: int) -> tuple[object, int]:
    """The JSON value that begins at `position`, and where it ends; raises JSONDecodeError, whatever is wrong."""
    try:
        return _decode(text, position)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, position) from None
    except ValueError as error:  # a number of thousands of digits
        raise json.JSONDecodeError(str(error), text, position) from None
