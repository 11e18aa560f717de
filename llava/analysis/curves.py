"""Curves over the LLM's layers, as tables and figures; a command is a view of one measurement (see `measure`)."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llava.analysis import measure
from llava.analysis.commands import NamedModel
from llava.analysis.measure import STATE_METRICS, TEXT_GROUPS, WITH_SINKS, Measurement
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

SHOWN_SINKS = 12
SUFFIX = {measure.WITHOUT_SINKS: "", WITH_SINKS: " with sinks"}
STYLES = {
    GROUPS[VISUAL]: {"color": VISUAL_COLOUR, "linewidth": 2.2},
    GROUPS[TEXT_AFTER]: {"color": TEXT_COLOUR, "linewidth": 2.2},
    GROUPS[TEXT_BEFORE]: {"color": TEXT_BEFORE_COLOUR, "linestyle": "--", "linewidth": 1.3},
    GROUPS[SPECIAL]: {"color": SPECIAL_COLOUR, "linestyle": ":", "linewidth": 1.3},
}


class Curve(NamedTuple):
    """Statistics per layer or state, each [L] or [L + 1]; NaN where no token was seen."""

    mean: np.ndarray
    median: np.ndarray
    count: np.ndarray


class View(NamedTuple):
    """What one command shows of the measurement.

    Attributes:
        cells: makes the summary's row for one group of tokens, without the sinks or with them.
        columns: the values in the table of all layers.
        panels: the columns of that table in the figure, with the properties of their panels.
    """

    cells: Callable[[Measurement, int, tuple[bool, ...]], TableRow]
    columns: tuple[str, ...]
    panels: dict[str, dict[str, str]]


class Run(NamedTuple):
    """The checkpoints of one training run, by optimizer step."""

    name: str
    steps: list[int]
    models: list[str]


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


def write_view(args: argparse.Namespace, view: View) -> tuple[dict[str, Measurement], list[Run], list[TableRow]]:
    """Measures every model, and writes the view's summary, its `-layers` and `-sinks` tables and its figure.

    Returns the measurements, the runs of `--checkpoints`, and the rows of `-layers`. The figure shows medians without
    sinks, a column of panels per model; each run has only its last checkpoint in it.
    """
    runs = [expand(folder, args.models) for folder in args.checkpoints]
    models, drawn = measure.begin(args)
    measured = {model.name: measure.measure_layers(model, drawn, args) for model in models}
    rows, last = layer_rows(measured, view.columns), without_earlier(measured, runs)
    write_result(args, summary(measured, view))
    write_result(args, rows, name=f"{args.command}-layers", show=False)
    write_sinks(args, measured)
    shown = [row for row in rows if row["model"] in last]
    draw_rows(args, shown, "layer", view.panels, "tokens", "model", STYLES, sharey="row", sharex=True)
    return measured, runs, rows


def expand(folder: Path, models: list[NamedModel]) -> Run:
    """Adds a run's checkpoints to `models`. Raises ValueError: the folder has none whose step is known."""
    name = "/".join([part for part in folder.parts if part != "/"][-2:])
    folders = [(step_of(path), path) for path in checkpoints(str(folder))]
    steps = dict(sorted((step, path) for step, path in folders if step is not None))
    if not steps:
        raise ValueError(f"--checkpoints {folder}: no checkpoint-N in it, and no trainer_state.json")
    named = [NamedModel(f"{name}, step {step}", path) for step, path in steps.items()]
    models += [model for model in named if model not in models]
    return Run(name, list(steps), [model.name for model in named])


def without_earlier(measured: dict[str, Measurement], runs: list[Run]) -> dict[str, Measurement]:
    """The measurements without all but the last checkpoint of each run."""
    earlier = {name for run in runs for name in run.models[:-1]}
    return {name: measurement for name, measurement in measured.items() if name not in earlier}


# --- tables -----------------------------------------------------------------------------------------------------------


def curve(
    measurement: Measurement,
    what: str,
    groups: int | tuple[int, ...],
    part: tuple[bool, ...] = measure.WITHOUT_SINKS,
) -> Curve:
    """Statistics of the value `what` in each layer.

    A cosine's median is taken from the angle, which keeps values apart where all cosines are near 1.
    """
    layers = range(measurement.layers + (what in STATE_METRICS))
    values = [measurement.of(what, groups, layer, part) for layer in layers]
    means, medians = ([of(layer) for layer in values] for of in (measure.mean, measure.median))
    if what == "cosine":
        medians = np.cos(np.deg2rad(curve(measurement, "turn", groups, part).median))
    return Curve(np.array(means), np.array(medians), np.array(list(map(len, values))))


