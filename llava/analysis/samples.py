"""Pictures with prompts to measure on, drawn from LLaVA records, a benchmark's Parquet tables, or folders of pictures.

All are read as LLaVA's records: a benchmark's row (columns `image` and `question`, as MMBench, POPE and MMStar have) is
a record of its question, hint and options; a picture of a folder is one of `--prompt`. Several `--data`, separated by
commas, are one collection.
"""

import argparse
import hashlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.checks import IMAGE_KEYS, Record, parsed_row, starts_from
from llava.data.errors import DataError, named_by
from llava.data.images import ImageError, ImageStore
from llava.data.mixture import MIXTURES
from llava.data.parquet_files import read_rows, turn_columns
from llava.data.records import data_files, load_records, record_images, record_name
from llava.utils.commands import whole
from llava.utils.pixels import exif_orientation, to_rgb

PLAYGROUND = "playground/data/scenes/heldout.json"
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
PROMPT = "Describe this image."
OPTIONS = "ABCDEFGHIJ"
SHOWN = 10


class PicturePrompt(NamedTuple):
    """A picture with what is asked about it, and the answer where the data has one."""

    name: str
    image: Image.Image
    prompt: str
    answer: str | None = None

    def digest(self) -> str:
        """Of everything that decides a value: words, pixels and orientation."""
        words = f"{self.prompt!r} {self.answer!r} {self.image.size} {exif_orientation(self.image)}"
        return hashlib.sha256(words.encode() + self.image.tobytes()).hexdigest()


def add_arguments(parser: argparse.ArgumentParser, samples: int) -> None:
    """The flags that choose the samples, besides `--data` and `--seed`."""
    number = "number of samples, drawn at random; the paper takes 1000"
    parser.add_argument("--samples", type=whole(1), default=samples, help=number)
    folder = "folder or zip file of the pictures of LLaVA records (default: images/ beside them)"
    parser.add_argument("--image-folder", type=Path, help=folder)
    parser.add_argument("--prompt", default=PROMPT, help="prompt for a folder of pictures")


class Source(NamedTuple):
    """One of the collections: its name in messages, records, where their pictures are, and how many each record has.

    `pictures` is None where a record is malformed.
    """

    name: str
    records: Sequence[Record]
    store: ImageStore
    pictures: Sequence[int | None]

    def sample(self, number: int) -> PicturePrompt:
        """The sample of a record. Raises ValueError: its picture or its question is missing or cannot be read."""
        record = self.records[number]
        name = record_name(record, number)
        prompt, answer = first_turns(record["conversations"])
        if prompt is None:
            raise ValueError(f"--data {self.name}, {name}: its question is null")
        try:
            return PicturePrompt(name, to_rgb(self.store.open(record_images(record)[0])), prompt, answer)
        except ImageError as error:
            raise ValueError(f"--data {self.name}, {name}: {error}") from error


class Samples(Sequence[PicturePrompt]):
    """The chosen samples, a source, a record's index and a digest each, read when asked for."""

    def __init__(self, chosen: Sequence[tuple[Source, int, str]]):
        self.chosen = chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> PicturePrompt:
        source, number, digest = self.chosen[index]
        sample = source.sample(number)
        if sample.digest() != digest:
            raise ValueError(f"--data {sample.name}: the sample changed while it was measured; rerun the same command")
        return sample

    def content(self) -> str:
        """A digest of the samples themselves, wherever they are."""
        return hashlib.sha256(" ".join(digest for *_, digest in self.chosen).encode()).hexdigest()[:16]


def choose(args: argparse.Namespace) -> Samples:
    """The samples that `--data`, `--samples` and `--seed` choose, in random order; each has exactly one picture.

    Each is read once. Those that cannot be read are named on stderr and left out. `args.drawn` is the number that is
    left; `args.left_out` counts these and the records of the data that do not have exactly one picture.

    Raises:
        ValueError, OSError: nothing readable there, or no sample with one picture; says what `--data` may be.
    """
    args.data = args.data or default_data()
    every, counts = [], []
    with named_by("--data"):
        for part in args.data.split(","):
            source = _source(Path(part.strip()), args)
            every += [(source, index) for index, count in enumerate(source.pictures) if count == 1]
            counts += source.pictures
    random.Random(args.seed).shuffle(every)
    chosen, unreadable = [], []
    for source, index in every[: args.samples]:
        try:
            chosen.append((source, index, source.sample(index).digest()))
        except ValueError as error:
            unreadable.append(str(error))
    reasons = {"without a picture": counts.count(0), "malformed": counts.count(None)}
    reasons["with several"] = len(counts) - len(every) - sum(reasons.values())
    reasons["that cannot be read"] = len(unreadable)
    args.left_out = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    if not chosen:
        why = "; ".join([args.left_out, *unreadable[:SHOWN]])
        raise ValueError(f"--data {args.data}: none of its {len(counts)} samples has exactly one picture ({why})")
    if args.left_out:
        print("samples left out:", "; ".join([args.left_out, *unreadable[:SHOWN]]), file=sys.stderr)
    args.drawn = len(chosen)
    return Samples(chosen)


