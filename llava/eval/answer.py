"""Answers to many questions: `python -m llava.eval.answer --model-path CKPT --data FILE --output answers.jsonl`.

Takes every data format of training, and LLaVA's question files (`question_id`, `image`, `text`). Writes one line per
question, in their order, with the fields that LLaVA's evaluation scripts read. Rerun the same command to resume:
questions whose answers are in the file are skipped.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava.anyres import Size
from llava.asking_flags import add_loading_arguments, add_model_arguments
from llava.eval.answer_file import answered_ids, recorded_count, write_record
from llava.utils.commands import Parser, exit_status, whole
from llava.utils.digests import revision
from llava.utils.locks import locked
from llava.utils.paths import checkpoint_name
from llava.utils.progress import progress
from llava.utils.versions import EVALUATION, code_digest

if TYPE_CHECKING:
    from llava.asking import Assistant
    from llava.eval.question_records import Question, QuestionRecords

WINDOW = 8  # batches; questions are sorted by length within a window, and an interruption costs one window
SHOWN_FAULTS = 10
ON_BAD_RECORD = ("error", "skip")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args), "interrupted; rerun the same command to resume")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m llava.eval.answer", description=__doc__.splitlines()[0])
    add_model_arguments(top)
    add_loading_arguments(top)
    top.add_argument("--data", required=True, help="questions: .json, .jsonl, .parquet or a mixture, as --data_path")
    top.add_argument("--image-folder", help="folder or zip file of their pictures (default: the current folder)")
    top.add_argument("--output", type=Path, required=True, help="file for the answers, one per line")
    top.add_argument(
        "--overwrite", action="store_true", help="answer all questions again, even if --output has answers"
    )
    top.add_argument("--batch-size", type=whole(1), default=8, help="questions per batch (default: 8)")
    top.add_argument("--max-new-tokens", type=whole(1), default=512, help="maximum tokens of an answer (default: 512)")
    top.add_argument("--temperature", type=float, default=0, help="0 decodes greedily, above 0 samples (default: 0)")
    top.add_argument("--top-p", type=float, help="sample from the likeliest tokens whose probabilities add up to this")
    top.add_argument("--num-beams", type=whole(1), default=1, help="beams of beam search (default: 1)")
    top.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    top.add_argument("--num-chunks", type=whole(1), default=1, help="parts of the data, one process each (default: 1)")
    top.add_argument("--chunk-idx", type=int, default=0, help="the part that this process answers, from 0 (default: 0)")
    top.add_argument(
        "--on-bad-record",
        choices=ON_BAD_RECORD,
        default="error",
        help="for questions that cannot be answered: `error` lists them and stops (default), `skip` skips them",
    )
    return top


def run(args: argparse.Namespace) -> None:
    """Writes `--output`.

    Raises:
        ValueError, OSError, ImportError: refused flags, questions or checkpoint; `--output` holds other answers, or
            another process writes it.
    """
    if not 0 <= args.chunk_idx < args.num_chunks:
        raise ValueError(f"--chunk-idx {args.chunk_idx}: expected 0 to {args.num_chunks - 1} (--num-chunks)")
    if args.temperature < 0 or (args.top_p is not None and not (0 < args.top_p <= 1 and args.temperature)):
        raise ValueError("--temperature: expected 0 or more; --top-p: above 0 to 1, and with --temperature above 0")
    from llava.eval.question_records import QuestionRecords  # takes seconds

    part = (args.chunk_idx, args.num_chunks)
    questions = QuestionRecords(args.data, args.image_folder, part)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lock = args.output.with_name(f".{args.output.name}.lock")
    with locked(lock, f"--output {args.output}: another process writes it"):
        answer_all(questions, args)


def answer_all(questions: "QuestionRecords", args: argparse.Namespace) -> None:
    """Answers the questions that `--output` has no answers to yet."""
    import torch  # this and what follows take seconds

    from llava.asking import batch_answers, chosen_assistant, is_captioner
    from llava.model.decoding import evaluation_options, evaluation_record, unused

    output, settings = args.output, answer_settings(questions, args)
    if (
        not args.overwrite
        and output.exists()
        and (count := recorded_count(output, settings)) == len(answered_ids(output))
    ):
        print(f"{output}: finished before, {count} answers (--overwrite answers again)")
        return
    sizes = usable(questions, args.on_bad_record)
    assistant = chosen_assistant(args)
    if assistant.image_orientation != "stored":
        questions.show_as(assistant.image_orientation)
        sizes = {place: questions.picture_sizes(place) for place in sizes}
    if is_captioner(assistant.template):
        print(f"note: {args.model_path} is a captioner (template plain): it writes captions and ignores the questions")
    places = fitting(questions, sizes, assistant, args.on_bad_record)
    if note := unused(args.model_path, assistant.model.file_decoding):
        print(f"note: {note}")
    if args.overwrite:
        output.unlink(missing_ok=True)
    options = evaluation_options(args.max_new_tokens, args.temperature, args.top_p, args.num_beams)
    write_record(output, settings, len(places), evaluation_record(assistant.model.file_decoding, options))
    window, done = WINDOW * args.batch_size, answered_ids(output)
    for number, identifier in enumerate(done):
        expected = questions[places[number]].identifier if number < len(places) else None
        if identifier != expected:
            raise ValueError(
                f"--output {output}, line {number + 1}: expected the answer to question {expected!r}, found "
                f"{identifier!r}; answer again with --overwrite"
            )
    with open(output, "ab") as file, progress(len(places), "answering", "questions", done=len(done)) as bar:
        for start in range(len(done), len(places), window):
            batch = [questions[place] for place in places[start : start + window]]
            torch.manual_seed(args.seed + start)  # so that a resumed run samples what an uninterrupted one does
            answers: dict[int, str] = {}
            prompts, pictures = [question.asked for question in batch], questions.images.open
            for answered in batch_answers(assistant, prompts, pictures, args.batch_size, **options):
                answers |= answered
                bar.update(len(answered))
            lines = [answer_line(question, answers[i], args.model_path) for i, question in enumerate(batch)]
            file.write("".join(lines).encode())
            file.flush()
    print(f"{output}: {len(places)} answers")


def answer_line(question: "Question", text: str, model_path: str) -> str:
    """A line with the fields of LLaVA's answer files; `metadata` has what the record says: expected answer, kind."""
    name = checkpoint_name(model_path)
    key = json.dumps([name, question.identifier, question.prompt, text])
    known = {"expected": question.expected, "kind": question.kind}
    fields = {
        "question_id": question.identifier,
        "prompt": question.prompt,
        "text": text,
        "answer_id": hashlib.sha256(key.encode()).hexdigest()[:22],
        "model_id": name,
        "metadata": {key: value for key, value in known.items() if value is not None},
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def answer_settings(questions: "QuestionRecords", args: argparse.Namespace) -> dict[str, object]:
    """Everything that decides the answers, by flag; batch size and device do not."""
    names = ("conv_mode", "dtype", "load_8bit", "load_4bit", "image_aspect_ratio", "max_new_tokens", "temperature")
    names += ("top_p", "num_beams", "seed", "num_chunks", "chunk_idx", "on_bad_record")
    settings: dict[str, object] = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    for flag, path in (("--model-path", args.model_path), ("--model-base", args.model_base)):
        settings[flag] = path and f"{checkpoint_name(path)}, content {revision(path)}"
    settings["--data"] = f"content {questions.records.key[:16]}"
    settings["--image-folder"] = f"pictures {questions.pictures_content()}"
    settings["code"] = code_digest(EVALUATION)[:16]
    return settings


# --- what can be answered ---------------------------------------------------------------------------------------------


def usable(questions: "QuestionRecords", on_bad_record: str) -> dict[int, list[Size]]:
    """The picture sizes of every question whose record and pictures are valid.

    Raises:
        ValueError: others exist and are not to be skipped; the message names record, picture and fault.
    """
    skip, faults, sizes = on_bad_record == "skip", [], {}
    for place in progress(range(len(questions)), "checking", "questions"):
        try:
            sizes[place] = questions.picture_sizes(place, decode=skip)
        except ValueError as error:
            faults.append(f"{questions.named(place)}: {error}")
    report(faults, len(questions), skip)
    return sizes


def fitting(
    questions: "QuestionRecords", sizes: dict[int, list[Size]], assistant: "Assistant", on_bad_record: str
) -> list[int]:
    """Places of the questions that the template can write and that fit into the context.

    Raises:
        ValueError: others exist and are not to be skipped; the message names record and fault.
    """
    faults, places = [], []
    for place, shown in progress(sizes.items(), "measuring", "questions", total=len(sizes)):
        try:
            if shown and assistant.image_processor is None:
                raise ValueError(f"it has pictures, and {assistant.name} has no vision tower")
            assistant.prompt_length(questions[place].asked.turns, shown)
            places.append(place)
        except ValueError as error:
            faults.append(f"{questions.named(place)}: {error}")
    report(faults, len(questions), on_bad_record == "skip")
    return places


def report(faults: Sequence[str], total: int, skip: bool) -> None:
    """Lists the skipped questions on stderr.

    Raises:
        ValueError: they are not to be skipped; the message has the same list.
    """
    if not faults:
        return
    more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
    shown = "\n  ".join([*faults[:SHOWN_FAULTS], *more])
    if not skip:
        advice = "fix them, or pass --on-bad-record skip"
        raise ValueError(f"--data: {len(faults)} of {total} questions cannot be answered; {advice}:\n  {shown}")
    print(f"skipped: {len(faults)} of {total} questions (--on-bad-record skip):\n  {shown}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
