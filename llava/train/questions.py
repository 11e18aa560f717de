"""Held-out questions that the model answers at every evaluation: its score, and a table of its answers.

The questions are the first human turns of records whose answer is short; the model answers by greedy decoding. An
answer is right if it is the record's, apart from case, sentence punctuation and white space (`llava.utils.scoring`).
Every rank asks all questions, so that under ZeRO-3 all ranks generate in step.

Logged keys: `eval/accuracy`, `eval/accuracy_low` and `eval/accuracy_high` (Wilson's 95 % interval), `eval/questions`;
the table is `eval/answers` (in TensorBoard the pictures are beside it, as `eval/pictures`).
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageOps
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from llava.asking import Asked, Assistant, batch_answers, is_captioner
from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.dataset import LazySupervisedDataset
from llava.data.records import Record, record_images
from llava.model.decoding import evaluation_options
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.utils.intervals import share_interval
from llava.utils.progress import progress
from llava.utils.scoring import normalized, same_answer

logger = logging.getLogger(__name__)

MOST_WORDS = 5  # words of an answer that can still be compared word for word
SIDE = 224  # pixels of a picture in the table
COLUMNS = ("picture", "question", "expected", "answer", "right")


class Answer(NamedTuple):
    """The model's answer to one question."""

    pictures: list[Image.Image]
    question: str
    expected: str
    said: str

    @property
    def is_right(self) -> bool:
        return same_answer(self.said, self.expected)


def can_be_asked(record: Record) -> bool:
    """Whether a record begins with a question that has a short answer and refers to all of the record's pictures."""
    turns = record["conversations"]
    if len(turns) < 2 or turns[0]["from"] != "human" or turns[1]["from"] != "gpt":
        return False
    shown = turns[0]["value"].count(DEFAULT_IMAGE_TOKEN)
    return 0 < len(normalized(turns[1]["value"]).split()) <= MOST_WORDS and shown == len(record_images(record))


