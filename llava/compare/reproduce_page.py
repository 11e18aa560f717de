"""The page of a reproduced table or figure: the paper's numbers, ours, the difference, figures, what ran on what."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare.report import render
from llava.compare.tables import TITLES, Statistics, measured_tables
from llava.utils.presentation import PAPER

Row = dict[str, Any]
MOST_ROWS = 30
"""Of a measured table on the page; longer ones, such as those of layers, are figures."""


def page_of(title: str, numbers: Sequence[Row], folder: Path, sources: Sequence[Row], notes: Sequence[str]) -> str:
    """The page in Markdown.

    Args:
        numbers: see `number`.
        folder: where the page and its figures are.
        sources: models and data, each with its revision or folder.
        notes: what is not here, and what the rest was measured with.
    """
    figures = [file.stem for file in sorted(folder.glob("*.png"))]
    measured = {name: rows for name, rows in measured_tables(folder).items() if len(rows) <= MOST_ROWS}
    tables = {"numbers": numbers, **measured, "models and data": sources}
    shown = {name: rows for name, rows in tables.items() if rows}
    return render("page.md.jinja", title=title, caveats=notes, figures=figures, tables=shown)


def number(what: str, paper: float | None, ours: float | None) -> Row:
    """A row: what is measured, the paper's number and ours in four digits, and their difference."""
    difference = None if paper is None or ours is None else ours - paper
    values = {"paper": paper, "ours": ours, "difference": difference}
    return {"measured": what} | {name: value if value is None else f"{value:.4g}" for name, value in values.items()}


def paper_rows(results: Path) -> list[Row]:
    """The cells of the tables in a folder of `llava.analysis` that have the paper's number next to them."""
    rows: list[Row] = []
    for file in sorted(results.glob("*.json")):
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            of = ", ".join(str(value) for value in row.values() if isinstance(value, str))
            rows += [number(f"{of}: {n}", row[n + PAPER], row[n]) for n in row if row.get(n + PAPER) is not None]
    return rows


def score_rows(preset: str, stats: Statistics) -> list[Row]:
    """Table 4: each arm's benchmarks and their mean next to the paper's."""
    return [
        number(f"{preset}, {arm}: {TITLES.get(task, task)}", stats.paper_score(arm, task), float(np.mean(scores)))
        for arm in stats.arms
        for task, scores in stats.scores[arm].items()
    ]


def samples_note(results: Path) -> str:
    """How many samples a folder of `llava.analysis` was measured on."""
    origins = [json.loads(file.read_text(encoding="utf-8"))["provenance"] for file in sorted(results.glob("*.json"))]
    counts = {origin["samples"] for origin in origins if origin["samples"]}
    return f"{' or '.join(map(str, sorted(counts)))} samples."
