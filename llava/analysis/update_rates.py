"""How fast visual and text tokens turn in every layer of the LLM, for several models or checkpoints side by side.

Paper figures 2 to 5: cosine between the states before and after a layer (near 1: slow), size of a layer's update over
the state's norm, and angle to the LLM's input. Visual features that a model adds between layers (DeepStack) are in no
layer's turn.
"""

import argparse

from llava.analysis import curves

NAMES = ("cosine", "turn", "update", "drift")
PANELS = {
    "cosine median": {"ylabel": "cosine of successive layers"},
    "update median": {"ylabel": "update over norm", "yscale": "log"},
    "drift median": {"ylabel": "angle to the input (°)"},
}

add_arguments = curves.add_arguments


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`-layers`), and figures of the values, the gap, the runs."""
    measured, runs, rows = curves.write_view(args, NAMES, PANELS)
    for model, measurement in measured.items():
        print(curves.verdict(model, measurement))
    curves.draw_gap(args, curves.without_earlier(measured, runs))
    if runs:
        curves.draw_runs(args, rows, runs)
