"""The report's pictures as data URIs: intervals with seeds, training curves, and what `llava.analysis` drew."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llava.eval.paired import Difference
from llava.experiment.runs import STAGES, Run
from llava.utils.presentation import COLOURS, STYLE, import_pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 300  # of a curve; more are averaged in blocks
MAX_SVG = 400_000  # bytes; of a larger drawing the PNG is shown
CURVES = {
    "loss": ("Loss", False),
    "norm/llm_input": ("Norm of visual tokens at the LLM's input", True),
    "norm/text_embeddings": ("Norm of text embeddings", False),
    "norm/gain_mean_abs": ("Mean |gain| of the norm", False),
    "grad_norm": ("Gradient norm, all weights", True),
    "grad_norm/llm_input": ("Gradient at the LLM's input", True),
    "grad_norm/before_norm": ("Gradient before the norm", True),
    "grad_norm/vision_features": ("Gradient at the vision features", True),
}
"""Keys of `train_log.jsonl`: title, and whether the axis is logarithmic."""
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


def colour_of(arms: Sequence[str], arm: str) -> str:
    """The arm's colour, the same in every figure."""
    return COLOURS[arms.index(arm) % len(COLOURS)]


def data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def _as_uri(figure: "Figure") -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return data_uri(stream.getvalue(), "svg+xml")


def intervals(results: Mapping[str, Mapping[str, Difference]], arms: Sequence[str]) -> str:
    """Per benchmark (and mean) and arm: difference, interval as a bar, every seed as a point."""
    pyplot = import_pyplot()
    names = list(next(iter(results.values())))
    with pyplot.rc_context(STYLE):
        height = 1.0 + 0.32 * len(names) * len(results)
        figure, axes = pyplot.subplots(figsize=(6.4, height), layout="constrained")
        for row, name in enumerate(names):
            for index, (arm, found) in enumerate(results.items()):
                y, colour, one = row + 0.8 * (index + 0.5) / len(results), colour_of(arms, arm), found[name]
                axes.plot((one.low, one.high), (y, y), color=colour, linewidth=3, solid_capstyle="butt", alpha=0.5)
                axes.plot(
                    one.delta, y, "|", color=colour, markersize=12, markeredgewidth=2.5, label="_" if row else arm
                )
                axes.plot(one.by_seed, [y] * len(one.by_seed), "o", color=colour, fillstyle="none", markersize=5)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks([row + 0.4 for row in range(len(names))], names)
        axes.set(ylim=(len(names), -0.1), xlabel="points above the baseline: 95 % interval, circles: seeds")
        axes.grid(axis="y", visible=False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1 + 0.5 / height), ncols=3)
        uri = _as_uri(figure)
        pyplot.close(figure)
    return uri


def training_curves(runs: Sequence[Run]) -> list[dict[str, str]]:
    """One picture per logged quantity, both stages one after the other, one line per run, colour by arm."""
    pyplot = import_pyplot()
    logs = {run: [run.log(stage) for stage in STAGES] for run in runs}
    arms = list(dict.fromkeys(run.arm for run in runs))
    pictures = []
    for key, (title, logarithmic) in CURVES.items():
        with pyplot.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=(4.8, 3.0), layout="constrained")
            drawn = False
            for run, stages in logs.items():
                start = 0
                for steps in stages:
                    points = np.array([(start + s["step"], s[key]) for s in steps if s.get(key) is not None])
                    start += steps[-1]["step"] if steps else 0
                    if len(points):
                        drawn = True
                        axes.plot(*thinned(points).T, color=colour_of(arms, run.arm), linewidth=1.2, alpha=0.8)
            boundary = max((stages[0][-1]["step"] for stages in logs.values() if stages[0]), default=0)
            axes.axvline(boundary + 0.5, color="grey", linewidth=0.8)
            axes.set(xlabel="optimizer step (stage 1 | stage 2)", title=title)
            if logarithmic:
                axes.set_yscale("log")
            if drawn:
                pictures.append({"title": title, "uri": _as_uri(figure)})
            pyplot.close(figure)
    return pictures


def thinned(points: np.ndarray) -> np.ndarray:
    """At most about `MAX_POINTS` of [K, 2], neighbours averaged."""
    block = max(1, len(points) // MAX_POINTS)
    kept = len(points) - len(points) % block
    return points[:kept].reshape(-1, block, 2).mean(axis=1)


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