def summary(measured: dict[str, Measurement], view: View) -> list[TableRow]:
    """A row per model and group that has tokens, without the sinks, and with them where there are any."""
    rows = []
    for model, measurement in measured.items():
        for group, label in GROUPS.items():
            counts = {part: len(measurement.of("norm", group, 0, part)) for part in SUFFIX}
            for part, count in counts.items():
                if count and not (part == WITH_SINKS and count == counts[measure.WITHOUT_SINKS]):
                    row = {"model": model, "tokens": label + SUFFIX[part], "count": count}
                    rows.append(row | view.cells(measurement, group, part))
    return rows


def layer_rows(measured: dict[str, Measurement], names: tuple[str, ...]) -> list[TableRow]:
    """A row per model, group and layer: mean and median of the values `names`, without the sinks and with them."""
    rows = []
    for model, measurement in measured.items():
        for group, label in GROUPS.items():
            curves = {(name, part): curve(measurement, name, group, part) for name in names for part in SUFFIX}
            for layer in np.flatnonzero(curves[names[0], WITH_SINKS].count).tolist():
                every, without = (
                    int(curves[names[0], part].count[layer]) for part in (WITH_SINKS, measure.WITHOUT_SINKS)
                )
                row = {"model": model, "tokens": label, "layer": layer, "count with sinks": every}
                row["sinks"] = every - without
                for (name, part), values in curves.items():
                    if layer < len(values.mean):
                        row[f"{name} mean{SUFFIX[part]}"] = float(values.mean[layer])
                        row[f"{name} median{SUFFIX[part]}"] = float(values.median[layer])
                rows.append(row)
    return rows


def write_sinks(args: argparse.Namespace, measured: dict[str, Measurement]) -> None:
    """Writes every model's sinks to `<command>-sinks`, the most frequent first."""
    rows = []
    for model, measurement in measured.items():
        places: dict[tuple, list[dict[str, Any]]] = {}
        for sink in measurement.sinks:
            places.setdefault((sink["group"], sink["position"], sink["token"]), []).append(sink)
        largest = {place: max(sink["ratio"] for sink in sinks) for place, sinks in places.items()}
        order = sorted(places, key=lambda place: (-len(places[place]), -largest[place]))
        for place in order[:SHOWN_SINKS]:
            (group, position, token), sinks = place, places[place]
            row = {"model": model, "tokens": GROUPS[group], "position": position, "token": repr(token) if token else ""}
            row |= {"samples": f"{len(sinks)} of {measurement.count}"}
            row["states"] = f"{min(sink['first'] for sink in sinks)} to {max(sink['last'] for sink in sinks)}"
            row |= {"largest norm": max(sink["norm"] for sink in sinks), "over the median": largest[place]}
            rows.append(row)
        if len(order) > SHOWN_SINKS:
            print(f"{model}: {len(order) - SHOWN_SINKS} rarer sinks are not listed")
    ratio = f"{measure.SINK_RATIO:.0f} times the median of"
    if rows:
        print(f"\nsinks (norm over {ratio} the sample's tokens of the same kind):")
        write_result(args, rows, name=f"{args.command}-sinks")
    else:
        print(f"no sinks: no token's norm exceeds {ratio} its kind in its sample")


def gap(measurement: Measurement) -> np.ndarray:
    """Median angle that text turns by over the median angle that visual tokens turn by, per layer [L]."""
    return curve(measurement, "turn", TEXT_GROUPS).median / curve(measurement, "turn", VISUAL).median


def verdict(model: str, measurement: Measurement) -> str:
    """One sentence: by how much text turns faster than visual tokens, or slower."""
    ratio = gap(measurement)
    mean = math.exp(float(np.nanmean(np.log(ratio))))
    return (
        f"{model}: a layer turns text by {mean:.2f} times the angle of visual tokens (geometric mean of the layers); "
        f"visual tokens are slower in {int((ratio > 1).sum())} of {len(ratio)} layers"
    )


# --- figures ----------------------------------------------------------------------------------------------------------


def draw_runs(args: argparse.Namespace, rows: list[TableRow], runs: list[Run]) -> None:
    """The cosine's mean per layer over a run's checkpoints (Figure 5): a column per run and kind of token."""
    steps = {model: (run.name, step) for run in runs for step, model in zip(run.steps, run.models, strict=True)}
    kinds = {GROUPS[VISUAL]: "visual tokens", GROUPS[TEXT_AFTER]: "text after the image"}
    points = [
        row | {"step": steps[row["model"]][1], "column": f"{steps[row['model']][0]}:\n{kinds[row['tokens']]}"}
        for row in rows
        if row["model"] in steps and row["tokens"] in kinds
    ]
    numbers, colours = sorted({row["step"] for row in points}), import_pyplot().get_cmap("viridis_r")
    styles = {str(step): {"color": colours(step / max(1, *numbers))} for step in numbers}
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
