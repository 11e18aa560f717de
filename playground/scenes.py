"""Drawn pictures of one or two coloured shapes, with captions and with questions whose answers are known."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

from playground import scene_questions
from playground.options import option
from playground.records import image_record
from playground.store import PlaygroundError, build, write_json

FOLDER = "scenes"
FORMAT = 1  # raise it when the same settings give other files
OVERSAMPLING = 4
MAX_REDRAWS = 10_000

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 150, 50),
    "blue": (40, 70, 220),
    "yellow": (250, 225, 40),
    "orange": (250, 140, 20),
    "purple": (140, 40, 170),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle")
POSITIONS = {  # centre of the quarter, as a share of the side: (x, y)
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
}
CHOICES = {"color": tuple(COLORS), "shape": SHAPES, "position": tuple(POSITIONS)}
TEXTURES = ("plain", "gradient", "stripes", "checks", "noise")
TINTS = {  # muted, so that every shape colour stands out
    "gray": (128, 128, 128),
    "rose": (165, 130, 130),
    "moss": (120, 140, 115),
    "slate": (115, 130, 150),
    "sand": (165, 155, 125),
    "teal": (110, 145, 145),
}
MIN_RADIUS, MAX_RADIUS, MARGIN = 0.16, 0.22, 0.015  # shares of the side; a shape never leaves its quarter


@dataclass
class Settings:
    """What `python -m playground scenes` draws."""

    size: int = option(64, "side of the square pictures in pixels")
    num_train: int = option(2000, "training pictures: each gives one caption and one record of questions")
    num_heldout: int = option(240, "held-out pictures: each gives one question")
    num_text: int = option(200, "training records without a picture")
    two_shapes: float = option(0.5, "share of the pictures that show two shapes")
    seed: int = option(0, "seed of everything drawn")


@dataclass(frozen=True)
class Shape:
    """One drawn shape; `center` (x, y) and `radius` in pixels of the saved picture."""

    color: str
    name: str
    position: str
    center: tuple[int, int]
    radius: float


@dataclass(frozen=True)
class Scene:
    """What one picture shows; `shapes` in reading order, with different colours, shapes and quarters."""

    texture: str
    tint: str
    shapes: tuple[Shape, ...]
    noise_seed: int

    def content(self) -> tuple:
        """Return what may not be shared by training and held-out pictures.

        For two shapes that is what is drawn and where; one shape has so few contents that the background counts too.
        """
        shapes = tuple((shape.color, shape.name, shape.position) for shape in self.shapes)
        return shapes if len(shapes) > 1 else (*shapes, self.texture, self.tint)


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/scenes`, made unless it is complete."""
    check(settings)

    def write(folder: Path) -> dict[str, Any]:
        return write_scenes(settings, folder)

    return build(root / FOLDER, "scenes", {**asdict(settings), "format": FORMAT}, write, force)


def check(settings: Settings) -> None:
    """Raise `PlaygroundError` for settings that cannot be drawn."""
    if settings.size < 32:
        raise PlaygroundError(f"--size {settings.size}: shapes are told apart from 32 pixels on; give at least 32.")
    if not 0 <= settings.two_shapes <= 1:
        raise PlaygroundError(f"--two-shapes {settings.two_shapes}: expected a share between 0 and 1.")
    for name in ("num_train", "num_heldout", "num_text"):
        if getattr(settings, name) < 0:
            raise PlaygroundError(f"--{name.replace('_', '-')} {getattr(settings, name)}: expected 0 or more.")


def write_scenes(settings: Settings, folder: Path) -> dict[str, Any]:
    """Write images and record files to `folder`; return the facts for the manifest."""
    train, heldout = draw_scenes(settings)
    (folder / "images").mkdir()
    for split, drawn in (("train", train), ("heldout", heldout)):
        for index, scene in enumerate(tqdm(drawn, desc=f"scenes: {split}", unit="picture")):
            render(scene, settings.size).save(folder / "images" / image_name(split, index))
    records = {
        "pretrain.json": pretrain_records(train, settings.seed),
        "finetune.json": finetune_records(train, settings),
        "heldout.json": heldout_records(heldout, settings.seed),
    }
    for name, content in records.items():
        write_json(folder / name, content)
    return {
        "records": {name: len(content) for name, content in records.items()},
        "choices": CHOICES,
        "chance_percent": {kind: round(100 / len(choices), 1) for kind, choices in CHOICES.items()},
    }


def image_name(split: str, index: int) -> str:
    """Return the file name of a picture in the `images` folder."""
    return f"{split}_{index:05d}.png"


def draw_scenes(settings: Settings) -> tuple[list[Scene], list[Scene]]:
    """Return the training and the held-out scenes, which share no content."""

    def generators(split: str, count: int) -> list[random.Random]:
        return [random.Random(f"{settings.seed}/{split}/{index}") for index in range(count)]

    heldout = [draw_scene(rng, settings) for rng in generators("heldout", settings.num_heldout)]
    taken = {scene.content() for scene in heldout}
    train = [_draw_outside(taken, rng, settings) for rng in generators("train", settings.num_train)]
    return train, heldout


def _draw_outside(taken: set[tuple], rng: random.Random, settings: Settings) -> Scene:
    for _ in range(MAX_REDRAWS):
        scene = draw_scene(rng, settings)
        if scene.content() not in taken:
            return scene
    raise PlaygroundError(
        f"--num-heldout {settings.num_heldout}: the held-out pictures use up nearly all contents, none is left for "
        "training. Give a smaller number."
    )


