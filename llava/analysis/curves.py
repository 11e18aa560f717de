"""Curves over the LLM's layers, as tables and figures; a command is a view of one measurement (see `measure`)."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from llava.analysis import measure, samples
from llava.analysis.commands import NamedModel, required_models
from llava.analysis.measure import ADDED, STATE_METRICS, STEP_METRICS, TEXT_GROUPS, WITH_SINKS, Measurement
from llava.analysis.models import check
from llava.analysis.norm_params import checkpoints, step_of
from llava.analysis.output import TableRow, figure, write_result
from llava.analysis.probe import GROUPS, SPECIAL, TEXT_AFTER, TEXT_BEFORE, VISUAL
from llava.utils.presentation import NEUTRAL, SPECIAL_COLOUR, TEXT_BEFORE_COLOUR, TEXT_COLOUR, VISUAL_COLOUR, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_SINKS = 12
SUFFIX = {measure.WITHOUT_SINKS: "", WITH_SINKS: " with sinks"}
# Groups as a figure draws them: label, colour, line style, whether with a band.
LINES = {
    VISUAL: ("visual tokens", VISUAL_COLOUR, "-", True),
    TEXT_AFTER: ("text after the image", TEXT_COLOUR, "-", True),
    TEXT_BEFORE: ("text before it", TEXT_BEFORE_COLOUR, "--", False),
    SPECIAL: ("special tokens", SPECIAL_COLOUR, ":", False),
}


class Curve(NamedTuple):
    """Statistics per layer or state, each [L] or [L + 1]; NaN where no token was seen."""

    mean: np.ndarray
    median: np.ndarray
    low: np.ndarray  # 25 %
    high: np.ndarray  # 75 %
    count: np.ndarray


class View(NamedTuple):
    """What one command shows of the measurement.

    Attributes:
        cells: makes the summary's row for one group of tokens, without the sinks or with them.
        columns: the values in the table of all layers.
        panels: the values in the figure, a row of panels each, with the label of its axis.
        logarithmic: the values with a logarithmic axis; cosines have an axis of their own, see `cosine_scale`.
        sinks: whether the figure shows the sinks.
    """

    cells: Callable[[Measurement, int, tuple[bool, ...]], TableRow]
    columns: tuple[str, ...]
    panels: dict[str, str]
    logarithmic: tuple[str, ...] = ()
    sinks: bool = False


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


def write_view(args: argparse.Namespace, view: View) -> tuple[dict[str, Measurement], list[Run]]:
    """Measures every model, and writes the view's summary, its `-layers` and `-sinks` tables and its figure."""
    runs = [expand(folder, args.models) for folder in args.checkpoints]
    drawn = samples.choose(args)
    for model in args.models:
        check(model, args)
    measured = {model.name: measure.measure_layers(model, drawn, args) for model in required_models(args.models)}
    write_result(args, summary(measured, view))
    write_result(args, layer_rows(measured, view.columns), name=f"{args.command}-layers", show=False)
    write_sinks(args, measured)
    draw_view(args, without_earlier(measured, runs), view)
    return measured, runs


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
    """The measurements for a figure with one panel per model: of each run only the last checkpoint."""
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

    A cosine's quantiles are taken from the angle, which keeps values apart where all cosines are near 1.
    """
    layers = range(measurement.layers + (what in STATE_METRICS))
    values = [measurement.of(what, groups, layer, part) for layer in layers]
    angles = [measurement.of(what.replace("cosine", "turn"), groups, layer, part) for layer in layers]
    columns = [[np.percentile(layer, p) if len(layer) else math.nan for layer in angles] for p in (50, 25, 75)]
    median, low, high = map(np.array, columns)
    if what.endswith("cosine"):  # the larger angle has the smaller cosine
        median, high, low = (np.cos(np.deg2rad(column)) for column in (median, low, high))
    return Curve(np.array(list(map(measure.mean, values))), median, low, high, np.array(list(map(len, values))))


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
    steps = tuple(name for name in names if name in STEP_METRICS)
    return [
        {"model": model, "tokens": f"{label}: {ADDED}after the layer" if prefix else label} | row
        for model, measurement in measured.items()
        for group, label in GROUPS.items()
        for prefix, kinds in (("", names), (ADDED, steps))
        for row in _layers(measurement, group, kinds, prefix)
    ]


def _layers(measurement: Measurement, group: int, names: tuple[str, ...], prefix: str) -> list[TableRow]:
    # A row per layer that has values of this prefix.
    values = {(name, part): curve(measurement, prefix + name, group, part) for name in names for part in SUFFIX}
    rows = []
    for layer in np.flatnonzero(values[names[0], WITH_SINKS].count if names else ()).tolist():
        every, without = (int(values[names[0], part].count[layer]) for part in (WITH_SINKS, measure.WITHOUT_SINKS))
        row = {"layer": layer, "count with sinks": every, "sinks": every - without}
        for (name, part), layer_values in values.items():
            if layer < len(layer_values.mean):
                row[f"{name} mean{SUFFIX[part]}"] = float(layer_values.mean[layer])
                row[f"{name} median{SUFFIX[part]}"] = float(layer_values.median[layer])
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


def draw_view(args: argparse.Namespace, measured: dict[str, Measurement], view: View) -> None:
    """A column per model, a row per value that all models share the scale of, with the groups' legend below."""
    rows, columns = len(view.panels), len(measured)
    size = (max(3.4 * columns, 5.5), 2.9 * rows + 0.6)
    with figure(args, rows, columns, figsize=size, sharey="row", sharex=True, squeeze=False) as (drawn, axes):
        for column, (name, measurement) in enumerate(measured.items()):
            for row, what in enumerate(view.panels):
                draw_groups(axes[row, column], measurement, what, view.sinks)
            axes[0, column].set_title(name)
            axes[-1, column].set_xlabel("layer")
        for row, (what, label) in enumerate(view.panels.items()):
            axes[row, 0].set_ylabel(label)
            for axis in axes[row]:  # a shared axis shares limits, not the scale
                if what == "cosine":
                    cosine_scale(axis)
                elif what in view.logarithmic:
                    axis.set_yscale("log")
        handles = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
        drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 3))


