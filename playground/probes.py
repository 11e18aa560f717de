"""Drawn pictures for tasks that need more of a picture than what it shows: count, relation, size, binding, small text.

    color, shape, position   of one of one or two shapes, as in `scenes`
    count                    of one to four shapes
    relation, size           of two shapes: beside or above each other; one of them small
    binding                  of three shapes: the color of one named by its form, or the form of one named by its color
    text                     a letter or digit written on a shape
    pair                     color or shape of a pair of both that training never shows

Of every color one form is held out: no picture, caption or question of either stage has the pair. Questions of the
kind `pair` are about these only, all others about pairs that training shows, in pictures that it does not. This tells
what was learnt apart from what carries over to new pairs. Only the tower has seen all pairs, as a real one would have:
a tower trained without them takes a color as proof that the form it never has is not there, and no language model could
see otherwise.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from playground.records import image_record
from playground.scene_drawing import POSITIONS, SHAPES, Scene, Shape, draw_scene, place_shape
from playground.scene_questions import about_scene, ask, caption, text_records
from playground.scenes import image_name, pretrain_records, write_set
from playground.store import build

FOLDER = "probes"
FORMAT = 2  # raise it when the same settings give other files
COLORS = ("red", "green", "blue", "yellow", "black", "white")
# One pair of every color and two of every form, so that no color and no form is rarer than another in training.
HELD_OUT_PAIRS = frozenset((color, SHAPES[index % len(SHAPES)]) for index, color in enumerate(COLORS))
NUMBERS = ("one", "two", "three", "four")
RELATIONS = {(-1, 0): "left", (1, 0): "right", (0, -1): "above", (0, 1): "below"}  # by the direction (x, y)
MARKS = tuple("CHTX24")
ANSWERS = {  # the kinds of questions, with answers in rotation
    "color": COLORS,
    "shape": SHAPES,
    "position": tuple(POSITIONS),
    "count": NUMBERS,
    "relation": tuple(RELATIONS.values()),
    "size": ("larger", "smaller"),
    "binding": (*COLORS, *SHAPES, *SHAPES),
    "text": MARKS,
    "pair": (*COLORS, *SHAPES, *SHAPES),
}
TOWER = "tower"  # the kind of additional pictures that only the vision tower is trained on
NUM_SHAPES = {"count": (1, 4), "relation": (2, 2), "size": (2, 2), "binding": (3, 3), TOWER: (1, 4)}
# The kinds of training pictures in rotation; `color` covers the first three kinds, and so occurs twice.
TRAINED = ("color", "count", "relation", "color", "size", "binding", "text")
CAPTION_SHARE = 0.25  # captions per record of questions in stage 2


@dataclass
class Settings:
    """What `python -m playground probes` draws.

    Attributes:
        size: side of the square pictures in pixels; what is written is legible from 64 on.
        num_train: training pictures: each gives a caption and a record of questions.
        num_more: more of them, for a longer training; none has the content of a held-out picture.
        num_validation: questions like the held-out ones, about other pictures, in validation.json.
        num_crowded: additional pictures of small and marked shapes, only for the vision tower.
        num_per_kind: held-out pictures, and questions, of every kind; of a multiple of 24 all answers are equally many.
        num_text: training records without a picture.
        seed: seed of everything drawn.
    """

    size: int = 96
    num_train: int = 1200
    num_more: int = 0
    num_validation: int = 0
    num_crowded: int = 2000
    num_per_kind: int = 96
    num_text: int = 40
    seed: int = 0


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/probes`, made unless it is complete."""
    optional = ("num_more", "num_validation")  # left out at 0, so that sets without them stay as they are
    made_with = {name: value for name, value in asdict(settings).items() if value or name not in optional}
    made_with["format"] = FORMAT
    return build(root / FOLDER, "probes", made_with, partial(write_probes, settings), force)


