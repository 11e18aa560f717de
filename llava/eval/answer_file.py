"""The answer file, and the record next to it of the settings that it was answered with."""

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


def write_record(output: Path, settings: Mapping[str, object], count: int, decoding: Mapping[str, object]) -> None:
    """Writes the settings, the final number of answers and `evaluation_record` next to `output`, in one step."""
    write_json(_record_file(output), {"asked": settings, "count": count, **decoding})


def recorded(output: Path) -> dict[str, Any] | None:
    """The record next to `output`: `asked`, the settings by flag, and `count`; None without a usable record."""
    try:
        record = json.loads(_record_file(output).read_text(encoding="utf-8"))
        return {"asked": dict(record["asked"]), "count": int(record["count"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded_count(output: Path, settings: Mapping[str, object]) -> int:
    """The final number of answers of the run that began `output`.

    Raises:
        ValueError: it has no usable record, or its settings differ; the message then names the flags with both
            values.
    """
    if (record := recorded(output)) is None:
        raise ValueError(
            f"--output {output}: the file exists, but the record of its settings, {_record_file(output).name}, is "
            "missing or damaged; name another file, or answer again with --overwrite"
        )
    if changed := differences(record["asked"], settings):
        pairs = "; ".join(f"{flag} was {was}, is {now}" for flag, (was, now) in changed.items())
        raise ValueError(f"--output {output} was answered with other settings: {pairs}; answer again with --overwrite")
    return record["count"]


def read_answers(output: Path) -> tuple[list[bytes], int]:
    """The complete lines of a file, and how many bytes they take; none if the file does not exist."""
    whole = output.read_bytes().rpartition(b"\n") if output.exists() else (b"", b"", b"")
    lines = whole[0].split(b"\n") if whole[1] else []
    return lines, len(whole[0]) + len(whole[1])


def complete_windows(output: Path, questions: "Sequence[Question]", window: int) -> tuple[int, int]:
    """Number of answers in complete windows of `output`, and their bytes.

    Raises:
        ValueError: a line does not belong to the question at its place.
    """
    lines, _ = read_answers(output)
    for number, line in enumerate(lines):
        expected = questions[number].identifier if number < len(questions) else None
        try:
            answered = json.loads(line)["question_id"]
        except (ValueError, KeyError, TypeError):
            answered = line[:40].decode("utf-8", "replace")
        if answered != expected:
            raise ValueError(
                f"--output {output}, line {number + 1}: expected the answer to question {expected!r}, found "
                f"{answered!r}; answer again with --overwrite"
            )
    count = len(lines) // window * window
    return count, sum(len(line) + 1 for line in lines[:count])
