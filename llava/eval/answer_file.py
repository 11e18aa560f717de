"""The answer file, and the record next to it of the settings that it was answered with."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava.utils.files import write_json
from llava.utils.provenance import differences


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


def answered_ids(output: Path) -> list[object]:
    """The ids of the questions whose answers are in the file; a last line that was cut off is removed.

    Raises:
        ValueError: a line is not an answer.
    """
    if not output.exists():
        return []
    text, end, cut = output.read_bytes().rpartition(b"\n")
    if cut:
        os.truncate(output, len(text + end))
    ids = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            ids.append(json.loads(line)["question_id"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"--output {output}, line {number}: not an answer; answer again with --overwrite"
            ) from None
    return ids
