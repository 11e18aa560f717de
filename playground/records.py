"""LLaVA-format records, as the picture sets write them."""

from collections.abc import Sequence
from typing import Any

IMAGE_TOKEN = "<image>"
# {"train" | "heldout": {image: {"picture": [caption, other true statements], "quarters": [list of statements, ...]}}};
# the four quarters in reading order
STATEMENTS = "statements.json"


def conversation(turns: Sequence[tuple[str, str]], with_image: bool) -> list[dict[str, str]]:
    """Return alternating human/gpt turns; with an image, its placeholder opens the first human turn."""
    messages = []
    for index, (question, answer) in enumerate(turns):
        prefix = f"{IMAGE_TOKEN}\n" if with_image and index == 0 else ""
        messages += [{"from": "human", "value": prefix + question}, {"from": "gpt", "value": answer}]
    return messages


def image_record(record_id: str, image: str, turns: Sequence[tuple[str, str]], **extra: Any) -> dict[str, Any]:
    """Return a record about one picture; `image` is relative to the set's `images` folder."""
    return {"id": record_id, "image": image, "conversations": conversation(turns, with_image=True), **extra}


def text_record(record_id: str, turns: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a record without a picture."""
    return {"id": record_id, "conversations": conversation(turns, with_image=False)}


def listed(choices: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer equals the expected one, except for case and a final full stop."""
    return answer.lower().rstrip(".") == expected.lower().rstrip(".")
