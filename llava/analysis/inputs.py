"""Pictures with prompts to measure on: a folder of pictures, LLaVA records, or Parquet tables of a benchmark.

What `--data` may be, found by what is there:
    a folder of pictures (with `--prompt`); LLaVA's records as `.json`, `.jsonl` or Parquet, with their pictures in
    `--image-folder`, which may be a zip file, or in the rows (see `llava.data.records`); a benchmark's Parquet files,
    one or a folder of them, with columns `image` and `question` (MMBench, POPE and MMStar). Several, separated by
    commas, are one collection.
"""

import argparse
import hashlib
import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.checks import IMAGE_KEYS, starts_from
from llava.data.errors import DataError, named_by
from llava.data.hub_files import is_hub_name
from llava.data.images import ImageError, ImageStore, decoded, picture_header
from llava.data.mixture import MIXTURES
from llava.data.parquet_files import turn_columns
from llava.data.records import data_files, load_records, record_images, record_name
from llava.utils.commands import whole
from llava.utils.digests import bytes_digest, remembered_digest
from llava.utils.pixels import ORIENTATIONS, to_rgb, upright

PLAYGROUND = ("playground/data/scenes/heldout.json", "playground/data/stamps/heldout.json")
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
PROMPT = "Describe this image."
OPTIONS = "ABCDEFGHIJ"
MALFORMED = -1
"""Stands in a list of numbers of pictures for a row that is no record."""


class Unreadable(ValueError):
    """A sample cannot be read."""


class PicturePrompt(NamedTuple):
    """A picture (None: text alone) with what is asked about it, and the answer where the data has one."""

    name: str
    image: Image.Image | None
    prompt: str
    answer: str | None = None


def add_arguments(parser: argparse.ArgumentParser, samples: int) -> None:
    """The flags that choose the samples, besides `--data` and `--seed`."""
    parser.add_argument(
        "--samples", type=whole(1), default=samples, help="number of samples, drawn at random; the paper takes 1000"
    )
    parser.add_argument(
        "--image-folder",
        type=Path,
        help="folder or zip file of the pictures of LLaVA records (default: images/ beside them)",
    )
    parser.add_argument("--prompt", default=PROMPT, help="prompt for a folder of pictures")
    parser.add_argument(
        "--image-orientation",
        choices=ORIENTATIONS,
        default="stored",
        help="exif turns pictures upright by their EXIF orientation; take it for a checkpoint trained with it",
    )


class Source(NamedTuple):
    """One of the collections.

    Attributes:
        pictures: how many pictures each of its samples has.
        read: reads sample `index`.
        content: a digest of all that decides these samples.
    """

    pictures: Sequence[int]
    read: Callable[[int], PicturePrompt]
    content: Callable[[Sequence[int]], str]


