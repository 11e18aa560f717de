"""The file of answers and, beside it, a record of what was asked: how many answers are there, and whether they fit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava.utils.files import write_json
from llava.utils.provenance import differences

if TYPE_CHECKING:
    from llava.eval.question_records import Question


def _record_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.run.json")


def write_record(output: Path, asked: Mapping[str, object], count: int) -> None:
    """Writes beside `output`, in one step, what is asked and how many answers there will be."""
    write_json(_record_file(output), {"asked": asked, "count": count})


def recorded(output: Path) -> dict[str, Any] | None:
    """What is recorded beside `output`: `asked`, by flag, and `count`; None where there is no usable record."""
    try:
        found = json.loads(_record_file(output).read_text(encoding="utf-8"))
        return {"asked": dict(found["asked"]), "count": int(found["count"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded_count(output: Path, asked: Mapping[str, object]) -> int:
    """How many answers the call that began `output` was to write.

    Raises:
        ValueError: there is no usable record of that call, or it asked something else; the message then
            names the flags with both values.
    """
    if (record := recorded(output)) is None:
        raise ValueError(
            f"--output {output}: the file exists, but {_record_file(output).name}, which says what was asked, is "
            "missing or damaged; name another file, or ask again with --overwrite"
        )
    if changed := differences(record["asked"], asked):
        pairs = "; ".join(f"{flag} was {was}, is {now}" for flag, (was, now) in changed.items())
        raise ValueError(f"--output {output} has answers to another call: {pairs}; ask again with --overwrite")
    return record["count"]


def read_answers(output: Path) -> tuple[list[bytes], int]:
    """The complete lines of a file, and how many bytes they take; none if the file does not exist."""
    whole = output.read_bytes().rpartition(b"\n") if output.exists() else (b"", b"", b"")
    lines = whole[0].split(b"\n") if whole[1] else []
    return lines, len(whole[0]) + len(whole[1])


def kept(output: Path, questions: "Sequence[Question]", window: int) -> tuple[int, int]:
    """How many answers `output` has in complete windows, and how many bytes these take.

    Raises:
        ValueError: a line does not answer the question at its place.
    """
    lines, _ = read_answers(output)
    for number, line in enumerate(lines):
        expected = questions[number].identifier if number < len(questions) else None
        try:
            found = json.loads(line)["question_id"]
        except (ValueError, KeyError, TypeError):
            found = line[:40].decode("utf-8", "replace")
        if found != expected:
            raise ValueError(
                f"--output {output}, line {number + 1}: expected the answer to question {expected!r}, found {found!r}; "
                "ask again with --overwrite"
            )
    count = len(lines) // window * window
    return count, sum(len(line) + 1 for line in lines[:count])
