"""Every figure of the pages, as SVG: intervals, training, norms, dose, controls, and what `llava.analysis` drew."""

import base64
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llava.eval.paired import MEAN
from llava.experiment.arms import parse_arm
from llava.experiment.report_tables import TITLES
from llava.experiment.stage import Log
from llava.experiment.study_record import Study, has_intervals
from llava.utils.presentation import COLOURS, STYLE, import_pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":")
MAX_POINTS = 300  # of a curve; more are averaged in blocks
MAX_SVG = 400_000  # bytes; of a larger drawing the PNG is shown
VISUAL, TEXT = "norm/llm_input", "norm/text_embeddings"
CURVES = {
    "loss": ("Loss", False),
    VISUAL: ("Norm of visual tokens (dotted: text) at the LLM's input", True),
    TEXT: ("Norm of text embeddings", False),
    "norm/gain_mean_abs": ("Mean |gain| of the norm", False),
    "grad_norm": ("Gradient norm, all weights", True),
    "grad_norm/llm_input": ("Gradient at the LLM's input", True),
    "grad_norm/before_norm": ("Gradient before the norm", True),
    "grad_norm/vision_features": ("Gradient at the vision features", True),
}
"""Keys of `train_log.jsonl`, each with its title and whether the axis is logarithmic."""
DRAWN = {
    "interface-norms": "Norms where visual and text tokens meet",
    "layer-norms": "Norms per layer",
    "update-rates": "Update rates per layer",
    "update-rates-gap": "Text's angle over visual tokens' angle, per layer",
    "norm-params": "Gain and bias of the norm",
    "attention-heatmaps": "Attention over pictures",
    "attention-profiles": "Attention to visual tokens",
    "gradients": "Gradients on their way down",
    "interventions": "Interventions at inference",
}
"""Figures of `scripts/analyze.sh` and their titles here."""


def svg(draw: Callable[..., "Figure | None"], *what: object) -> bytes:
    """What `draw(*what, pyplot)` draws, as SVG; empty where it has nothing to draw."""
    pyplot = import_pyplot()
    with pyplot.rc_context(STYLE):
        figure = draw(*what, pyplot)
        if figure is None:
            return b""
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return stream.getvalue()


def colour_of(arms: Sequence[str], arm: str) -> str:
    """The arm's colour, the same in every figure."""
    return COLOURS[arms.index(arm) % len(COLOURS)]


def data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def intervals(results: Mapping[str, Mapping[str, Mapping[str, Any]]], arms: Sequence[str]) -> str:
    """Per benchmark (and mean) and arm: difference, interval as a bar, every seed as a point."""
    return data_uri(svg(_intervals_by_task, results, arms), "svg+xml")


def _intervals_by_task(
    results: Mapping[str, Mapping[str, Mapping[str, Any]]], arms: Sequence[str], pyplot: ModuleType
) -> "Figure":
    names = list(next(iter(results.values())))
    height = 1.0 + 0.32 * len(names) * len(results)
    figure, axes = pyplot.subplots(figsize=(6.4, height), layout="constrained")
    for row, name in enumerate(names):
        for index, (arm, by_task) in enumerate(results.items()):
            y = row + 0.8 * (index + 0.5) / len(results)
            _bar(axes, by_task[name], y, colour_of(arms, arm), "_" if row else arm)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks([row + 0.4 for row in range(len(names))], [TITLES.get(name, name) for name in names])
    axes.set(ylim=(len(names), -0.1), xlabel="points above the baseline: 95 % interval, circles: seeds")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1 + 0.5 / height), ncols=3)
    return figure


def _bar(axes, result: Mapping[str, Any], y: float, colour: str, label: str = "_") -> None:
    seeds = result["by_seed"]
    axes.plot((result["low"], result["high"]), (y, y), color=colour, linewidth=3, solid_capstyle="butt", alpha=0.5)
    axes.plot(result["delta"], y, "|", color=colour, markersize=12, markeredgewidth=2.5, label=label)
    axes.plot(seeds, [y] * len(seeds), "o", color=colour, fillstyle="none", markersize=5)


def training_curves(runs: Sequence[tuple[str, Sequence[Log]]]) -> list[dict[str, str]]:
    """One picture per logged quantity, both stages one after the other, one line per run, colour by arm.

    Args:
        runs: the arm of each run, and the optimizer steps that its stages logged.
    """
    drawn = [(title, svg(_curve, runs, key, title, logarithmic)) for key, (title, logarithmic) in CURVES.items()]
    return [{"title": title, "uri": data_uri(content, "svg+xml")} for title, content in drawn if content]


def _curve(
    runs: Sequence[tuple[str, Sequence[Log]]], key: str, title: str, logarithmic: bool, pyplot: ModuleType
) -> "Figure | None":
    arms = list(dict.fromkeys(arm for arm, _ in runs))
    lines = [(arm, points) for arm, stages in runs for points in _points(stages, key)]
    if not lines:
        return None
    figure, axes = pyplot.subplots(figsize=(4.8, 3.0), layout="constrained")
    for arm, points in lines:
        axes.plot(*points.T, color=colour_of(arms, arm), linewidth=1.2, alpha=0.8)
    for points in _points(runs[0][1], TEXT) if key == VISUAL else ():
        axes.plot(*points.T, color="black", linestyle=":")
    boundary = max((stages[0][-1]["step"] for _, stages in runs if stages[0]), default=0)
    axes.axvline(boundary + 0.5, color="grey", linewidth=0.8)
    axes.set(xlabel="optimizer step (stage 1 | stage 2)", title=title)
    if logarithmic:
        axes.set_yscale("log")
    return figure


