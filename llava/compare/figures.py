"""Every figure of the pages, as SVG: differences with intervals, training, and what `llava.analysis` drew."""

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from llava.compare.record import CURVES, Record
from llava.compare.tables import TITLES, Statistics, rates_by_arm
from llava.launch.recipe import STAGES
from llava.utils.presentation import NEUTRAL, STYLE, TEXT_COLOUR, import_pyplot, looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def differences(stats: Statistics, pyplot: ModuleType) -> "Figure":
    """Each arm's difference from the baseline with its interval and its seeds.

    Of a plan the overall result alone, its primary arms above a line, and its margin as a band.
    """
    names = [stats.overall] if stats.plan else list(next(iter(stats.results.values())))
    rows = [(name, arm, by_task[name]) for name in names for arm, by_task in stats.results.items()]
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.32 * len(rows)), layout="constrained")
    look, labels = looks(stats.arms), []
    if stats.plan:
        axes.axhline(len(stats.plan.primary) - 0.5, color=NEUTRAL, linewidth=0.8)
        axes.axvspan(-stats.plan.margin, stats.plan.margin, color=NEUTRAL, alpha=0.12, linewidth=0)
    for row, (name, arm, result) in enumerate(rows):
        colour, seeds = look[arm]["color"], result["by_seed"]
        bounds = (result["low"], result["high"])
        axes.plot(bounds, (row, row), color=colour, linewidth=3, solid_capstyle="butt", alpha=0.5)
        axes.plot(result["delta"], row, "|", color=colour, markersize=12, markeredgewidth=2.5)
        axes.plot(seeds, [row] * len(seeds), "o", color=colour, fillstyle="none", markersize=5)
        labels.append(arm if stats.plan else f"{TITLES.get(name, name)}, {arm}")
    axes.axvline(0, color=NEUTRAL, linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel=f"points above {stats.baseline}: interval, circles: seeds")
    axes.grid(axis="y", visible=False)
    return figure


def lengths(studies: Sequence[Statistics], pyplot: ModuleType) -> "Figure":
    """Differences of the last study's arms over the length of training; hollow where one set of rates served all."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    baseline, *arms = studies[-1].arms
    steps = list(map(steps_of, studies))
    for number, (arm, look) in enumerate(looks(arms).items()):
        for stats, length in zip(studies, steps, strict=True):
            if arm in stats.arms:
                result = stats.results[arm][stats.overall]
                fill = "none" if len(set(rates_by_arm(stats.record).values())) == 1 else "full"
                place = length * 1.03 ** (number - (len(arms) - 1) / 2 + (fill == "full") / 3)  # all beside each other
                axes.plot((place, place), (result["low"], result["high"]), color=look["color"], linewidth=3, alpha=0.5)
                axes.plot(place, result["delta"], "o", color=look["color"], fillstyle=fill, label=arm)
    axes.axhline(0, color=NEUTRAL, linewidth=0.8)
    lines = {line.get_label(): line for line in axes.lines if line.get_label() in arms}
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=len(arms))
    axes.set(xscale="log", xlabel="optimizer steps of both stages", ylabel=f"points above {baseline}, interval")
    axes.set_xticks([], minor=True)
    axes.set_xticks(sorted(set(steps)))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(axis="x", visible=False)
    return figure


def steps_of(stats: Statistics) -> int:
    """Optimizer steps of both stages."""
    if stats.plan:
        return sum(stats.plan.steps.values())
    return sum(stage["steps"] for stage in stats.record["runs"][0]["stages"].values())


def training_curves(record: Record) -> list[dict[str, str]]:
    """One picture per logged quantity, both stages one after the other, one line per run, colour by arm."""
    pictures = []
    for key, (title, _) in CURVES.items():
        if any(curves_of(entry, key) for entry in record["runs"]):
            drawn = svg(_curve, record["runs"], key)
            seen = f"A line for each run shows, over the optimizer steps of both stages: {title}."
            pictures.append({"title": title, "alt": seen, "uri": data_uri(drawn, "svg+xml")})
    return pictures


def _curve(runs: Sequence[Mapping[str, Any]], key: str, pyplot: ModuleType) -> "Figure":
    look = looks(entry["arm"] for entry in runs)
    figure, axes = pyplot.subplots(figsize=(4.8, 3.0), layout="constrained")
    for entry in runs:
        for points in curves_of(entry, key):
            axes.plot(*points.T, color=look[entry["arm"]]["color"], linewidth=1.2, alpha=0.8)
    for points in curves_of(runs[0], "norm/text_embeddings") if key == "norm/llm_input" else ():
        axes.plot(*points.T, color=TEXT_COLOUR, linestyle=":")
    boundary = max(entry["stages"][STAGES[0]]["steps"] for entry in runs)
    axes.axvline(boundary + 0.5, color=NEUTRAL, linewidth=0.8)
    axes.set_xlabel("optimizer step (stage 1 | stage 2)")
    low, high = axes.get_ylim()
    if CURVES[key][1]:  # a logarithmic axis
        axes.set_yscale("log")
    elif high - low < 0.1 * abs(high + low):  # what hardly changes shall not look as if it did
        axes.set_ylim(0.4 * (high + low), 0.6 * (high + low))
    return figure


def curves_of(entry: Mapping[str, Any], key: str) -> list[np.ndarray]:
    """What a run's stages logged under `key` [K, 2] each; the steps of a stage follow those of the stage before."""
    curves, start = [], 0
    for stage in entry.get("stages", {}).values():
        if points := stage["curves"].get(key):
            curves.append(np.array(points) + (start, 0))
        start += stage["steps"]
    return curves


def analysis_figures(folder: Path, tables: Iterable[str]) -> list[dict[str, str]]:
    """What `llava.analysis` drew into `folder` beside `tables`, whose names begin those of their figures."""
    pictures = []
    for file in sorted(file for file in folder.glob("*.png") if file.stem.startswith(tuple(tables))):
        title = f"Figure of the measurement {file.stem}."
        pictures.append({"title": title, "alt": title, "uri": data_uri(file.read_bytes(), "png")})
    return pictures
