"""Scores a file of answers: `python -m llava.eval.score answers.jsonl [other.jsonl]`.

Reads what `python -m llava.eval.answer` writes: a line for each question with `question_id`, `text` (the answer) and
the expected answer, `expected`, under `metadata` or beside it. A question's `kind` says how it is scored
(`llava.utils.scoring`); without one it is scored as `exact`. `--metric` scores all in one way. With a second file, both
are compared on the same questions: the second minus the first.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llava.eval.answer_file import recorded
from llava.eval.paired import compare_benchmarks
from llava.eval.results import Answered, TaskResult
from llava.utils.commands import Parser, exit_status
from llava.utils.intervals import share_interval
from llava.utils.presentation import format_table
from llava.utils.scoring import KINDS, READERS, can_expect, is_right

DEFAULT_KIND = "exact"
SHOWN = 5  # question ids that a message lists
ALL = "all"


class Scored(NamedTuple):
    """One answer: its question's id, kind and metric, what was said and expected, and whether it is right."""

    identifier: str
    kind: str
    metric: str
    answer: str
    expected: str
    right: bool

    @property
    def is_read(self) -> bool:
        """Whether the answer has what its metric reads: a yes or no, a letter, a number."""
        return self.metric not in READERS or READERS[self.metric](self.answer) is not None


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    top = Parser(prog="python -m llava.eval.score", description=__doc__.splitlines()[0])
    top.add_argument("answers", type=Path, help="file of answers, as python -m llava.eval.answer writes it")
    top.add_argument("other", type=Path, nargs="?", help="answers to the same questions, compared with the first")
    top.add_argument(
        "--metric",
        choices=KINDS,
        help=f"metric of every answer (default: by the question's field `kind`, {DEFAULT_KIND} without one)",
    )
    args = top.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Prints the scores, and with a second file the differences.

    Raises:
        ValueError, OSError: not a file of answers, or two with other questions; the message names the record.
    """
    files = [args.answers, *([args.other] if args.other else [])]
    scored = [read_scored(file, args.metric) for file in files]
    tables = {str(file): score_rows(answers) for file, answers in zip(files, scored, strict=True)}
    if args.other:
        tables[f"{args.other} minus {args.answers}, points"] = difference_rows(files, *scored)
    print("\n\n".join(f"{title}\n{format_table(rows)}" for title, rows in tables.items()))
    if any(not answer.is_read for answers in scored for answer in answers):
        print("\nunread: answers that hold no yes or no, letter or number, or several of them; they count as wrong")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_scored(file: Path, metric: str | None = None) -> list[Scored]:
    """Every answer of a file, scored.

    Args:
        metric: of every answer, whatever its question's kind.

    Raises:
        ValueError, OSError: no such file, an incomplete one, or a record that cannot be scored; the message names it.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; python -m llava.eval.answer writes it") from None
    answers: dict[str, Scored] = {}
    for number, line in enumerate(lines, 1):
        try:
            answer = scored_line(json.loads(line), metric)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"no field {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}, line {number}: {fault}") from None
        if answer.identifier in answers:
            raise ValueError(
                f"{file}, line {number}: question {answer.identifier} is answered twice; expected each id once"
            )
        answers[answer.identifier] = answer
    if not answers:
        raise ValueError(f"{file}: no answers")
    if (record := recorded(file)) and record["count"] != len(answers):
        raise ValueError(
            f"{file}: {len(answers)} of {record['count']} answers; python -m llava.eval.answer was stopped, rerun it"
        )
    return list(answers.values())


def scored_line(line: Mapping, metric: str | None) -> Scored:
    """One line of an answer file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it cannot be scored.
    """
    metadata = line.get("metadata") or {}
    identifier = json.dumps(line["question_id"], ensure_ascii=False)
    answer, expected = line["text"], metadata.get("expected", line.get("expected"))
    kind = metadata.get("kind", line.get("kind"))
    check_expected(f"question {identifier}", expected, kind, metric)
    if not isinstance(answer, str):
        raise ValueError(f"question {identifier}: expected the answer as text, found {answer!r}")
    used = metric or kind or DEFAULT_KIND
    return Scored(identifier, kind or used, used, answer, expected, is_right(used, answer, expected))


def check_expected(name: str, expected: object, kind: object, metric: str | None = None) -> None:
    """Raises ValueError unless a question, called `name`, has an expected answer that its kind can score."""
    used = metric or kind or DEFAULT_KIND
    if used not in KINDS:
        raise ValueError(f"{name}: kind {used!r} is not one of {', '.join(KINDS)}; or pass --metric for all")
    if not isinstance(expected, str):
        raise ValueError(f"{name}: no expected answer; use records that end with one, or add a field 'expected'")
    if not can_expect(used, expected):
        raise ValueError(f"{name}: {expected!r} cannot be the expected answer of a question of kind {used}")