def write_probes(settings: Settings, folder: Path) -> dict[str, Any]:
    """Write images and record files to `folder`; return the facts for the manifest."""
    train = [draw_train(settings, TRAINED[i % len(TRAINED)], i) for i in range(settings.num_train)]
    rngs = [random.Random(f"{settings.seed}/{TOWER}/{i}") for i in range(settings.num_crowded)]
    crowded = [lay_out(rng, settings.size, TOWER, number_of_shapes(rng, TOWER)) for rng in rngs]
    shown = {scene.content() for scene in train}
    heldout = [draw_probe(settings, "heldout", i, shown) for i in range(settings.num_per_kind * len(ANSWERS))]
    taken = {scene.content() for scene, _ in heldout}
    validation = [draw_probe(settings, "validation", i, shown | taken) for i in range(settings.num_validation)]
    taken |= {scene.content() for scene, _ in validation}
    last = settings.num_train + settings.num_more
    train += [draw_train(settings, TRAINED[i % len(TRAINED)], i, taken) for i in range(settings.num_train, last)]
    records = {
        "pretrain.json": pretrain_records(train, counted_caption),
        "finetune.json": finetune_records(train, settings),
        "heldout.json": [record for _, record in heldout],
    }
    splits = {"train": train + crowded, "heldout": [scene for scene, _ in heldout]}
    if validation:
        records["validation.json"] = [record for _, record in validation]
        splits["validation"] = [scene for scene, _ in validation]
    return write_set(splits, records, settings.size, folder, counted_caption) | {
        "held_out_pairs": sorted(f"{color} {form}" for color, form in HELD_OUT_PAIRS),
        "chance_percent": chance_percent(records["heldout.json"]),
    }


