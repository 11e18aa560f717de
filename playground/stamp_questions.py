"""Captions and questions about stamps, from their captions and folder names."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playground.records import image_record, listed, text_record

KINDS = {  # first folder of a stamp -> its name in a question; other folders keep their name
    "animals": "an animal",
    "clothes": "clothing",
    "food": "food",
    "hobbies": "a hobby",
    "household": "a household object",
    "medical": "medicine",
    "military": "the military",
    "naturalforces": "weather",
    "people": "people",
    "plants": "a plant",
    "seasonal": "a holiday",
    "space": "space",
    "sports": "sports",
    "symbols": "a symbol",
    "town": "a town",
    "vehicles": "a vehicle",
}
NUM_CHOICES = {"category": 4, "caption": 2}
TEXT_SHARE = 0.1


@dataclass(frozen=True)
class Stamp:
    """One picture with its caption; `kind` as a question names it, `name` unique in the set."""

    path: Path
    name: str
    caption: str
    kind: str


def pretrain_records(stamps: list[Stamp], seed: int) -> list[dict[str, Any]]:
    """Return one caption record per picture (stage 1)."""
    rng = random.Random(f"{seed}/pretrain")
    prompts = ("Describe the picture.", "What is in the picture?", "Write a short caption.")
    return [
        image_record(f"stamp-caption-{stamp.name}", f"{stamp.name}.png", [(rng.choice(prompts), stamp.caption)])
        for stamp in stamps
    ]


def category_turn(rng: random.Random, stamp: Stamp, subject: str) -> tuple[tuple[str, str], list[str]]:
    """Return the question for the kind of `subject`, with its answer, and the choices that it names."""
    others = sorted(set(KINDS.values()) - {stamp.kind})
    choices = [stamp.kind, *rng.sample(others, NUM_CHOICES["category"] - 1)]
    rng.shuffle(choices)
    return (f"What does {subject} belong to: {listed(choices)}?", stamp.kind), choices


def caption_turn(rng: random.Random, stamp: Stamp, captions: list[str]) -> tuple[tuple[str, str], list[str]]:
    """Return the question which of two captions fits, with its answer, and the two."""
    other = rng.choice([caption for caption in captions if caption != stamp.caption])
    choices = rng.sample([stamp.caption, other], 2)
    return (f'Which caption fits the picture: "{choices[0]}" or "{choices[1]}"?', stamp.caption), choices


def finetune_records(stamps: list[Stamp], seed: int) -> list[dict[str, Any]]:
    """Return one record of one or two questions per picture, and records without a picture (stage 2), mixed.

    The question for the category comes first, because the other two name the content.
    """
    rng = random.Random(f"{seed}/finetune")
    captions = sorted({stamp.caption for stamp in stamps})
    records = []
    for stamp in stamps:
        name_it = rng.choice((("What is in the picture?", stamp.caption), caption_turn(rng, stamp, captions)[0]))
        category = category_turn(rng, stamp, "the picture")[0]
        turns = rng.choice(([category], [name_it], [category, name_it]))
        records.append(image_record(f"stamp-question-{stamp.name}", f"{stamp.name}.png", turns))
    for stamp in rng.sample(stamps, round(TEXT_SHARE * len(stamps))):
        turn, _ = category_turn(rng, stamp, f'"{stamp.caption}"')
        records.append(text_record(f"stamp-text-{stamp.name}", [turn]))
    rng.shuffle(records)
    return records


def heldout_records(stamps: list[Stamp], all_stamps: list[Stamp], seed: int) -> list[dict[str, Any]]:
    """Return one question of every kind per held-out picture; wrong captions come from the whole set."""
    rng = random.Random(f"{seed}/heldout")
    captions = sorted({stamp.caption for stamp in all_stamps})
    records = []
    for stamp in stamps:
        asked = {
            "category": category_turn(rng, stamp, "the picture"),
            "caption": caption_turn(rng, stamp, captions),
        }
        for kind, (turn, choices) in asked.items():
            extra = {"kind": kind, "choices": choices, "caption": stamp.caption}
            records.append(image_record(f"stamp-heldout-{kind}-{stamp.name}", f"{stamp.name}.png", [turn], **extra))
    return records
