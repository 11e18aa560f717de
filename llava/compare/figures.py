"""Every figure of the pages, as SVG: intervals, training, norms, dose, controls, and what `llava.analysis` drew."""

import base64
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llava.compare.arms import parse_arm
from llava.compare.report_tables import TITLES
from llava.compare.stage import Log
from llava.compare.study_record import Study, has_intervals
from llava.eval.paired import MEAN
from llava.utils.presentation import NEUTRAL, STYLE, TEXT_COLOUR, import_pyplot, looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D")  # of the picture, and of each way to take it away
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
            _bar(axes, by_task[name], y, looks(arms)[arm]["color"], "_" if row else arm)
    axes.axvline(0, color=NEUTRAL, linewidth=0.8)
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
    seen = "A line for each run shows, over the optimizer steps of both stages: {}."
    return [
        {"title": title, "alt": seen.format(title), "uri": data_uri(content, "svg+xml")}
        for title, content in drawn
        if content
    ]


def _curve(
    runs: Sequence[tuple[str, Sequence[Log]]], key: str, title: str, logarithmic: bool, pyplot: ModuleType
) -> "Figure | None":
    look = looks(arm for arm, _ in runs)
    lines = [(arm, points) for arm, stages in runs for points in _points(stages, key)]
    if not lines:
        return None
    figure, axes = pyplot.subplots(figsize=(4.8, 3.0), layout="constrained")
    for arm, points in lines:
        axes.plot(*points.T, color=look[arm]["color"], linewidth=1.2, alpha=0.8)
    for points in _points(runs[0][1], TEXT) if key == VISUAL else ():
        axes.plot(*points.T, color=TEXT_COLOUR, linestyle=":")
    boundary = max((stages[0][-1]["step"] for _, stages in runs if stages[0]), default=0)
    axes.axvline(boundary + 0.5, color=NEUTRAL, linewidth=0.8)
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
    for name, (title, alt) in DRAWN.items():
        svg, png = folder / f"{name}.svg", folder / f"{name}.png"
        if svg.is_file() and (svg.stat().st_size <= MAX_SVG or not png.is_file()):
            pictures.append({"title": title, "alt": alt, "uri": data_uri(svg.read_bytes(), "svg+xml")})
        elif png.is_file():
            pictures.append({"title": title, "alt": alt, "uri": data_uri(png.read_bytes(), "png")})
    return pictures


# --- the study's, each drawn from `study.json` alone ------------------------------------------------------------------


class Picture(NamedTuple):
    """A figure of the study: `alt` says what is seen, `caption` what it shows, and of which arms and seeds."""

    title: str
    alt: str
    caption: str
    svg: bytes


def figures(study: Study) -> dict[str, Picture]:
    """Every figure that the study has data for, by name."""
    seeds = [str(seed) for seed in study["seeds"]]
    facts = {"arms": len(study["arms"]), "baseline": study["arms"][0], "first": seeds[0], "seeds": ", ".join(seeds)}
    facts |= {"asked": study["training"]["questions"]}
    drawn = {
        name: Picture(title, alt, caption.format(**facts), svg(draw, study))
        for name, (title, alt, caption, draw) in _FIGURES.items()
    }
    return {name: picture for name, picture in drawn.items() if picture.svg}


def differences(results: Mapping[str, Mapping[str, Any]], arms: Sequence[str], primary: int, margin: float) -> bytes:
    """Each arm's difference from the baseline with its interval and its seeds, as SVG.

    Args:
        primary: number of arms above a line, which are decided.
        margin: points; up to here, the band, a difference is not relevant.
    """
    return svg(_differences, results, arms, primary, margin)


def _intervals(study: Study, pyplot: ModuleType) -> "Figure":
    results = {arm: by_task[MEAN] for arm, by_task in study["results"].items()}
    results |= {name: by_task[MEAN] for name, by_task in study["contrasts"].items()}
    return _differences(results, study["arms"], len(study["results"]), 0.0, pyplot)


