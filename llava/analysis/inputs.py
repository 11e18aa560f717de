"""Pictures with prompts to measure on: a folder of pictures, LLaVA records, or Parquet tables of a benchmark.

What `--data` may be, found by what is there:
    a folder of pictures (with `--prompt`); a folder of Parquet files, or one of them (LLaVA-NeXT's columns
    `image` + `conversations`, or a benchmark's `image` + `question`, as MMBench, POPE and MMStar have); LLaVA's `.json`
    or `.jsonl` (with `--image-folder`). Several, separated by commas, are one collection.
"""

import argparse
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from PIL import Image

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.records import load_records, record_images, record_name
from llava.mm_utils import to_rgb

PLAYGROUND = ("playground/data/scenes/heldout.json", "playground/data/stamps/heldout.json")
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
PROMPT = "Describe this image."
OPTIONS = "ABCDEFGHIJ"


class Unreadable(ValueError):
    """A picture cannot be read."""


class PicturePrompt(NamedTuple):
    """A picture (None: text alone) with what is asked about it, and the answer where the data has one."""

    name: str
    image: Image.Image | None
    prompt: str
    answer: str | None = None


def add_arguments(parser: argparse.ArgumentParser, samples: int) -> None:
    """The flags that choose the samples, beside `--data` and `--seed`."""
    parser.add_argument("--samples", type=int, default=samples, help="how many, drawn at random; the paper takes 1000")
    parser.add_argument("--image-folder", type=Path, help="of LLaVA records (default: images/ beside them)")
    parser.add_argument("--prompt", default=PROMPT, help="for a folder of pictures")


class Samples(Sequence[PicturePrompt]):
    """The chosen samples, read when asked for; a slice leaves out those whose picture cannot be read.

    Args:
        readers: per source (length, function from an index to a sample).
        chosen: indices into all sources, one behind the other.
        key: says which collection and choice this is.
        unreadable: gets what a slice left out, with the reason, by position.
    """

    def __init__(
        self, readers: list[tuple[int, Any]], chosen: list[int], key: str, unreadable: dict[str, str] | None = None
    ):
        self.readers, self.chosen, self.key = readers, chosen, key
        self.unreadable = {} if unreadable is None else unreadable

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [sample for i in range(*index.indices(len(self))) if (sample := self._readable(i)) is not None]
        position = self.chosen[index]
        for length, read in self.readers:
            if position < length:
                return read(position)
            position -= length
        raise IndexError(index)

    def _readable(self, index: int) -> PicturePrompt | None:
        try:
            return self[index]
        except Unreadable as error:
            self.unreadable[str(index)] = str(error)
        if len(self.unreadable) == len(self):
            raise ValueError(
                f"none of {len(self)} pictures can be read, the last because of {self.unreadable[str(index)]}"
            )
        return None


def choose(args: argparse.Namespace) -> Samples:
    """The samples that `--data`, `--samples` and `--seed` choose, in random order; each has a picture.

    What cannot be read of them is named in `args.unreadable` as soon as it is met.

    Raises:
        ValueError: nothing readable there, or no sample with a picture; says what `--data` may be.
    """
    if args.samples < 1:
        raise ValueError(f"--samples {args.samples}: expected at least 1")
    data = args.data or default_data()
    args.data = data
    readers, usable, start = [], [], 0
    for part in data.split(","):
        length, read, with_picture = _source(Path(part.strip()), args)
        readers.append((length, read))
        usable += [start + index for index in with_picture]
        start += length
    if not usable:
        raise ValueError(f"--data {data}: none of its {start} samples has exactly one picture")
    random.Random(args.seed).shuffle(usable)
    args.unreadable = getattr(args, "unreadable", {})
    return Samples(readers, usable[: args.samples], f"{data}|{args.image_folder}|{args.prompt}", args.unreadable)


def default_data() -> str:
    """The playground's held-out pictures: scenes, else stamps.

    Raises:
        ValueError: neither has been prepared.
    """
    found = [path for path in PLAYGROUND if Path(path).is_file()]
    if not found:
        raise ValueError(
            f"--data: none given, and {' or '.join(PLAYGROUND)} is not there; run python -m playground scenes"
        )
    return found[0]


def _source(path: Path, args: argparse.Namespace) -> tuple[int, Any, Sequence[int]]:
    """Length of one source, what reads a sample of it, and the indices that have exactly one picture."""
    if path.suffix == ".parquet":
        return _parquet([path])
    if path.suffix in (".json", ".jsonl"):
        return _records(path, args.image_folder or path.parent / "images")
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
        if tables:
            return _parquet(tables)
        pictures = sorted(file for file in path.rglob("*") if file.suffix.lower() in PICTURES)
        if pictures:
            return _folder(pictures, args.prompt)
        raise ValueError(f"--data {path}: the folder holds neither pictures nor Parquet files")
    raise ValueError(f"--data {path}: expected a folder, .json, .jsonl or .parquet; found none of that name")


