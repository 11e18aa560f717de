"""Chat messages, as TRL, ms-swift and LLaMA-Factory take them, made into LLaVA's records when a file is converted.

A record's keys tell its form: turns under `messages`, `conversation` or `conversations`, each with `role` and `content`
or with `from` and `value`. docs/data.md says what each part becomes. A record in LLaVA's form stays as it is; a record
of neither form is left to `llava.data.checks`.
"""

import json
import re
from typing import Any

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.checks import (
    TURN_KEYS,
    Element,
    Problem,
    Record,
    image_keys,
    record_images,
    record_problem,
    row_image_fields,
)

_SURROGATE = re.compile("[\ud800-\udfff]")
_SPEAKERS = {"user": "human", "human": "human", "assistant": "gpt", "gpt": "gpt", "system": "system"}
_TOOLS = ("tool", "function", "observation", "function_call", "tool_call", "tool_response", "tool_calls", "ipython")
_PICTURE_KEYS = ("image", "path", "url", "image_url")


class _Fault(ValueError):
    """Kind and message of what keeps a record from being converted."""


def checked_element(value: object) -> Element:
    """The element of a record in any form, converted to LLaVA's and checked."""
    record, problem = value, None
    try:
        record = as_record(value)
    except _Fault as fault:
        problem = Problem(*fault.args)
    text = json.dumps(record, ensure_ascii=False, default=row_image_fields)
    if not text.isascii() and (surrogate := _SURROGATE.search(text)):
        where = text[max(0, surrogate.start() - 30) : surrogate.end()]
        problem = Problem("text", f"not UTF-8, or half of a surrogate pair, which no tokenizer accepts: {where!r}")
        text = json.dumps(record, default=row_image_fields)
    return Element(text, problem or record_problem(record))


def as_record(element: object) -> Any:
    """`element` as LLaVA's record, the same object if there is nothing to convert; raises a fault otherwise."""
    if not isinstance(element, dict):
        return element
    keys = [key for key in TURN_KEYS if element.get(key) is not None]
    if len(keys) > 1:
        raise _Fault("schema", f"turns under {' and under '.join(map(repr, keys))}; keep one of the two")
    turns = element[keys[0]] if keys else None
    if not isinstance(turns, list) or not turns or keys == ["conversations"] and all(map(_is_llavas, turns)):
        return element
    pictures: list[str | None] = []
    conversations = []
    for number, turn in enumerate(turns):
        try:
            conversations.append(_turn(turn, pictures))
        except _Fault as fault:
            kind, message = fault.args
            raise _Fault(kind, f"turn {number}: {message}") from None
    record = {("conversations" if name == keys[0] else name): value for name, value in element.items()}
    record["conversations"] = conversations
    if named := [picture for picture in pictures if picture is not None]:
        if image_keys(record):
            raise _Fault("schema", f"pictures in the turns and under {image_keys(record)[0]!r}; keep one of the two")
        if len(named) < len(pictures):
            raise _Fault("schema", f"{len(pictures)} image parts, but only {len(named)} of them name a picture")
        record["image"] = named
    elif any(isinstance(turn, dict) and _fields(turn)[0] == "role" for turn in turns):
        _place_in_front(record)
    return record


def _is_llavas(turn: object) -> bool:
    """Whether a turn needs no conversion."""
    return not isinstance(turn, dict) or turn.get("from") in _SPEAKERS.values() and isinstance(turn.get("value"), str)


def _fields(turn: dict[str, Any]) -> tuple[str, str]:
    """The keys of a turn's speaker and text."""
    chat = turn.get("role") is not None and turn.get("from") is None
    return ("role", "content") if chat else ("from", "value")


def _turn(turn: object, pictures: list[str | None]) -> object:
    """The turn in LLaVA's form, or as it is if it is at fault; the pictures of image parts are added to `pictures`."""
    if not isinstance(turn, dict):
        return turn
    keys = _fields(turn)
    role, content = map(turn.get, keys)
    if tools := role if role in _TOOLS else next((name for name in _TOOLS if turn.get(name)), None):
        raise _Fault("turns", f"{tools!r}: calls of tools and functions are not trained here; leave the record out")
    if not isinstance(role, str):
        return turn
    if role not in _SPEAKERS and keys[0] == "role":
        raise _Fault("turns", f"'role' is {role!r:.80}, expected one of user, assistant, system")
    further = {name: value for name, value in turn.items() if name not in keys and value is not None}
    text = _text(content, pictures)
    return further | {"from": _SPEAKERS.get(role, role), "value": text} if isinstance(text, str) else turn


def _text(content: object, pictures: list[str | None]) -> object:
    """The text of a list of parts; an image part becomes a placeholder on a separate line, in its place."""
    if not isinstance(content, list):
        return content
    text, behind_image = "", False
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text += ("\n" if behind_image and part["text"] and not part["text"].startswith("\n") else "") + part["text"]
            behind_image = behind_image and not part["text"]
        elif kind in ("image", "image_url"):
            pictures.append(_picture(part, number))
            text += ("\n" if text and not text.endswith("\n") else "") + DEFAULT_IMAGE_TOKEN
            behind_image = True
        else:
            expected = "{'type': 'text', 'text': ...} or {'type': 'image'}"
            raise _Fault("schema", f"part {number}: expected {expected}, found {part!r:.80}")
    return text


def _picture(part: dict[str, Any], number: int) -> str | None:
    """The path that an image part names, or None where the pictures are listed outside the turns."""
    named = next((part[key] for key in _PICTURE_KEYS if part.get(key) is not None), None)
    if isinstance(named, dict):
        if named.get("bytes") is not None:
            raise _Fault("schema", f"part {number}: the bytes of a picture; expected them under 'images'")
        named = named.get("path", named.get("url"))
    if named is not None and (not isinstance(named, str) or "://" in named or named.startswith("data:")):
        raise _Fault("schema", f"part {number}: expected a picture's path below --image_folder, found {named!r:.80}")
    return named


def _place_in_front(record: Record) -> None:
    """Puts placeholders before the first question of messages that have none, as TRL and ms-swift do."""
    turns, images = record["conversations"], record_images(record)
    if not all(isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns):
        return
    asked = [turn for turn in turns if turn.get("from") == "human"]
    if isinstance(images, list) and asked and not any(DEFAULT_IMAGE_TOKEN in turn["value"] for turn in asked):
        first = asked[0]
        first["value"] = f"{DEFAULT_IMAGE_TOKEN}\n" * len(images) + first["value"]
