"""Curves over the LLM's layers, as tables and figures; commands that show one measurement (see `measure`)."""

import argparse
import itertools
import math
from pathlib import Path

import numpy as np

from llava.analysis import measure
from llava.analysis.commands import NamedModel
from llava.analysis.measure import STATE_METRICS, TEXT_GROUPS, Measurement
from llava.analysis.norm_params import checkpoints, step_of
from llava.analysis.output import TableRow, draw_rows, write_result
from llava.analysis.probe import GROUPS, SPECIAL, TEXT_AFTER, TEXT_BEFORE, VISUAL
from llava.utils.presentation import (
    SPECIAL_COLOUR,
    TEXT_BEFORE_COLOUR,
    TEXT_COLOUR,
    VISUAL_COLOUR,
    import_pyplot,
)

SUFFIX = {False: "", True: " with sinks"}
STYLES = {
    GROUPS[VISUAL]: {"color": VISUAL_COLOUR, "linewidth": 2.2},
    GROUPS[TEXT_AFTER]: {"color": TEXT_COLOUR, "linewidth": 2.2},
    GROUPS[TEXT_BEFORE]: {"color": TEXT_BEFORE_COLOUR, "linestyle": "--", "linewidth": 1.3},
    GROUPS[SPECIAL]: {"color": SPECIAL_COLOUR, "linestyle": ":", "linewidth": 1.3},
}


Runs = dict[str, tuple[str, int]]
"""By model, the training run of which it is a checkpoint, and the optimizer step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_arguments(parser, batches=True)
    parser.add_argument(
        "--checkpoints",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a run's folder: all its checkpoint-N and its final model, over the steps; may be given several times",
    )


def write_view(
    args: argparse.Namespace, names: tuple[str, ...], panels: dict[str, dict[str, str]]
) -> tuple[dict[str, Measurement], Runs, list[TableRow]]:
    """Measures every model, and writes a summary, the table `-layers`, and the figure.

    The figure shows medians without sinks, a column of panels per model; each run has only its last checkpoint in it.

    Args:
        names: the values in the tables.
        panels: the columns of `-layers` in the figure, with the properties of their panels.

    Returns:
        the measurements by model, those of `--checkpoints`, and the rows of `-layers`.
    """
    runs = {model: place for folder in args.checkpoints for model, place in expand(folder, args.models).items()}
    models, drawn = measure.begin(args)
    measured = {model.name: measure.measure_layers(model, drawn, args) for model in models}
    rows, last = layer_rows(measured, names), without_earlier(measured, runs)
    write_result(args, summary(rows))
    write_result(args, rows, name=f"{args.command}-layers", show=False)
    shown = [row for row in rows if row["model"] in last]
    draw_rows(args, shown, "layer", panels, "tokens", "model", STYLES, sharey="row", sharex=True)
    return measured, runs, rows


def expand(folder: Path, models: list[NamedModel]) -> Runs:
    """Adds a run's checkpoints to `models`. Raises ValueError: the folder has none whose step is known."""
    name = "/".join([part for part in folder.parts if part != "/"][-2:])
    folders = [(step_of(path), path) for path in checkpoints(str(folder))]
    steps = dict(sorted((step, path) for step, path in folders if step is not None))
    if not steps:
        raise ValueError(f"--checkpoints {folder}: no checkpoint-N in it, and no trainer_state.json")
    named = {step: NamedModel(f"{name}, step {step}", path) for step, path in steps.items()}
    models += [model for model in named.values() if model not in models]
    return {model.name: (name, step) for step, model in named.items()}


def without_earlier(measured: dict[str, Measurement], runs: Runs) -> dict[str, Measurement]:
    """The measurements without all but the last checkpoint of each run."""
    last = dict(sorted(runs.values()))
    return {name: of for name, of in measured.items() if name not in runs or runs[name][1] == last[runs[name][0]]}


# --- tables -----------------------------------------------------------------------------------------------------------


