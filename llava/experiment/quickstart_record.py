"""Scores trained checkpoints on held-out pictures and shows arms side by side: table, figures, examples, one page.

Answers that `python -m playground answers` has left in the output folder are taken as they are.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava.eval.paired import Difference, compare_benchmarks
from llava.experiment import answers
from llava.experiment import quickstart_page as page
from llava.experiment.stage import LOG_FILE
from llava.utils.files import write_json
from llava.utils.intervals import share_interval
from playground.store import PlaygroundError

LOSS_STEPS = 10  # last steps, whose mean loss is shown
Log = list[dict[str, float]]


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


def run(args: argparse.Namespace) -> None:
    """Writes `results.json`, `table.md`, `index.html` and the figures, and prints table and examples.

    Raises:
        PlaygroundError: an arm named twice, a folder without a finished training, or data without questions.
    """
    names = [name for name, _, _ in args.arm]
    if len(set(names)) < len(names):
        raise PlaygroundError(f"--arm: {', '.join(names)}: expected different names")
    records = answers.held_out(args.data)
    logs = {name: [read_log(Path(folder)) for folder in folders] for name, *folders in args.arm}
    given = {name: answers.answered(name, folder, args) for name, _, folder in args.arm}
    right = {name: np.array(answers.hits(records, texts)) for name, texts in given.items()}
    results = {
        "chance_percent": chance_percent(records),
        "arms": {
            name: {"folder": folder, **summarize(logs[name], records, right[name])} for name, _, folder in args.arm
        },
        "differences": differences(records, right),
        "records": [
            {
                "id": record["id"],
                "kind": record["kind"],
                "expected": answers.expected_answer(record),
                **{name: texts[i] for name, texts in given.items()},
            }
            for i, record in enumerate(records)
        ],
    }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_json(args.output_dir / "results.json", results)
    table = markdown_table(results["arms"], results["chance_percent"])
    (args.output_dir / "table.md").write_text(table + "\n")
    examples = page.examples(records, given, args.data / "images")
    page.write_page(args, results, logs, examples)
    for one in examples:
        print(f"{one['image']}: {one['question']} expected: {one['expected']} | " + " | ".join(one["replies"]))
    print(table)
    print(f"page: {args.output_dir / page.FILE}")


def read_log(folder: Path) -> Log:
    """The optimizer steps that a run logged.

    Raises:
        PlaygroundError: there is no log, or no step in it.
    """
    path = folder / LOG_FILE
    if not path.is_file():
        raise PlaygroundError(f"{path} does not exist; --arm wants the two output folders of a finished training")
    steps = [step for step in map(json.loads, path.read_text().splitlines()) if "loss" in step]
    if not steps:
        raise PlaygroundError(f"{path} has no optimizer step; --arm wants the output folders of a finished training")
    return steps


# --- scores -----------------------------------------------------------------------------------------------------------


def kinds_of(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Indices of the questions of every kind, in order of appearance, and of all."""
    kinds = np.array([record["kind"] for record in records])
    return {kind: np.flatnonzero(kinds == kind) for kind in dict.fromkeys(kinds.tolist())} | {
        page.ALL: np.arange(len(kinds))
    }


def chance_percent(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What guessing one of the possible answers scores, per kind of question and for all."""
    chance = np.array(list(map(answers.chance_of, records)))
    return {kind: float(chance[chosen].mean()) for kind, chosen in kinds_of(records).items()}


def summarize(logs: Sequence[Log], records: Sequence[dict[str, Any]], right: np.ndarray) -> dict[str, Any]:
    """Accuracy per kind with its interval, last losses, and norms at the LLM's input before and after training."""
    chosen = kinds_of(records)
    percent = {kind: 100 * float(right[one].mean()) for kind, one in chosen.items()}
    interval = {
        kind: [100 * end for end in share_interval(int(right[one].sum()), len(one))] for kind, one in chosen.items()
    }
    stage_1, stage_2 = logs

    def norms(key: str) -> list[float]:
        return [_first(stage_1, key), _last(stage_1, key), _last(stage_2, key)]

    return {
        "accuracy_percent": percent,
        "accuracy_interval": interval,
        "final_loss": [float(np.mean([step["loss"] for step in log[-LOSS_STEPS:]])) for log in logs],
        "visual_norm": norms("norm/llm_input"),
        "text_norm": norms("norm/text_embeddings"),
    }


def differences(records: Sequence[dict[str, Any]], right: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Every arm minus the first, per kind and over all questions, paired by question."""
    baseline, *others = right
    found = {}
    for name in others:
        change = right[name] - right[baseline]
        parts = [change[None, one] for one in kinds_of(records).values()]
        each, _ = compare_benchmarks(parts, [None] * len(parts))
        found[name] = {kind: _points(one) for kind, one in zip(kinds_of(records), each, strict=True)}
    return found


def _points(found: Difference) -> dict[str, Any]:
    named = {"points": found.delta, "interval": [found.low, found.high], "verdict": found.verdict}
    return named | {"won": found.won, "lost": found.lost, "p": found.p}


def _first(log: Log, key: str) -> float:
    return next((step[key] for step in log if key in step), math.nan)


def _last(log: Log, key: str) -> float:
    return _first(log[::-1], key)


# --- table ------------------------------------------------------------------------------------------------------------


def markdown_table(arms: Mapping[str, dict[str, Any]], chance: Mapping[str, float]) -> str:
    """One column per arm, and what chance gives; a score has its 95 % interval."""
    rows = [("held-out accuracy, % (95 % interval)", *[""] * len(arms), "chance")]
    for kind in chance:
        cells = []
        for arm in arms.values():
            low, high = arm["accuracy_interval"][kind]
            cells.append(f"{arm['accuracy_percent'][kind]:.1f} ({low:.0f} to {high:.0f})")
        rows.append((f"  {kind}", *cells, f"{chance[kind]:.1f}"))
    for label, key, index in page.ROWS:
        rows.append((label, *[f"{arm[key][index]:.3g}" for arm in arms.values()], ""))
    header = ("", *arms, "")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
