"""Writes the page of a record: scores with intervals, training, layers, cost, configuration, and where it comes from.

`report.html` is self-contained; `report.md` has its tables but the measurements of `analysis/` beside it.
"""

import argparse
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from llava.compare.plan import Plan, check_record, read_plan
from llava.compare.record import Record, differing, read_record
from llava.utils.presentation import column_names, looks, number_columns
from llava.utils.versions import git_commit

PAGE = "report.html"
SHOWN_SIDE = 256  # longest side of a picture on the page, in pixels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `report`."""
    several = "a record.json, or the folder of an experiment; several: a figure of the differences over their lengths"
    parser.add_argument("record", type=Path, nargs="+", help=several)
    parser.add_argument("--plan", type=Path, nargs="+", default=[], help="the plan of each record's runs")
    parser.add_argument("--output-dir", type=Path, help="folder of the page (default: the record's)")
    against = "write no page: compare every score with this record of the same runs"
    parser.add_argument("--against", type=Path, help=against)


def run(args: argparse.Namespace) -> None:
    """The command `report`."""
    records = [read_record(place) for place in args.record]
    if args.against:
        if len(records) > 1:
            raise ValueError("--against: give one record to compare")
        changed = differing(records[0], read_record(args.against))
        for name, parts in changed.items():
            print(f"{name}: {', '.join(parts) or 'every score and log-probability is the same'}")
        if any(changed.values()):
            raise ValueError(f"not as in {args.against}; another kind of processor rounds differently")
        return
    plans = [read_plan(file) for file in args.plan] or [None] * len(records)
    if len(plans) != len(records):
        raise ValueError(f"--plan: {len(plans)} of {len(records)} records' plans; give one for each, in their order")
    for place, record, plan in zip(args.record, records, plans, strict=True):
        if plan:
            check_record(plan, record, place)
        elif record["runs"][0]["plan"]:
            raise ValueError(f"{place}: its runs follow a plan; give it as --plan FILE")
    folder = args.output_dir or (args.record[0] if args.record[0].is_dir() else args.record[0].parent)
    written = write_page(records[0], folder, plans[0]) if len(records) == 1 else write_lengths(records, folder, plans)
    for path in written:
        print(f"written: {path}")


def write_lengths(records: Sequence[Record], folder: Path, plans: Sequence[Plan | None]) -> list[Path]:
    """Writes a figure of several records' differences over the length of training into `folder`; returns its path.

    Raises:
        ValueError: see `Statistics`; or their results are not over the same tasks.
    """
    from llava.compare import figures, tables

    studies = list(map(tables.Statistics, records, plans))
    for stats in studies:
        if stats.counted != studies[0].counted:
            raise ValueError(f"results over {stats.counted} cannot stand beside those over {studies[0].counted}")
    path = folder / "lengths.svg"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(figures.svg(figures.lengths, studies))
    return [path]


def write_page(record: Record, folder: Path, plan: Plan | None = None) -> list[Path]:
    """Writes the page and its Markdown into `folder`; returns their paths.

    Args:
        plan: of the study that the record is of.

    Raises:
        ValueError: see `Statistics`.
    """
    from llava.compare import figures, tables

    stats, analysis = tables.Statistics(record, plan), folder / "analysis"
    context = {
        "title": record.get("title") or ", ".join(stats.arms),
        "summaries": tables.summaries(stats),
        "caveats": tables.caveats(stats),
        "tables": tables.every_table(stats),
        "measured": tables.measured_tables(analysis, record),
        "commit": git_commit(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / PAGE, folder / "report.md"]
    drawn = {
        "colours": {arm: look["color"] for arm, look in looks(stats.arms).items()},
        "curves": figures.training_curves(record),
        "analysis": figures.analysis_figures(analysis, context["measured"]),
        "examples": pictured(record),
        "talk": record.get("talk", ""),
    }
    if stats.results:
        written.append(folder / "report-differences.svg")
        written[-1].write_bytes(picture := figures.svg(figures.differences, stats))
        drawn["differences"] = figures.data_uri(picture, "svg+xml")
    written[0].write_text(render("page.html.jinja", **context, **drawn), encoding="utf-8")
    written[1].write_text(render("page.md.jinja", **context), encoding="utf-8")
    return written


def pictured(record: Record) -> list[dict[str, Any]]:
    """The record's examples with their pictures inline, and the first seed's answers of all arms."""
    from PIL import Image

    from llava.compare.figures import data_uri

    first = [entry for entry in record["runs"] if entry["seed"] == record["runs"][0]["seed"]]
    shown = []
    for example in record.get("examples", []):
        task, number = example["task"], record["questions"][example["task"]].index(example["id"])
        answers = [f"{entry['arm']}: {entry['answers'][task][number]}" for entry in first]
        expected = record["tasks"][task]["targets"][number]
        stream = io.BytesIO()
        with Image.open(example["picture"]) as picture:
            picture = picture.convert("RGB")
            picture.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
            picture.save(stream, "PNG")
        uri = data_uri(stream.getvalue(), "png")
        shown.append({"question": example["question"], "expected": expected, "answers": answers, "uri": uri})
    return shown


def shown(value: Any) -> str:
    """A table's value as text; -0.0, which rounding may leave, is 0.0."""
    return "" if value is None else str(value + 0.0 if isinstance(value, float) else value)


def markdown_text(value: object) -> str:
    """`value` so that Markdown shows it as it is, inside a table too."""
    if isinstance(value, Markup):  # a table that is escaped already
        return value
    text = re.sub(r"\s+", " ", shown(value))
    return re.sub(r"([\\`*_{}\[\]<>|&#~])", r"\\\1", text)


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
    environment.globals.update(helpers)
    return environment.get_template(template).render(**context)