class Samples(Sequence[PicturePrompt]):
    """The chosen samples, read when asked for; a slice leaves out those whose picture cannot be read.

    Args:
        sources: see `Source`.
        chosen: indices of samples, counted on from one source to the next.
        key: names the collection and the choice; part of the name of saved measurements.
        orientation: how the pictures are shown, see `llava.utils.pixels`.
        unreadable: is filled with the reason for each sample that a slice left out, by position.
    """

    def __init__(
        self,
        sources: list[Source],
        chosen: list[int],
        key: str,
        unreadable: dict[str, str] | None = None,
        orientation: str = "stored",
    ):
        self.sources, self.chosen, self.key, self.orientation = sources, chosen, key, orientation
        self.unreadable = {} if unreadable is None else unreadable
        self._content: str | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> PicturePrompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[PicturePrompt]: ...

    def __getitem__(self, index: int | slice) -> PicturePrompt | list[PicturePrompt]:
        if isinstance(index, slice):
            return [sample for i in range(*index.indices(len(self))) if (sample := self._readable(i)) is not None]
        source, position = self._place(self.chosen[index])
        sample = source.read(position)
        return sample._replace(image=sample.image and upright(sample.image, self.orientation))

    def _place(self, position: int) -> tuple[Source, int]:
        for source in self.sources:
            if position < len(source.pictures):
                return source, position
            position -= len(source.pictures)
        raise IndexError(position)

    def content(self) -> str:
        """A digest of the samples themselves: records, prompts and pictures by all their bytes."""
        if self._content is None:
            places = [self._place(position) for position in self.chosen]
            parts = [source.content([place for of, place in places if of is source]) for source in self.sources]
            self._content = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
        return self._content

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
    """The samples that `--data`, `--samples` and `--seed` choose, in random order; each has exactly one picture.

    `args.unreadable` names those that cannot be read, as soon as they are met; `args.left_out` counts the samples that
    do not have exactly one picture.

    Raises:
        ValueError, OSError: nothing readable there, or no sample with one picture; says what `--data` may be.
    """
    args.data = args.data or default_data()
    with named_by("--data"):
        sources = [_source(Path(part.strip()), args) for part in args.data.split(",")]
    pictures = [count for source in sources for count in source.pictures]
    usable = [index for index, count in enumerate(pictures) if count == 1]
    args.left_out = left_out(pictures)
    if not usable:
        raise ValueError(
            f"--data {args.data}: none of its {len(pictures)} samples has exactly one picture ({args.left_out})"
        )
    random.Random(args.seed).shuffle(usable)
    args.unreadable = getattr(args, "unreadable", {})
    orientation = getattr(args, "image_orientation", "stored")
    key = f"{args.data}|{args.image_folder}|{args.prompt}" + (f"|{orientation}" if orientation != "stored" else "")
    return Samples(sources, usable[: args.samples], key, args.unreadable, orientation)


def left_out(pictures: Sequence[int]) -> str:
    """How many samples are left out for each reason, in words; empty if none is."""
    several = sum(count > 1 for count in pictures)
    reasons = {"without a picture": pictures.count(0), "with several": several, "malformed": pictures.count(MALFORMED)}
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)


def default_data() -> str:
    """The playground's held-out pictures: scenes, else stamps.

    Raises:
        ValueError: neither has been prepared.
    """
    prepared = [path for path in PLAYGROUND if Path(path).is_file()]
    if not prepared:
        raise ValueError(
            f"--data: none given, and {' or '.join(PLAYGROUND)} is not there; run python -m playground scenes"
        )
    return prepared[0]


def _source(path: Path, args: argparse.Namespace) -> Source:
    if path.suffix in (".json", ".jsonl"):
        return _records(path, args.image_folder or path.parent / "images")
    if path.suffix in MIXTURES or is_hub_name(str(path)):
        return _records(path, args.image_folder)
    if path.suffix == ".parquet" and path.is_file() or next(path.rglob("*.parquet"), None):
        try:
            shards = data_files(str(path))
            turns = turn_columns(pq.read_schema(shards[0]))
            return _records(path, args.image_folder) if turns else _benchmark(shards)
        except pa.ArrowException as error:
            raise DataError(path, f"cannot be read as Parquet ({error})") from error
    if path.is_dir():
        pictures = sorted(file for file in path.rglob("*") if file.suffix.lower() in PICTURES)
        if pictures:
            return _folder(pictures, args.prompt)
        raise DataError(path, "the folder holds neither pictures nor Parquet files")
    expected = "a folder, .json, .jsonl, .parquet, .yaml"
    raise DataError(path, f"expected {expected}; found none of that name{starts_from(path)}")


def _folder(pictures: list[Path], prompt: str) -> Source:
    def read(index: int) -> PicturePrompt:
        return PicturePrompt(pictures[index].name, open_picture(pictures[index], str(pictures[index])), prompt)

    def content(indices: Sequence[int]) -> str:
        return " ".join(f"{pictures[index].name} {bytes_digest(pictures[index])}" for index in indices)

    return Source([1] * len(pictures), read, content)


