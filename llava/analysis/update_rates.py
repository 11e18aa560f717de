"""How fast visual and text tokens turn in every layer of the LLM, for several models or checkpoints side by side.

Paper figures 2 to 5: cosine between the states before and after a layer (near 1: slow), size of a layer's update over
the state's norm, and angle to the LLM's input. Visual features that a model adds between layers (DeepStack) are in no
layer's turn.
"""

import argparse

import numpy as np

from llava.analysis import curves
from llava.analysis.measure import Measurement
from llava.analysis.output import TableRow


def cells(measurement: Measurement, group: int, part: tuple[bool, ...]) -> TableRow:
    """Every value's mean over the layers of its mean and of its median; of the angle to the input, at the end."""
    row = {}
    for what in ("cosine", "update"):
        curve = curves.curve(measurement, what, group, part)
        row |= {f"{what} mean": float(np.nanmean(curve.mean)), f"{what} median": float(np.nanmean(curve.median))}
    drift = curves.curve(measurement, "drift", group, part)
    return row | {"angle to input, mean": float(drift.mean[-1]), "angle to input, median": float(drift.median[-1])}


VIEW = curves.View(
    cells,
    columns=("cosine", "turn", "update", "drift"),
    panels={
        "cosine median": {"ylabel": "cosine of successive layers"},
        "update median": {"ylabel": "update over norm", "yscale": "log"},
        "drift median": {"ylabel": "angle to the input (°)"},
    },
)

add_arguments = curves.add_arguments


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`-layers`), the sinks (`-sinks`), and figures of the values, the gap, the runs."""
    measured, runs, rows = curves.write_view(args, VIEW)
    for model, measurement in measured.items():
        print(curves.verdict(model, measurement))
    curves.draw_gap(args, curves.without_earlier(measured, runs))
    if runs:
        curves.draw_runs(args, rows, runs)
