"""Answers to many questions: `python -m llava.eval.answer --model-path CKPT --data FILE --output answers.jsonl`.

Takes every data format of training, and LLaVA's question files (`question_id`, `image`, `text`). Writes one line per
question, in their order, with the fields that LLaVA's evaluation scripts read, and the settings of the run next to it
(`answers.jsonl.run.json`). Rerun the same command to resume: questions whose answers are in the file are skipped.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava.asking_flags import add_loading_arguments, add_model_arguments
from llava.utils.commands import Parser, exit_status, whole
from llava.utils.digests import revision
from llava.utils.files import write_json
from llava.utils.locks import locked
from llava.utils.paths import checkpoint_name
from llava.utils.progress import progress
from llava.utils.provenance import differences
from llava.utils.versions import EVALUATION, made_by

if TYPE_CHECKING:
    from llava.anyres import Size
    from llava.eval.question_records import Question, QuestionRecords

NEUTRAL = ("output", "batch_size", "device", "plugin")
"""Flags that do not decide the answers."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args), "interrupted; rerun the same command to resume")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m llava.eval.answer", description=__doc__.splitlines()[0])
    add_model_arguments(top)
    add_loading_arguments(top)
    add_decoding_arguments(top, temperature=0)
    top.add_argument("--data", required=True, help="questions: .json, .jsonl, .parquet or a mixture, as --data_path")
    top.add_argument("--image-folder", help="folder or zip file of their pictures (default: the current folder)")
    top.add_argument("--output", type=Path, required=True, help="file for the answers, one per line")
    top.add_argument("--batch-size", type=whole(1), default=8, help="questions per batch; sampled answers: 1")
    top.add_argument("--seed", type=int, default=0, help="seed of sampling")
    return top


def add_decoding_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    """The flags of decoding, also in LLaVA's spelling."""
    parser.add_argument("--temperature", type=float, default=temperature, help="0 decodes greedily, above 0 samples")
    likeliest = "sample from the likeliest tokens whose probabilities add up to this"
    parser.add_argument("--top-p", "--top_p", type=float, help=likeliest)
    parser.add_argument("--num-beams", "--num_beams", type=whole(1), default=1, help="beams of beam search")
    longest = "maximum tokens of an answer"
    parser.add_argument("--max-new-tokens", "--max_new_tokens", type=whole(1), default=512, help=longest)


def run(args: argparse.Namespace) -> None:
    """Writes `--output`.

    Raises ValueError, OSError, ImportError: refused flags, questions or checkpoint; `--output` holds other answers, or
    another process writes it.
    """
    if args.temperature < 0 or (args.top_p is not None and not (0 < args.top_p <= 1 and args.temperature)):
        raise ValueError("--temperature: expected 0 or more; --top-p: above 0 to 1, and with --temperature above 0")
    from llava.eval.question_records import QuestionRecords  # takes seconds

    questions = QuestionRecords(args.data, args.image_folder)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lock = args.output.with_name(f".{args.output.name}.lock")
    with locked(lock, f"--output {args.output}: another process writes it"):
        answer_all(questions, args)


def answer_all(questions: "QuestionRecords", args: argparse.Namespace) -> None:
    """Answers the questions that `--output` has no answers to yet."""
    import torch  # this and what follows take seconds

    from llava.asking import chosen_assistant, is_captioner
    from llava.model.decoding import evaluation_options, evaluation_record, unused

    output, settings = args.output, answer_settings(questions, args)
    done = number_answered(output, settings) if output.exists() else 0
    if questions and done == len(questions):
        print(f"{output}: finished before, {done} answers")
        return
    assistant = chosen_assistant(args)

    def fits(index: int, question: "Question", sizes: "list[Size]") -> None:
        if sizes and assistant.image_processor is None:
            raise ValueError(f"it has pictures, and {assistant.name} has no vision tower")
        assistant.prompt_length(question.asked.turns, sizes)

    questions.check(fits)
    if is_captioner(assistant.template):
        print(f"note: {args.model_path} is a captioner (template plain): it writes captions and ignores the questions")
    if note := unused(args.model_path, assistant.model.file_decoding):
        print(f"note: {note}")
    options = evaluation_options(args.max_new_tokens, args.temperature, args.top_p, args.num_beams)
    record = {"asked": settings, "count": len(questions)}
    write_json(record_file(output), record | evaluation_record(assistant.model.file_decoding, options))
    with open(output, "ab") as file, progress(len(questions), "answering", "questions", done=done) as bar:
        size = 1 if args.temperature else args.batch_size  # each sampled answer has a seed of its own
        for start in range(done, len(questions), size):
            batch = [questions[index] for index in range(start, min(start + size, len(questions)))]
            pictures = [questions.images.open(place) for question in batch for place in question.asked.pictures]
            torch.manual_seed(args.seed + start)
            answers = assistant.answer([question.asked.turns for question in batch], pictures, **options)
            lines = [answer_line(*pair, args.model_path) for pair in zip(batch, answers, strict=True)]
            file.write("".join(lines).encode())
            bar.update(len(batch))
            file.flush()
    if answer_settings(questions, args) != settings:
        record_file(output).unlink()  # whoever goes on with this file must not take it for either's
        raise ValueError(f"--output {output}: checkpoint or pictures changed during the run; remove the file and rerun")
    print(f"{output}: {len(questions)} answers")


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


# --- what is there already --------------------------------------------------------------------------------------------


def answer_settings(questions: "QuestionRecords", args: argparse.Namespace) -> dict[str, object]:
    """Everything that decides the answers: by flag, without batch size and device, and packages and code."""
    import torch  # takes seconds

    decisive = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    settings: dict[str, object] = {f"--{name.replace('_', '-')}": value for name, value in decisive.items()}
    for flag, path in (("--model-path", args.model_path), ("--model-base", args.model_base)):
        settings[flag] = path and f"{checkpoint_name(path)}, content {revision(path)}"
    settings["--data"] = f"content {questions.records.key[:16]}"
    settings["--image-folder"] = f"pictures {questions.pictures_content()}"
    on_cpu = not torch.accelerator.is_available() or str(args.device or "").startswith("cpu")
    settings["--dtype"] = args.dtype or ("float32" if on_cpu else "the checkpoint's")
    return settings | made_by(EVALUATION)


def record_file(output: Path) -> Path:
    """The record next to an answer file."""
    return output.with_name(f"{output.name}.run.json")


def recorded(output: Path) -> dict[str, Any] | None:
    """The record's `asked`, settings by flag, and `count`, the final number of answers; None without a usable one."""
    try:
        record = json.loads(record_file(output).read_text(encoding="utf-8"))
        return {"asked": dict(record["asked"]), "count": int(record["count"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def number_answered(output: Path, settings: dict[str, object]) -> int:
    """How many questions, from the first on, have their answers in the file; a line that was cut off is removed.

    Raises ValueError: the file has no record of its settings, or other ones.
    """
    again = "name another file, or remove this one"
    if (record := recorded(output)) is None:
        raise ValueError(f"--output {output}: no record of its settings, {record_file(output).name}; {again}")
    if changed := differences(record["asked"], settings):
        pairs = "; ".join(f"{flag} was {was}, is {now}" for flag, (was, now) in changed.items())
        raise ValueError(f"--output {output} was answered with other settings: {pairs}; {again}")
    lines = output.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        os.truncate(output, sum(map(len, lines[:-1])))
        del lines[-1]
    return len(lines)


if __name__ == "__main__":
    sys.exit(main())
