"""The result file of an evaluation: what `scripts/evaluate.sh` writes and what comparisons and reports read.

`results.json` in the output folder of one checkpoint is `Results` as JSON, with a `format`.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llava.utils.files import write_json

FORMAT = 1
RESULTS_FILE = "results.json"
LLAVA_COMMIT = "llava (git commit)"  # this tree among the versions of `Results`
NEUTRAL = ("batch_size", "num_gpus")  # settings on which the scores do not depend


@dataclass(frozen=True)
class Answered:
    """One question of a task."""

    id: str  # the same for every checkpoint, so that runs can be paired; unique in the task
    score: float  # 0 (wrong) to 1 (right)
    answer: str  # the model's; for tasks scored by likelihood, the likeliest choice
    target: str  # the expected answer; empty where the harness does not record it
    group: str | None = None  # the kind of question, such as a subject, where the task has kinds
    log_probability: float | None = None  # of the target, in nats (`Assistant.log_probabilities`), where computed


@dataclass(frozen=True)
class TaskResult:
    """What a checkpoint reached on one task."""

    metric: str  # the harness's name of the score
    score: float  # in percent, as the harness computed it; for some tasks not the mean of the samples' scores
    samples: list[Answered]  # every question, in the order of the data set
    chance: float | None  # percent that guessing reaches, where that is known
    seconds: float  # from the harness's start to its end; tasks that shared a process share its time equally
    data: str | None = None  # fingerprint of the local data set, or None where it came from the hub


@dataclass
class Results:
    """All finished tasks of one checkpoint, with what made them."""

    checkpoint: str  # its folder or hub id
    fingerprint: str  # hash that changes with the checkpoint's weights and configuration
    command: str  # of the newest run that wrote the file
    versions: dict[str, str | None]  # of the packages that scores depend on, this tree's code and its commit
    settings: dict[str, Any]  # template, limit, few-shot examples, batch size and devices of the newest run
    created: str  # time of the newest change, ISO 8601 in UTC
    tasks: dict[str, TaskResult] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What decides the scores besides the data; results are current only while this and the data stay equal."""
        settings = {name: value for name, value in self.settings.items() if name not in NEUTRAL}
        versions = {name: version for name, version in self.versions.items() if name != LLAVA_COMMIT}
        return {"checkpoint": self.fingerprint, **settings, **versions}


def write_results(results: Results, folder: Path) -> Path:
    """Writes `results.json` into `folder` in one step, so that a reader never sees half of it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS_FILE
    write_json(path, {"format": FORMAT, **asdict(results)})
    return path


def read_results(path: str | Path) -> Results:
    """The results in a `results.json`, given by its path or its folder.

    Raises ValueError: no such file, or not one of this format; the message says what is wrong.
    """
    path = Path(path)
    path = path / RESULTS_FILE if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (version := content.pop("format", None)) != FORMAT:
            raise ValueError(f"format {version!r}, expected {FORMAT}")
        for name, task in content["tasks"].items():
            samples = [Answered(**sample) for sample in task["samples"]]
            content["tasks"][name] = TaskResult(**task | {"samples": samples})
        return Results(**content)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; make it with: bash scripts/evaluate.sh CKPT") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not a result file of format {FORMAT} ({error}); remove it and evaluate again"
        raise ValueError(f"{path}: {what}") from error
