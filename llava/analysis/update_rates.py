"""How fast visual and text tokens turn in every layer of the LLM, for several models or checkpoints beside each other.

Paper figures 2 to 5: cosine between the states before and after a layer (near 1: slow), size of a layer's update over
the state's norm, and angle to the LLM's input. Visual features that a model adds between layers (DeepStack) are in no
layer's turn; the table of the layers has rows of their own for them.
"""

import argparse
import math
from typing import Any

import numpy as np

from llava.analysis import curves, layer_statistics
from llava.analysis.commands import Needs
from llava.analysis.layer_statistics import ADDED, TEXT_GROUPS, WITH_SINKS, WITHOUT_SINKS, Measurement
from llava.analysis.output import figure, write_result
from llava.analysis.probe import GROUPS, VISUAL
from llava.presentation import COLOURS

NEEDS = Needs()

VALUES = {"cosine": "cosine of successive layers", "update": "update over norm", "drift": "angle to the input (°)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layer_statistics.add_arguments(parser)
    curves.add_checkpoints(parser)


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`-layers`), the sinks (`-sinks`), and figures of the values, the gap, the runs."""
    measured, runs = curves.measure_all(args)
    write_result(args, summary(measured))
    write_result(
        args, curves.layer_rows(measured, ("cosine", "turn", "update", "drift")), name="update-rates-layers", show=False
    )
    curves.write_sinks(args, measured)
    for model, measurement in measured.items():
        print(verdict(model, measurement))
        added = sorted({layer for what, _, layer, _ in measurement.streams if what.startswith(ADDED)})
        if added:
            layers = ", ".join(map(str, added))
            print(f"{model}: adds features behind layers {layers}; rows of their own, in no layer's turn")
    shown = curves.without_earlier(measured, runs)
    draw_values(args, shown)
    draw_gap(args, shown)
    if runs:
        curves.draw_runs(args, measured, runs)


def summary(measured: dict[str, Measurement]) -> list[dict[str, Any]]:
    """Every value's mean over the layers of its mean and of its median, per group, without the sinks and with them."""
    rows = []
    for model, measurement in measured.items():
        for group, label in GROUPS.items():
            for part in (WITHOUT_SINKS, WITH_SINKS):
                found = {what: curves.curve(measurement, what, group, part) for what in ("cosine", "update", "drift")}
                count = int(found["cosine"].count[0])
                if not count or (part == WITH_SINKS and count == rows[-1]["count"]):
                    continue  # no tokens, or no sinks among them
                row = {"model": model, "tokens": label + curves.SUFFIX[part], "count": count}
                for what in ("cosine", "update"):
                    row[f"{what} mean"] = float(np.nanmean(found[what].mean))
                    row[f"{what} median"] = float(np.nanmean(found[what].median))
                row["angle to input, mean"] = float(found["drift"].mean[-1])
                row["angle to input, median"] = float(found["drift"].median[-1])
                rows.append(row)
    return rows


def gap(measurement: Measurement) -> np.ndarray:
    """Median angle that text turns by over the median angle that visual tokens turn by, per layer [L]."""
    return curves.curve(measurement, "turn", TEXT_GROUPS).median / curves.curve(measurement, "turn", VISUAL).median


def verdict(model: str, measurement: Measurement) -> str:
    """One sentence: by how much text turns faster than visual tokens, or slower."""
    ratio = gap(measurement)
    mean = math.exp(float(np.nanmean(np.log(ratio))))
    slower = int((ratio > 1).sum())
    return (
        f"{model}: a layer turns text by {mean:.2f} times the angle of visual tokens (geometric mean of the layers); "
        f"visual tokens are slower in {slower} of {len(ratio)} layers"
    )


def draw_values(args: argparse.Namespace, measured: dict[str, Measurement]) -> None:
    """A column per model, a row per value."""
    with curves.panels(args, measured, len(VALUES)) as axes:
        for column, measurement in enumerate(measured.values()):
            for row, what in enumerate(VALUES):
                curves.draw_groups(axes[row, column], measurement, what)
            axes[-1, column].set_xlabel("layer")
        for row, label in enumerate(VALUES.values()):
            axes[row, 0].set_ylabel(label)
        for column in range(len(measured)):  # a shared axis shares limits, not the scale
            curves.cosine_scale(axes[0, column])
            axes[1, column].set_yscale("log")


def draw_gap(args: argparse.Namespace, measured: dict[str, Measurement]) -> None:
    """One line per model: how many times the visual tokens' angle a layer turns text by."""
    with figure(args, name="update-rates-gap", figsize=(7, 3.8)) as (_, axis):
        for index, (model, measurement) in enumerate(measured.items()):
            axis.plot(gap(measurement), color=COLOURS[index % len(COLOURS)], label=model)
        axis.axhline(1, color="black", linewidth=1, linestyle="--")
        low, high = axis.get_ylim()
        low, high = min(low, 0.7), max(high, 1.5)
        axis.set(xlabel="layer", yscale="log", ylim=(low, high))
        ticks = [tick for tick in (0.1, 0.2, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_ylabel("angle text turns by over\nangle visual tokens turn by")
        axis.text(0.99, 0.97, "visual tokens slower", transform=axis.transAxes, ha="right", va="top", color="#555555")
        axis.text(
            0.99, 0.03, "visual tokens faster", transform=axis.transAxes, ha="right", va="bottom", color="#555555"
        )
        axis.legend(loc="best")
