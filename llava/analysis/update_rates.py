"""How fast visual and text tokens turn in every layer of the LLM, for several models or checkpoints side by side.

Paper figures 2 to 5: cosine between the states before and after a layer (near 1: slow), size of a layer's update over
the state's norm, and angle to the LLM's input. Visual features that a model adds between layers (DeepStack) are in no
layer's turn.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

from llava.analysis import measure
from llava.analysis.commands import NamedModel
from llava.analysis.measure import Measurement, mean, median
from llava.analysis.norm_params import checkpoints, step_of
from llava.analysis.output import TableRow, draw_rows, write_result
from llava.analysis.probe import GROUPS, SPECIAL, TEXT_AFTER, TEXT_BEFORE, VISUAL
from llava.utils.presentation import SPECIAL_COLOUR, TEXT_BEFORE_COLOUR, TEXT_COLOUR, VISUAL_COLOUR, import_pyplot

NAMES = ("cosine", "turn", "update", "drift")
PANELS = {
    "cosine median": {"ylabel": "cosine of successive layers"},
    "update median": {"ylabel": "update over norm", "yscale": "log"},
    "drift median": {"ylabel": "angle to the input (°)"},
}
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
    measure.add_arguments(parser)
    folder = "a run's folder: all its checkpoint-N and its final model, over the steps; may be given several times"
    parser.add_argument("--checkpoints", type=Path, action="append", default=[], metavar="DIR", help=folder)


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`-layers`), and figures of the values and the runs."""
    runs, rows = write_view(args, NAMES, PANELS)
    if runs:
        draw_runs(args, rows, runs)


def write_view(
    args: argparse.Namespace, names: tuple[str, ...], panels: dict[str, dict[str, str]]
) -> tuple[Runs, list[TableRow]]:
    """Measures every model, and writes a summary, the table `-layers`, and the figure.

    The figure shows medians without sinks, a column of panels per model; each run has only its last checkpoint in it.

    Args:
        names: the values in the tables.
        panels: the columns of `-layers` in the figure, with the properties of their panels.

    Returns:
        the models of `--checkpoints`, and the rows of `-layers`.
    """
    runs = {model: place for folder in args.checkpoints for model, place in expand(folder, args.models).items()}
    models, drawn = measure.begin(args)
    measured = {model.name: measure.measure_layers(model, drawn, args) for model in models}
    rows, last = layer_rows(measured, names), dict(sorted(runs.values()))
    write_result(args, summary(rows))
    write_result(args, rows, name=f"{args.command}-layers", show=False)
    shown = [row for row in rows if row["model"] not in runs or last[runs[row["model"]][0]] == runs[row["model"]][1]]
    draw_rows(args, shown, "layer", panels, "tokens", "model", STYLES, sharey="row", sharex=True)
    return runs, rows


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


# --- tables -----------------------------------------------------------------------------------------------------------


def layer_rows(measured: dict[str, Measurement], names: tuple[str, ...]) -> list[TableRow]:
    """A row per model, group and layer: mean and median of the values `names`, without the sinks and with them.

    A cosine's median is taken from the angle's, which keeps values apart where all cosines are near 1.
    """
    rows = []
    for (model, measurement), (group, label) in itertools.product(measured.items(), GROUPS.items()):
        every, without = (int(measurement.tokens(group, sinks).sum()) for sinks in (True, False))
        for layer in range(max(len(measurement.values[name]) for name in names) if every else 0):
            row = {"model": model, "tokens": label, "layer": layer, "count": without, "sinks": every - without}
            for name, sinks in itertools.product(names, SUFFIX):
                if layer < len(measurement.values[name]):
                    row[f"{name} mean{SUFFIX[sinks]}"] = mean(measurement.of(name, group, layer, sinks))
                    middle = median(measurement.of("turn" if name == "cosine" else name, group, layer, sinks))
                    middle = float(np.cos(np.deg2rad(middle))) if name == "cosine" else middle
                    row[f"{name} median{SUFFIX[sinks]}"] = middle
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