def default_data() -> str:
    """The playground's held-out scenes. Raises ValueError: they have not been prepared."""
    if Path(PLAYGROUND).is_file():
        return PLAYGROUND
    raise ValueError(f"--data: none given, and {PLAYGROUND} is not there; run python -m playground scenes")


def _source(path: Path, args: argparse.Namespace) -> Source:
    if path.suffix in (".json", ".jsonl", *MIXTURES):
        return _records(path, args)
    if path.suffix == ".parquet" and path.is_file() or next(path.rglob("*.parquet"), None):
        try:
            shards = data_files(str(path))
            if turn_columns(pq.read_schema(shards[0])):
                return _records(path, args)
            rows = [row for shard in shards for row in _benchmark_rows(shard)]
        except pa.ArrowException as error:
            raise DataError(path, f"cannot be read as Parquet ({error})") from error
        store = ImageStore(None, setting="--data")
        return Source(str(path), rows, store, [len(record_images(row)) for row in rows])
    if path.is_dir():
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.suffix.lower() in PICTURES)
        if not files:
            raise DataError(path, "the folder holds neither pictures nor Parquet files")
        records = [record_of(file, file, args.prompt) for file in files]
        store = ImageStore(path, setting="--data")
        return Source(str(path), records, store, [1] * len(files))
    expected = "a folder, .json, .jsonl, .parquet, .yaml"
    raise DataError(path, f"expected {expected}; found none of that name{starts_from(path)}")


def _records(path: Path, args: argparse.Namespace) -> Source:
    """LLaVA's records; the first malformed ones are named on stderr."""
    records = load_records(str(path), check=False).epoch()
    beside = path.parent / "images" if path.suffix in (".json", ".jsonl") else None
    store = ImageStore(args.image_folder or beside, others=records.image_folders, setting="--image-folder")
    # Missing placeholders do not matter here: the prompt is asked about its one picture anyway.
    malformed = {i for i in records.malformed().tolist() if records.problem(i).kind != "placeholders"}
    for i in sorted(malformed)[:SHOWN]:
        print(f"--data {records.named(i)}: {records.problem(i).message}", file=sys.stderr)
    pictures = [None if i in malformed else len(record_images(records[i])) for i in range(len(records))]
    return Source(str(path), records, store, pictures)


def record_of(name: str, image: Any, prompt: str | None, answer: str | None = None) -> Record:
    """A record of one picture and one question."""
    turns = [{"from": "human", "value": prompt}] + ([] if answer is None else [{"from": "gpt", "value": answer}])
    return {"id": name, "image": image, "conversations": turns}


def first_turns(conversations: list[dict[str, Any]]) -> tuple[str | None, str | None]:
    """The first question, without its placeholder, and the answer to it."""
    turns = [turn["value"] for turn in conversations if turn["from"] != "system"]
    question = turns[0] and turns[0].replace(DEFAULT_IMAGE_TOKEN, "").strip()
    return question, turns[1] if len(turns) > 1 else None


def _benchmark_rows(shard: Path) -> list[Record]:
    """The rows of a benchmark's file as records. Raises ValueError: a column of a benchmark is missing."""
    names = pq.read_schema(shard).names
    if "question" not in names or not set(IMAGE_KEYS) & set(names):
        expected = "expected columns conversations, or question and image or images"
        raise ValueError(f"--data {shard}: {expected}; found {', '.join(names)}")
    records, texts = [], [name for name in ("hint", "question", "answer", *OPTIONS) if name in names]
    for index, element in enumerate(read_rows(shard, texts)):
        row = parsed_row(element.text, str(shard))
        answer = None if row.get("answer") is None else str(row["answer"])
        record = record_of(f"{shard.name}, row {index}", None, question_of(row), answer)
        records.append(record | {key: row[key] for key in IMAGE_KEYS if key in row})
    return records


def question_of(row: Record) -> str | None:
    """The prompt of a benchmark's row, with hint and options; None where its question is null."""
    if row["question"] is None:
        return None
    parts = [row.get("hint") or "", row["question"]]
    parts += [f"{letter}. {row[letter]}" for letter in OPTIONS if isinstance(row.get(letter), str)]
    return "\n".join(part for part in parts if part)
