"""Drawn pictures of one to four coloured shapes, with captions and with questions whose answers are known."""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llava.utils.files import write_json
from llava.utils.progress import progress
from playground.options import option
from playground.records import STATEMENTS, image_record
from playground.scene_drawing import CHOICES, Scene, draw_scene, render
from playground.scene_questions import about_scene, ask, caption, quarter_statements, text_records
from playground.store import PlaygroundError, build

FOLDER = "scenes"
FORMAT = 4  # raise it when the same settings give other files
MAX_REDRAWS = 10_000
MOST_SHAPES = 4  # of a crowded picture
CAPTION_SHARE = 0.5  # captions per record of questions in stage 2


@dataclass
class Settings:
    """What `python -m playground scenes` draws."""

    size: int = option(64, "side of the square pictures in pixels")
    num_train: int = option(
        1000, "training pictures of one or two shapes: each gives a caption and a record of questions"
    )
    num_crowded: int = option(1000, "training pictures of one to four shapes, only for the vision tower")
    num_heldout: int = option(240, "held-out pictures: each gives one question")
    num_text: int = option(40, "training records without a picture")
    two_shapes: float = option(0.3, "share of the pictures that show two shapes, of those that are not crowded")
    seed: int = option(0, "seed of everything drawn")


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/scenes`, made unless it is complete."""
    check(settings)

    def write(folder: Path) -> dict[str, Any]:
        return write_scenes(settings, folder)

    return build(root / FOLDER, "scenes", {**asdict(settings), "format": FORMAT}, write, force)


def check(settings: Settings) -> None:
    """Raise `PlaygroundError` for settings that cannot be drawn."""
    if settings.size < 32:
        raise PlaygroundError(f"--size {settings.size}: shapes need at least 32 pixels to differ; give 32 or more.")
    if not 0 <= settings.two_shapes <= 1:
        raise PlaygroundError(f"--two-shapes {settings.two_shapes}: expected a share between 0 and 1.")
    check_counts(settings, "num_train", "num_crowded", "num_heldout", "num_text")


def check_counts(settings: Any, *names: str) -> None:
    """Raise `PlaygroundError` if one of the named settings is below 0."""
    for name in names:
        if getattr(settings, name) < 0:
            raise PlaygroundError(f"--{name.replace('_', '-')} {getattr(settings, name)}: expected 0 or more.")


def write_scenes(settings: Settings, folder: Path) -> dict[str, Any]:
    """Write images and record files to `folder`; return the facts for the manifest."""
    train, heldout = draw_scenes(settings)
    records = {
        "pretrain.json": pretrain_records(train[: settings.num_train]),
        "finetune.json": finetune_records(train[: settings.num_train], settings),
        "heldout.json": heldout_records(heldout, settings.seed),
    }
    write_set({"train": train, "heldout": heldout}, records, settings.size, folder)
    return {
        "records": {name: len(content) for name, content in records.items()},
        "choices": CHOICES,
        "chance_percent": {kind: round(100 / len(choices), 1) for kind, choices in CHOICES.items()},
    }


def write_set(
    splits: dict[str, list[Scene]],
    records: dict[str, list[dict[str, Any]]],
    size: int,
    folder: Path,
    say: Callable[[Scene], str] = caption,
) -> None:
    """Write to `folder` the pictures of every split's scenes, what is true of each, and the record files."""
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
    kinds = [plain] * settings.num_train + [crowded] * settings.num_crowded
    drawn = zip(generators("train", len(kinds)), kinds, strict=True)
    return [_draw_outside(taken, rng, settings, draw) for rng, draw in drawn], heldout


def _draw_outside(
    taken: set[tuple], rng: random.Random, settings: Settings, draw: Callable[[random.Random], Scene]
) -> Scene:
    for _ in range(MAX_REDRAWS):
        scene = draw(rng)
        if scene.content() not in taken:
            return scene
    raise PlaygroundError(
        f"--num-heldout {settings.num_heldout}: the held-out pictures use up nearly all contents and leave none for "
        "training. Give a smaller number."
    )


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

    def records() -> Iterator[dict[str, Any]]:
        for index, scene in enumerate(scenes):
            kind = tuple(CHOICES)[index % len(CHOICES)]
            turn = ask(kind, rng.choice(scene.shapes))
            extra = {"kind": kind, "choices": list(CHOICES[kind]), "caption": caption(scene)}
            yield image_record(f"scene-heldout-{index:05d}", image_name("heldout", index), [turn], **extra)

    return list(records())