def _differences(
    results: Mapping[str, Mapping[str, Any]], arms: Sequence[str], above: int, margin: float, pyplot: ModuleType
) -> "Figure":
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.32 * len(results)), layout="constrained")
    look = looks(arms)
    if margin:
        axes.axvspan(-margin, margin, color=NEUTRAL, alpha=0.12, linewidth=0)
    for row, (name, difference) in enumerate(results.items()):
        _bar(axes, difference, row, look[name]["color"] if name in look else NEUTRAL)
    axes.axvline(0, color=NEUTRAL, linewidth=0.8)
    axes.axhline(above - 0.5, color=NEUTRAL, linewidth=0.8)
    axes.set_yticks(range(len(results)), list(results))
    axes.set(ylim=(len(results) - 0.5, -0.5), xlabel="points, mean of the tasks (circles: seeds)")
    axes.grid(axis="y", visible=False)
    return figure


def _curves(study: Study, pyplot: ModuleType) -> "Figure":
    training, look = study["training"], looks(study["arms"])
    baseline, *others = study["arms"]
    rows = math.ceil(len(others) / 3)
    figure, panels = pyplot.subplots(
        rows, 3, figsize=(7, 0.8 + 1.7 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, arm in zip(panels.flat, others, strict=False):
        panel.axhline(100 * training["chance"], color=NEUTRAL, linewidth=0.8, label="chance")
        for name in (baseline, arm):
            curve = 100 * np.array(training["curves"][name])
            panel.plot(training["samples"], curve.mean(axis=0), label=name, **look[name])
            band = curve.min(axis=0), curve.max(axis=0)
            panel.fill_between(training["samples"], *band, color=look[name]["color"], alpha=0.15, linewidth=0)
        panel.set_title(arm)
    for panel in panels.flat[max(0, len(others) - 3) : len(others)]:
        panel.tick_params(labelbottom=True)
    for panel in panels.flat[len(others) :]:
        panel.set_visible(False)
    figure.supxlabel("samples of stage 2", fontsize="medium")
    figure.supylabel(f"% of {training['questions']} questions right", fontsize="medium")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles[:2], labels[:2], loc="outside upper center", ncols=2)
    return figure


def _dose(study: Study, pyplot: ModuleType) -> "Figure | None":
    if len(study["dose"]) < 2:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
    look, baseline = looks(study["arms"]), study["arms"][0]
    scores = {arm: study["scores"][arm][MEAN] for arm in study["dose"]}
    factors = study["dose"]
    axes.plot(list(factors.values()), [np.mean(seeds) for seeds in scores.values()], color=NEUTRAL)
    for arm, seeds in scores.items():
        colour = look[arm]["color"]
        axes.plot(factors[arm], np.mean(seeds), "o", color=colour)
        axes.plot([factors[arm]] * len(seeds), seeds, "o", color=colour, fillstyle="none", markersize=5)
    axes.axhline(float(np.mean(study["scores"][baseline][MEAN])), linewidth=0.8, **look[baseline])
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(factors.values()), [f"{factor:g}" for factor in factors.values()])
    axes.set(xlabel="initial norm over the text's", ylabel=f"%, mean of all tasks (black: {baseline})")
    return figure


