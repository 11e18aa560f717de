"""Chat messages, as TRL, ms-swift and LLaMA-Factory take them, made into LLaVA's records when a file is converted.

A record's keys tell its form: turns under `messages`, `conversation` or `conversations`, each with `role` and `content`
or with `from` and `value`; or TRL's `prompt` and `completion`, both lists of messages. docs/data.md says what each part
becomes. A record in LLaVA's form stays as it is; a record of neither form is left to `llava.data.checks`.
"""

import json
from typing import Any

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.data.checks import (
    LONGEST_RECORD,
    TURN_KEYS,
    Element,
    Problem,
    Record,
    RepeatedKeys,
    image_keys,
    record_problem,
    row_image_fields,
    text_problem,
)

TURN_PAIR = ("prompt", "completion")
"""TRL's names for the two halves of a conversation."""
_SPEAKERS = {"user": "human", "human": "human", "assistant": "gpt", "gpt": "gpt", "system": "system"}
_LLAVA = ("human", "gpt", "system")
_TOOLS = ("tool", "function", "observation", "function_call", "tool_call", "tool_response", "tool_calls", "ipython")
_PICTURE_KEYS = ("image", "path", "url", "image_url")


class _Fault(ValueError):
    """What keeps a record from being converted."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.problem = Problem(kind, message)


def checked_element(value: object, text: str = "", problem: Problem | None = None) -> Element:
    """The element of a record in any form, converted to LLaVA's and checked.

    Args:
        value: the record.
        text: its JSON; empty if it has none yet.
        problem: what kept the text from being parsed.
    """
    problem = text_problem(text) or problem
    if problem is None:
        record, problem = as_record(value)
        if not text or record is not value:
            text = json.dumps(record, default=row_image_fields)
        problem = problem or text_problem(text) or record_problem(record)
    return Element(text if len(text) <= LONGEST_RECORD else text[:1000], problem)


def as_record(element: object) -> tuple[Any, Problem | None]:
    """`element` as LLaVA's record (the same object if there is nothing to convert), and why it cannot be converted."""
    if not isinstance(element, dict) or isinstance(element, RepeatedKeys):
        return element, None
    try:
        key, turns = _turns(element)
        return element if key is None else _converted(element, key, turns), None
    except _Fault as fault:
        return element, fault.problem


def _turns(record: Record) -> tuple[str | None, list[object]]:
    """The key that the conversations replace, and the turns to convert; None as the key where nothing is converted."""
    keys = [key for key in TURN_KEYS if record.get(key) is not None]
    if len(keys) > 1:
        raise _Fault("schema", f"turns under {' and under '.join(map(repr, keys))}; keep one of the two")
    prompt, completion = map(record.get, TURN_PAIR)
    if not keys and isinstance(prompt, list) and isinstance(completion, list):
        if any(map(_is_answer, prompt)):
            raise _Fault(
                "turns", "'prompt' has an assistant turn, which would be trained on too; expected it in 'completion'"
            )
        return "prompt", prompt + completion
    if not keys or not isinstance(record[keys[0]], list) or not record[keys[0]]:
        return None, []
    key, turns = keys[0], record[keys[0]]
    return (None, []) if key == "conversations" and not any(map(_differs, turns)) else (key, turns)


def _is_answer(turn: object) -> bool:
    """Whether a turn is the assistant's, in either form and by any name of the speaker."""
    role = turn.get(_fields(turn)[0]) if isinstance(turn, dict) else None
    return isinstance(role, str) and _SPEAKERS.get(role) == "gpt"


def _differs(turn: object) -> bool:
    """Whether a turn needs to be converted; other turns are in LLaVA's form, or at fault."""
    if type(turn) is not dict or turn.get("from") in _LLAVA and isinstance(turn.get("value"), str):
        return False
    role_key, text_key = _fields(turn)
    role = turn.get(role_key)
    is_known = isinstance(role, str) and (role in _SPEAKERS or role in _TOOLS)
    return role_key == "role" or is_known and role not in _LLAVA or isinstance(turn.get(text_key), list)


def _fields(turn: dict[str, Any]) -> tuple[str, str]:
    """The keys of a turn's speaker and text."""
    chat = turn.get("role") is not None and turn.get("from") is None
    return ("role", "content") if chat else ("from", "value")


def _converted(record: Record, key: str, turns: list[object]) -> Record:
    pictures: list[str | None] = []
    conversations = []
    for number, turn in enumerate(turns):
        try:
            conversations.append(_turn(turn, pictures))
        except _Fault as fault:
            raise _Fault(fault.problem.kind, f"turn {number}: {fault}") from None
    record = {("conversations" if name == key else name): value for name, value in record.items()}
    record["conversations"] = conversations
    if key == "prompt":
        del record["completion"]
    if named := [picture for picture in pictures if picture is not None]:
        if keys := image_keys(record):
            raise _Fault("schema", f"pictures in the turns and under {keys[0]!r}; keep one of the two")
        if len(named) < len(pictures):
            raise _Fault("schema", f"{len(pictures)} image parts, but only {len(named)} of them name a picture")
        record["image"] = named
    elif any(isinstance(turn, dict) and _fields(turn)[0] == "role" for turn in turns):
        _place_in_front(record)
    return record


def _turn(turn: object, pictures: list[str | None]) -> object:
    """The turn in LLaVA's form, or as it is if it is at fault; the pictures of image parts are added to `pictures`."""
    if type(turn) is not dict:
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
        kind = part.get("type") if isinstance(part, dict) and not isinstance(part, RepeatedKeys) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text += ("\n" if behind_image and part["text"] and not part["text"].startswith("\n") else "") + part["text"]
            behind_image = behind_image and not part["text"]
        elif kind in ("image", "image_url"):
            pictures.append(_picture(part, number))
            text += ("\n" if text and not text.endswith("\n") else "") + DEFAULT_IMAGE_TOKEN
            behind_image = True
        else:
            raise _Fault(
                "schema",
                f"part {number}: expected {{'type': 'text', 'text': ...}} or {{'type': 'image'}}, found {part!r:.80}",
            )
    return text


def _picture(part: dict[str, Any], number: int) -> str | None:
    """The path that an image part names, or None where the pictures are listed outside the turns."""
    named = next((part[key] for key in _PICTURE_KEYS if part.get(key) is not None), None)
    if isinstance(named, dict):
        if named.get("bytes") is not None:
            raise _Fault("schema", f"part {number}: the bytes of a picture; expected them under 'images'")
        named = named.get("path", named.get("url"))
    if named is not None and not isinstance(named, str):
        raise _Fault("schema", f"part {number}: expected a picture's path, found {named!r:.80}")
    if named and ("://" in named or named.startswith("data:")):
        raise _Fault("schema", f"part {number}: {named:.80}: pictures are not downloaded or unpacked; expected a path")
    return named


def _place_in_front(record: Record) -> None:
    """Puts placeholders before the first question of messages that have none, as TRL and ms-swift do."""
    turns = record["conversations"]
    if not all(isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns):
        return
    keys = image_keys(record)
    images = record[keys[0]] if keys else []
    first = next((turn for turn in turns if turn.get("from") == "human"), None)
    if images and first and not any(DEFAULT_IMAGE_TOKEN in turn["value"] for turn in turns):
        count = len(images) if isinstance(images, list) else 1
        first["value"] = f"{DEFAULT_IMAGE_TOKEN}\n" * count + first["value"]
