"""How every command writes its result: a printed table, `<command>.json` and `.csv` with provenance, figures."""

import argparse
import contextlib
import csv
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llava.utils.digests import revision
from llava.utils.presentation import PAPER, STYLE, Row, column_names, format_table, import_pyplot
from llava.utils.versions import git_commit, version_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TableRow = dict[str, str | int | float | None]
"""A row of a result, by column."""
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "matplotlib")


def with_paper(row: Row, paper: Row | None) -> dict[str, Any]:
    """`row` with the paper's number beside each one that it has, in a column `<name> (paper)`."""
    result = {}
    for name, value in row.items():
        result[name] = value
        if paper and name in paper:
            result[name + PAPER] = paper[name]
    return result


def write_result(
    args: argparse.Namespace, rows: Sequence[Row], details: object = None, name: str | None = None, show: bool = True
) -> None:
    """Prints `rows` (if `show`) and writes them to `--output-dir` as `<name>.json` and `<name>.csv`.

    NaN and infinity, which JSON cannot hold and a CSV reader misreads, are written as nothing.

    Args:
        rows: the table; a column that only some rows have stays empty in the others. Values are numbers, text or None.
        details: what is too long for the table (curves, settings); goes to the JSON only.
        name: of the files; the command's where None.
    """
    name = name or args.command
    if show:
        print(format_table(rows))
    document = {"command": name, "provenance": provenance(args), "rows": list(rows), "details": details}
    document = json.loads(json.dumps(document), parse_constant=lambda constant: None)
    json_file, csv_file = args.output_dir / f"{name}.json", args.output_dir / f"{name}.csv"
    args.output_dir.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    with open(csv_file, "w", newline="") as stream:
        for key, value in document["provenance"].items():
            stream.write(f"# {key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n")
        writer = csv.DictWriter(stream, column_names(rows))
        writer.writeheader()
        writer.writerows(document["rows"])
    print(f"written: {json_file}, {csv_file}")


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Where a result comes from: models and data with their revisions, seed, versions, command, commit."""
    data = getattr(args, "data", None)
    return {
        "command": shlex.join(["python", "-m", "llava.analysis", *args.argv]),
        "models": [{"name": m.name, "path": m.path, "revision": revision(m.path)} for m in args.models],
        "data": data and {"path": str(data), "revision": revision(str(data))},
        "samples": getattr(args, "drawn", None),
        "left out": getattr(args, "left_out", ""),
        "unreadable": list(getattr(args, "unreadable", {}).values()),
        "seed": args.seed,
        "versions": {"python": sys.version.split()[0]} | {name: version_of(name) for name in PACKAGES},
        "git_commit": git_commit(),
    }


@contextlib.contextmanager
def figure(
    args: argparse.Namespace, *grid: int, name: str | None = None, **options: Any
) -> Iterator[tuple["Figure", Any]]:
    """A figure and its axes in the house style, written as PNG and SVG to `--output-dir` when the block ends.

    Args:
        grid, options: of `matplotlib.pyplot.subplots`.
        name: of the files; the command's where None.
    """
    pyplot = import_pyplot()
    with pyplot.rc_context(STYLE):
        drawn, axes = pyplot.subplots(*grid, **({"layout": "constrained"} | options))
        try:
            yield drawn, axes
            args.output_dir.mkdir(parents=True, exist_ok=True)
            files = [args.output_dir / f"{name or args.command}.{kind}" for kind in ("png", "svg")]
            drawn.savefig(files[0], metadata={"Software": None})
            drawn.savefig(files[1], metadata={"Date": None})
            print(f"written: {files[0]}, {files[1]}")
        finally:
            pyplot.close(drawn)
