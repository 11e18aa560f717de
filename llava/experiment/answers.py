"""Asks one checkpoint the held-out questions, and measures on some pictures how fast its tokens change over the layers.

`python -m playground compare` shows both beside those of other arms. Both are kept, and later calls take them as they
are.
"""

import argparse
import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llava.eval.results import CONTROLS
from llava.launch.devices import has_bf16_instructions
from llava.utils.commands import whole
from llava.utils.digests import revision
from llava.utils.files import write_json
from llava.utils.progress import progress
from llava.utils.provenance import differences
from llava.utils.versions import PLAYGROUND, code_digest
from playground.records import IMAGE_TOKEN, is_right
from playground.store import PlaygroundError

UNTOUCHED, BLANK, SHUFFLED, TEXT_ONLY = CONTROLS
ANALYSIS = "analysis"  # folder of what llava.analysis writes
UPDATE_RATES = "update-rates"
PICTURES = 24  # pictures on which update rates are measured
RECORDS = "heldout.json"
SHORTEST = 8  # tokens that an answer may always have


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m playground answers`."""
    parser.add_argument(
        "--arm", nargs=2, required=True, metavar=("NAME", "CHECKPOINT"), help="an arm's name and its last checkpoint"
    )
    add_shared_arguments(parser)


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `compare` has as well."""
    parser.add_argument("--data", type=Path, required=True, help=f"prepared folder with {RECORDS} and images/")
    parser.add_argument("--output-dir", type=Path, required=True, help="where everything goes")
    parser.add_argument("--batch-size", type=whole(1), default=80, help="questions answered at a time")
    parser.add_argument(
        "--max-new-tokens",
        type=whole(0),
        default=0,
        help="longest answer in tokens; 0: the longest expected one, at least 8",
    )
    parser.add_argument(
        "--pictures", type=whole(0), default=PICTURES, help="pictures on which update rates are measured; 0: none"
    )


def run(args: argparse.Namespace) -> None:
    """Writes `answers/<name>.json`, and the state of the measurement into `analysis/`."""
    name, checkpoint = args.arm
    answered(name, checkpoint, args)
    if args.pictures:
        measured(name, checkpoint, args)


def answered(name: str, checkpoint: str, args: argparse.Namespace) -> list[str]:
    """The checkpoint's answer to every held-out question, as recorded unless checkpoint or questions have changed.

    Raises:
        PlaygroundError: there is no checkpoint, or there are no questions.
    """
    records, asked = held_out(args.data), what_is_asked(checkpoint, args.data, args.max_new_tokens)
    if recorded := recorded_answers(name, asked, args.output_dir):
        return recorded
    answers = answer(checkpoint, records, args.data / "images", args.batch_size, args.max_new_tokens, name)
    file = answers_file(name, args.output_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"asked": asked, "dtype": fastest_dtype(), "answers": answers})
    return answers


def what_is_asked(checkpoint: str, data: Path, max_new_tokens: int) -> dict[str, Any]:
    """The facts that decide the answers: checkpoint, questions and pictures by content, code, and longest answer.

    Raises:
        PlaygroundError: there is no checkpoint.
    """
    from llava.data.images import ImageStore

    if not Path(checkpoint, "config.json").is_file():
        raise PlaygroundError(f"{checkpoint} holds no checkpoint; --arm wants the output folder of a finished training")
    pictures = ImageStore(data / "images", follow_links=True)
    return {
        "checkpoint": revision(checkpoint),
        "questions": hashlib.sha256((data / RECORDS).read_bytes()).hexdigest(),
        "pictures": pictures.content(record["image"] for record in held_out(data)),
        "code": code_digest(PLAYGROUND),
        "max_new_tokens": max_new_tokens,
    }


def recorded_answers(name: str, asked: dict[str, Any], folder: Path) -> list[str]:
    """The answers in `folder` if they were given to exactly what is asked; else none, and a line says what differs."""
    file = answers_file(name, folder)
    try:
        recorded = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    if changed := differences(recorded["asked"], asked):
        print(f"{file}: made with other {', '.join(changed)}; asked again")
        return []
    return recorded["answers"]


def is_recorded(name: str, checkpoint: str, data: Path, folder: Path) -> bool:
    """Whether `folder` has this checkpoint's answers to these questions."""
    there = answers_file(name, folder).is_file()
    return there and bool(recorded_answers(name, what_is_asked(checkpoint, data, 0), folder))


def answers_file(name: str, folder: Path) -> Path:
    return folder / "answers" / f"{name}.json"


def held_out(data: Path) -> list[dict[str, Any]]:
    """The held-out records of a prepared folder."""
    if not (data / RECORDS).is_file():
        raise PlaygroundError(f"{data}: no {RECORDS} there. Run `python -m playground {data.name}` first.")
    return json.loads((data / RECORDS).read_text(encoding="utf-8"))


def fastest_dtype() -> str | None:
    """The precision to answer in: on a GPU the checkpoint's own (None), on a CPU bf16 if it has instructions for it."""
    import torch

    if torch.accelerator.is_available():
        return None
    return "bfloat16" if has_bf16_instructions() else "float32"


def answer(
    checkpoint: str, records: list[dict[str, Any]], images: Path, batch_size: int, max_new_tokens: int, name: str
) -> list[str]:
    """The checkpoint's greedy answer to the first question of every record."""
    from llava.asking import load_assistant

    assistant = load_assistant(checkpoint, torch_dtype=fastest_dtype())
    return asked_under(UNTOUCHED, assistant, records, images, batch_size, name, max_new_tokens)


def asked_under(
    control: str,
    assistant: Any,
    records: Sequence[dict[str, Any]],
    images: Path,
    batch_size: int,
    name: str,
    max_new_tokens: int = 0,
) -> list[str]:
    """The greedy answer to every record's first question, with its picture changed as the control says.

    Args:
        name: what the progress bar says.
    """
    from PIL import Image

    from llava.analysis.interventions import GREY
    from llava.asking import Asked, batch_answers
    from llava.data.images import ImageStore

    store = ImageStore(images, follow_links=True)

    def picture(file: Any) -> Image.Image:
        image = store.open(file)
        return Image.new("RGB", image.size, GREY) if control == BLANK else image

    def question(record: dict[str, Any]) -> Asked:
        (turn,) = record["conversations"][:1]
        if control == TEXT_ONLY:
            return Asked([turn | {"value": turn["value"].replace(f"{IMAGE_TOKEN}\n", "")}], [])
        return Asked([turn], [record["image"]])

    options = {"do_sample": False, "max_new_tokens": max_new_tokens or longest_answer(records, assistant.tokenizer)}
    texts: dict[int, str] = {}
    with reordered(assistant.model) if control == SHUFFLED else contextlib.nullcontext():
        batches = batch_answers(assistant, list(map(question, records)), picture, batch_size, **options)
        for batch in progress(batches, f"answering, {name}", "batches", total=math.ceil(len(records) / batch_size)):
            texts |= batch
    return [texts[number] for number in range(len(records))]


@contextlib.contextmanager
def reordered(model: Any) -> Iterator[None]:
    """Reorders the projector's tokens of every picture within the block, the same way for all pictures and models."""
    from llava.analysis.interventions import shuffled

    handle = model.get_model().mm_projector.register_forward_hook(lambda module, inputs, tokens: shuffled(tokens))
    try:
        yield
    finally:
        handle.remove()


def longest_answer(records: Sequence[dict[str, Any]], tokenizer: Any) -> int:
    """Tokens of the longest expected answer plus one, so that an answer that goes on after it is not taken for it."""
    expected = tokenizer(list(map(expected_answer, records)))["input_ids"]
    return max(SHORTEST, 1 + max(map(len, expected)))


# --- scores -----------------------------------------------------------------------------------------------------------


def expected_answer(record: Mapping[str, Any]) -> str:
    return record["conversations"][1]["value"]


def hits(records: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float]:
    """Which answers are right, as 0 and 1."""
    return [float(is_right(text, expected_answer(r))) for r, text in zip(records, texts, strict=True)]


def chance_of(record: Mapping[str, Any]) -> float:
    """Percent that guessing one of the possible answers scores."""
    return 100 / len(record["choices"])


# --- update rates -----------------------------------------------------------------------------------------------------


def measured(name: str, checkpoint: str, args: argparse.Namespace) -> None:
    """Measures update rates and leaves them where the command `update-rates` finds them."""
    from llava.analysis import inputs
    from llava.analysis.layer_statistics import measure_layers

    flags = update_rates_arguments([(name, checkpoint)], args)
    measure_layers(flags.models[0], inputs.choose(flags), flags)


def update_rates_arguments(checkpoints: Sequence[tuple[str, str]], args: argparse.Namespace) -> argparse.Namespace:
    """The parsed command line of `python -m llava.analysis update-rates` for these checkpoints."""
    from llava.analysis.__main__ import parser

    words = [UPDATE_RATES, "--data", str(args.data / RECORDS), "--output-dir", str(args.output_dir / ANALYSIS)]
    for name, checkpoint in checkpoints:
        words += ["--model", f"{name}={checkpoint}"]
    words += ["--samples", str(args.pictures), "--batch-size", "8"]
    if dtype := fastest_dtype():
        words += ["--dtype", dtype]
    flags = parser(UPDATE_RATES).parse_args(words)
    flags.argv = words
    return flags
