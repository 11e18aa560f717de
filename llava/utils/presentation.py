"""How tables and figures look, whichever command writes them."""

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

PAPER = " (paper)"
"""Ends the name of a column with the paper's number; the measured column has the same name without it."""

# Okabe and Ito's colours, which the colour-blind can tell apart; a modality has the same colour in every figure.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
VISUAL_COLOUR, TEXT_COLOUR, TEXT_BEFORE_COLOUR, SPECIAL_COLOUR = "#D55E00", "#0072B2", "#56B4E9", "#999999"
STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "svg.fonttype": "none",  # text stays text, which can be searched and edited
    "svg.hashsalt": "llava",  # the same figure gives the same file
}
Row = Mapping[str, Any]


def column_names(rows: Sequence[Row]) -> list[str]:
    """Every column of `rows` in the order in which they first occur, a paper's column after the measured column."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    order = {name: index for index, name in enumerate(names)}
    return sorted(names, key=lambda name: (order.get(name.removesuffix(PAPER), order[name]), name.endswith(PAPER)))


def format_table(rows: Sequence[Row]) -> str:
    """`rows` as aligned text: numbers to the right with four significant digits, text to the left."""
    columns = column_names(rows)
    cells = [columns] + [[_cell(row.get(name)) for name in columns] for row in rows]
    numeric = [all(isinstance(row.get(n), int | float | None) for row in rows) for n in columns]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = []
    for line in cells:
        parts = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
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
