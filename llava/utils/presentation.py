"""How tables and figures look, whichever command writes them."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

PAPER = " (paper)"
"""Ends the name of a column with the paper's number; the measured column has the same name without it."""

# A colour has one meaning in all figures: a kind of token, or a norm. The colour-blind can tell them apart.
VISUAL_COLOUR, TEXT_COLOUR, TEXT_BEFORE_COLOUR, SPECIAL_COLOUR = "#D55E00", "#0072B2", "#56B4E9", "#999999"
NORM_COLOURS = {
    "none": "#000000",
    "layernorm": "#E69F00",
    "gwc_layernorm": "#009E73",
    "rmsnorm": "#CC79A7",
    "gwc_rmsnorm": "#882255",
    "clip": "#66331A",
    "pre_layernorm_mlp2x_gelu": "#B8A000",
    "scale": "#AA99DD",  # this and the next only in committed records
    "gwc_scale": "#332288",
}
_OTHER_COLOURS = ("#4477AA", "#AA3377", "#66AA55", "#775533", "#66CCEE", "#CCBB44", "#BB5566", "#114477")
"""Of variants of a norm, and of models that are not an arm."""
NEUTRAL = "#777777"
"""The colour of what is neither an arm nor a kind of token: chance, pairs of arms."""
STYLE = {
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 3.5,  # long enough to tell dashes apart
    "svg.fonttype": "none",  # text stays text, which can be searched and edited
    "svg.hashsalt": "llava",  # the same figure gives the same file
}
Row = Mapping[str, Any]


def looks(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Colour and line of each arm or model of a figure, as Matplotlib's arguments.

    A norm, also as `norm/stage`, has its own colour whatever else is drawn; all others take the next one that is left.
    """
    left = itertools.cycle(itertools.product(("-", "--", ":"), _OTHER_COLOURS))
    chosen = {}
    for name in dict.fromkeys(names):
        own = NORM_COLOURS.get(name.partition("/")[0])
        line, colour = ("-", own) if own else next(left)
        chosen[name] = {"color": colour, "linestyle": line}
    return chosen


def column_names(rows: Sequence[Row]) -> list[str]:
    """Every column of `rows` in the order in which they first occur, a paper's column after the measured column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    order = {name: index for index, name in enumerate(names)}
    return sorted(names, key=lambda name: (order.get(name.removesuffix(PAPER), order[name]), name.endswith(PAPER)))


def number_columns(rows: Sequence[Row]) -> set[str]:
    """Columns to align right: some cell is a number, or all are texts that start with one, as `26.6 (20 to 30)`."""
    right = set()
    for name in column_names(rows):
        cells = [row[name] for row in rows if row.get(name) is not None]
        numbers = any(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)
        if numbers or (cells and all(re.match(r"[-+]?\d", str(cell)) for cell in cells)):
            right.add(name)
    return right


def format_table(rows: Sequence[Row]) -> str:
    """`rows` as aligned text: numbers to the right with four significant digits, text to the left."""
    right, columns = number_columns(rows), []
    for name in column_names(rows):
        cells = [name, *(_cell(row.get(name)) for row in rows)]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if name in right else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if value and math.isfinite(value) and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def import_pyplot() -> ModuleType:
    """`matplotlib.pyplot` with a backend that needs no display.

    Raises:
        ImportError: Matplotlib is not installed; the message says which extra brings it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need Matplotlib: pip install 'llava[analysis]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
