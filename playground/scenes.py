"""Drawn pictures of one to four coloured shapes, with captions and with questions whose answers are known."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llava.utils.files import write_json
from llava.utils.progress import progress
from playground.records import STATEMENTS, image_record
from playground.scene_drawing import CHOICES, Scene, draw_scene, render
from playground.scene_questions import about_scene, ask, caption, quarter_statements, text_records
from playground.store import build

FOLDER = "scenes"
FORMAT = 4  # raise it when the same settings give other files
MOST_SHAPES = 4  # of a crowded picture
CAPTION_SHARE = 0.5  # captions per record of questions in stage 2


@dataclass
class Settings:
    """What `python -m playground scenes` draws; see `FLAGS`.

    Attributes:
        size: side of the square pictures in pixels.
        num_text: training records without a picture.
        two_shapes: share of the pictures that show two shapes, of those that are not crowded.
        seed: seed of everything drawn.
    """

    size: int = 64
    num_train: int = 1000
    num_crowded: int = 1000
    num_heldout: int = 240
    num_text: int = 40
    two_shapes: float = 0.3
    seed: int = 0


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/scenes`, made unless it is complete."""
    made_with = {**asdict(settings), "format": FORMAT}
    return build(root / FOLDER, "scenes", made_with, partial(write_scenes, settings), force)


def write_scenes(settings: Settings, folder: Path) -> dict[str, Any]:
    """Write images and record files to `folder`; return the facts for the manifest."""
    train, heldout = draw_scenes(settings)
    records = {
        "pretrain.json": pretrain_records(train[: settings.num_train]),
        "finetune.json": finetune_records(train[: settings.num_train], settings),
        "heldout.json": heldout_records(heldout, settings.seed),
    }
    return write_set({"train": train, "heldout": heldout}, records, settings.size, folder)


def write_set(
    splits: dict[str, list[Scene]],
    records: dict[str, list[dict[str, Any]]],
    size: int,
    folder: Path,
    say: Callable[[Scene], str] = caption,
) -> dict[str, Any]:
    """Write to `folder` the pictures of every split's scenes, what is true of each, and the records; return counts."""
    (folder / "images").mkdir()
    for split, drawn in splits.items():
        for index, scene in enumerate(progress(drawn, f"{folder.stem}: {split}", "pictures")):
            render(scene, size).save(folder / "images" / image_name(split, index))
    for name, content in records.items():
        write_json(folder / name, content)
    statements = {
        split: {
            image_name(split, index): {"picture": [say(scene)], "quarters": quarter_statements(scene)}
            for index, scene in enumerate(drawn)
        }
        for split, drawn in splits.items()
    }
    write_json(folder / STATEMENTS, statements)
    return {"records": {name: len(content) for name, content in records.items()}}


def image_name(split: str, index: int) -> str:
    """Return the file name of a picture in the `images` folder."""
    return f"{split}_{index:05d}.png"


def draw_scenes(settings: Settings) -> tuple[list[Scene], list[Scene]]:
    """Return the training and the held-out scenes, which share no content."""

    def generators(split: str, count: int) -> list[random.Random]:
        return [random.Random(f"{settings.seed}/{split}/{index}") for index in range(count)]

    def plain(rng: random.Random) -> Scene:
        return draw_scene(rng, settings.size, 2 if rng.random() < settings.two_shapes else 1)

    def crowded(rng: random.Random) -> Scene:
        return draw_scene(rng, settings.size, rng.randint(1, MOST_SHAPES))

    heldout = [plain(rng) for rng in generators("heldout", settings.num_heldout)]
    taken = {scene.content() for scene in heldout}

    def outside(rng: random.Random, draw: Callable[[random.Random], Scene]) -> Scene:
        while (scene := draw(rng)).content() in taken:
            pass
        return scene

    kinds = [plain] * settings.num_train + [crowded] * settings.num_crowded
    return [outside(rng, kind) for rng, kind in zip(generators("train", len(kinds)), kinds, strict=True)], heldout


def pretrain_records(scenes: list[Scene], say: Callable[[Scene], str] = caption) -> list[dict[str, Any]]:
    """Return one caption record per scene (stage 1); the prompt is the picture alone, as in LLaVA's own stage 1."""
    return [
        image_record(f"scene-caption-{i:05d}", image_name("train", i), [("", say(scene))])
        for i, scene in enumerate(scenes)
    ]


def finetune_records(scenes: list[Scene], settings: Settings) -> list[dict[str, Any]]:
    """Return questions, captions, and records without a picture (stage 2), mixed.

    With captions the language model keeps reading the picture while it learns the form of answers.
    """
    rng = random.Random(f"{settings.seed}/finetune")
    records = pretrain_records(scenes)[: round(CAPTION_SHARE * len(scenes))]
    records += [
        image_record(f"scene-question-{i:05d}", image_name("train", i), about_scene(rng, scene))
        for i, scene in enumerate(scenes)
    ]
    records += text_records(rng, settings.num_text)
    rng.shuffle(records)
    return records


def heldout_records(scenes: list[Scene], seed: int) -> list[dict[str, Any]]:
    """Return one question per scene; kinds take turns, so that any first part of the list is balanced."""
    rng = random.Random(f"{seed}/heldout")

    def record(index: int, scene: Scene) -> dict[str, Any]:
        kind = tuple(CHOICES)[index % len(CHOICES)]
        turn = ask(kind, rng.choice(scene.shapes))
        extra = {"kind": kind, "choices": list(CHOICES[kind]), "caption": caption(scene)}
        return image_record(f"scene-heldout-{index:05d}", image_name("heldout", index), [turn], **extra)

    return [record(index, scene) for index, scene in enumerate(scenes)]