def chance_percent(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return for every kind how many per cent of its questions a guess among the choices gets right."""
    chances = {kind: [1 / len(record["choices"]) for record in records if record["kind"] == kind] for kind in ANSWERS}
    return {kind: round(100 * sum(shares) / len(shares), 1) for kind, shares in chances.items() if shares}


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw_train(settings: Settings, kind: str, index: int, asked: Collection[tuple] = ()) -> Scene:
    """Return a training scene for questions of `kind`, without a held-out pair and of none of the contents `asked`."""
    rng = random.Random(f"{settings.seed}/train/{index}")
    number = number_of_shapes(rng, kind)  # drawn once, so that rejected scenes do not change its frequency
    while True:
        scene = lay_out(rng, settings.size, kind, number)
        if not any(map(is_held_out, scene.shapes)) and scene.content() not in asked:
            return scene


def draw_probe(settings: Settings, split: str, index: int, shown: Collection[tuple]) -> tuple[Scene, dict[str, Any]]:
    """Return an untrained scene and its question: about a held-out pair if the kind is `pair`, else without such pairs.

    Kinds rotate, and so do the answers of a kind, so that any first part of the list is balanced.

    Args:
        shown: contents of other scenes; the scene has none of them.
    """
    rng = random.Random(f"{settings.seed}/{split}/{index}")
    turn_of_kind, which = divmod(index, len(ANSWERS))
    kind = tuple(ANSWERS)[which]
    expected = ANSWERS[kind][turn_of_kind % len(ANSWERS[kind])]
    while True:
        scene = lay_out(rng, settings.size, kind, number_of_shapes(rng, kind))
        new_pairs = list(filter(is_held_out, scene.shapes))
        if bool(new_pairs) != (kind == "pair") or scene.content() in shown:
            continue
        for shape in new_pairs or scene.shapes:
            turn, choices = question(rng, kind, scene, shape)
            if turn[1] == expected:
                extra = {"kind": kind, "choices": list(choices), "caption": counted_caption(scene)}
                return scene, image_record(f"probe-{split}-{index:05d}", image_name(split, index), [turn], **extra)


def is_held_out(shape: Shape) -> bool:
    """Say whether the shape's pair of color and form is held out of both stages."""
    return (shape.color, shape.name) in HELD_OUT_PAIRS


def number_of_shapes(rng: random.Random, kind: str) -> int:
    """Return how many shapes a picture for questions of `kind` has."""
    return rng.randint(*NUM_SHAPES.get(kind, (1, 2)))


def lay_out(rng: random.Random, size: int, kind: str, number: int) -> Scene:
    """Return a random scene of `number` shapes, for questions of `kind`."""

    def small(shape: Shape) -> Shape:
        return place_shape(rng, size, shape.color, shape.name, shape.position, is_small=True)

    def marked(shape: Shape) -> Shape:
        return replace(shape, mark=rng.choice(MARKS))

    scene = draw_scene(rng, size, number, COLORS)
    if kind == "relation" and not relation(*scene.shapes):
        return lay_out(rng, size, kind, number)
    chosen = rng.choice(scene.shapes)
    changes = {
        "size": lambda shape: small(shape) if shape is chosen else shape,
        "text": lambda shape: marked(shape) if shape is chosen else shape,
        TOWER: lambda shape: rng.choice((small, marked, marked))(shape),
    }
    return replace(scene, shapes=tuple(map(changes.get(kind, lambda shape: shape), scene.shapes)))


def relation(shape: Shape, other: Shape) -> str | None:
    """Return where `shape` is as seen from `other`: left, right, above or below; None if it is none of these."""
    (x, y), (other_x, other_y) = POSITIONS[shape.position], POSITIONS[other.position]
    return RELATIONS.get((round(2 * (x - other_x)), round(2 * (y - other_y))))


# --- captions and questions -------------------------------------------------------------------------------------------


def counted_caption(scene: Scene) -> str:
    """Return the scene's caption after the number of its shapes."""
    number, sentence = NUMBERS[len(scene.shapes) - 1], caption(scene)
    return f"{number.capitalize()} shape{'s' * (len(scene.shapes) > 1)}: {sentence[0].lower()}{sentence[1:]}"


def question(rng: random.Random, kind: str, scene: Scene, shape: Shape) -> tuple[tuple[str, str], Sequence[str]]:
    """Return question and answer of `kind` about one shape of a scene, and what a guess can choose from.

    A guess is assumed to know which pairs training shows. For the color in a question of the kind `binding` the choices
    are also limited to the colors in the picture: a model that sees them, but not whose they are, guesses among them.
    """
    if kind == "count":
        return ("How many shapes are there?", NUMBERS[len(scene.shapes) - 1]), NUMBERS
    if kind == "text":
        return (f"What is written on the {shape.name}?", shape.mark), MARKS
    if kind in ("relation", "size"):
        (other,) = (other for other in scene.shapes if other is not shape)
        if kind == "size":
            asked, answer = "larger or smaller than", "smaller" if shape.is_small else "larger"
        else:
            asked, answer = "left of, right of, above or below", relation(shape, other)
        return (f"Is the {shape.name} {asked} the {other.name}?", answer), ANSWERS[kind]
    if kind == "position":
        return ask(kind, shape), ANSWERS[kind]
    property = rng.choice(("color", "shape")) if kind in ("binding", "pair") else kind
    if property == "shape":
        choices = [form for form in SHAPES if kind == "pair" or (shape.color, form) not in HELD_OUT_PAIRS]
    else:
        there = [other.color for other in scene.shapes] if kind == "binding" else COLORS
        choices = [c for c in COLORS if c in there and (kind == "pair" or (c, shape.name) not in HELD_OUT_PAIRS)]
    return ask(property, shape), choices


def conversation_about(rng: random.Random, scene: Scene, kind: str) -> list[tuple[str, str]]:
    """Return turns about a training scene, the question of `kind` first; no question gives a later answer away."""
    if kind == "color":
        return about_scene(rng, scene)
    shape = rng.choice([shape for shape in scene.shapes if shape.mark or kind != "text"])
    turn, _ = question(rng, kind, scene, shape)
    others = rng.sample(scene.shapes, len(scene.shapes))
    if kind == "count":  # forms come twice, so that positions name the shapes
        return [turn] + [(f"What color is the object in the {other.position}?", other.color) for other in others[:2]]
    return [turn] + [ask("color", other) for other in others if other.color not in "".join(turn)]


def finetune_records(scenes: list[Scene], settings: Settings) -> list[dict[str, Any]]:
    """Return questions, captions, and records without a picture (stage 2), mixed."""
    rng = random.Random(f"{settings.seed}/finetune")
    records = pretrain_records(scenes, counted_caption)[: round(CAPTION_SHARE * len(scenes))]
    records += [
        image_record(
            f"probe-question-{i:05d}",
            image_name("train", i),
            conversation_about(rng, scene, TRAINED[i % len(TRAINED)]),
        )
        for i, scene in enumerate(scenes)
    ]
    records += text_records(rng, settings.num_text)
    rng.shuffle(records)
    return records
