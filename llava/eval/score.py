"""Scores a file of answers: `python -m llava.eval.score answers.jsonl`.

Reads what `python -m llava.eval.answer` writes: a line for each question with `question_id`, `text` (the answer) and
the expected answer, `expected`, under `metadata` or beside it. A question's `kind` says how it is scored
(`llava.utils.scoring`); without one it is scored as `exact`.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llava.eval.answer import recorded
from llava.eval.results import Answered, TaskResult
from llava.eval.tasks import mean
from llava.utils.commands import Parser, exit_status
from llava.utils.intervals import share_interval
from llava.utils.presentation import format_table
from llava.utils.scoring import READERS, is_right, kind_of

Rows = list[dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    top = Parser(prog="python -m llava.eval.score", description=__doc__.splitlines()[0])
    top.add_argument("answers", type=Path, help="file of answers, as python -m llava.eval.answer writes it")
    args = top.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Prints the scores. Raises ValueError, OSError: not a file of answers; the message names the record."""
    rows = score_rows(read_scored(args.answers))
    print(f"{args.answers}\n{format_table(rows)}")
    if any(row["unread"] for row in rows):
        print("\nunread: answers that hold no yes or no, letter or number, or several of them; they count as wrong")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_scored(file: Path) -> list[Answered]:
    """Every answer of a file, scored; the group is the question's kind.

    Raises ValueError, OSError: no such file, an incomplete one, or a record that cannot be scored; the message names
    it.
    """
    answers: dict[str, Answered] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):  # text has more ends of lines than JSON escapes
        try:
            answer = scored_line(json.loads(line))
            if answer.id in answers:
                raise ValueError(f"question {answer.id} is answered twice; expected each id once")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"no field {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}, line {number}: {fault}") from None
        answers[answer.id] = answer
    expected = record["count"] if (record := recorded(file)) else max(1, len(answers))
    if len(answers) != expected:
        raise ValueError(f"{file}: {len(answers)} of {expected} answers; rerun python -m llava.eval.answer")
    return list(answers.values())


def scored_line(line: Mapping) -> Answered:
    """One line of an answer file; raises ValueError, KeyError, TypeError or AttributeError if it cannot be scored."""
    known = {**line, **(line.get("metadata") or {})}
    identifier = json.dumps(line["question_id"], ensure_ascii=False)
    answer = line["text"]
    expected: Any = known.get("expected")
    kind = kind_of(f"question {identifier}", expected, known.get("kind"))
    if not isinstance(answer, str):
        raise ValueError(f"question {identifier}: expected the answer as text, found {answer!r}")
    return Answered(identifier, float(is_right(kind, answer, expected)), answer, expected, kind)


def check_questions(data: str, image_folder: Path | None) -> None:
    """Raises ValueError or OSError where one of `--questions` cannot be answered or scored; the message names it."""
    from llava.eval.question_records import QuestionRecords  # takes seconds

    questions = QuestionRecords(data, str(image_folder) if image_folder else None)
    questions.check(lambda *_: None, f"--questions {data}", all_scored=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def score_rows(answers: Sequence[Answered]) -> Rows:
    """Right answers of every kind in percent, with Wilson's 95 % interval."""
    by_kind: dict[str, list[Answered]] = {}
    for answer in answers:
        by_kind.setdefault(str(answer.group), []).append(answer)
    if len(by_kind) > 1:
        by_kind["all"] = list(answers)
    rows: Rows = []
    for kind, chosen in by_kind.items():
        readers = [READERS.get(str(answer.group), str) for answer in chosen]
        unread = sum(reader(answer.answer) is None for reader, answer in zip(readers, chosen, strict=True))
        right = sum(answer.score == 1 for answer in chosen)
        low, high = (round(100 * end, 1) for end in share_interval(right, len(chosen)))
        row = {"kind": kind, "questions": len(chosen), "right": right, "percent": f"{mean(chosen):.1f}"}
        row |= {"95 % interval": f"{low} to {high}", "unread": unread}
        rows.append(row)
    return rows


def task_result(file: Path) -> TaskResult:
    """The answers of a file as a task's result, for comparisons."""
    answers = read_scored(file)
    return TaskResult("right answers, llava.eval.score", mean(answers), answers, None, 0.0)


if __name__ == "__main__":
    sys.exit(main())
