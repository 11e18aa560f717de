"""How every command writes its result: a printed table, `<command>.json` and `.csv` with provenance, figures."""

import argparse
import contextlib
import csv
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava.utils.digests import fingerprint, revision
from llava.utils.presentation import PAPER, STYLE, Row, column_names, format_table, import_pyplot, looks
from llava.utils.versions import git_commit, version_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TableRow = dict[str, str | int | float | None]
"""A row of a result, by column."""
DOTTED = 60
"""A line of fewer points shows each."""
PACKAGES = ("torch", "transformers", "safetensors", "numpy", "matplotlib")


def with_paper(row: Row, paper: Row | None) -> dict[str, Any]:
    """`row` with the paper's number beside each one that it has, in a column `<name> (paper)`."""
    result = {}
    for name, value in row.items():
        result[name] = value
        if paper and name in paper:
            result[name + PAPER] = paper[name]
    return result


def write_result(args: argparse.Namespace, rows: Sequence[Row], name: str | None = None, show: bool = True) -> None:
    """Prints `rows` (if `show`) and writes them to `--output-dir` as `<name>.json` and `<name>.csv`.

    NaN and infinity, which JSON cannot hold and a CSV reader misreads, are written as nothing.

    Args:
        rows: the table; a column that only some rows have stays empty in the others. Values are numbers, text or None.
        name: of the files; the command's where None.
    """
    name = name or args.command
    if show:
        print(format_table(rows))
    document = {"command": name, "provenance": provenance(args), "rows": list(rows)}
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
        "data": data and {"path": str(data), "revision": fingerprint(Path(data)) if Path(data).exists() else None},
        "samples": getattr(args, "drawn", None),
        "left out": getattr(args, "left_out", ""),
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


def draw_rows(
    args: argparse.Namespace,
    rows: Sequence[Row],
    x: str,
    y: Mapping[str, Mapping[str, Any]],
    by: str = "model",
    column: str | None = None,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    name: str | None = None,
    **options: Any,
) -> None:
    """Writes a figure of a table: a panel for each column of `y`, in it a line for each value of the column `by`.

    Args:
        x: the column of the horizontal axis.
        y: the columns to draw, with properties of their panels, such as `ylabel` and `yscale`.
        column: whose values get a column of panels each, the panels of `y` below each other; else these are in a row.
        styles: of the lines, as `Axes.plot` takes them; the house's looks where None.
        name: of the files; the command's where None.
        options: of `matplotlib.pyplot.subplots`.
    """
    lines = list(dict.fromkeys(row[by] for row in rows))
    styles = looks(map(str, lines)) if styles is None else styles
    heads = list(dict.fromkeys(row[column] for row in rows)) if column else [None]
    shape = (len(y), len(heads)) if column else (1, len(y))
    size = (max(3.6 * shape[1], 6.5), 3 * shape[0] + 0.6)
    with figure(args, *shape, name=name, **({"figsize": size, "squeeze": False} | options)) as (drawn, axes):
        for panels, head in zip(axes.T if column else axes, heads, strict=True):
            own = [row for row in rows if head is None or row[column] == head]
            for axis, (value, properties) in zip(panels, y.items(), strict=True):
                for line in lines:
                    points = [row for row in own if row[by] == line and None not in (row.get(x), row.get(value))]
                    at, heights = ([row[axis_of] for row in points] for axis_of in (x, value))
                    dots = {"marker": "o", "markersize": 3} if len(points) < DOTTED else {}
                    axis.plot(at, heights, label=str(line) if points else None, **dots, **styles[str(line)])
                if own and isinstance(own[0][x], str):
                    axis.tick_params("x", rotation=60)
                axis.set(**({"xlabel": x, "ylabel": value} | dict(properties)))
            panels[0].set_title(panels[0].get_title() if head is None else head)
        handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
