"""Pictures with prompts to measure on: a folder of pictures, LLaVA records, or Parquet tables of a benchmark.

What `--data` may be, found by what is there:
    a folder of pictures (with `--prompt`); LLaVA's records as `.json`, `.jsonl` or Parquet, with their pictures in
    `--image-folder`, which may be a zip file, or in the rows (see `llava.data.records`); a benchmark's Parquet files,
    one or a folder of them, with columns `image` and `question` (MMBench, POPE and MMStar). Several, separated by
    commas, are one collection.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.checks import IMAGE_KEYS, ImagePlace, Record, starts_from
from llava.data.errors import DataError, named_by
from llava.data.images import ImageError, ImageStore
from llava.data.mixture import MIXTURES
from llava.data.parquet_files import read_rows, turn_columns, with_row_images
from llava.data.records import data_files, load_records, record_images, record_name
from llava.utils.commands import whole
from llava.utils.digests import remembered_digest
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

    `args.unreadable` names those that cannot be read, as soon as they are met; `args.drawn` is their number, those
    included; `args.left_out` counts the samples that do not have exactly one picture.

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
    args.drawn = min(len(usable), args.samples)
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
    if path.suffix in MIXTURES:
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
            return _folder(path, [str(file.relative_to(path)) for file in pictures], args.prompt)
        raise DataError(path, "the folder holds neither pictures nor Parquet files")
    expected = "a folder, .json, .jsonl, .parquet, .yaml"
    raise DataError(path, f"expected {expected}; found none of that name{starts_from(path)}")


def _folder(folder: Path, pictures: list[str], prompt: str) -> Source:
    store = ImageStore(folder, follow_links=True, setting="--data")

    def read(index: int) -> PicturePrompt:
        return PicturePrompt(Path(pictures[index]).name, _opened(store, pictures[index], str(folder)), prompt)

    return Source([1] * len(pictures), read, lambda indices: store.content(pictures[index] for index in indices))


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
        picture = _opened(store, record_images(record)[0], f"{path}, {name}")
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
    rows = [(f"{shard}, row {number}", row) for shard in shards for number, row in enumerate(_benchmark_rows(shard))]
    store = ImageStore(None, follow_links=True, setting="--data")

    def read(index: int) -> PicturePrompt:
        name, row = rows[index]
        picture = _opened(store, record_images(row)[0], name)
        return PicturePrompt(name, picture, *question_and_answer(row, name))

    def content(indices: Sequence[int]) -> str:
        shown = store.content(record_images(rows[index][1])[0] for index in indices)
        return f"{[remembered_digest(shard) for shard in shards]} {shown} {[*indices]}"

    return Source([len(record_images(row)) for _, row in rows], read, content)


def _benchmark_rows(shard: Path) -> list[Record]:
    """The rows of a benchmark's file, of a picture in the file its place.

    Raises:
        ValueError: the columns of a benchmark are missing; the message names those that are there.
    """
    names = pq.read_schema(shard).names
    for columns, present in (
        ("image or images", any(name in names for name in IMAGE_KEYS)),
        ("conversations or question", "question" in names),
    ):
        if not present:
            raise ValueError(f"--data {shard}: Parquet without a column {columns}; it has {', '.join(names)}")
    elements = read_rows(shard, [name for name in ("hint", "question", "answer", *OPTIONS) if name in names])
    rows = [(json.loads(element.text), element.row) for element in elements]
    return [row if number is None else with_row_images(row, str(shard), number) for row, number in rows]


def question_and_answer(row: Record, name: str) -> tuple[str, str | None]:
    """The prompt of a benchmark's row, with hint and options, and the answer.

    Raises:
        Unreadable: its question is null.
    """
    if row["question"] is None:
        raise Unreadable(f"--data {name}: its question is null")
    parts = [row.get("hint") or "", row["question"]]
    parts += [f"{letter}. {row[letter]}" for letter in OPTIONS if isinstance(row.get(letter), str)]
    answer = row.get("answer")
    return "\n".join(part for part in parts if part), None if answer is None else str(answer)


def _opened(store: ImageStore, image: ImagePlace, name: str) -> Image.Image:
    """A sample's picture in RGB; raises Unreadable if it cannot be read."""
    try:
        return to_rgb(store.open(image))
    except ImageError as error:
        raise Unreadable(f"--data {name}: {error}") from error
