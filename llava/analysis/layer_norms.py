"""L2 norms of visual and text tokens in every layer of the LLM, for several models or checkpoints side by side.

Paper figure 4. A norm is taken of what enters each layer, and of what leaves the last one before the final norm.
"""

import argparse

from llava.analysis import curves
from llava.analysis.measure import Measurement, mean, median
from llava.analysis.output import TableRow


def cells(measurement: Measurement, group: int, part: tuple[bool, ...]) -> TableRow:
    """Norms at the LLM's input, in the middle and at its end."""
    last, row = measurement.layers, {}
    for name, layer in (("input", 0), (f"layer {last // 2}", last // 2), ("end", last)):
        norms = measurement.of("norm", group, layer, part)
        row |= {f"{name} mean": mean(norms), f"{name} median": median(norms)}
    return row


PANELS = {"norm median": {"ylabel": "L2 norm of the hidden state (median)", "yscale": "log"}}
VIEW = curves.View(cells, columns=("norm",), panels=PANELS)

add_arguments = curves.add_arguments


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`layer-norms-layers`), the sinks (`layer-norms-sinks`) and the figure."""
    curves.write_view(args, VIEW)
