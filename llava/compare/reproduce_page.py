"""The page of a reproduced table or figure: the paper's numbers, ours, the difference, figures, what ran on what."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from llava.analysis.norm_params import PAPER_ROWS
from llava.compare.paper import MEANS, TABLE_4
from llava.compare.report_tables import Rows
from llava.compare.runs import Run
from llava.eval.results import PAPER_COLUMNS, RESULTS_FILE, Results, read_results
from llava.launch.devices import resolve_devices
from llava.utils.machine import machine
from llava.utils.presentation import PAPER, column_names

NO_NUMBERS = "The paper prints no numbers here; compare the figures."
INITS = {"layernorm@default": "paper, default init", "layernorm": "paper, aligned init"}
"""Table 5's rows among those of `norm-params`, by arm."""


def page_of(title: str, numbers: Rows, figures: Sequence[Path], sources: Sequence[tuple[str, str]], notes: str) -> str:
    """The page in Markdown.

    Args:
        numbers: rows of `compared`.
        figures: files next to the page.
        sources: models and data, each with its revision or folder.
        notes: what is not here, and what the rest was measured with.
    """
    parts = [f"# {title}", markdown_table(numbers) if numbers else NO_NUMBERS]
    parts += [f"![{figure.stem}]({figure.name})" for figure in figures]
    parts += [markdown_table([{"model or data": what, "revision or folder": where} for what, where in sources]), notes]
    return "\n\n".join(parts) + "\n"


def measured_numbers(results: Path) -> Rows:
    """Every number in a folder of `llava.analysis` that the paper has too."""
    rows: Rows = []
    for file in sorted(results.glob("*.json")):
        measured = json.loads(file.read_text(encoding="utf-8"))["rows"]
        rows += init_rows(measured) if file.stem == "norm-params" else paper_rows(measured)
    return rows


def paper_rows(measured: Rows) -> Rows:
    """The cells of a measured table that have the paper's number next to them."""
    rows: Rows = []
    for row in measured:
        of = ", ".join(str(value) for value in row.values() if isinstance(value, str))
        for name in row:
            if (published := row.get(name + PAPER)) is not None:
                rows.append(compared(f"{of}: {name}", published, row[name]))
    return rows


def init_rows(measured: Rows) -> Rows:
    """Table 5: the last checkpoint of each arm next to the paper's row."""
    last = {row["model"]: row for row in measured}
    published = {row["model"]: row for row in PAPER_ROWS}
    return [
        compared(f"{arm}: {name}", value, last[arm].get(name))
        for arm, paper in INITS.items()
        if arm in last
        for name, value in published[paper].items()
        if isinstance(value, float)
    ]


def score_rows(preset: str, runs: Sequence[Run]) -> Rows:
    """Table 4: each benchmark's score of every arm, and the mean of all nine; the paper's for its own presets."""
    llm = next((name for name in TABLE_4 if name.lower() == preset), None)
    titles = {task: title for title, task in PAPER_COLUMNS.items()}
    rows: Rows = []
    for run in runs:
        scores = {task: result.score for task, result in scored(run).tasks.items()}
        published = TABLE_4[llm][run.arm] if llm else {}
        name = f"{llm or preset}, {run.arm}"
        for task, score in scores.items():
            rows.append(compared(f"{name}: {titles.get(task, task)}", published.get(task), score))
        if llm and scores.keys() >= published.keys():
            mean = sum(scores[task] for task in published) / len(published)
            rows.append(compared(f"{name}: mean", MEANS[llm][run.arm], mean))
    return rows


def limit_notes(preset: str, runs: Sequence[Run]) -> list[str]:
    """What has to be said of scores that are not over all questions."""
    limits = {run.arm: scored(run).settings.get("limit") for run in runs}
    text = "only the first {} questions of each benchmark."
    return [f"{preset}, {arm}: {text.format(limit)}" for arm, limit in limits.items() if limit]


def scored(run: Run) -> Results:
    return read_results(run.folder("eval") / RESULTS_FILE)


def samples_note(results: Path, requested: int) -> str:
    """How many samples a folder of `llava.analysis` was measured on."""
    origins = [json.loads(file.read_text(encoding="utf-8"))["provenance"] for file in sorted(results.glob("*.json"))]
    counts = {origin["samples"] - len(origin["unreadable"]) for origin in origins if origin["samples"]}
    fewer = f" of {requested} requested" if counts != {requested} else ""
    return f"{' or '.join(map(str, sorted(counts)))} samples{fewer}; "


def compared(what: str, paper: float | None, ours: float | None) -> dict[str, str | float | None]:
    """A row of the page."""
    difference = None if paper is None or ours is None else ours - paper
    return {"": what, "paper": paper, "ours": ours, "difference": difference}


def markdown_table(rows: Rows) -> str:
    """`rows` as a table in Markdown; numbers with four digits."""
    columns = column_names(rows)

    def cell(value: object) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [columns, ["---"] * len(columns), *([cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def device() -> str:
    """The GPU, or else the processor."""
    if not resolve_devices(os.environ).on_gpu:
        return machine()
    import torch  # after the measurements, which are processes of their own

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "GPUs that are not here"
