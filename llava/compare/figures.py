"""Every figure of the pages, as SVG: differences with intervals, training, and what `llava.analysis` drew."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from llava.compare.record import CURVES, Record
from llava.compare.tables import TITLES, Statistics
from llava.launch.recipe import STAGES
from llava.utils.presentation import NEUTRAL, STYLE, TEXT_COLOUR, import_pyplot, looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SVG = 400_000  # bytes; of a larger drawing the PNG is shown
VISUAL, TEXT = "norm/llm_input", "norm/text_embeddings"
DRAWN = {
    "interface-norms": (
        "Norms where visual and text tokens meet",
        "A row for each model shows how the norms of visual tokens, text tokens and text embeddings are distributed.",
    ),
    "layer-norms": (
        "Norms per layer",
        "A panel for each model shows the norms of visual and text tokens over the layers.",
    ),
    "update-rates": (
        "Update rates per layer",
        "A column for each model shows how much its layers change visual and text tokens: cosine, update and angle.",
    ),
    "update-rates-gap": (
        "Text's angle over visual tokens' angle, per layer",
        "A line for each model gives the angle by which a layer turns text over that of visual tokens.",
    ),
    "norm-params": (
        "Gain and bias of the norm",
        "Three panels follow the norm layer's gain and bias over the optimizer steps.",
    ),
    "attention-heatmaps": (
        "Attention over pictures",
        "A row of pictures for each model shows where its attention lies.",
    ),
    "attention-profiles": (
        "Attention to visual tokens",
        "Three panels show each model's attention to rows of the picture, to visual tokens, and its entropy.",
    ),
    "gradients": (
        "Gradients on their way down",
        "A panel for each model follows the gradient's norm from the LLM's input to the tower, a line for each norm.",
    ),
    "interventions": (
        "Interventions at inference",
        "Three panels show how outputs, keys and values change when visual tokens are rescaled or exchanged.",
    ),
}
"""Figures of `scripts/analyze.sh`, each with its title and what is seen on it."""


def svg(draw: Callable[..., "Figure"], *what: object) -> bytes:
    """What `draw(*what, pyplot)` draws, as SVG."""
    pyplot = import_pyplot()
    with pyplot.rc_context(STYLE):
        figure = draw(*what, pyplot)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return stream.getvalue()


def data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def differences_figure(stats: Statistics) -> bytes:
    """Each arm's difference from the baseline with its interval and its seeds, as SVG.

    Of a plan the overall result alone, its primary arms above a line, and its margin as a band.
    """
    names = [stats.overall] if stats.plan else list(next(iter(stats.results.values())))
    rows = [(name, arm, by_task[name]) for name in names for arm, by_task in stats.results.items()]
    return svg(_differences, rows, stats)


def _differences(rows: Sequence[tuple[str, str, Mapping[str, Any]]], stats: Statistics, pyplot: ModuleType) -> "Figure":
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.32 * len(rows)), layout="constrained")
    look, labels = looks(stats.arms), []
    if stats.plan:
        axes.axvspan(-stats.plan.margin, stats.plan.margin, color=NEUTRAL, alpha=0.12, linewidth=0)
    for row, (name, arm, result) in enumerate(rows):
        colour, seeds = look[arm]["color"], result["by_seed"]
        bounds = (result["low"], result["high"])
        axes.plot(bounds, (row, row), color=colour, linewidth=3, solid_capstyle="butt", alpha=0.5)
        axes.plot(result["delta"], row, "|", color=colour, markersize=12, markeredgewidth=2.5)
        axes.plot(seeds, [row] * len(seeds), "o", color=colour, fillstyle="none", markersize=5)
        labels.append(arm if stats.plan else f"{TITLES.get(name, name)}, {arm}")
    axes.axvline(0, color=NEUTRAL, linewidth=0.8)
    group = len(stats.plan.primary) if stats.plan else len(stats.results)
    for edge in [group] if stats.plan else range(group, len(rows), group):
        axes.axhline(edge - 0.5, color=NEUTRAL, linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=f"points above {stats.baseline}: interval, circles: seeds")
    axes.grid(axis="y", visible=False)
    return figure


def training_curves(record: Record) -> list[dict[str, str]]:
    """One picture per logged quantity, both stages one after the other, one line per run, colour by arm."""
    pictures = []
    for key, (title, logarithmic) in CURVES.items():
        lines = [(entry["arm"], points) for entry in record["runs"] for points in curves_of(entry, key)]
        if lines:
            drawn = svg(_curve, record, lines, key, title, logarithmic)
            seen = f"A line for each run shows, over the optimizer steps of both stages: {title}."
            pictures.append({"title": title, "alt": seen, "uri": data_uri(drawn, "svg+xml")})
    return pictures


def _curve(
    record: Record,
    lines: Sequence[tuple[str, np.ndarray]],
    key: str,
    title: str,
    logarithmic: bool,
    pyplot: ModuleType,
) -> "Figure":
    look = looks(entry["arm"] for entry in record["runs"])
    figure, axes = pyplot.subplots(figsize=(4.8, 3.0), layout="constrained")
    for arm, points in lines:
        axes.plot(*points.T, color=look[arm]["color"], linewidth=1.2, alpha=0.8)
    for points in curves_of(record["runs"][0], TEXT) if key == VISUAL else ():
        axes.plot(*points.T, color=TEXT_COLOUR, linestyle=":")
    boundary = max(entry["stages"][STAGES[0]]["steps"] for entry in record["runs"])
    axes.axvline(boundary + 0.5, color=NEUTRAL, linewidth=0.8)
    axes.set(xlabel="optimizer step (stage 1 | stage 2)", title=title)
    if logarithmic:
        axes.set_yscale("log")
    return figure


def curves_of(entry: Mapping[str, Any], key: str) -> list[np.ndarray]:
    """What a run's stages logged under `key` [K, 2] each; the steps of a stage follow those of the stage before."""
    curves, start = [], 0
    for stage in entry.get("stages", {}).values():
        if points := stage["curves"].get(key):
            curves.append(np.array(points) + (start, 0))
        start += stage["steps"]
    return curves


def analysis_figures(folder: Path) -> list[dict[str, str]]:
    """What `scripts/analyze.sh` drew into `folder`, each as SVG unless that is large."""
    pictures = []
    for name, (title, alt) in DRAWN.items():
        svg, png = folder / f"{name}.svg", folder / f"{name}.png"
        if svg.is_file() and (svg.stat().st_size <= MAX_SVG or not png.is_file()):
            pictures.append({"title": title, "alt": alt, "uri": data_uri(svg.read_bytes(), "svg+xml")})
        elif png.is_file():
            pictures.append({"title": title, "alt": alt, "uri": data_uri(png.read_bytes(), "png")})
    return pictures
