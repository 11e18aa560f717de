"""Scores trained checkpoints on held-out pictures and shows arms side by side: results, table and one page.

Answers that `python -m playground controls` left in the output folder are reused.
"""

import argparse
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from llava.compare import answers
from llava.compare.figures import TEXT, VISUAL, analysis_figures, data_uri, training_curves
from llava.compare.quickstart import ANSWERS, TIMES
from llava.compare.report import aligned, render
from llava.compare.report_tables import Rows, analysis_tables
from llava.compare.stage import LOG_FILE, Log, logged_steps
from llava.compare.study_page import differences as difference_rows
from llava.compare.study_record import as_json, start_and_ends
from llava.eval.paired import Difference, compare_benchmarks
from llava.eval.results import Answered
from llava.utils.commands import whole
from llava.utils.files import write_json
from llava.utils.intervals import share_interval
from llava.utils.presentation import looks
from llava.utils.versions import git_commit
from playground.store import PlaygroundError, shown_python

FILE = "index.html"
ALL = "all questions"
SCORES = "held-out accuracy, % (95 % interval)"
LOSS_STEPS = 10  # last steps, whose mean loss is shown
EXAMPLES = 3
PICTURES = 24  # pictures on which update rates are measured
SHOWN_SIDE = 256  # longest side of a picture on the page, in pixels
LOGGED = (
    ("final loss, stage 1", "final_loss", 0),
    ("final loss, stage 2", "final_loss", 1),
    ("visual token norm, start", "visual_norm", 0),
    ("visual token norm, after stage 1", "visual_norm", 1),
    ("visual token norm, after stage 2", "visual_norm", 2),
    ("text token norm, start", "text_norm", 0),
    ("text token norm, after stage 2", "text_norm", 2),
)
"""Rows below the scores: label, key of an arm's summary, index."""
Results = Mapping[str, Any]
"""The content of `results.json`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m playground compare`."""
    parser.add_argument(
        "--arm",
        nargs=3,
        action="append",
        required=True,
        metavar=("NAME", "STAGE1", "STAGE2"),
        help="an arm's name and the output folders of its two stages; repeat for every arm, the baseline first",
    )
    answers.add_shared_arguments(parser)
    parser.add_argument(
        "--pictures", type=whole(0), default=PICTURES, help="pictures on which update rates are measured; 0: none"
    )