def draw_groups(axis: "Axes", measurement: Measurement, what: str, sinks: bool) -> None:
    """Median per group without the sinks, with the middle half as a band; and of all sinks, if these are shown."""
    for group, (label, colour, style, band) in LINES.items():
        values = curve(measurement, what, group)
        if values.count.any():
            axis.plot(values.median, style, color=colour, label=label, linewidth=2.2 if band else 1.3)
            if band:
                layers = np.arange(len(values.median))
                axis.fill_between(layers, values.low, values.high, color=colour, alpha=0.2, linewidth=0)
    values = curve(measurement, what, tuple(GROUPS), measure.ONLY_SINKS)
    if sinks and values.count.any():
        axis.plot(values.median, "-.", color="black", linewidth=1, label="sinks")
    axis.margins(x=0.01)


def cosine_scale(axis: "Axes") -> None:
    """Spreads cosines near 1, where nearly all are, by the logarithm of their distance from it."""

    def spread(cosine: ArrayLike) -> np.ndarray:
        return -np.log10(np.clip(1 - np.asarray(cosine), 1e-6, None))

    def back(value: ArrayLike) -> np.ndarray:
        return 1 - 10 ** -np.asarray(value)

    shown = [other.dataLim for other in axis.get_shared_y_axes().get_siblings(axis)]
    low, high = spread(min(box.y0 for box in shown)), spread(max(box.y1 for box in shown))
    low, high = back(low - 0.05 * (high - low)), back(high + 0.05 * (high - low))
    axis.set_yscale("function", functions=(spread, back))
    ticks = [t for t in (-0.5, 0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999) if low < t < high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ylim(float(low), float(high))


def draw_runs(args: argparse.Namespace, measured: dict[str, Measurement], runs: list[Run]) -> None:
    """The cosine's mean per layer over a run's checkpoints (Figure 5): a column per run, visual above, text below."""
    size, name = (max(3.8 * len(runs), 5.5), 5.8), f"{args.command}-checkpoints"
    with figure(args, 2, len(runs), name=name, figsize=size, sharex=True, sharey=True, squeeze=False) as (drawn, axes):
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = ScalarMappable(Normalize(0, max(max(run.steps) for run in runs)), colormaps["viridis_r"])
        for column, run in enumerate(runs):
            for row, (groups, label) in enumerate(((VISUAL, "visual tokens"), (TEXT_GROUPS, "text tokens"))):
                for step, model in zip(run.steps, run.models, strict=True):
                    mean = curve(measured[model], "cosine", groups).mean
                    axes[row, column].plot(mean, color=scale.to_rgba(step), linewidth=1.6)
                axes[row, 0].set_ylabel(f"cosine of successive\nlayers, {label}")
            axes[0, column].set_title(run.name)
            axes[1, column].set_xlabel("layer")
        for axis in axes.flat:
            cosine_scale(axis)
        drawn.colorbar(scale, ax=axes, label="optimizer step", shrink=0.7)


def draw_gap(args: argparse.Namespace, measured: dict[str, Measurement]) -> None:
    """One line per model: the angle that a layer turns text by, as a multiple of the visual tokens' angle."""
    with figure(args, name="update-rates-gap", figsize=(7, 4)) as (drawn, axis):
        for model, look in looks(measured).items():
            axis.plot(gap(measured[model]), label=model, **look)
        axis.axhline(1, color=NEUTRAL, linewidth=1)
        axis.set(xlabel="layer", yscale="log")  # before the limits are read: a linear scale's may lie below 0
        low, high = axis.get_ylim()
        low, high = min(low, 0.7), max(high, 1.5)
        axis.set_ylim(low, high)
        ticks = [tick for tick in (0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_ylabel("angle text turns by over\nangle visual tokens turn by")
        axis.set_title("above 1 visual tokens are slower, below 1 faster")  # where no curve is
        drawn.legend(loc="outside lower center", ncols=3)
