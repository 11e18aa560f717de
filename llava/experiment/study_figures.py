"""The study's figures, each drawn from `study.json` alone, as SVG."""

import io
import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from llava.eval.paired import MEAN
from llava.experiment.arms import parse_arm
from llava.experiment.study_record import Study, has_intervals
from llava.utils.presentation import COLOURS, STYLE, import_pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":")


def figures(study: Study) -> dict[str, tuple[str, bytes]]:
    """Every figure that the study has data for: its title and its SVG, by name."""
    pyplot = import_pyplot()
    found = {}
    for name, (title, draw) in _FIGURES.items():
        with pyplot.rc_context(STYLE):
            figure = draw(study, pyplot)
            if figure is not None:
                stream = io.BytesIO()
                figure.savefig(stream, format="svg", metadata={"Date": None})
                pyplot.close(figure)
                found[name] = (title, stream.getvalue())
    return found


def look_of(study: Study, arm: str) -> dict[str, str]:
    """The arm's colour and line, the same in every figure."""
    index = study["arms"].index(arm)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}


def _intervals(study: Study, pyplot: ModuleType) -> "Figure | None":
    results = {arm: found[MEAN] for arm, found in study["results"].items()}
    results |= {name: found[MEAN] for name, found in study["contrasts"].items()}
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.32 * len(results)), layout="constrained")
    for row, (name, one) in enumerate(results.items()):
        colour = look_of(study, name)["color"] if name in study["results"] else "black"
        axes.plot((one["low"], one["high"]), (row, row), color=colour, linewidth=3, solid_capstyle="butt", alpha=0.5)
        axes.plot(one["delta"], row, "|", color=colour, markersize=12, markeredgewidth=2.5)
        axes.plot(one["by_seed"], [row] * len(one["by_seed"]), "o", color=colour, fillstyle="none", markersize=5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.axhline(len(study["results"]) - 0.5, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(results)), list(results))
    axes.set(ylim=(len(results) - 0.5, -0.5), xlabel="points, mean of all tasks (circles: seeds)")
    axes.grid(axis="y", visible=False)
    return figure


def _curves(study: Study, pyplot: ModuleType) -> "Figure | None":
    training = study["training"]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for arm, seeds in training["curves"].items():
        curve = 100 * np.array(seeds)
        axes.plot(training["samples"], curve.mean(axis=0), label=arm, **look_of(study, arm))
        colour = look_of(study, arm)["color"]
        axes.fill_between(training["samples"], curve.min(axis=0), curve.max(axis=0), color=colour, alpha=0.08)
    axes.axhline(100 * training["chance"], color="grey", linewidth=0.8)
    axes.set(xlabel="samples of stage 2", ylabel=f"% of {training['questions']} questions right (grey: chance)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _dose(study: Study, pyplot: ModuleType) -> "Figure | None":
    if len(study["dose"]) < 2:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
    scores = [study["scores"][arm][MEAN] for arm in study["dose"]]
    factors = list(study["dose"].values())
    axes.plot(factors, [np.mean(seeds) for seeds in scores], "o-", color=COLOURS[0])
    for factor, seeds in zip(factors, scores, strict=True):
        axes.plot([factor] * len(seeds), seeds, "o", color=COLOURS[0], fillstyle="none", markersize=5)
    baseline = float(np.mean(study["scores"][study["arms"][0]][MEAN]))
    axes.axhline(baseline, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(factors, [f"{factor:g}" for factor in factors])
    axes.set(xlabel="initial norm over the text's", ylabel="%, mean of all tasks (grey: baseline)")
    return figure


def _controls(study: Study, pyplot: ModuleType) -> "Figure | None":
    arms = study["arms"]
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.4 * len(arms)), layout="constrained")
    width = 0.8 / len(study["controls"])
    for index, (control, found) in enumerate(study["controls"].items()):
        rows = [row + (index - (len(study["controls"]) - 1) / 2) * width for row in range(len(arms))]
        scores = [found[arm]["score"] for arm in arms]
        error = None
        if has_intervals(study):
            error = [[found[arm]["score"] - found[arm]["low"] for arm in arms]]
            error += [[found[arm]["high"] - found[arm]["score"] for arm in arms]]
        axes.barh(rows, scores, width, xerr=error, color=COLOURS[index], label=control, error_kw={"linewidth": 0.8})
    axes.set_yticks(range(len(arms)), arms)
    axes.set(ylim=(len(arms) - 0.5, -0.5), xlabel="% of answers right, all seeds")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _rescaling(study: Study, pyplot: ModuleType) -> "Figure | None":
    rows = study["measured"].get("finetune", {}).get("interventions", [])
    sweep = [row for row in rows if row["intervention"].startswith("alpha ")]
    if not sweep:
        return None
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    values = ("KL (nats)", "cos of keys", "cos of values")
    for panel, value in zip(panels, values, strict=True):
        for arm in study["arms"]:
            points = [(float(row["intervention"].split()[1]), row[value]) for row in sweep if row["model"] == arm]
            points.append((1.0, 0.0 if value == values[0] else 1.0))
            points = sorted((alpha, math.nan if one is None else one) for alpha, one in points)
            panel.plot(*zip(*points, strict=True), label=arm, **look_of(study, arm))
        panel.set(xscale="log", xlabel="alpha (factor on visual tokens)", title=value)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def _norms(study: Study, pyplot: ModuleType) -> "Figure | None":
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    points = ["start", "after stage 1", "after stage 2"]
    for arm, found in study["logged"].items():
        pairs = zip(found["visual norm"], found["text norm"], strict=True)
        ratios = [visual / text if visual and text else math.nan for visual, text in pairs]
        axes.plot(range(len(points)), ratios, "o", label=arm, **look_of(study, arm))
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(points)), points)
    axes.set(yscale="log", ylabel="visual norm over text norm")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _gradients(study: Study, pyplot: ModuleType) -> "Figure | None":
    rows = study["measured"].get("finetune", {}).get("gradients", [])
    points = list(dict.fromkeys(row["gradient at"] for row in rows))
    if not points:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for arm in study["arms"]:
        own = {row["gradient at"]: row for row in rows if row["model"] == arm}
        # Each checkpoint was run with every norm at the projector's end; its own is the one that it was trained with.
        norm = parse_arm(arm).norm
        if own and norm in own[points[0]]:
            axes.plot(range(len(points)), [own[at][norm] for at in points], label=arm, **look_of(study, arm))
    axes.set_xticks(range(len(points)), points, rotation=40, ha="right")
    axes.set(yscale="log", ylabel="L2 norm of the gradient")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


_FIGURES: dict[str, tuple[str, Callable[[Study, ModuleType], "Figure | None"]]] = {
    "intervals": ("Differences from the baseline, and of arms from each other", _intervals),
    "training": ("Accuracy over the samples of stage 2 (bands: seeds)", _curves),
    "dose": ("Dose and response: initial norm of the visual tokens", _dose),
    "controls": ("Answers with the picture taken away", _controls),
    "rescaling": ("Rescaling visual tokens of the trained arms at inference", _rescaling),
    "norms": ("Norms where visual tokens meet the text", _norms),
    "gradients": ("Gradients on their way down to the tower", _gradients),
}