def _folder(pictures: list[Path], prompt: str) -> tuple[int, Any, Sequence[int]]:
    def read(index: int) -> PicturePrompt:
        return PicturePrompt(pictures[index].name, open_picture(pictures[index], str(pictures[index])), prompt)

    return len(pictures), read, range(len(pictures))


def _records(path: Path, folder: Path) -> tuple[int, Any, Sequence[int]]:
    records = load_records(str(path))

    def read(index: int) -> PicturePrompt:
        record = records[index]
        name = record_name(record, index)
        picture = folder / record_images(record)[0]
        prompt, answer = first_turns(record["conversations"])
        return PicturePrompt(name, open_picture(picture, f"{path}, {name}: {picture}"), prompt, answer)

    return len(records), read, [i for i, record in enumerate(records) if len(record_images(record)) == 1]


def first_turns(conversations: list[dict[str, str]]) -> tuple[str, str | None]:
    """The first question, without its placeholder, and the answer to it."""
    turns = [turn for turn in conversations if turn["from"] != "system"]
    answer = turns[1]["value"] if len(turns) > 1 else None
    return turns[0]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip(), answer


def _parquet(paths: list[Path]) -> tuple[int, Any, Sequence[int]]:
    tables = [pq.ParquetFile(path) for path in paths]
    groups = [(t, p, g) for t, p in zip(tables, paths, strict=True) for g in range(t.num_row_groups)]
    ends, total = [], 0
    for table, _, group in groups:
        total += table.metadata.row_group(group).num_rows
        ends.append(total)
    cached: dict[int, Any] = {}

    def read(index: int) -> PicturePrompt:
        number = next(i for i, end in enumerate(ends) if index < end)
        if number not in cached:  # one group of rows at a time stays in memory
            cached.clear()
            table, _, group = groups[number]
            cached[number] = table.read_row_group(group)
        start = ends[number - 1] if number else 0
        row = cached[number].slice(index - start, 1).to_pylist()[0]
        return row_sample(row, f"{groups[number][1]}, row {index}")

    return total, read, _rows_with_picture(tables)


def _rows_with_picture(tables: list[pq.ParquetFile]) -> list[int]:
    """Rows whose picture is not null; reads the short `path` beside the pictures' bytes where there is one."""
    found, start = [], 0
    for table in tables:
        names = table.schema_arrow.names
        column = next((name for name in ("image", "images") if name in names), None)
        if column is None:
            raise ValueError(f"--data: Parquet without a column image or images; it has {', '.join(names)}")
        leaves = [table.schema.column(i).path for i in range(len(table.schema))]
        column = f"{column}.path" if f"{column}.path" in leaves else column
        for batch in table.iter_batches(columns=[column]):
            found += [start + index for index, ok in enumerate(batch.column(0).is_valid().to_pylist()) if ok]
            start += len(batch)
    return found


def row_sample(row: dict[str, Any], name: str) -> PicturePrompt:
    """A sample of a Parquet row with LLaVA-NeXT's columns, or a benchmark's.

    Raises:
        ValueError: it has neither conversations nor a question, or no readable picture.
    """
    picture = row.get("image") if row.get("image") is not None else (row.get("images") or [None])[0]
    image = open_picture(picture, name)
    if row.get("conversations"):
        return PicturePrompt(name, image, *first_turns(row["conversations"]))
    if row.get("question") is None:
        raise ValueError(f"--data {name}: expected a column conversations or question, found {', '.join(row)}")
    parts = [row.get("hint") or "", row["question"]]
    parts += [f"{letter}. {row[letter]}" for letter in OPTIONS if isinstance(row.get(letter), str)]
    answer = row.get("answer")
    return PicturePrompt(name, image, "\n".join(p for p in parts if p), None if answer is None else str(answer))


def open_picture(source: Any, name: str) -> Image.Image:
    """The picture at a path, in bytes, or in a struct of `bytes` and `path`, in RGB.

    Raises:
        Unreadable: there is none, or it cannot be read.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if source is None:
        raise Unreadable(f"--data {name}: no picture")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return to_rgb(image.copy())
    except Exception as error:  # a decoder raises whatever it stumbles over
        raise Unreadable(f"--data {name}: the picture cannot be read ({error})") from error
