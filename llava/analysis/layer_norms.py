"""L2 norms of visual and text tokens in every layer of the LLM, for several models or checkpoints side by side.

Paper figure 4. A norm is taken of what enters each layer, and of what leaves the last one before the final norm.
"""

import argparse

from llava.analysis import update_rates

PANELS = {"norm median": {"ylabel": "L2 norm of the hidden state (median)", "yscale": "log"}}

add_arguments = update_rates.add_arguments


def run(args: argparse.Namespace) -> None:
    """Writes a summary, every layer (`layer-norms-layers`) and the figure."""
    update_rates.write_view(args, ("norm",), PANELS)