def _records(path: Path, folder: Path | None) -> Source:
    """LLaVA's records; malformed rows of Parquet files are left out, malformed JSON records are refused."""
    records = load_records(str(path), check=path.suffix in (".json", ".jsonl", *MIXTURES))
    store = ImageStore(folder, follow_links=True, others=records.image_folders, setting="--image-folder")
    # Missing placeholders do not matter here: the prompt is asked about its one picture anyway.
    malformed = {i for i in records.malformed().tolist() if records.problem(i).kind != "placeholders"}
    pictures = [MALFORMED if i in malformed else len(record_images(records[i])) for i in range(len(records))]

    def read(index: int) -> PicturePrompt:
        record = records[index]
        name = record_name(record, index)
        try:
            picture = to_rgb(store.open(record_images(record)[0]))
        except ImageError as error:
            raise Unreadable(f"--data {path}, {name}: {error}") from error
        return PicturePrompt(name, picture, *first_turns(record["conversations"]))

    def content(indices: Sequence[int]) -> str:
        shown = store.content(record_images(records[index])[0] for index in indices)
        return f"{records.key} {shown} {[*indices]}"

    return Source(pictures, read, content)


def first_turns(conversations: list[dict[str, str]]) -> tuple[str, str | None]:
    """The first question, without its placeholder, and the answer to it."""
    turns = [turn for turn in conversations if turn["from"] != "system"]
    answer = turns[1]["value"] if len(turns) > 1 else None
    return turns[0]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip(), answer


def _benchmark(shards: list[Path]) -> Source:
    tables = [pq.ParquetFile(shard) for shard in shards]
    pictures = [count for table, shard in zip(tables, shards, strict=True) for count in _row_pictures(table, shard)]
    groups = [(t, shard, g) for t, shard in zip(tables, shards, strict=True) for g in range(t.num_row_groups)]
    ends, total = [], 0
    for table, _, group in groups:
        total += table.metadata.row_group(group).num_rows
        ends.append(total)
    cached: dict[int, pa.Table] = {}

    def read(index: int) -> PicturePrompt:
        number = next(i for i, end in enumerate(ends) if index < end)
        table, shard, group = groups[number]
        if number not in cached:  # one group of rows at a time stays in memory
            cached.clear()
            cached[number] = table.read_row_group(group)
        place = index - (ends[number - 1] if number else 0)
        first = sum(table.metadata.row_group(before).num_rows for before in range(group))
        return row_sample(cached[number].slice(place, 1).to_pylist()[0], f"{shard}, row {first + place}")

    def content(indices: Sequence[int]) -> str:
        return f"{[remembered_digest(shard) for shard in shards]} {[*indices]}"

    return Source(pictures, read, content)


def _row_pictures(table: pq.ParquetFile, shard: Path) -> list[int]:
    """How many pictures each row has; reads the short `path` beside the pictures' bytes where there is one.

    Raises:
        ValueError: the columns of a benchmark are missing; the message names those that are there.
    """
    names = table.schema_arrow.names
    column = next((name for name in IMAGE_KEYS if name in names), None)
    for columns, present in (("image or images", column), ("conversations or question", "question" in names)):
        if not present:
            raise ValueError(f"--data {shard}: Parquet without a column {columns}; it has {', '.join(names)}")
    leaves = [table.schema.column(i).path for i in range(len(table.schema))]
    leaf = next((leaf for leaf in leaves if leaf.startswith(f"{column}.") and leaf.endswith(".path")), column)
    counts: list[int] = []
    for batch in table.iter_batches(columns=[leaf]):
        values = batch.column(0)
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        there = pc.list_value_length(values) if is_list else values.is_valid().cast(pa.int64())
        counts += pc.fill_null(there, 0).to_pylist()
    return counts


def row_sample(row: dict[str, Any], name: str) -> PicturePrompt:
    """A sample of a benchmark's Parquet row, which has one picture.

    Raises:
        Unreadable: its question is null, or its picture cannot be read.
    """
    picture = next(row[key] for key in IMAGE_KEYS if row.get(key) is not None)
    image = open_picture(picture[0] if isinstance(picture, list) else picture, name)
    if row["question"] is None:
        raise Unreadable(f"--data {name}: its question is null")
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
        with picture_header(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return to_rgb(decoded(image))
    except Exception as error:  # decoders raise all kinds of errors
        where = starts_from(source) if isinstance(error, FileNotFoundError) else ""
        raise Unreadable(f"--data {name}: the picture cannot be read ({error}{where})") from error