def _controls(study: Study, pyplot: ModuleType) -> "Figure":
    arms, look = study["arms"], looks(study["arms"])
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.4 * len(arms)), layout="constrained")
    for index, (control, by_arm) in enumerate(study["controls"].items()):
        shape = {"marker": MARKERS[index], "linestyle": "none", "fillstyle": "none" if index else "full"}
        for row, arm in enumerate(arms):
            answers = by_arm[arm]
            error = None
            if has_intervals(study):
                error = [[answers["score"] - answers["low"]], [answers["high"] - answers["score"]]]
            y = row + 0.15 * (index - 1.5)  # marks of one score stay apart
            axes.errorbar(answers["score"], y, xerr=error, color=look[arm]["color"], elinewidth=0.8, **shape)
        axes.plot([], [], color=NEUTRAL, label=control, **shape)
    axes.set_yticks(range(len(arms)), arms)
    axes.set(ylim=(len(arms) - 0.5, -0.5), xlabel="% of answers right, all seeds")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _rescaling(study: Study, pyplot: ModuleType) -> "Figure | None":
    rows = study["measured"].get("finetune", {}).get("interventions", [])
    sweep = [row for row in rows if row["intervention"].startswith("alpha ")]
    if not sweep:
        return None
    look = looks(study["arms"])
    figure, panels = pyplot.subplots(3, 1, figsize=(7, 8), sharex=True, layout="constrained")
    values = ("KL (nats)", "cos of keys", "cos of values")
    for panel, value in zip(panels, values, strict=True):
        for arm in study["arms"]:
            points = [(float(row["intervention"].split()[1]), row[value]) for row in sweep if row["model"] == arm]
            points.append((1.0, 0.0 if value == values[0] else 1.0))
            points = sorted((alpha, math.nan if measured is None else measured) for alpha, measured in points)
            panel.plot(*zip(*points, strict=True), label=arm, **look[arm])
        panel.set(xscale="log", title=value)
    panels[-1].set_xlabel("alpha (factor on visual tokens)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _norms(study: Study, pyplot: ModuleType) -> "Figure | None":
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    points, look = ["start", "after stage 1", "after stage 2"], looks(study["arms"])
    for arm, norms in study["logged"].items():
        pairs = zip(norms["visual norm"], norms["text norm"], strict=True)
        ratios = [visual / text if visual and text else math.nan for visual, text in pairs]
        axes.plot(range(len(points)), ratios, marker="o", markersize=4, label=arm, **look[arm])
    axes.axhline(1, color=NEUTRAL, linewidth=0.8)
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
    for arm, look in looks(study["arms"]).items():
        own = {row["gradient at"]: row for row in rows if row["model"] == arm}
        # Each checkpoint was run with every norm at the projector's end; its own is the one that it was trained with.
        norm = parse_arm(arm).norm
        if own and norm in own[points[0]]:
            axes.plot(range(len(points)), [own[at][norm] for at in points], label=arm, **look)
    axes.set_xticks(range(len(points)), points, rotation=40, ha="right")
    axes.set(yscale="log", ylabel="L2 norm of the gradient")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


_FIGURES: dict[str, tuple[str, str, str, Callable[[Study, ModuleType], "Figure | None"]]] = {
    "intervals": (
        "Differences from the baseline, and of arms from each other",
        "Each row is an arm's difference from the baseline, or of two arms, with its interval and its seeds.",
        "Points over all tasks, each arm minus {baseline}; below the line, pairs of arms. Bars: intervals corrected "
        "for the number of arms, or of pairs. Circles: seeds {seeds}.",
        _intervals,
    ),
    "training": (
        "Accuracy over the samples of stage 2",
        "Each panel compares an arm's accuracy over the samples of stage 2 with the baseline's.",
        "Right answers to {asked} held-out questions during stage 2; each panel an arm, and in black the baseline, "
        "{baseline}. Lines: mean of seeds {seeds}. Bands: lowest and highest seed. Grey: chance.",
        _curves,
    ),
    "dose": (
        "Dose and response",
        "A line gives the score over all tasks for each initial norm of visual tokens, and circles give the seeds.",
        "Score over all tasks by the initial norm of visual tokens, a multiple of the text norm. Line: mean of seeds "
        "{seeds}. Circles: each seed. Black: the baseline, {baseline}.",
        _dose,
    ),
    "controls": (
        "Answers with the picture taken away",
        "Each row shows an arm's right answers with the picture, and with the picture taken away in three ways.",
        "Right answers of {arms} arms, seeds {seeds} together: with the picture, with a blank picture, with visual "
        "tokens in another order, and without a picture.",
        _controls,
    ),
    "rescaling": (
        "Rescaling visual tokens at inference",
        "Three panels show how outputs, keys and values change when visual tokens are multiplied by alpha.",
        "How far the outputs of {arms} trained arms change when their visual tokens are multiplied by alpha, and how "
        "far keys and values turn. Seed {first}.",
        _rescaling,
    ),
    "norms": (
        "Norms where visual tokens meet the text",
        "A line for each arm gives the norm of its visual tokens over that of text, at the start and after each stage.",
        "Norm of visual tokens over that of text embeddings at the LLM's input, {arms} arms, seed {first}. Grey: equal "
        "norms.",
        _norms,
    ),
    "gradients": (
        "Gradients on their way down to the tower",
        "A line for each arm follows the gradient's norm from the LLM's input down to the tower's first layer.",
        "L2 norm of the loss gradient from the LLM's input to the tower's layers after stage 2, arms of the paper's "
        "norms, seed {first}.",
        _gradients,
    ),
}
