"""Captions and questions about drawn scenes, and questions about shapes and colours that need no picture."""

import random
from typing import Any

from playground.records import listed, text_record
from playground.scene_drawing import POSITIONS, Scene, Shape

WORDS = {
    "color": ("red", "green", "blue", "yellow", "orange", "purple", "black", "white", "pink", "brown"),
    "shape": ("circle", "square", "triangle", "rectangle", "oval", "star"),
    "place": ("top", "bottom", "left", "right", "middle", "corner"),
}
FACTS = (
    ("How many sides does a triangle have?", "three"),
    ("How many sides does a square have?", "four"),
    ("How many corners does a circle have?", "none"),
    ("Which shape has three corners?", "triangle"),
    ("Which shape is round?", "circle"),
    ("Which shape has four equal sides?", "square"),
    ("Which color do red and yellow make?", "orange"),
    ("Which color do blue and yellow make?", "green"),
    ("Which color do red and blue make?", "purple"),
    ("Which color is a ripe banana?", "yellow"),
    ("Which color is fresh grass?", "green"),
    ("Which color is snow?", "white"),
    ("Which color is coal?", "black"),
    ("Which color is the clear sky?", "blue"),
    ("What is the opposite of top?", "bottom"),
    ("What is the opposite of left?", "right"),
    ("What is the opposite of black?", "white"),
)


def caption(scene: Scene) -> str:
    """Return one sentence that names every shape with colour and position, in reading order."""
    sentence = " and ".join(f"{described(shape)} in the {shape.position}" for shape in scene.shapes)
    return sentence[0].upper() + sentence[1:] + "."


def described(shape: Shape) -> str:
    """Return a phrase with everything about a shape but its position."""
    size, mark = "small " * shape.is_small, f" marked {shape.mark}" * bool(shape.mark)
    return f"a {size}{shape.color} {shape.name}{mark}".replace("a orange", "an orange")


def quarter_statements(scene: Scene) -> list[list[str]]:
    """Return what is true of each quarter in reading order: where it is, and the phrases about its shape, if any."""
    there = {shape.position: statements_about(shape) for shape in scene.shapes}
    return [[position, *there.get(position, [])] for position in POSITIONS]


def statements_about(shape: Shape) -> list[str]:
    """Return phrases that name the shape by colour, by form, by both, and by size and mark where it has them."""
    phrases = [f"a {shape.color} {shape.name}", f"a {shape.color} shape", f"a {shape.name}"]
    phrases += ["a small shape"] * shape.is_small + [f"marked {shape.mark}"] * bool(shape.mark)
    return [phrase.replace("a orange", "an orange") for phrase in phrases]


def ask(kind: str, shape: Shape) -> tuple[str, str]:
    """Return question and answer of `kind` (color, shape or position) about one shape of a scene."""
    if kind == "color":
        return f"What color is the {shape.name}?", shape.color
    if kind == "shape":
        return f"What shape is the {shape.color} object?", shape.name
    return f"Where is the {shape.color} {shape.name}?", shape.position


def about_scene(rng: random.Random, scene: Scene) -> list[tuple[str, str]]:
    """Return two turns about every shape of a scene of one or two shapes, none of which gives a later answer away.

    Each shape is named by one of colour, shape and position, and the questions are about the other two.
    """
    turns = []
    for shape in rng.sample(scene.shapes, len(scene.shapes)):
        named_by = {
            "color": [(f"What shape is the {shape.color} object?", shape.name)]
            + [(f"Where is the {shape.color} object?", shape.position)],
            "shape": [(f"What color is the {shape.name}?", shape.color)]
            + [(f"Where is the {shape.name}?", shape.position)],
            "position": [(f"What color is the object in the {shape.position}?", shape.color)]
            + [(f"What shape is the object in the {shape.position}?", shape.name)],
        }
        asked = named_by[rng.choice(tuple(named_by))]
        turns += rng.sample(asked, len(asked))
    return turns


def text_question(rng: random.Random) -> tuple[str, str]:
    """Return a question that needs no picture."""
    form = rng.randrange(3)
    if form == 0:
        return rng.choice(FACTS)
    kind = rng.choice(tuple(WORDS))
    answer = rng.choice(WORDS[kind])
    if form == 1:
        return f"Is {answer} a {listed(tuple(WORDS))}?", kind
    others = [rng.choice(words) for other, words in WORDS.items() if other != kind]
    options = rng.sample([answer, *others], len(WORDS))
    return f"Which of these words names a {kind}: {listed(options)}?", answer


def text_records(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return `count` records without a picture, of one or two turns."""
    return [
        text_record(f"text-{index:05d}", [text_question(rng) for _ in range(rng.randint(1, 2))])
        for index in range(count)
    ]
