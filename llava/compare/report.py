"""One page about a comparison: scores with intervals and verdicts, training, layers, cost, configuration, provenance.

Writes `report.html` (self-contained), `report.md` and a `report-<table>.csv` for every table.
"""

import base64
import csv
import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from llava.compare import paper
from llava.compare.figures import analysis_figures, intervals, training_curves
from llava.compare.report_tables import (
    Statistics,
    analysis_tables,
    caveats,
    every_table,
    headline_table,
)
from llava.compare.runs import Run
from llava.compare.study_record import as_json
from llava.launch.recipe import STAGES
from llava.utils.presentation import column_names, looks, number_columns
from llava.utils.versions import git_commit


def write_report(runs: Sequence[Run], folder: Path, questions: bool = False) -> list[Path]:
    """Writes the page, its Markdown and its CSV files into `folder`; returns their paths.

    Args:
        questions: whether the runs also answered the caller's own questions.
    """
    stats = Statistics(runs, lambda run: run.results.tasks | (run.own_results.tasks if questions else {}))
    model = runs[0].configuration("pretrain")["model.model_name_or_path"]
    llm = paper.language_model_of(model)
    tables = every_table(stats, runs, llm, folder)
    context = {
        "title": f"{', '.join(stats.arms)} on {Path(model).name}",
        "stats": stats,
        "caveats": caveats(stats, runs),
        "headline": headline_table(tables["results"], llm),
        "tables": tables,
        "measured": analysis_tables(folder / "analysis"),
        "commit": git_commit(),
    }
    figures = {
        "intervals": intervals({arm: as_json(by_task) for arm, by_task in stats.results.items()}, stats.arms),
        "curves": training_curves([(run.arm, [run.log(stage) for stage in STAGES]) for run in runs]),
        "analysis": analysis_figures(folder / "analysis"),
        "colours": {arm: look["color"] for arm, look in looks(stats.arms).items()},
    }
    written = [folder / "report.html", folder / "report.md"]
    written[0].write_text(render("page.html.jinja", **context, **figures), encoding="utf-8")
    written[1].write_text(render("page.md.jinja", **context), encoding="utf-8")
    for name, rows in tables.items():
        written.append(folder / f"report-{name}.csv")
        with open(written[-1], "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, column_names(rows))
            writer.writeheader()
            writer.writerows(rows)
    return written


def shown(value: Any) -> str:
    """A table's value as text; -0.0, which rounding may leave, is 0.0."""
    return "" if value is None else str(value + 0.0 if isinstance(value, float) else value)


def markdown_text(value: object) -> str:
    """`value` so that Markdown shows it as it is, inside a table too."""
    if isinstance(value, Markup):  # a table that is escaped already
        return value
    text = re.sub(r"\s+", " ", shown(value))
    return re.sub(r"([\\`*_{}\[\]<>|&#~])", r"\\\1", text)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also read as text; the first row is its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def render(template: str, **context: Any) -> str:
    """Renders a template, with the escaping that its format, HTML or Markdown, needs."""
    html = template.endswith(".html.jinja")
    environment = Environment(
        loader=PackageLoader("llava.compare"),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=None if html else markdown_text,
    )
    helpers: dict[str, Any] = {"column_names": column_names, "number_columns": number_columns, "shown": shown}
    environment.globals.update(helpers | {"script_hash": script_hash, "quoted": shlex.join})
    return environment.get_template(template).render(**context)


def script_hash(script: str) -> str:
    """The hash by which the page's security policy allows its one script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
