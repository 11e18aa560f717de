"""Samples to ask about: a picture and a question, drawn from LLaVA's JSON records."""

import argparse
import json
import random
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.eval.ask import load_picture

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "playground/data/scenes/heldout.json"


class Question(NamedTuple):
    """A question about a picture."""

    name: str
    prompt: str
    image: Image.Image


def add_question_arguments(parser: argparse.ArgumentParser, samples: int) -> None:
    parser.add_argument("--image-folder", type=Path, help="pictures of --data (default: `images` beside it)")
    parser.add_argument("--samples", type=int, default=samples, help="questions, drawn with --seed")


def read_questions(args: argparse.Namespace) -> list[Question]:
    """`--samples` records of `--data` with a picture, in the file's order; all of them where there are fewer.

    Raises:
        ValueError: no such file, or no record with a picture and a human's question.
    """
    path = Path(args.data) if args.data else DEFAULT_DATA
    if not path.is_file():
        hint = "" if args.data else "; make the default with python -m playground scenes"
        raise ValueError(f"--data {path}: no such file{hint}")
    folder = args.image_folder or path.parent / "images"
    records = [record for record in json.loads(path.read_text()) if record.get("image")]
    if not records or args.samples < 1:
        raise ValueError(f"--data {path}, --samples {args.samples}: expected at least one record with a picture")
    chosen = sorted(random.Random(args.seed).sample(range(len(records)), min(args.samples, len(records))))
    return [_question(records[index], folder) for index in chosen]


def _question(record: dict, folder: Path) -> Question:
    text = record["conversations"][0]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()
    return Question(str(record.get("id", record["image"])), text, load_picture(str(folder / record["image"])))