def draw_scene(rng: random.Random, settings: Settings) -> Scene:
    """Return a random scene."""
    count = 2 if rng.random() < settings.two_shapes else 1
    colors, names = rng.sample(tuple(COLORS), count), rng.sample(SHAPES, count)
    positions = sorted(rng.sample(tuple(POSITIONS), count), key=tuple(POSITIONS).index)
    shapes = tuple(place_shape(rng, settings.size, *item) for item in zip(colors, names, positions, strict=True))
    return Scene(rng.choice(TEXTURES), rng.choice(tuple(TINTS)), shapes, rng.randrange(2**32))


def place_shape(rng: random.Random, size: int, color: str, name: str, position: str) -> Shape:
    """Return the shape at a random place inside its quarter."""
    radius = rng.uniform(MIN_RADIUS, MAX_RADIUS)
    freedom = 0.25 - MARGIN - radius
    x, y = (int(size * (middle + rng.uniform(-freedom, freedom))) for middle in POSITIONS[position])
    return Shape(color, name, position, (x, y), radius * size)


def render(scene: Scene, size: int) -> Image.Image:
    """Return the picture, RGB [size, size], with smooth edges and exact colours inside the shapes."""
    large = size * OVERSAMPLING
    picture = Image.fromarray(background(scene, large))
    draw = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        draw_shape(draw, shape)
    return picture.reduce(OVERSAMPLING)


def draw_shape(draw: ImageDraw.ImageDraw, shape: Shape) -> None:
    """Draw one shape on the oversampled picture."""
    # + 0.5: the middle of the pixel, so that the pixel `center` is inside
    x, y = ((value + 0.5) * OVERSAMPLING for value in shape.center)
    radius = shape.radius * OVERSAMPLING
    if shape.name == "circle":
        draw.circle((x, y), 0.95 * radius, fill=COLORS[shape.color])
    elif shape.name == "square":
        half = 0.85 * radius
        draw.rectangle((x - half, y - half, x + half, y + half), fill=COLORS[shape.color])
    else:
        corners = [(x, y - radius), (x + radius, y + 0.8 * radius), (x - radius, y + 0.8 * radius)]
        draw.polygon(corners, fill=COLORS[shape.color])


def background(scene: Scene, side: int) -> np.ndarray:
    """Return the background, uint8 [side, side, 3]: the tint, made lighter and darker by the texture."""
    rng = np.random.default_rng(scene.noise_seed)
    row, column = np.mgrid[0:side, 0:side] / side
    period = rng.uniform(0.12, 0.3)
    angle = rng.uniform(0, np.pi)
    along = row * np.sin(angle) + column * np.cos(angle)
    cells = rng.uniform(-0.5, 0.5, (16, 16))
    shade = {
        "plain": lambda: np.zeros((side, side)),
        "gradient": lambda: along - along.mean(),
        "stripes": lambda: np.floor(along / period) % 2 - 0.5,
        "checks": lambda: (np.floor(row / period) + np.floor(column / period)) % 2 - 0.5,
        "noise": lambda: cells[(16 * row).astype(int), (16 * column).astype(int)],
    }[scene.texture]()
    return np.clip(np.asarray(TINTS[scene.tint]) + 40 * shade[..., None], 0, 255).astype(np.uint8)


def caption(scene: Scene) -> str:
    """Return one sentence that names every shape with colour and position."""
    parts = [f"a {shape.color} {shape.name} in the {shape.position}" for shape in scene.shapes]
    parts = [part.replace("a orange", "an orange") for part in parts]
    sentence = " and ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def pretrain_records(scenes: list[Scene], seed: int) -> list[dict[str, Any]]:
    """Return one caption record per scene (stage 1)."""
    rng = random.Random(f"{seed}/pretrain")
    prompts = ("Describe the picture.", "What is in the picture?", "Write a short caption.")
    return [
        image_record(f"scene-caption-{i:05d}", image_name("train", i), [(rng.choice(prompts), caption(scene))])
        for i, scene in enumerate(scenes)
    ]


def finetune_records(scenes: list[Scene], settings: Settings) -> list[dict[str, Any]]:
    """Return one record of questions per scene, and the records without a picture (stage 2), mixed."""
    rng = random.Random(f"{settings.seed}/finetune")
    records = [
        image_record(f"scene-question-{i:05d}", image_name("train", i), scene_questions.about_scene(rng, scene))
        for i, scene in enumerate(scenes)
    ]
    records += scene_questions.text_records(rng, settings.num_text)
    rng.shuffle(records)
    return records


def heldout_records(scenes: list[Scene], seed: int) -> list[dict[str, Any]]:
    """Return one question per scene; kinds take turns, so that any first part of the list is balanced."""
    rng = random.Random(f"{seed}/heldout")

    def records() -> Iterator[dict[str, Any]]:
        for index, scene in enumerate(scenes):
            kind = tuple(CHOICES)[index % len(CHOICES)]
            turn = scene_questions.ask(kind, rng.choice(scene.shapes))
            extra = {"kind": kind, "choices": list(CHOICES[kind]), "caption": caption(scene)}
            yield image_record(f"scene-heldout-{index:05d}", image_name("heldout", index), [turn], **extra)

    return list(records())
