"""Asks one checkpoint the held-out questions as they are and under controls, and scores each kind of question.

The controls take the picture away in three ways: a grey one of the same size, visual tokens in another order, and the
question alone. Results go to `<control>/results.json` (`llava.eval.results`), with a task for every kind of question.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llava.eval.results import (
    CONTROLS,
    LLAVA_CODE,
    LLAVA_COMMIT,
    Answered,
    Results,
    TaskResult,
    read_results,
    write_results,
)
from llava.experiment import answers
from llava.utils.commands import whole
from llava.utils.provenance import differences
from llava.utils.versions import PACKAGES, git_commit, version_of

UNTOUCHED = CONTROLS[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m playground controls`."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a finished training")
    parser.add_argument("--data", type=Path, required=True, help="prepared folder with heldout.json and images/")
    parser.add_argument("--output-dir", type=Path, required=True, help="where <control>/results.json goes")
    parser.add_argument(
        "--controls",
        nargs="+",
        choices=CONTROLS,
        default=list(CONTROLS),
        help="which to run (default: all, with untouched)",
    )
    parser.add_argument(
        "--questions", type=whole(0), default=0, help="how many, from the first; kinds take turns; 0: all"
    )
    parser.add_argument(
        "--control-questions",
        type=whole(0),
        default=0,
        help="how many of those are also asked with the picture taken away; 0: all",
    )
    parser.add_argument("--batch-size", type=whole(1), default=80, help="questions answered at a time")


def run(args: argparse.Namespace) -> None:
    """Asks the questions under every control whose answers are not recorded yet.

    Raises:
        PlaygroundError: there is no checkpoint, or there are no questions.
    """
    records = answers.held_out(args.data)[: args.questions or None]
    asked = answers.what_is_asked(str(args.checkpoint), args.data, 0)
    dtype = answers.fastest_dtype()
    parts = {
        name: records if name == UNTOUCHED else records[: args.control_questions or None] for name in args.controls
    }
    settings = {name: {"questions": len(part), "dtype": dtype} for name, part in parts.items()}
    data = f"{asked['questions']}-{asked['pictures']}"
    versions = {package: version_of(package) for package in PACKAGES}
    versions |= {LLAVA_CODE: asked["code"], LLAVA_COMMIT: git_commit()}
    command = shlex.join(["python", "-m", "playground", *sys.argv[1:]])
    results = {
        name: Results(str(args.checkpoint), asked["checkpoint"], command, versions, settings[name], created="")
        for name in parts
    }
    missing = [name for name in parts if not is_recorded(args.output_dir / name, results[name], data)]
    if not missing:
        print(f"{args.output_dir}: all answers are recorded already")
        return
    from llava.asking import load_assistant

    assistant = load_assistant(str(args.checkpoint), torch_dtype=dtype)
    for name in missing:
        start = time.monotonic()
        said = answers.asked_under(name, assistant, parts[name], args.data / "images", args.batch_size, name)
        results[name].tasks = scored(parts[name], said, time.monotonic() - start, data)
        results[name].created = datetime.now(UTC).isoformat(timespec="seconds")
        print(f"written: {write_results(results[name], args.output_dir / name)}")


def is_recorded(folder: Path, now: Results, data: str) -> bool:
    """Whether `folder` has answers of what `now` describes to `data`; if it has others, a line says what differs."""
    try:
        before = read_results(folder)
    except ValueError:
        return False
    changed = ["checkpoint"] * (before.fingerprint != now.fingerprint)
    changed += ["questions or pictures"] * any(task.data != data for task in before.tasks.values())
    changed += [*differences(before.settings, now.settings)]
    changed += [name for name in differences(before.versions, now.versions) if name != LLAVA_COMMIT]
    if changed:
        print(f"{folder}: made with other {', '.join(changed)}; asked again")
    return not changed


def scored(records: Sequence[dict[str, Any]], said: Sequence[str], seconds: float, data: str) -> dict[str, TaskResult]:
    """A task for every kind of question; `data` says which questions they are."""
    samples: dict[str, list[Answered]] = {}
    chance: dict[str, list[float]] = {}
    for record, text, right in zip(records, said, answers.hits(records, said), strict=True):
        kind, expected = record["kind"], answers.expected_answer(record)
        samples.setdefault(kind, []).append(Answered(record["id"], right, text, expected, kind))
        chance.setdefault(kind, []).append(answers.chance_of(record))
    return {
        kind: TaskResult(
            "accuracy",
            100 * sum(one.score for one in found) / len(found),
            found,
            sum(chance[kind]) / len(found),
            seconds * len(found) / len(records),
            data,
        )
        for kind, found in samples.items()
    }
