"""The result file of an evaluation: what `scripts/evaluate.sh` writes and what comparisons and reports read.

`results.json` in the output folder of one checkpoint:

    {"format": 1, "checkpoint": str, "fingerprint": str, "command": str, "versions": {package: version or null},
     "settings": {name: value}, "created": ISO 8601 time,
     "tasks": {task: {"metric": str, "score": 0..100, "chance": 0..100 or null, "seconds": float,
                      "data": str or null,
                      "samples": [{"id": str, "score": 0..1, "answer": str, "target": str, "group": str or null,
                                   "log_probability": float or null}]}}}
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llava.utils.files import write_json

FORMAT = 1
RESULTS_FILE = "results.json"
LLAVA_COMMIT = "llava (git commit)"
"""This tree among the versions of `Results`."""
LLAVA_CODE = "llava (code)"
"""The digest of the sources that decide answers and scores, also among the versions."""
CONTROLS = UNTOUCHED, BLANK, SHUFFLED, TEXT_ONLY = "untouched", "blank", "shuffled", "text-only"
"""Folders with the results of a checkpoint as it is, and with its pictures removed in three ways."""

PAPER_COLUMNS = {
    "MMBench-EN": "mmbench_en_dev_static",
    "MM-Star": "mmstar",
    "POPE": "pope",
    "SEED-Bench-2-Plus": "seedbench_2_plus",
    "OCRBench": "ocrbench",
    "ScienceQA": "scienceqa",
    "AI2D": "ai2d",
    "HellaSwag": "hellaswag",
    "MMLU": "mmlu",
}
"""Columns of the paper's Table 4 in its order, and their tasks. All are percent, OCRBench's 0 to 1000 divided by 10."""


@dataclass(frozen=True)
class Answered:
    """One question of a task.

    Attributes:
        id: the same for every checkpoint, so that runs can be paired; unique in the task.
        score: 0 (wrong) to 1 (right).
        answer: what the model said; for tasks scored by likelihood, the likeliest choice.
        target: what was expected.
        group: the kind of question, such as a subject, where the task has kinds.
        log_probability: of the target, in nats (`Assistant.log_probabilities`); None where it was not computed.
    """

    id: str
    score: float
    answer: str
    target: str
    group: str | None = None
    log_probability: float | None = None


@dataclass(frozen=True)
class TaskResult:
    """What a checkpoint reached on one task.

    Attributes:
        metric: the harness's name of the score.
        score: in percent, as the harness computed it; for some tasks not the mean of the samples' scores.
        samples: every question, in the order of the data set.
        chance: percent that guessing reaches, or None where that is not known.
        seconds: from the harness's start to its end; tasks that shared a process share its time equally.
        data: fingerprint of the local data set, or None where it came from the hub.
    """

    metric: str
    score: float
    samples: list[Answered]
    chance: float | None
    seconds: float
    data: str | None = None

    def by_group(self) -> dict[str, float]:
        """Mean score of each kind of question in percent, in order of first sight; empty where there are no kinds."""
        groups: dict[str, list[float]] = defaultdict(list)
        for sample in self.samples:
            if sample.group is not None:
                groups[sample.group].append(sample.score)
        return {name: 100 * sum(scores) / len(scores) for name, scores in groups.items()}


@dataclass
class Results:
    """All finished tasks of one checkpoint, with what made them.

    Attributes:
        checkpoint: its folder or hub id.
        fingerprint: hash that changes with the checkpoint's weights and configuration.
        command: the command line of the newest run that wrote the file.
        versions: of the packages that the scores depend on, the digest of this tree's code, and its commit.
        settings: template, limit, few-shot examples, batch size and devices of the newest run.
        created: time of the newest change, ISO 8601 in UTC.
    """

    checkpoint: str
    fingerprint: str
    command: str
    versions: dict[str, str | None]
    settings: dict[str, Any]
    created: str
    tasks: dict[str, TaskResult] = field(default_factory=dict)


def write_results(results: Results, folder: Path) -> Path:
    """Writes `results.json` into `folder` in one step, so that a reader never sees half of it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    write_json(path, {"format": FORMAT, **asdict(results)})
    return path


def read_results(path: str | Path) -> Results:
    """The results in a `results.json`, given by its path or its folder.

    Raises:
        ValueError: no such file, or not one of this format; the message says what is wrong.
    """
    path = Path(path)
    path = path / RESULTS_FILE if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; make it with: bash scripts/evaluate.sh CKPT") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); remove it and evaluate again") from error
    version = content.pop("format", None) if isinstance(content, dict) else None
    if version != FORMAT:
        raise ValueError(f"{path}: format {version!r}, expected {FORMAT}; evaluate again with this version")
    try:
        tasks = {
            name: TaskResult(**task | {"samples": [Answered(**sample) for sample in task["samples"]]})
            for name, task in content.pop("tasks").items()
        }
        return Results(**content, tasks=tasks)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a result file of format {FORMAT} ({error}); evaluate again") from error
