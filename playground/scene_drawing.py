"""Scenes of one to four coloured shapes: what they hold, how they are drawn at random, and how they look."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

OVERSAMPLING = 4
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
# An outline of one colour around every shape, so that a small tower sees forms whatever they are filled with.
OUTLINE, OUTLINE_WIDTH = (45, 45, 45), 2  # width in pixels of the saved picture
MIN_RADIUS, MAX_RADIUS, MARGIN = 0.2, 0.23, 0.016  # shares of the side; a shape never leaves its quarter
SMALL_RADIUS = 0.12  # of a small shape
MARK_HEIGHT = 0.24  # font size of a mark, as a share of the side
INK = {True: (250, 250, 250), False: (15, 15, 15)}  # of a mark: light on a dark shape, dark on a light one


@dataclass(frozen=True)
class Shape:
    """One drawn shape; `center` (x, y) and `radius` in pixels of the saved picture; `mark` is written on it, if any."""

    color: str
    name: str
    position: str
    center: tuple[int, int]
    radius: float
    is_small: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Scene:
    """What one picture shows: `shapes` in reading order. Colours and quarters differ, as do forms of up to three."""

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


def draw_scene(rng: random.Random, size: int, count: int, colors: Sequence[str] = tuple(COLORS)) -> Scene:
    """Return a random scene of `size` pixels with `count` shapes, at most four, each in a different one of `colors`."""
    colors, names = rng.sample(colors, count), rng.sample(SHAPES * (1 + count // 4), count)
    positions = sorted(rng.sample(tuple(POSITIONS), count), key=tuple(POSITIONS).index)
    shapes = tuple(place_shape(rng, size, *item) for item in zip(colors, names, positions, strict=True))
    return Scene(rng.choice(TEXTURES), rng.choice(tuple(TINTS)), shapes, rng.randrange(2**32))


def place_shape(rng: random.Random, size: int, color: str, name: str, position: str, is_small: bool = False) -> Shape:
    """Return the shape at a random place inside its quarter."""
    radius = SMALL_RADIUS if is_small else rng.uniform(MIN_RADIUS, MAX_RADIUS)
    freedom = 0.25 - MARGIN - radius
    x, y = (int(size * (middle + rng.uniform(-freedom, freedom))) for middle in POSITIONS[position])
    return Shape(color, name, position, (x, y), radius * size, is_small)


def render(scene: Scene, size: int) -> Image.Image:
    """Return the picture, RGB [size, size], with smooth edges and exact colours inside the shapes."""
    large = size * OVERSAMPLING
    picture = Image.fromarray(background(scene, large))
    draw = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        draw_shape(draw, shape)
        if shape.mark:
            draw_mark(draw, shape, MARK_HEIGHT * large)
    return picture.reduce(OVERSAMPLING)


def draw_shape(draw: ImageDraw.ImageDraw, shape: Shape) -> None:
    """Draw one shape on the oversampled picture."""
    # + 0.5: the middle of the pixel, so that the pixel `center` is inside
    x, y = ((value + 0.5) * OVERSAMPLING for value in shape.center)
    radius = shape.radius * OVERSAMPLING
    style = {"fill": COLORS[shape.color], "outline": OUTLINE, "width": round(OUTLINE_WIDTH * OVERSAMPLING)}
    if shape.name == "circle":
        draw.circle((x, y), 0.95 * radius, **style)
    elif shape.name == "square":
        half = 0.85 * radius
        draw.rectangle((x - half, y - half, x + half, y + half), **style)
    else:
        corners = [(x, y - radius), (x + radius, y + 0.8 * radius), (x - radius, y + 0.8 * radius)]
        draw.polygon(corners, **style)


def draw_mark(draw: ImageDraw.ImageDraw, shape: Shape, height: float) -> None:
    """Write the shape's mark on its middle, in bold, on the oversampled picture."""
    place = tuple((value + 0.5) * OVERSAMPLING for value in shape.center)
    red, green, blue = COLORS[shape.color]
    ink = INK[3 * red + 6 * green + blue < 10 * 128]
    draw.text(place, shape.mark, ink, ImageFont.load_default(height), "mm", stroke_width=height / 30)


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