def _points(stages: Sequence[Log], key: str) -> Iterator[np.ndarray]:
    """What each stage logged under `key` [K, 2]; the steps of a stage follow those of the stage before."""
    start = 0
    for steps in stages:
        points = np.array([(start + s["step"], s[key]) for s in steps if s.get(key) is not None])
        start += steps[-1]["step"] if steps else 0
        if len(points):
            yield thinned(points)


def thinned(points: np.ndarray) -> np.ndarray:
    """At most about `MAX_POINTS` of [K, 2], neighbours averaged."""
    block = max(1, len(points) // MAX_POINTS)
    length = len(points) - len(points) % block
    return points[:length].reshape(-1, block, 2).mean(axis=1)


def analysis_figures(folder: Path) -> list[dict[str, str]]:
    """What `scripts/analyze.sh` drew into `folder`, each as SVG unless that is large."""
    pictures = []
    for name, title in DRAWN.items():
        svg, png = folder / f"{name}.svg", folder / f"{name}.png"
        if svg.is_file() and (svg.stat().st_size <= MAX_SVG or not png.is_file()):
            pictures.append({"title": title, "uri": data_uri(svg.read_bytes(), "svg+xml")})
        elif png.is_file():
            pictures.append({"title": title, "uri": data_uri(png.read_bytes(), "png")})
    return pictures


# --- the study's, each drawn from `study.json` alone ------------------------------------------------------------------


class Picture(NamedTuple):
    """A figure of the study: `caption` says what it shows, and of which arms and seeds."""

    title: str
    caption: str
    svg: bytes


def figures(study: Study) -> dict[str, Picture]:
    """Every figure that the study has data for, by name."""
    seeds = [str(seed) for seed in study["seeds"]]
    facts = {"arms": len(study["arms"]), "baseline": study["arms"][0], "first": seeds[0], "seeds": ", ".join(seeds)}
    facts |= {"asked": study["training"]["questions"]}
    drawn = {
        name: Picture(title, caption.format(**facts), svg(draw, study))
        for name, (title, caption, draw) in _FIGURES.items()
    }
    return {name: picture for name, picture in drawn.items() if picture.svg}


def look_of(study: Study, arm: str) -> dict[str, str]:
    """The arm's colour and line, the same in every figure."""
    index = study["arms"].index(arm)
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}


def _intervals(study: Study, pyplot: ModuleType) -> "Figure | None":
    results = {arm: by_task[MEAN] for arm, by_task in study["results"].items()}
    results |= {name: by_task[MEAN] for name, by_task in study["contrasts"].items()}
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.32 * len(results)), layout="constrained")
    for row, (name, difference) in enumerate(results.items()):
        colour = look_of(study, name)["color"] if name in study["results"] else "black"
        _bar(axes, difference, row, colour)
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
    for index, (control, by_arm) in enumerate(study["controls"].items()):
        rows = [row + (index - (len(study["controls"]) - 1) / 2) * width for row in range(len(arms))]
        scores = [by_arm[arm]["score"] for arm in arms]
        error = None
        if has_intervals(study):
            error = [[by_arm[arm]["score"] - by_arm[arm]["low"] for arm in arms]]
            error += [[by_arm[arm]["high"] - by_arm[arm]["score"] for arm in arms]]
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
            points = sorted((alpha, math.nan if measured is None else measured) for alpha, measured in points)
            panel.plot(*zip(*points, strict=True), label=arm, **look_of(study, arm))
        panel.set(xscale="log", xlabel="alpha (factor on visual tokens)", title=value)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def _norms(study: Study, pyplot: ModuleType) -> "Figure | None":
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    points = ["start", "after stage 1", "after stage 2"]
    for arm, norms in study["logged"].items():
        pairs = zip(norms["visual norm"], norms["text norm"], strict=True)
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


_FIGURES: dict[str, tuple[str, str, Callable[[Study, ModuleType], "Figure | None"]]] = {
    "intervals": (
        "Differences from the baseline, and of arms from each other",
        "Points over all tasks, each arm minus {baseline}; below the line, pairs of arms. Bars: intervals corrected "
        "for the number of arms, or of pairs. Circles: seeds {seeds}.",
        _intervals,
    ),
    "training": (
        "Accuracy over the samples of stage 2",
        "Right answers to {asked} held-out questions during stage 2, {arms} arms. Lines: mean of seeds {seeds}. Bands: "
        "lowest and highest seed. Grey: chance.",
        _curves,
    ),
    "dose": (
        "Dose and response",
        "Score over all tasks by the initial norm of visual tokens, a multiple of the text norm. Line: mean of seeds "
        "{seeds}. Circles: each seed. Grey: the baseline, {baseline}.",
        _dose,
    ),
    "controls": (
        "Answers with the picture taken away",
        "Right answers of {arms} arms, seeds {seeds} together: with the picture, with a blank picture, with visual "
        "tokens in another order, and without a picture.",
        _controls,
    ),
    "rescaling": (
        "Rescaling visual tokens at inference",
        "How far the outputs of {arms} trained arms change when their visual tokens are multiplied by alpha, and how "
        "far keys and values turn. Seed {first}.",
        _rescaling,
    ),
    "norms": (
        "Norms where visual tokens meet the text",
        "Norm of visual tokens over that of text embeddings at the LLM's input, {arms} arms, seed {first}. Grey: equal "
        "norms.",
        _norms,
    ),
    "gradients": (
        "Gradients on their way down to the tower",
        "L2 norm of the loss gradient from the LLM's input to the tower's layers after stage 2, {arms} arms, seed "
        "{first}.",
        _gradients,
    ),
}
