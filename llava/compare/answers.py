"""Answers a prepared set's held-out questions with one checkpoint, kind by kind.

Answers go to `results.json` (`llava.eval.results`), with a task for every kind of question. Recorded answers are reused
while checkpoint, questions, pictures, code and packages stay the same.
"""

import argparse
import hashlib
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llava.eval.results import LLAVA_COMMIT, Answered, Results, TaskResult, read_results, write_results
from llava.launch.devices import has_bf16_instructions
from llava.utils.commands import whole
from llava.utils.digests import revision
from llava.utils.progress import progress
from llava.utils.versions import ANALYSIS, git_commit, made_by
from playground.records import is_right

SOURCES = (*ANALYSIS, "llava/compare/answers.py", "playground/records.py")
"""The source files that may decide the answers and their scores."""
RECORDS = "heldout.json"
DATA = f"prepared folder with {RECORDS} and images/, or another file of such questions beside images/"
SHORTEST = 8  # tokens that every answer may have
Question = Mapping[str, Any]
"""A held-out record of a prepared set."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `answers`."""
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a finished training")
    parser.add_argument("--data", type=Path, required=True, help=DATA)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the results")
    parser.add_argument("--batch-size", type=whole(1), default=80, help="questions per batch")


def run(args: argparse.Namespace) -> None:
    """Answers the questions, unless their answers are recorded."""
    records, images = held_out(args.data), questions_file(args.data).with_name("images")
    content = content_of(args.data)
    now = described(args.checkpoint, len(records))
    if is_answered(args.output_dir, now, content):
        print(f"{args.output_dir}: all answers are already recorded")
        return
    from llava.asking import load_assistant

    assistant = load_assistant(str(args.checkpoint), torch_dtype=fastest_dtype())
    start = time.monotonic()
    said = answers_of(assistant, records, images, args.batch_size)
    if content_of(args.data) != content:
        raise ValueError(f"--data {args.data}: changed while its questions were answered; rerun the same command")
    now.tasks = scored(records, said, time.monotonic() - start, content)
    now.created = datetime.now(UTC).isoformat(timespec="seconds")
    print(f"written: {write_results(now, args.output_dir)}")


def questions_file(data: Path) -> Path:
    """The questions of a prepared folder, or `data` itself if it is a file.

    Raises:
        ValueError: there are none.
    """
    file = data if data.suffix == ".json" else data / RECORDS
    if not file.is_file():
        raise ValueError(f"{data}: no {file.name}; make it with: python -m playground {file.parent.name}")
    return file


def held_out(data: Path) -> list[dict[str, Any]]:
    """The records of `questions_file`."""
    return json.loads(questions_file(data).read_text(encoding="utf-8"))


def content_of(data: Path) -> str:
    """The fingerprint of the held-out questions and their pictures."""
    from llava.data.images import ImageStore

    file = questions_file(data)
    pictures = ImageStore(file.with_name("images")).content(record["image"] for record in held_out(data))
    return f"{hashlib.sha256(file.read_bytes()).hexdigest()}-{pictures}"


def is_answered(folder: Path, now: Results, content: str) -> bool:
    """Whether `folder` has answers made as `now` says, to questions and pictures of this `content`."""
    try:
        before = read_results(folder)
    except ValueError:
        return False
    return before.identity() == now.identity() and {task.data for task in before.tasks.values()} == {content}


def described(checkpoint: Path, questions: int) -> Results:
    """What decides a checkpoint's answers to this many questions, as a result without tasks.

    Raises:
        ValueError: there is no checkpoint.
    """
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint}: no checkpoint; expected the output folder of a finished training")
    from llava.model.decoding import GREEDY, evaluation_record, other_settings, read_generation_config  # takes seconds

    settings = {"questions": questions, "dtype": fastest_dtype()}
    settings |= evaluation_record(other_settings(read_generation_config(str(checkpoint))), GREEDY)
    command = shlex.join(["python", "-m", "llava.compare", *sys.argv[1:]])
    versions = made_by(SOURCES) | {LLAVA_COMMIT: git_commit()}
    return Results(str(checkpoint), revision(str(checkpoint)) or "", command, versions, settings, created="")


def scored(
    records: Sequence[Question], said: Sequence[tuple[str, float]], seconds: float, content: str
) -> dict[str, TaskResult]:
    """A task for every kind of question, from what `answers_of` gives; `content` identifies the questions."""
    kinds: dict[str, list[tuple[Answered, float]]] = {}
    for record, (text, log_probability) in zip(records, said, strict=True):
        kind, expected = record["kind"], record["conversations"][1]["value"]
        right = float(is_right(text, expected))
        answered = Answered(record["id"], right, text, expected, kind, log_probability)
        kinds.setdefault(kind, []).append((answered, 100 / len(record["choices"])))
    tasks = {}
    for kind, pairs in kinds.items():
        answers, chances = ([*each] for each in zip(*pairs, strict=True))
        score, chance = 100 * sum(answer.score for answer in answers) / len(answers), sum(chances) / len(answers)
        share = seconds * len(answers) / len(records)
        tasks[kind] = TaskResult("accuracy", score, answers, chance, share, content)
    return tasks


def fastest_dtype() -> str | None:
    """The answers' precision: on a GPU the checkpoint's own (None), on a CPU bf16 if it has instructions for it."""
    import torch

    if torch.accelerator.is_available():
        return None
    return "bfloat16" if has_bf16_instructions() else "float32"


def answers_of(assistant: Any, records: Sequence[Question], images: Path, batch_size: int) -> list[tuple[str, float]]:
    """The greedy answer to every record's first question.

    With each answer comes the log-probability of the expected one, in nats (`Assistant.log_probabilities`).
    """
    from llava.asking import Asked, batch_answers
    from llava.data.images import ImageStore
    from llava.model.decoding import evaluation_options

    store = ImageStore(images)
    questions = [Asked(record["conversations"][:1], [record["image"]]) for record in records]
    answered = [[*asked.turns, record["conversations"][1]] for asked, record in zip(questions, records, strict=True)]
    options = evaluation_options(longest_answer(records, assistant.tokenizer))
    texts: dict[int, str] = {}
    expected: list[float] = []
    batches = batch_answers(assistant, questions, store.open, batch_size, **options)
    for batch in progress(batches, "answering", "batches", total=math.ceil(len(records) / batch_size)):
        texts |= batch
    for start in progress(range(0, len(records), batch_size), "scoring", "batches"):
        part = slice(start, start + batch_size)
        shown = [store.open(place) for asked in questions[part] for place in asked.pictures]
        expected += assistant.log_probabilities(answered[part], shown)
    return [(texts[number], value) for number, value in enumerate(expected)]


def longest_answer(records: Sequence[Question], tokenizer: Any) -> int:
    """Tokens of the longest expected answer plus one, so that a longer answer is not mistaken for it."""
    expected = tokenizer([record["conversations"][1]["value"] for record in records])["input_ids"]
    return max(SHORTEST, 1 + max(map(len, expected)))