class Questions:
    """The questions of a run, drawn evenly over the held-out records.

    Args:
        dataset: the held-out records.
        number: `--eval_generate`, the number of questions; if there are fewer, all of them.
        batch_size: questions per batch.
        context: tokens that the model takes.
        show_progress: whether to show a bar, as on one rank.

    Raises:
        ValueError: the template has no questions, or no record that fits has a short answer.
    """

    def __init__(
        self, dataset: LazySupervisedDataset, number: int, batch_size: int, context: int, show_progress: bool = True
    ):
        if is_captioner(dataset.template):
            raise ValueError(
                f"--eval_generate {number}: a captioner's template (--version plain) has no questions; leave it out"
            )
        self.dataset, self.batch_size, self.show_progress = dataset, batch_size, show_progress
        longest = min(dataset.model_max_length, context)
        fits = dataset.whole_lengths() <= longest
        usable = [i for i in range(len(dataset)) if fits[i] and can_be_asked(dataset.records[i])]
        if not usable:
            raise ValueError(
                f"--eval_generate {number}: no held-out record of at most {longest} tokens (--model_max_length, or "
                f"what the model takes) begins with a question and an answer of at most {MOST_WORDS} words; leave it "
                "out, or take other records"
            )
        if len(usable) < number:
            logger.info(
                "--eval_generate %d: %d held-out records fit --model_max_length and have short answers; all are asked",
                number, len(usable),
            )  # fmt: skip
        count = min(number, len(usable))
        self.indices = [usable[i * len(usable) // count] for i in range(count)]
        answers = [dataset.records[i]["conversations"][1]["value"] for i in self.indices]
        self.max_new_tokens = 2 + max(map(len, dataset.tokenizer(answers)["input_ids"]))  # a longer answer is wrong

    def ask(self, model: LlavaMetaForCausalLM, at_batch: Callable[[], bool] = lambda: False) -> list[Answer] | None:
        """The answers of a model in evaluation mode; None if `at_batch` stops it, as in `HeldOut.totals`."""
        dataset = self.dataset
        assistant = Assistant("--eval_generate", dataset.tokenizer, model, dataset.image_processor, dataset.template)
        options = evaluation_options(self.max_new_tokens) | {"synced_gpus": is_deepspeed_zero3_enabled()}
        records = [dataset.records[i] for i in self.indices]
        asked = [Asked(record["conversations"][:1], record_images(record)) for record in records]
        batches = batch_answers(assistant, asked, dataset.images.open, self.batch_size, at_batch, **options)
        count, said = math.ceil(len(asked) / self.batch_size), {}
        for batch in progress(batches, "asking", "batches", total=count, hidden=not self.show_progress):
            said |= batch
        if len(said) < len(asked):
            return None
        return [self._answer(record, said[number]) for number, record in enumerate(records)]

    def _answer(self, record: Record, said: str) -> Answer:
        question, expected = (turn["value"] for turn in record["conversations"][:2])
        pictures = [self.dataset.images.open(name) for name in record_images(record)]
        return Answer(pictures, question.replace(DEFAULT_IMAGE_TOKEN, "").strip(), expected, said)


def accuracy(answers: Sequence[Answer]) -> dict[str, float]:
    """The share of right answers and its interval, by logged name."""
    right = sum(answer.is_right for answer in answers)
    low, high = share_interval(right, len(answers))
    named = {"accuracy": right / len(answers), "accuracy_low": low, "accuracy_high": high, "questions": len(answers)}
    return {f"eval_{name}": value for name, value in named.items()}


# --- the table --------------------------------------------------------------------------------------------------------


def show_answers(answers: Sequence[Answer], callbacks: Iterable[TrainerCallback], step: int) -> None:
    """Writes the table to the loggers among the Trainer's callbacks on this rank."""
    for callback in callbacks:
        if getattr(callback, "tb_writer", None) is not None:
            _to_tensorboard(callback.tb_writer, answers, step)
        for library in (getattr(callback, "_wandb", None), getattr(callback, "_trackio", None)):
            if library is not None and getattr(callback, "_initialized", False):
                table = library.Table(columns=list(COLUMNS), data=[_row(answer, library.Image) for answer in answers])
                library.log({"eval/answers": table, "train/global_step": step})


def _row(answer: Answer, image: Callable[[Image.Image], Any]) -> list[Any]:
    """A row of `COLUMNS`; several pictures are shown side by side."""
    picture = image(_thumbnail(answer.pictures)) if answer.pictures else None
    return [picture, answer.question, answer.expected, answer.said, "yes" if answer.is_right else "no"]


def _thumbnail(pictures: Sequence[Image.Image]) -> Image.Image:
    """The pictures in one row, each padded to a square."""
    row = Image.new("RGB", (SIDE * max(1, len(pictures)), SIDE), "white")
    for number, picture in enumerate(pictures):
        row.paste(ImageOps.pad(picture.convert("RGB"), (SIDE, SIDE), color="white"), (SIDE * number, 0))
    return row


def _to_tensorboard(writer: Any, answers: Sequence[Answer], step: int) -> None:
    lines = ["| number | question | expected | answer | right |", "|---|---|---|---|---|"]
    pictures = []
    for number, answer in enumerate(answers):
        _, *cells = _row(answer, lambda picture: picture)
        lines.append(f"| {number} | " + " | ".join(" ".join(c.replace("|", "\\|").split()) for c in cells) + " |")
        if answer.pictures:
            pixels = torch.frombuffer(bytearray(_thumbnail(answer.pictures[:1]).tobytes()), dtype=torch.uint8)
            pictures.append(pixels.view(SIDE, SIDE, 3))
    writer.add_text("eval/answers", "\n".join(lines), step)
    if pictures:
        writer.add_images("eval/pictures", torch.stack(pictures), step, dataformats="NHWC")
    writer.flush()
