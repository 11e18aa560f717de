"""L2 norms of visual and text tokens in every layer of the LLM, for several models or checkpoints beside each other.

Paper figure 4. A norm is taken of what enters each layer, and of what leaves the last one before the final norm.
"""

import argparse
from typing import Any

from llava.analysis import curves, layer_statistics
from llava.analysis.commands import Needs
from llava.analysis.layer_statistics import WITH_SINKS, WITHOUT_SINKS, Measurement
from llava.analysis.output import write_result
from llava.analysis.probe import GROUPS

NEEDS = Needs()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layer_statistics.add_arguments(parser)
    curves.add_checkpoints(parser)


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`layer-norms-layers`), the sinks (`layer-norms-sinks`) and the figure."""
    measured, runs = curves.measure_all(args)
    write_result(args, summary(measured))
    write_result(args, curves.layer_rows(measured, ("norm",)), name="layer-norms-layers", show=False)
    curves.write_sinks(args, measured)
    shown = curves.without_earlier(measured, runs)
    with curves.panels(args, shown, 1) as axes:
        for axis, measurement in zip(axes[0], shown.values(), strict=True):
            curves.draw_groups(axis, measurement, "norm")
            curves.draw_sinks(axis, measurement, "norm")
            axis.set(yscale="log", xlabel="layer")
        axes[0, 0].set_ylabel("L2 norm of the hidden state\n(median, middle half)")


def summary(measured: dict[str, Measurement]) -> list[dict[str, Any]]:
    """Norms at the LLM's input, in the middle and at its end."""
    rows = []
    for model, measurement in measured.items():
        last = measurement.layers
        for group, label in GROUPS.items():
            for part in (WITHOUT_SINKS, WITH_SINKS):
                found = [measurement.stream("norm", group, layer, part) for layer in (0, last // 2, last)]
                if not found[0].count or (part == WITH_SINKS and found[0].count == rows[-1]["count"]):
                    continue  # no tokens, or no sinks among them
                row = {"model": model, "tokens": label + curves.SUFFIX[part], "count": found[0].count}
                for layer, stream in zip(("input", f"layer {last // 2}", "end"), found, strict=True):
                    row |= {f"{layer} mean": stream.mean, f"{layer} median": stream.median}
                rows.append(row)
    return rows
