"""How every command writes its result: a printed table, `<command>.json` and `.csv` with provenance, figures."""

import argparse
import contextlib
import csv
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
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


def check(args: argparse.Namespace) -> None:
    """Checks that results can be written to `--output-dir` and figures drawn; creates nothing.

    Raises:
        ValueError: the folder is a file, or it cannot be written to.
        ImportError: Matplotlib is not installed.
    """
    import_pyplot()
    folder = args.output_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--output-dir {args.output_dir}: {there} is a file, expected a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--output-dir {args.output_dir}: {there} cannot be written to")


def write_result(
    args: argparse.Namespace, rows: Sequence[Row], details: object = None, name: str | None = None, show: bool = True
) -> None:
    """Prints `rows` (if `show`) and writes them to `--output-dir` as `<name>.json` and `<name>.csv`.

    Args:
        args: the parsed command line; gives folder, models, data, seed and command.
        rows: the table; a column that only some rows have stays empty in the others. Values are numbers, text or None.
        details: what is too long for the table (curves, settings); goes to the JSON only.
        name: of the files; the command's where None.
    """
    name = name or args.command
    origin = provenance(args)
    columns = column_names(rows)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if show:
        print(format_table(rows))
    document = finite({"command": name, "provenance": origin, "rows": list(rows), "details": details})
    json_file, csv_file = args.output_dir / f"{name}.json", args.output_dir / f"{name}.csv"
    json_file.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    with open(csv_file, "w", newline="") as stream:
        for key, value in origin.items():
            stream.write(f"# {key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n")
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(finite(list(rows)))
    print(f"written: {json_file}, {csv_file}")


def finite(value: Any) -> Any:
    """`value` with None in place of every NaN or infinity, which JSON cannot hold and a CSV reader misreads."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


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

    Raises:
        ImportError: Matplotlib is not installed.
    """
    pyplot = import_pyplot()
    name = name or args.command
    with pyplot.rc_context(STYLE):
        drawn, axes = pyplot.subplots(*grid, **({"layout": "constrained"} | options))
        try:
            yield drawn, axes
            args.output_dir.mkdir(parents=True, exist_ok=True)
            files = [args.output_dir / f"{name}.{kind}" for kind in ("png", "svg")]
            drawn.savefig(files[0], metadata={"Software": None})
            drawn.savefig(files[1], metadata={"Date": None})
            print(f"written: {files[0]}, {files[1]}")
        finally:
            pyplot.close(drawn)
