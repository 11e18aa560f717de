"""The page of a reproduced table or figure: the paper's numbers, ours, the difference, figures, what ran on what."""

import json
from collections.abc import Sequence
from pathlib import Path

from llava.analysis.norm_params import PAPER_ROWS
from llava.compare.paper import MEANS, TABLE_4
from llava.compare.runs import Run
from llava.eval.results import PAPER_COLUMNS, RESULTS_FILE, read_results
from llava.utils.presentation import PAPER

Row = tuple[str, float | None, float | None]
"""What is measured, the paper's number and ours."""
NO_NUMBERS = "The paper prints no numbers here; compare the figures."
INITS = {"layernorm@default": "paper, default init", "layernorm": "paper, aligned init"}
"""Table 5's rows among those of `norm-params`, by arm."""


def page_of(
    title: str, numbers: Sequence[Row], figures: Sequence[Path], sources: Sequence[tuple[str, str]], notes: str
) -> str:
    """The page in Markdown.

    Args:
        figures: files next to the page.
        sources: models and data, each with its revision or folder.
        notes: what is not here, and what the rest was measured with.
    """
    rows = [
        (what, paper, ours, None if paper is None or ours is None else ours - paper) for what, paper, ours in numbers
    ]
    parts = [f"# {title}", table(("", "paper", "ours", "difference"), rows) if rows else NO_NUMBERS]
    parts += [f"![{figure.stem}]({figure.name})" for figure in figures]
    return "\n\n".join([*parts, table(("model or data", "revision or folder"), sources), notes]) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown; numbers with four digits."""

    def cell(value: object) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def measured_numbers(results: Path) -> list[Row]:
    """Every number in a folder of `llava.analysis` that the paper has too."""
    rows: list[Row] = []
    for file in sorted(results.glob("*.json")):
        measured = json.loads(file.read_text(encoding="utf-8"))["rows"]
        rows += init_rows(measured) if file.stem == "norm-params" else paper_rows(measured)
    return rows


def paper_rows(measured: Sequence[dict]) -> list[Row]:
    """The cells of a measured table that have the paper's number next to them."""
    rows: list[Row] = []
    for row in measured:
        of = ", ".join(str(value) for value in row.values() if isinstance(value, str))
        rows += [(f"{of}: {n}", row[n + PAPER], row[n]) for n in row if row.get(n + PAPER) is not None]
    return rows


def init_rows(measured: Sequence[dict]) -> list[Row]:
    """Table 5: the last checkpoint of each arm next to the paper's row."""
    last, published = {row["model"]: row for row in measured}, {row["model"]: row for row in PAPER_ROWS}
    return [
        (f"{arm}: {name}", value, last[arm].get(name))
        for arm, paper in INITS.items()
        if arm in last
        for name, value in published[paper].items()
        if isinstance(value, float)
    ]


def score_rows(preset: str, runs: Sequence[Run]) -> tuple[list[Row], list[str]]:
    """Table 4: each arm's benchmarks and their mean next to the paper's, and what limits them."""
    llm = next((name for name in TABLE_4 if name.lower() == preset), None)
    titles, rows, notes = {task: title for title, task in PAPER_COLUMNS.items()}, [], []
    for run in runs:
        results = read_results(run.folder("eval") / RESULTS_FILE)
        scores = {task: result.score for task, result in results.tasks.items()}
        published, name = TABLE_4[llm][run.arm] if llm else {}, f"{llm or preset}, {run.arm}"
        rows += [(f"{name}: {titles.get(task, task)}", published.get(task), score) for task, score in scores.items()]
        if llm and scores.keys() >= published.keys():
            mean = sum(scores[task] for task in published) / len(published)
            rows.append((f"{name}: mean", MEANS[llm][run.arm], mean))
        if limit := results.settings.get("limit"):
            notes.append(f"{preset}, {run.arm}: only the first {limit} questions of each benchmark.")
    return rows, notes


def samples_note(results: Path, requested: int) -> str:
    """How many samples a folder of `llava.analysis` was measured on."""
    origins = [json.loads(file.read_text(encoding="utf-8"))["provenance"] for file in sorted(results.glob("*.json"))]
    counts = {origin["samples"] - len(origin["unreadable"]) for origin in origins if origin["samples"]}
    fewer = f" of {requested} requested" if counts != {requested} else ""
    return f"{' or '.join(map(str, sorted(counts)))} samples{fewer}; "