def medians(measurement: Measurement, name: str, groups: int | tuple[int, ...], with_sinks: bool = False) -> np.ndarray:
    """The value's median in each layer [L], or state [L + 1]; NaN where no token was seen.

    A cosine's is taken from the angle, which keeps values apart where all cosines are near 1.
    """
    if name == "cosine":
        return np.cos(np.deg2rad(medians(measurement, "turn", groups, with_sinks)))
    layers = range(measurement.layers + (name in STATE_METRICS))
    return np.array([measure.median(measurement.of(name, groups, layer, with_sinks)) for layer in layers])


def layer_rows(measured: dict[str, Measurement], names: tuple[str, ...]) -> list[TableRow]:
    """A row per model, group and layer: mean and median of the values `names`, without the sinks and with them."""
    rows = []
    for model, measurement in measured.items():
        for group, label in GROUPS.items():
            every, without = (int(measurement.tokens(group, sinks).sum()) for sinks in (True, False))
            middle = {key: medians(measurement, key[0], group, key[1]) for key in itertools.product(names, SUFFIX)}
            for layer in range(max(map(len, middle.values())) if every else 0):
                row = {"model": model, "tokens": label, "layer": layer, "count": without, "sinks": every - without}
                for (name, sinks), values in middle.items():
                    if layer < len(values):
                        mean = measure.mean(measurement.of(name, group, layer, sinks))
                        row |= {f"{name} mean{SUFFIX[sinks]}": mean}
                        row[f"{name} median{SUFFIX[sinks]}"] = float(values[layer])
                rows.append(row)
    return rows


def summary(rows: list[TableRow]) -> list[TableRow]:
    """A row per model and group: the mean over the layers of every column, without the sinks."""
    table = []
    for model, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in rows):
        own = [row for row in rows if (row["model"], row["tokens"]) == (model, tokens)]
        columns = [name for name in own[0] if name.endswith((" mean", " median"))]
        means = {name: float(np.nanmean([row[name] for row in own if name in row])) for name in columns}
        table.append({"model": model, "tokens": tokens, "count": own[0]["count"], "sinks": own[0]["sinks"]} | means)
    return table


def gap(measurement: Measurement) -> np.ndarray:
    """Median angle that text turns by over the median angle that visual tokens turn by, per layer [L]."""
    return medians(measurement, "turn", TEXT_GROUPS) / medians(measurement, "turn", VISUAL)


def verdict(model: str, measurement: Measurement) -> str:
    """One sentence: by how much text turns faster than visual tokens, or slower."""
    ratio = gap(measurement)
    mean = math.exp(float(np.nanmean(np.log(ratio))))
    return (
        f"{model}: a layer turns text by {mean:.2f} times the angle of visual tokens (geometric mean of the layers); "
        f"visual tokens are slower in {int((ratio > 1).sum())} of {len(ratio)} layers"
    )


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_runs(args: argparse.Namespace, rows: list[TableRow], runs: Runs) -> None:
    """The cosine's mean per layer over a run's checkpoints (Figure 5): a column per run and kind of token."""
    kinds = {GROUPS[VISUAL]: "visual tokens", GROUPS[TEXT_AFTER]: "text after the image"}
    points = []
    for row in rows:
        if row["model"] in runs and row["tokens"] in kinds:
            run, step = runs[row["model"]]
            points.append(row | {"step": step, "column": f"{run}:\n{kinds[row['tokens']]}"})
    steps, colours = sorted({row["step"] for row in points}), import_pyplot().get_cmap("viridis_r")
    styles = {str(step): {"color": colours(step / max(1, *steps))} for step in steps}
    panel = {"cosine mean": {"ylabel": "cosine of successive layers"}}
    name = f"{args.command}-checkpoints"
    draw_rows(args, points, "layer", panel, "step", "column", styles, name, sharey=True)


def draw_gap(args: argparse.Namespace, measured: dict[str, Measurement]) -> None:
    """One line per model: the angle that a layer turns text by, as a multiple of the visual tokens' angle."""
    rows = [
        {"model": model, "layer": layer, "ratio": ratio}
        for model, measurement in measured.items()
        for layer, ratio in enumerate(gap(measurement).tolist())
    ]
    axes = {"ylabel": "angle text turns by over\nangle visual tokens turn by", "yscale": "log"}
    axes["title"] = "above 1 visual tokens are slower, below 1 faster"
    draw_rows(args, rows, "layer", {"ratio": axes}, name="update-rates-gap")
