"""Trains every arm at the same few points of rates, with the same seeds, and chooses each arm's by its held-out loss.

A plan with `points` is a tuning. It asks no questions: the loss is that of the playground's validation set, whose
pictures are neither trained on nor asked about. Each result is in `record.json` as soon as its training ends, and is
not trained again; the choice is there after the last one.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from llava.compare.plan import RATES, Settings, check_digest, hold
from llava.compare.planned import Planned
from llava.compare.record import (
    BF16,
    FILE,
    LANGUAGE_MODEL,
    TOWER,
    Record,
    logged_by,
    shared_configuration,
)
from llava.compare.runs import Run, changed
from llava.compare.steps import Step, StepError
from llava.launch.devices import count_of
from llava.launch.recipe import STAGES
from llava.utils.files import write_text
from llava.utils.machine import machine
from llava.utils.provenance import DONE

DIVERGED = "NonFiniteError"  # in the log of a training that the trainer gave up


@dataclass
class Tuning(Planned):
    """A plan's arms at each of its points; the record has them, `seeds`, `configuration`, `results` and `choice`."""

    @property
    def runs(self) -> list[Run]:
        """Those without a result."""
        known = {(result["point"], result["seed"], result["arm"]) for result in self.record.get("results", [])}
        tried = [
            (point, seed, arm) for seed in self.seeds for point in range(len(self.plan.points)) for arm in self.arms
        ]
        return [Run(self.folder / f"point-{point}", seed, arm) for point, seed, arm in tried
                if (point, seed, arm) not in known]  # fmt: skip

    def rates(self, run: Run) -> Settings:
        """The settings of the run's point."""
        return self.plan.points[point_of(run)]

    def data_settings(self, stage: str) -> dict[str, str]:
        """The loss is measured once, after the last step of stage 2."""
        once = {"EVAL_STEPS": str(self.plan.steps[stage]), "EVAL_ON_START": "False"} if stage == STAGES[-1] else {}
        return super().data_settings(stage) | once

    def lane(self, run: Run) -> list[Step]:
        """Both stages; no questions."""
        steps = [self.stage(run, stage, more=self.threads(len(self.places()))) for stage in STAGES]
        for step in steps:
            step.title = f"{run.root.name}, {step.title}"
        return steps

    def work(self) -> None:
        """Trains what has no result yet, and says what is chosen."""
        for name in ("EVAL_DATA_PATH", "EVAL_IMAGE_FOLDER", "EVAL_STEPS"):
            if os.environ.get(name):
                raise ValueError(f"{name}={os.environ[name]}: the plan {self.plan.file} decides it; leave it out")
        if not self.plan.pictures.get("num_validation"):
            raise ValueError(f"--plan {self.plan.file}: a tuning needs pictures.num_validation, whose loss decides")
        hold(self.plan, self.folder)
        file = self.folder / FILE
        described = {"format": 1, "plan": self.plan.digest, "seeds": self.plan.seeds, "points": self.plan.points}
        self.record = described | {"configuration": {}, "results": []}
        if file.is_file():
            self.record = json.loads(file.read_text(encoding="utf-8"))
            check_digest(self.plan, self.record["plan"], file)
        if self.runs:
            self.check_settings()
            self.prepare()
        while self.runs:
            title = (
                f"{count_of(len(self.runs), 'run')}, {len(self.places())} at a time: stage 1, stage 2, held-out loss"
            )
            try:
                self.part(title, {lane_of(run): self.lane(run) for run in self.runs}, ended=self.ended)
            except StepError:
                diverged = [run for run in self.runs if has_diverged(run)]
                if not diverged:
                    raise
                for run in diverged:
                    self.add(run, {"loss": None})
        for arm, point in best_points(self.record).items():
            print(f"{arm}: point {point}, {json.dumps(self.plan.points[point])}")
        print(f"written: {file}")

    def ended(self, name: str) -> None:
        """Records the result of the run whose lane has this name; its weights are not needed any more."""
        run = next(run for run in self.runs if lane_of(run) == name)
        self.record["configuration"] = self.checked_configuration(run)
        last = run.log(STAGES[-1], "eval/loss")[-1]
        loss = last["eval/loss"] if math.isfinite(last["eval/loss"] or math.nan) else None
        if last["step"] != self.plan.steps[STAGES[-1]]:
            raise ValueError(f"{run.folder(STAGES[-1])}: the held-out loss is of step {last['step']}, not the last")
        start = run.starts(STAGES[0])[0]
        seconds = sum(float((run.folder(stage) / DONE).read_text()) for stage in STAGES)
        result = {"loss": loss, "loss of stage 1": logged_by(run)["loss"][0], "hours": seconds / 3600}
        result |= {"commit": start["configuration"]["code"]["commit"], "started": start["provenance"]["started"]}
        self.add(run, result | {"machine": machine()})
        for weights in run.folder(STAGES[-1]).glob("*model*.safetensors"):
            weights.unlink()

    def checked_configuration(self, run: Run) -> dict[str, Any]:
        """What all runs share but for their rates, weights and precision included.

        Raises:
            ValueError: it is not that of the recorded results.
        """
        own = Run(run.root, run.seed, run.arm, own=tuple(RATES.values()))
        configuration, names = run.configuration(STAGES[0]), [f"initial_weights.{n}" for n in (TOWER, LANGUAGE_MODEL)]
        shared = shared_configuration(own, None) | {name: configuration.get(name) for name in (BF16, *names)}
        if fields := changed(self.record["configuration"] or shared, shared, ("recorded", "now")):
            raise ValueError(f"{lane_of(run)} differs from the recorded results{fields}\nContinue at their commit.")
        return shared

    def add(self, run: Run, result: dict[str, Any]) -> None:
        """Writes a run's result, and after the last one the choice."""
        result = {"point": point_of(run), "seed": run.seed, "arm": run.arm} | result
        self.record["results"].append(result)
        if not self.runs:
            self.record["choice"] = {arm: self.plan.points[point] for arm, point in best_points(self.record).items()}
        write_text(self.folder / FILE, json.dumps(self.record, indent=1) + "\n")


def point_of(run: Run) -> int:
    return int(run.root.name.removeprefix("point-"))


def lane_of(run: Run) -> str:
    return f"{run.root.name}, {run.name}"


def has_diverged(run: Run) -> bool:
    logs = (run.folder(stage).with_suffix(".log") for stage in STAGES)
    return any(log.is_file() and DIVERGED in log.read_text() for log in logs)


def best_points(record: Record) -> dict[str, int]:
    """Each arm's point of the lowest mean held-out loss over the seeds.

    Raises:
        ValueError: at every point of some arm a training was given up.
    """
    losses: dict[str, list[list[float]]] = {}
    for result in record["results"]:
        points = losses.setdefault(result["arm"], [[] for _ in record["points"]])
        points[result["point"]].append(math.inf if result["loss"] is None else result["loss"])
    means = {arm: [float(np.mean(own)) for own in points] for arm, points in losses.items()}
    if hopeless := [arm for arm, own in means.items() if not math.isfinite(min(own))]:
        raise ValueError(f"no point trains {', '.join(hopeless)}; plan other points")
    return {arm: own.index(min(own)) for arm, own in means.items()}
