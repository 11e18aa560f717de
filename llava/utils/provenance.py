"""The record that a training run leaves, and how two records differ."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
"""Beside `train_log.jsonl`: what a run was made from. `llava.train.run_record` writes it."""
RUN_FORMAT = 1
COMPLETE = "complete.json"
"""In a checkpoint that is whole, and in the folder of a finished run. `llava.train.checkpoint` writes it last."""
DONE = "done"  # in the folder of a stage that a comparison or the quickstart has trained to its end


def differences(first: Mapping[str, Any], second: Mapping[str, Any], absent: Any = None) -> dict[str, tuple[Any, Any]]:
    """The names whose values differ, sorted, each with both values; `absent` stands for a value that is not there."""
    pairs = {name: (first.get(name, absent), second.get(name, absent)) for name in sorted({**first, **second})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a `run.json`: one entry for each time that the run was started or resumed.

    Raises:
        ValueError: the file does not exist or has another format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == RUN_FORMAT and content["starts"]:
            return content["starts"]
        raise ValueError(f"format {content['format']!r}, expected {RUN_FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a record of a run ({error!r}); train the run again") from error
