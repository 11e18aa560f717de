"""What the steps of an experiment share: a stage's files, and the variables that the experiment sets."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from llava.launch.variable_check import OF_ONE_STAGE
from llava.utils.processes import tail
from llava.utils.provenance import DONE

LOG_FILE = "train_log.jsonl"
Log = Sequence[Mapping[str, float]]
"""The optimizer steps that a stage logged."""


class StepError(RuntimeError):
    """A step failed; the message says which, and names its log where it has one."""


WHOLE_RUNS = dict.fromkeys(OF_ONE_STAGE, "")
"""Variables of every run of an experiment."""
_SET_BY = {
    "PRESET": "--preset sets it",
    "DEMO_DATA": "--preset, or the quickstart's --data, sets it",
    "SEED": "--seeds sets it",
    "PROJECTOR": "arms have mlp2x_gelu, or that of their name in --arms, as in pre_layernorm_mlp2x_gelu",
    "NORM": "--arms sets it",
    "NORM_INIT": "--arms sets it, as in layernorm@4x",
    "NORM_LEARNABLE": "--arms sets it, as in layernorm-fixed",
    "PRETRAIN_ADAPTER": "every stage 2 takes the adapter of its own stage 1",
    "OUTPUT_DIR": "--output-dir, or the quickstart's OUTPUT_ROOT, sets it",
    "RUN_NAME": "every run has its own name",
} | OF_ONE_STAGE


def refuse_ignored(runs: Iterable[Mapping[str, str]]) -> None:
    """Refuses a variable of the recipe whose value from the caller some run would not get.

    Args:
        runs: the variables that each run's script is called with, besides the caller's.

    Raises:
        ValueError: there is one; the message names it.
    """
    for settings in runs:
        for name, reason in _SET_BY.items():
            if name in settings and os.environ.get(name, settings[name]) != settings[name]:
                raise ValueError(f"{name}={os.environ[name]}: {reason}; leave the variable out")


def interpreter() -> str:
    """Python for a step's process: the caller's, or else the current one."""
    return os.environ.get("LLAVA_PYTHON") or sys.executable


def is_finished(folder: Path) -> bool:
    """Whether the stage in `folder` ended, and its model is there."""
    return (folder / DONE).is_file() and any(folder.glob("*model*.safetensors"))  # LORA=1: adapter_model.safetensors


def logged_steps(folder: Path) -> list[dict[str, float]]:
    """The optimizer steps that the stage in `folder` logged."""
    lines = map(json.loads, (folder / LOG_FILE).read_text().splitlines())
    return [line for line in lines if "loss" in line]


def last_step(folder: Path) -> dict | None:
    """The newest line about an optimizer step, or None; an incomplete last line is skipped."""
    try:
        lines = tail(folder / LOG_FILE).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if re.search(r'"loss": .*"samples_per_second": .*}$', line):
            return json.loads(line)
    return None
