"""Curves over the LLM's layers, as tables and figures: one measurement, of which each command is a view.

A view (`layer-norms`, `update-rates`) says which values it shows; the measurement is that of `layer_statistics`.
"""

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from llava.analysis import inputs, layer_statistics, loading
from llava.analysis.layer_statistics import (
    ADDED,
    ONLY_SINKS,
    SINK_RATIO,
    STATE_METRICS,
    STEP_METRICS,
    TEXT_GROUPS,
    WITH_SINKS,
    WITHOUT_SINKS,
    Measurement,
    measure_layers,
)
from llava.analysis.models import NamedModel, required_models
from llava.analysis.norm_params import checkpoints, step_of
from llava.analysis.output import TableRow, figure, write_result
from llava.analysis.probe import GROUPS, SPECIAL, TEXT_AFTER, TEXT_BEFORE, VISUAL
from llava.utils.presentation import NEUTRAL, SPECIAL_COLOUR, TEXT_BEFORE_COLOUR, TEXT_COLOUR, VISUAL_COLOUR, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_SINKS = 12
SUFFIX = {WITHOUT_SINKS: "", WITH_SINKS: " with sinks"}
# Groups as a figure draws them: colour, line style, whether with a band.
LINES = {
    VISUAL: (VISUAL_COLOUR, "-", True),
    TEXT_AFTER: (TEXT_COLOUR, "-", True),
    TEXT_BEFORE: (TEXT_BEFORE_COLOUR, "--", False),
    SPECIAL: (SPECIAL_COLOUR, ":", False),
}
LABELS = {
    VISUAL: "visual tokens",
    TEXT_AFTER: "text after the image",
    TEXT_BEFORE: "text before it",
    SPECIAL: "special tokens",
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
    layer_statistics.add_arguments(parser)
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
    measured, runs = measure_all(args)
    write_result(args, summary(measured, view))
    write_result(args, layer_rows(measured, view.columns), name=f"{args.command}-layers", show=False)
    write_sinks(args, measured)
    draw_view(args, without_earlier(measured, runs), view)
    return measured, runs


def measure_all(args: argparse.Namespace) -> tuple[dict[str, Measurement], list[Run]]:
    """Measures every model of the command line and of `--checkpoints`; the measurements by model name, and the runs."""
    runs = [expand(folder, args.models) for folder in args.checkpoints]
    samples = inputs.choose(args)
    for model in args.models:
        loading.check(model, args)
    return {model.name: measure_layers(model, samples, args) for model in required_models(args.models)}, runs


def expand(folder: Path, models: list[NamedModel]) -> Run:
    """Adds a run's checkpoints to `models`.

    Raises:
        ValueError: the folder has none whose step is known.
    """
    name = "/".join([part for part in folder.parts if part != "/"][-2:])
    folders = [(step_of(path), path) for path in checkpoints(str(folder))]
    steps = sorted((step, path) for step, path in folders if step is not None)
    if not steps:
        raise ValueError(f"--checkpoints {folder}: no checkpoint-N in it, and no trainer_state.json")
    named = [NamedModel(f"{name}, step {step}", path) for step, path in dict(steps).items()]
    models += [model for model in named if model not in models]
    return Run(name, [step for step, _ in dict(steps).items()], [model.name for model in named])


def without_earlier(measured: dict[str, Measurement], runs: list[Run]) -> dict[str, Measurement]:
    """The measurements for a figure with one panel per model: of each run only the last checkpoint."""
    earlier = {name for run in runs for name in run.models[:-1]}
    return {name: measurement for name, measurement in measured.items() if name not in earlier}


def curve(
    measurement: Measurement, what: str, groups: int | Sequence[int], part: tuple[bool, ...] = WITHOUT_SINKS
) -> Curve:
    """Statistics of the value `what` in each layer, see `Measurement.stream`.

    A cosine's quantiles are taken from the angle, which keeps values apart where all cosines are near 1.
    """
    layers = range(measurement.layers + (what in STATE_METRICS))
    streams = [measurement.stream(what, groups, layer, part) for layer in layers]
    quantiles = [measurement.stream(what.replace("cosine", "turn"), groups, layer, part) for layer in layers]
    columns = [np.array([stream.percentile(p) for stream in quantiles]) for p in (50, 25, 75)]
    if what.endswith("cosine"):
        columns = [np.cos(np.deg2rad(column)) for column in columns]
        columns = [columns[0], columns[2], columns[1]]  # the larger angle has the smaller cosine
    mean = np.array([stream.mean if stream.count else math.nan for stream in streams])
    return Curve(mean, *columns, np.array([stream.count for stream in streams]))


def summary(measured: dict[str, Measurement], view: View) -> list[TableRow]:
    """A row per model and group that has tokens, without the sinks, and with them where there are any."""
    rows = []
    for model, measurement in measured.items():
        for group, label in GROUPS.items():
            without, everything = (measurement.stream("norm", group, 0, part).count for part in SUFFIX)
            for part, count in ((WITHOUT_SINKS, without), (WITH_SINKS, everything)):
                if not count or (part == WITH_SINKS and count == without):
                    continue  # no tokens, or no sinks among them
                row = {"model": model, "tokens": label + SUFFIX[part], "count": count}
                rows.append(row | view.cells(measurement, group, part))
    return rows


def layer_rows(measured: dict[str, Measurement], names: tuple[str, ...]) -> list[TableRow]:
    """A row per model, group and layer: mean and median of the values `names`, without the sinks and with them."""
    rows = []
    for model, measurement in measured.items():
        for group, label in GROUPS.items():
            rows += [{"model": model, "tokens": label} | row for row in _layers(measurement, group, names)]
            steps = tuple(name for name in names if name in STEP_METRICS)
            added = _layers(measurement, group, steps, ADDED) if steps else []
            rows += [{"model": model, "tokens": f"{label}: {ADDED}after the layer"} | row for row in added]
    return rows


def _layers(measurement: Measurement, group: int, names: tuple[str, ...], prefix: str = "") -> list[TableRow]:
    # A row per layer that has values of this prefix.
    values = {(name, part): curve(measurement, prefix + name, group, part) for name in names for part in SUFFIX}
    everything, rows = values[names[0], WITH_SINKS].count, []
    for layer in np.flatnonzero(everything).tolist():
        row = {"layer": layer, "count with sinks": int(everything[layer])}
        row["sinks"] = row["count with sinks"] - int(values[names[0], WITHOUT_SINKS].count[layer])
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
        sinks = sorted(measurement.sinks.items(), key=lambda item: (-item[1]["samples"], -item[1]["ratio"]))
        for (group, position, token), sink in sinks[:SHOWN_SINKS]:
            rows.append(
                {
                    "model": model,
                    "tokens": GROUPS[group],
                    "position": position,
                    "token": repr(token) if token else "",
                    "samples": f"{sink['samples']} of {measurement.done}",
                    "states": f"{sink['first']} to {sink['last']}",
                    "largest norm": sink["norm"],
                    "over the median": sink["ratio"],
                }
            )
        if len(sinks) > SHOWN_SINKS:
            print(f"{model}: {len(sinks) - SHOWN_SINKS} rarer sinks are not listed")
    if rows:
        print(f"\nsinks (norm over {SINK_RATIO:.0f} times the median of the sample's tokens of the same kind):")
        write_result(args, rows, name=f"{args.command}-sinks")
    else:
        print(f"no sinks: no token's norm exceeds {SINK_RATIO:.0f} times the median of its kind in its sample")


def gap(measurement: Measurement) -> np.ndarray:
    """Median angle that text turns by over the median angle that visual tokens turn by, per layer [L]."""
    return curve(measurement, "turn", TEXT_GROUPS).median / curve(measurement, "turn", VISUAL).median


def verdict(model: str, measurement: Measurement) -> str:
    """One sentence: by how much text turns faster than visual tokens, or slower."""
    ratio = gap(measurement)
    mean = math.exp(float(np.nanmean(np.log(ratio))))
    slower = int((ratio > 1).sum())
    return (
        f"{model}: a layer turns text by {mean:.2f} times the angle of visual tokens (geometric mean of the layers); "
        f"visual tokens are slower in {slower} of {len(ratio)} layers"
    )


# --- figures ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def panels(
    args: argparse.Namespace, measured: dict[str, Measurement], rows: int, **options: Any
) -> Iterator[np.ndarray]:
    """Axes [rows, models] that share each row's scale, with the groups' legend below."""
    size = (max(3.4 * len(measured), 5.5), 2.9 * rows + 0.6)
    with figure(args, rows, len(measured), figsize=size, sharey="row", sharex=True, squeeze=False, **options) as (f, a):
        yield a
        for axis, name in zip(a[0], measured, strict=True):
            axis.set_title(name)
        handles = dict(zip(*reversed(a[0, 0].get_legend_handles_labels()), strict=True))
        f.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 3))