def check_questions(data: str, image_folder: Path | None) -> None:
    """Raises ValueError or OSError where one of `--questions` cannot be answered or scored; the message names it."""
    from llava.eval.question_records import QuestionRecords  # takes seconds

    questions = QuestionRecords(data, str(image_folder) if image_folder else None)
    names: dict[str, str] = {}
    for place in range(len(questions)):
        name = f"--questions {data}, {questions.named(place)}"
        try:
            questions.picture_sizes(place)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        question = questions[place]
        check_expected(name, question.expected, question.kind)
        identifier = json.dumps(question.identifier, ensure_ascii=False)
        if identifier in names:
            raise ValueError(f"{name}: the id {identifier} is also that of {names[identifier]}; expected each id once")
        names[identifier] = questions.named(place)


# --- tables -----------------------------------------------------------------------------------------------------------


def groups(answers: Sequence[Scored]) -> dict[str, list[int]]:
    """Places of the answers of each kind, and of all where there are several kinds."""
    places_of_kind: dict[str, list[int]] = {}
    for place, answer in enumerate(answers):
        places_of_kind.setdefault(answer.kind, []).append(place)
    return places_of_kind if len(places_of_kind) == 1 else places_of_kind | {ALL: list(range(len(answers)))}


def score_rows(answers: Sequence[Scored]) -> list[dict[str, Any]]:
    """Right answers of every kind in percent, with Wilson's 95 % interval."""
    rows: list[dict[str, Any]] = []
    for kind, places in groups(answers).items():
        chosen = [answers[place] for place in places]
        right = sum(answer.right for answer in chosen)
        low, high = (round(100 * end, 1) for end in share_interval(right, len(chosen)))
        metrics = "+".join(dict.fromkeys(answer.metric for answer in chosen))
        row: dict[str, Any] = {"kind": kind, "metric": metrics, "questions": len(chosen), "right": right}
        row |= {"percent": f"{100 * right / len(chosen):.1f}", "95 % interval": f"{low} to {high}"}
        rows.append(row | {"unread": sum(not answer.is_read for answer in chosen)})
    return rows


def difference_rows(files: Sequence[Path], first: Sequence[Scored], second: Sequence[Scored]) -> list[dict[str, Any]]:
    """The second file's scores minus the first's, paired by question, with a bootstrap's 95 % interval.

    Raises:
        ValueError: the files have other questions, kinds or expected answers; the message names them.
    """
    theirs = {answer.identifier: answer for answer in second}
    ours = {answer.identifier: answer for answer in first}
    for file, missing in ((files[1], ours.keys() - theirs.keys()), (files[0], theirs.keys() - ours.keys())):
        if missing:
            listed = ", ".join(sorted(missing)[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
            raise ValueError(f"{file}: no answer to {len(missing)} questions of the other file, by id: {listed}")
    for name, answer in ours.items():
        if (answer.kind, answer.expected) != (theirs[name].kind, theirs[name].expected):
            raise ValueError(
                f"question {name}: {answer.kind}, {answer.expected!r} is expected in {files[0]}; {theirs[name].kind}, "
                f"{theirs[name].expected!r} in {files[1]}"
            )
    changes = np.array([float(theirs[answer.identifier].right) - float(answer.right) for answer in first])
    rows: list[dict[str, Any]] = []
    for kind, places in groups(first).items():
        result, _ = compare_benchmarks([changes[places][None]], [None])
        (difference,) = result
        row: dict[str, Any] = {"kind": kind, "difference": f"{difference.delta:+.1f}"}
        row |= {"95 % interval": f"{difference.low:+.1f} to {difference.high:+.1f}"}
        row |= {
            "verdict": difference.verdict,
            "won": difference.won,
            "lost": difference.lost,
            "p": float(f"{difference.p:.2g}"),
        }
        rows.append(row)
    return rows


def task_result(file: Path) -> TaskResult:
    """The answers of a file as a task's result, for comparisons."""
    answers = read_scored(file)
    samples = [
        Answered(answer.identifier, float(answer.right), answer.answer, answer.expected, answer.kind)
        for answer in answers
    ]
    score = 100 * sum(answer.right for answer in answers) / len(answers)
    return TaskResult("right answers, llava.eval.score", score, samples, None, 0.0)


if __name__ == "__main__":
    sys.exit(main())