def run(args: argparse.Namespace) -> None:
    """Writes `results.json`, `table.md` and `index.html`, and prints table and examples.

    Raises:
        PlaygroundError: an arm with two entries, a folder without a finished training, or data without questions.
    """
    names = [name for name, _, _ in args.arm]
    if len(set(names)) < len(names):
        raise PlaygroundError(f"--arm: {', '.join(names)}: expected different names")
    records = answers.held_out(args.data)
    logs = {name: [read_log(Path(folder)) for folder in folders] for name, *folders in args.arm}
    replies = {name: answered(name, Path(folder), records, args) for name, _, folder in args.arm}
    texts = {name: [sample.answer for sample in of_arm] for name, of_arm in replies.items()}
    right = {name: np.array([sample.score for sample in of_arm]) for name, of_arm in replies.items()}
    compared = differences(records, right)
    results = {
        "chance_percent": chance_percent(records),
        "arms": {
            name: {"folder": folder, **summarize(logs[name], records, right[name])} for name, _, folder in args.arm
        },
        "differences": {
            name: {kind: points(result) for kind, result in kinds.items()} for name, kinds in compared.items()
        },
        "records": [
            {
                "id": record["id"],
                "kind": record["kind"],
                "expected": answers.expected_answer(record),
                **{name: of_arm[i] for name, of_arm in texts.items()},
            }
            for i, record in enumerate(records)
        ],
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(args.output_dir / "results.json", results)
    table = markdown_table(results)
    (args.output_dir / "table.md").write_text(table + "\n")
    shown = examples(records, texts, args.data / "images")
    write_page(args, results, compared, logs, shown)
    for row in shown:
        print(f"{row['image']}: {row['question']} expected: {row['expected']} | " + " | ".join(row["replies"]))
    print(table)
    print(f"page: {args.output_dir / FILE}")


def read_log(folder: Path) -> Log:
    """The optimizer steps that a run logged.

    Raises:
        PlaygroundError: no log, or no step in it.
    """
    path = folder / LOG_FILE
    if not (steps := logged_steps(folder) if path.is_file() else []):
        raise PlaygroundError(f"{path}: no optimizer step; --arm expects the output folders of a finished training")
    return steps


def answered(
    name: str, checkpoint: Path, records: Sequence[answers.Record], args: argparse.Namespace
) -> list[Answered]:
    """An arm's answers, in the order of the questions; recorded ones are reused."""
    place = args.output_dir / ANSWERS / name
    asked = answers.evaluated(checkpoint, args.data, {answers.UNTOUCHED: records}, place, args.batch_size)
    of_kind = {kind: iter(task.samples) for kind, task in asked[answers.UNTOUCHED].tasks.items()}
    return [next(of_kind[record["kind"]]) for record in records]


# --- scores -----------------------------------------------------------------------------------------------------------


def kinds_of(records: Sequence[answers.Record]) -> dict[str, np.ndarray]:
    """Indices of the questions of every kind, in order of appearance, and of all."""
    kinds = np.array([record["kind"] for record in records])
    return {kind: np.flatnonzero(kinds == kind) for kind in dict.fromkeys(kinds.tolist())} | {
        ALL: np.arange(len(kinds))
    }


def chance_percent(records: Sequence[answers.Record]) -> dict[str, float]:
    """The score of guessing among the possible answers, per kind of question and for all."""
    chance = np.array(list(map(answers.chance_of, records)))
    return {kind: float(chance[chosen].mean()) for kind, chosen in kinds_of(records).items()}


def summarize(logs: Sequence[Log], records: Sequence[answers.Record], right: np.ndarray) -> dict[str, Any]:
    """Accuracy per kind with its interval, last losses, and norms at the LLM's input before and after training."""
    chosen = kinds_of(records)
    percent = {kind: 100 * float(right[rows].mean()) for kind, rows in chosen.items()}
    interval = {
        kind: [100 * end for end in share_interval(int(right[rows].sum()), len(rows))] for kind, rows in chosen.items()
    }
    return {
        "accuracy_percent": percent,
        "accuracy_interval": interval,
        "final_loss": [float(np.mean([step["loss"] for step in log[-LOSS_STEPS:]])) for log in logs],
        "visual_norm": start_and_ends(logs, VISUAL, math.nan),
        "text_norm": start_and_ends(logs, TEXT, math.nan),
    }


def differences(records: Sequence[answers.Record], right: Mapping[str, np.ndarray]) -> dict[str, dict[str, Difference]]:
    """Every arm minus the first, per kind and over all questions, paired by question."""
    baseline, *others = right
    chosen = kinds_of(records)
    by_arm = {}
    for name in others:
        change = right[name] - right[baseline]
        each, _ = compare_benchmarks([change[None, rows] for rows in chosen.values()], [None] * len(chosen))
        by_arm[name] = dict(zip(chosen, each, strict=True))
    return by_arm


def points(difference: Difference) -> dict[str, Any]:
    """A difference in `results.json`."""
    named = {"points": difference.delta, "interval": [difference.low, difference.high], "verdict": difference.verdict}
    return named | {"won": difference.won, "lost": difference.lost, "p": difference.p}


# --- table and page ---------------------------------------------------------------------------------------------------


def score_rows(results: Results) -> Rows:
    """Percent of right answers with its 95 % interval, per kind of question and for all, and what chance gives."""
    rows = []
    for kind, chance in results["chance_percent"].items():
        row = {SCORES: kind}
        for name, arm in results["arms"].items():
            low, high = arm["accuracy_interval"][kind]
            row[name] = f"{arm['accuracy_percent'][kind]:.1f} ({low:.0f} to {high:.0f})"
        rows.append(row | {"chance": f"{chance:.1f}"})
    return rows


def logged_rows(results: Results) -> Rows:
    """What the arms logged at the start and at the end of each stage."""
    arms = results["arms"].items()
    return [{"logged": label} | {name: f"{arm[key][at]:.3g}" for name, arm in arms} for label, key, at in LOGGED]


def markdown_table(results: Results) -> str:
    """One column per arm, and what chance gives."""
    arms = list(results["arms"])
    rows = [["", *arms, ""], [SCORES, *[""] * len(arms), "chance"]]
    rows += [[f"  {row[SCORES]}", *[row[name] for name in [*arms, "chance"]]] for row in score_rows(results)]
    rows += [[*row.values(), ""] for row in logged_rows(results)]
    return aligned(rows)


def write_page(
    args: argparse.Namespace,
    results: Results,
    compared: Mapping[str, Mapping[str, Difference]],
    logs: Mapping[str, Sequence[Log]],
    examples: Sequence[Mapping[str, Any]],
) -> None:
    """Writes `index.html`.

    Args:
        args: the command line of `compare`.
        compared: see `differences`.
        logs: every arm's optimizer steps, by stage.
        examples: see `examples`.
    """
    folder, arms = args.output_dir, list(results["arms"])
    analysis = folder / "analysis"
    if args.pictures:
        measure(args, analysis)
    times = json.loads((folder / TIMES).read_text()) if (folder / TIMES).is_file() else {}
    context = {
        "title": f"{' and '.join(arms)} on {args.data.name}",
        "results": results,
        "all": ALL,
        "steps": " + ".join(str(int(log[-1]["step"])) for log in logs[arms[0]]),
        "scores": score_rows(results),
        "differences": difference_rows({f"{name} minus {arms[0]}": as_json(kinds) for name, kinds in compared.items()}),
        "logged": logged_rows(results),
        "colours": {arm: look["color"] for arm, look in looks(arms).items()},
        "curves": training_curves(list(logs.items())),
        "analysis": analysis_figures(analysis) if args.pictures else [],
        "measured": analysis_tables(analysis) if args.pictures else {},
        "measured_pictures": args.pictures,
        "examples": examples,
        "times": [{"step": name, "seconds": round(seconds)} for name, seconds in times.items()],
        "logs": log_links(args),
        "python": shown_python(),
        "models": [f"{name}={arm['folder']}" for name, arm in results["arms"].items()],
        "commit": git_commit(),
    }
    (folder / FILE).write_text(render("page.html.jinja", **context), encoding="utf-8")


def examples(
    records: Sequence[answers.Record], replies: Mapping[str, Sequence[str]], images: Path
) -> list[dict[str, Any]]:
    """Held-out pictures, at first one per kind of question, with question, expected answer and all arms' answers."""
    chosen: dict[str, int] = {}
    pictures: set[str] = set()
    for index, record in enumerate(records):
        if record["kind"] not in chosen and record["image"] not in pictures:
            chosen[record["kind"]] = index
            pictures.add(record["image"])
    others = (i for i, record in enumerate(records) if record["image"] not in pictures)
    shown = []
    for index in [*chosen.values(), *others][:EXAMPLES]:
        question, expected = (message["value"] for message in records[index]["conversations"][:2])
        path = images / records[index]["image"]
        shown.append({"image": records[index]["image"], "path": str(path), "uri": picture_uri(path)})
        shown[-1] |= {"question": question.replace("<image>\n", ""), "expected": expected}
        shown[-1] |= {"replies": [f"{name}: {texts[index]}" for name, texts in replies.items()]}
    return shown


def picture_uri(path: Path) -> str:
    """A picture of at most `SHOWN_SIDE` pixels, inline."""
    stream = io.BytesIO()
    with Image.open(path) as picture:
        picture = picture.convert("RGB")
        picture.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
        picture.save(stream, "PNG")
    return data_uri(stream.getvalue(), "png")


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Writes tables and figures of `python -m llava.analysis update-rates` into `folder`."""
    from llava.analysis import update_rates
    from llava.analysis.__main__ import parser

    words = ["update-rates", "--data", str(args.data / answers.RECORDS), "--output-dir", str(folder)]
    words += [word for name, _, checkpoint in args.arm for word in ("--model", f"{name}={checkpoint}")]
    words += ["--samples", str(args.pictures), "--batch-size", "8"]
    if dtype := answers.fastest_dtype():
        words += ["--dtype", dtype]
    flags = parser(words[0]).parse_args(words)
    flags.argv = words
    update_rates.run(flags)


def log_links(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Titles and relative paths of every stage's log."""
    links = []
    for name, *folders in args.arm:
        for number, folder in enumerate(map(Path, folders), 1):
            for file in (folder / LOG_FILE, folder.with_suffix(".log")):
                if file.is_file():
                    links.append((f"{name}, stage {number}: {file.name}", os.path.relpath(file, args.output_dir)))
    return links