def draw_view(args: argparse.Namespace, measured: dict[str, Measurement], view: View) -> None:
    """A column per model, a row per value."""
    with panels(args, measured, len(view.panels)) as axes:
        for column, measurement in enumerate(measured.values()):
            for row, what in enumerate(view.panels):
                draw_groups(axes[row, column], measurement, what)
                if view.sinks:
                    draw_sinks(axes[row, column], measurement, what)
            axes[-1, column].set_xlabel("layer")
        for row, (what, label) in enumerate(view.panels.items()):
            axes[row, 0].set_ylabel(label)
            for axis in axes[row]:  # a shared axis shares limits, not the scale
                if what == "cosine":
                    cosine_scale(axis)
                elif what in view.logarithmic:
                    axis.set_yscale("log")


def draw_groups(axis: "Axes", measurement: Measurement, what: str) -> None:
    """Median per group without the sinks, with the middle half as a band."""
    for group, (colour, style, band) in LINES.items():
        values = curve(measurement, what, group)
        if not values.count.any():
            continue
        layers = np.arange(len(values.median))
        axis.plot(layers, values.median, style, color=colour, label=LABELS[group], linewidth=2.2 if band else 1.3)
        if band:
            axis.fill_between(layers, values.low, values.high, color=colour, alpha=0.2, linewidth=0)
    axis.margins(x=0.01)


def draw_sinks(axis: "Axes", measurement: Measurement, what: str) -> None:
    """Median of all sinks, where there are any."""
    values = curve(measurement, what, tuple(GROUPS), ONLY_SINKS)
    if values.count.any():
        axis.plot(values.median, "-.", color="black", linewidth=1, label="sinks")


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
    size = (max(3.8 * len(runs), 5.5), 5.8)
    name = f"{args.command}-checkpoints"
    with figure(args, 2, len(runs), name=name, figsize=size, sharex=True, sharey=True, squeeze=False) as (drawn, axes):
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        last = max(max(run.steps) for run in runs)
        scale = ScalarMappable(Normalize(0, last), colormaps["viridis_r"])
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
