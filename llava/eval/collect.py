"""Turns a harness's output folder into a task's result, or names the samples that failed.

lmms-eval writes `<model>/<time>_results.json` and `<model>/<time>_samples_<task>.jsonl`, lm-eval
`<model>/results_<time>.json` and `<model>/samples_<task>_<time>.jsonl`. Neither harness says when something went
wrong: a failure may be an empty answer, an answer that is an error text, a missing sample, or a missing file.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava.eval.results import TaskResult
from llava.eval.tasks import Record, Task, answer_of, doc_id

ERROR_TEXTS = re.compile(
    r"^(failed to obtain answer via api|error(?: code)?:|traceback \(most recent call last\)|\[lmms[-_]eval)",
    re.IGNORECASE,
)
FAILED_AT = "llava.eval.launch: failed at "
"""Starts the line in the log that names the samples at which a harness stopped."""


class EvaluationError(RuntimeError):
    """A task failed; `problems` are one line each and name the samples at fault."""

    def __init__(self, task: str, problems: list[str], shown: int = 20):
        self.problems = problems
        rest = f"\n  ... and {len(problems) - shown} more" if len(problems) > shown else ""
        super().__init__(f"{task} failed:\n  " + "\n  ".join(problems[:shown]) + rest)


def collect(task: Task, folder: Path, seconds: float, data: str | None = None, allow_empty: bool = False) -> TaskResult:
    """The result of `task` from a harness's output `folder`.

    Raises:
        EvaluationError: no results, missing or doubled samples, empty answers (unless allowed) or error texts, or a
            score that the samples do not give.
    """
    results = read_scores(task, folder)
    records = read_records(task, folder, results["n-samples"])
    problems = answer_problems(records, allow_empty) if task.generates else likelihood_problems(records)
    if problems:
        raise EvaluationError(task.name, problems)
    return result_of(task, results, records, seconds, data)


def result_of(
    task: Task, results: dict[str, Any], records: Sequence[Record], seconds: float, data: str | None = None
) -> TaskResult:
    """The result of `task` from a harness's scores (`read_scores`) and records (`read_records`).

    Raises:
        EvaluationError: the records do not give the score.
    """
    value = scores_of(task, results)[task.metric]
    samples = task.samples(records)
    score = task.score(samples)
    if not math.isclose(task.percent(value, len(samples)), score, abs_tol=1e-3):
        raise EvaluationError(
            task.name,
            [
                f"the harness's {task.metric} is {value}, which is not the samples' score of {score:.4f} %; this "
                "version of the harness may compute it differently"
            ],
        )
    chance = task.chance(records) if callable(task.chance) else task.chance
    return TaskResult(task.metric, score, samples, chance, seconds, data)


def scores_of(task: Task, results: dict[str, Any]) -> dict[str, Any]:
    """The harness's scores of the task or of the group of that name."""
    return results["results"].get(task.name) or results.get("groups", {}).get(task.name) or {}


def read_scores(task: Task, folder: Path) -> dict[str, Any]:
    """The harness's result file.

    Raises:
        EvaluationError: there is none, or it has no score for the task.
    """
    files = sorted([*folder.rglob("*_results.json"), *folder.rglob("results_*.json")], key=lambda f: f.stat().st_mtime)
    if not files:
        raise EvaluationError(task.name, [f"{folder}: the harness ended without writing results"])
    results = json.loads(files[-1].read_text(encoding="utf-8"))
    scores = scores_of(task, results)
    if not isinstance(scores.get(task.metric), int | float):
        keys = ", ".join(scores) or "nothing"
        raise EvaluationError(task.name, [f"{files[-1]}: expected a number {task.metric} for it, found {keys}"])
    return results


def read_records(task: Task, folder: Path, counts: dict[str, dict[str, int]]) -> list[Record]:
    """The records of all samples in the order of the data set; those of a group's tasks have their name as `subtask`.

    Args:
        counts: by task, the numbers of samples; `effective` is how many the harness was to evaluate.

    Raises:
        EvaluationError: a sample is missing or doubled.
    """
    own = {name: count for name, count in counts.items() if name == task.name or name.startswith(task.name + "_")}
    if task.name in own:
        own = {task.name: own[task.name]}  # `scienceqa` beside `scienceqa_img`
    problems, records = [], []
    for name, count in own.items():
        files = [*folder.rglob(f"*_samples_{name}.jsonl"), *folder.rglob(f"samples_{name}_[0-9]*.jsonl")]
        lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
        samples = sorted((json.loads(line) for line in lines), key=lambda record: record["doc_id"])
        if name != task.name:
            samples = [record | {"subtask": name.removeprefix(task.name + "_")} for record in samples]
        problems += count_problems(name, samples, int(count["effective"]))  # with --limit it may be 8.0
        records += samples
    if problems or not records:
        raise EvaluationError(task.name, problems or [f"{folder}: the harness wrote no samples"])
    return records


def count_problems(name: str, records: Sequence[Record], expected: int) -> list[str]:
    """What is wrong with the number of samples; the harness numbers them from 0."""
    seen = Counter(record["doc_id"] for record in records)
    missing = [str(index) for index in range(expected) if index not in seen]
    doubled = [str(index) for index, count in seen.items() if count > 1]
    problems = []
    if missing:
        problems.append(f"{name}: {len(missing)} of {expected} samples are missing: doc {_listed(missing)}")
    if doubled:
        problems.append(f"{name}: {len(doubled)} samples are there more than once: doc {_listed(doubled)}")
    return problems


def _listed(items: list[str], shown: int = 20) -> str:
    return ", ".join(items[:shown]) + (", ..." if len(items) > shown else "")


def answer_problems(records: Sequence[Record], allow_empty: bool) -> list[str]:
    """One line for every sample whose answer is empty or an error text."""
    problems = []
    for record in records:
        answer = answer_of(record)
        if not answer and not allow_empty:
            problems.append(f"doc {doc_id(record)}: empty answer (--allow-empty counts it as wrong)")
        elif ERROR_TEXTS.match(answer):
            problems.append(f"doc {doc_id(record)}: an error text instead of an answer: {answer[:100]!r}")
    return problems


def likelihood_problems(records: Sequence[Record]) -> list[str]:
    """One line for every sample with a likelihood that is not a number."""
    return [
        f"doc {doc_id(record)}: likelihoods {[response[0] for response in record['filtered_resps']]}"
        for record in records
        if not all(math.isfinite(float(response[0])) for response in record["filtered_resps"])
    ]


def crash_problems(status: int, log: Path, lines: int = 15) -> list[str]:
    """What a harness that ended with exit `status` said: the samples it stopped at, and the end of its log."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line.split(FAILED_AT, 1)[1] for line in text if FAILED_AT in line]
    tail = [line.split("\r")[-1] for line in text if line.strip() and FAILED_AT not in line][-lines:]
    return [f"stopped at {place}" for place in dict.fromkeys(named)] + [
        f"the harness ended with exit status {status}; the end of {log}:",
        *tail,
    ]
