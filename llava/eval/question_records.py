"""The questions of `python -m llava.eval.answer`: training records, and the lines of LLaVA's question files.

A conversation is used up to its last question, earlier answers included; an answer after that question is the expected
answer. A line of a question file has its words under `text` and its pictures, if any, under `image`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from llava.anyres import Size
from llava.asking import Asked
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.checks import TURN_KEYS, ImagePlace, Record, record_images, record_problem
from llava.data.errors import named_by
from llava.data.images import ImageStore
from llava.data.records import RecordTable, load_records
from llava.utils.progress import progress
from llava.utils.scoring import kind_of

SHOWN_FAULTS = 10
_SHOWN = f"{DEFAULT_IMAGE_TOKEN}\n"


class Question(NamedTuple):
    """One record's question.

    `prompt` is the last turn's words, after an `<image>` line for each picture shown up to it; of a question file the
    words alone. LLaVA's programs write it so, and those that score answers look for it.
    """

    identifier: object  # `question_id` or `id` of the record, else its place
    asked: Asked
    prompt: str
    expected: str | None  # the answer that the record has for it
    kind: object = None  # the record's `kind`, which says how the answer is scored


class QuestionRecords(Sequence[Question]):
    """The questions of `--data`, parsed on access; `[i]` raises ValueError where record i has none.

    Args:
        data: see `llava.data.records.load_records`.
        image_folder: pictures are looked up below it; a folder or zip file.

    Attributes:
        images: opens the pictures.

    Raises DataError, OSError: nothing readable there.
    """

    def __init__(self, data: str, image_folder: str | None):
        with named_by("--data"):
            self.records: RecordTable = load_records(data, check=False, show_progress=True).epoch()
        self.images = ImageStore(image_folder, others=self.records.image_folders, setting="--image-folder")

    def __len__(self) -> int:
        return len(self.records)

    # pyrefly: ignore[bad-override]  # one question, never a slice
    def __getitem__(self, index: int) -> Question:
        problem = self.records.problem(index)
        if problem is None:
            return as_question(self.records[index], index)
        line = json.loads(self.records.text(index)) if problem.kind == "schema" else None
        if type(line) is not dict or not set(TURN_KEYS).isdisjoint(line):
            raise ValueError(problem.message)
        if not isinstance(line.get("text"), str):
            raise ValueError(f"{problem.message}; a line of a question file has its words under 'text'")
        line = self.records[index]
        text, pictures = line["text"], record_images(line)
        if DEFAULT_IMAGE_TOKEN not in text and isinstance(pictures, list):  # they come first
            text = _SHOWN * len(pictures) + text
        record = line | {"conversations": [{"from": "human", "value": text}]}
        if problem := record_problem(record):
            raise ValueError(problem.message)
        question = as_question(record, index)
        return question._replace(prompt=question.prompt.removeprefix(len(question.asked.pictures) * _SHOWN))

    def pictures_content(self) -> str:
        """A digest of the questions' pictures, wherever their folder is."""

        def pictures() -> Iterator[ImagePlace]:
            for index in progress(range(len(self)), "reading pictures of", "questions"):
                with suppress(ValueError):  # no question, which `check` reports
                    yield from self[index].asked.pictures

        return self.images.content(pictures())

    def check(
        self, refuse: Callable[[int, Question, list[Size]], None], setting: str = "--data", all_scored: bool = False
    ) -> None:
        """Calls `refuse` with the index of each question, the question, and the sizes of its pictures.

        Raises ValueError: it raised one, a record or picture is invalid, or a question with an expected answer (or any,
        with `all_scored`) cannot be scored by `llava.eval.score`; the message names records and faults.
        """
        faults, places = [], {}
        for index in progress(range(len(self)), "checking", "questions"):
            try:
                question = self[index]
                if all_scored or question.expected is not None:
                    name = f"question {json.dumps(question.identifier, ensure_ascii=False)}"
                    kind_of(name, question.expected, question.kind)
                    if (first := places.setdefault(name, index)) != index:
                        raise ValueError(f"{name} is also that of {self.records.named(first)}; expected each id once")
                refuse(index, question, [self.images.open(place).size for place in question.asked.pictures])
            except ValueError as error:
                faults.append(f"{self.records.named(index)}: {error}")
        if faults:
            shown = "\n  ".join(faults[:SHOWN_FAULTS])
            raise ValueError(f"{setting}: {len(faults)} of {len(self)} questions cannot be used; fix them:\n  {shown}")


def as_question(record: Record, place: int) -> Question:
    """The question of a record that `record_problem` accepts; raises ValueError if it has no human's turn."""
    turns = record["conversations"]
    asking = [number for number, turn in enumerate(turns) if turn["from"] == "human"]
    if not asking:
        raise ValueError("expected a question, found no turn of 'human' (or 'user')")
    end = asking[-1] + 1
    shown = sum(turn["value"].count(DEFAULT_IMAGE_TOKEN) for turn in turns[:end])
    identifier = next((record[key] for key in ("question_id", "id") if record.get(key) is not None), place)
    asked = Asked(turns[:end], record_images(record)[:shown])
    prompt = shown * _SHOWN + turns[end - 1]["value"].replace(DEFAULT_IMAGE_TOKEN, "").strip()
    expected = turns[end]["value"] if len(turns) > end else record.get("expected")
    return Question(identifier, asked, prompt, expected, record.get("kind"))
