"""Experiments of a written plan: a study, compared after its last seed, and a tuning, which chooses each arm's rates.

A plan with `points` is a tuning. It does not ask the held-out questions, but those of the playground's validation set,
whose pictures are neither trained on nor held out. Each result is in `record.json` as soon as its training ends, and is
not trained again; the choice is there after the last one.
"""

import argparse
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare.engine import EXTRAS, Experiment
from llava.compare.plan import RATES, Plan, Settings, check_digest, check_record, hold, read_plan
from llava.compare.record import (
    BF16,
    FILE,
    LANGUAGE_MODEL,
    TOWER,
    Record,
    add_runs,
    logged_by,
    new_record,
    read_record,
    shared_configuration,
    stage_of,
    write_record,
)
from llava.compare.report import write_page
from llava.compare.runs import Run, changed, check_software
from llava.compare.steps import Step, StepError, runs_at_once
from llava.eval.results import Results, read_results
from llava.launch.devices import count_of, resolve_devices
from llava.launch.recipe import STAGES
from llava.utils.files import write_text
from llava.utils.machine import available_cores
from llava.utils.paths import ROOT
from llava.utils.presentation import format_table

PROBES = "probes"  # the pictures of planned studies
HELD_OUT = "heldout"  # folder of a planned run's answers
VALIDATION = "validation.json"  # of the playground's probes: about pictures of neither training nor heldout.json
VALIDATED = "validation"  # folder of a tuned run's answers
RUNS_PER_GPU = 8  # at most: each keeps a core busy with starting kernels, and leaves most of a card idle
MEMORY_ON_GPU = 8 * 2**30  # bytes, estimated, that a run of the demo takes at most
DIVERGED = "NonFiniteError"  # in the log of a training that the trainer gave up


def card() -> Any:
    """The first GPU's properties, such as `name` and `total_memory`."""
    import torch

    return torch.cuda.get_device_properties(0)


@dataclass
class Planned(Experiment):
    """A study by a written plan: its runs train in parallel, and answer held-out questions.

    Attributes:
        plan: what is trained.
        record: what is recorded of complete seeds.
        answered: runs whose lanes have ended in this call.
    """

    plan: Plan = field(kw_only=True)
    record: Record = field(default_factory=new_record)
    answered: set[str] = field(default_factory=set)

    def rates(self, run: Run) -> Settings:
        """What the plan decides for the run's arm."""
        return self.plan.settings.get(run.arm, {})

    @property
    def pictures(self) -> Path:
        return ROOT / "playground/data" / PROBES

    def data_settings(self, stage: str) -> dict[str, str]:
        """Pictures and steps."""
        return {"MAX_STEPS": str(self.plan.steps[stage])} | ({"DEMO_DATA": PROBES} if self.demo else {})

    def lane(self, run: Run) -> list[Step]:
        """The steps of one run."""
        answers = self.held_out(run, self.pictures, run.folder(HELD_OUT))
        return [*(self.stage(run, stage, more=self.threads()) for stage in STAGES), answers]

    def places(self) -> list[dict[str, str]]:
        """Variables of the runs that train side by side."""
        devices = resolve_devices(os.environ)
        if not self.demo:
            return [{}]
        if not devices.on_gpu:
            return [{}] * runs_at_once(len(self.runs), available_cores())
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = seen if len(seen) >= devices.ranks and all(seen) else list(map(str, range(devices.ranks)))
        lanes = min(RUNS_PER_GPU, runs_at_once(len(self.runs), available_cores()) // devices.ranks)
        lanes = max(1, min(lanes, card().total_memory // MEMORY_ON_GPU))
        return [{"CUDA_VISIBLE_DEVICES": name, "NUM_GPUS": "1"} for name in names[: devices.ranks] * lanes]

    def work(self) -> None:
        """Trains the seeds that are not recorded, and records each when its last arm is answered."""
        hold(self.plan, self.folder)
        if (self.folder / FILE).is_file():
            self.record = read_record(self.folder / FILE)
            check_record(self.plan, self.record, self.folder / FILE)
        self.seeds = self.plan.missing(self.record)
        if self.seeds:
            self.check_settings()
            self.prepare()
            title = f"{count_of(len(self.runs), 'run')}, {len(self.places())} at a time: stage 1, stage 2, answers"
            self.part(title, {run.name: self.lane(run) for run in self.runs}, ended=self.ended)
        for path in write_page(self.record, self.folder, self.plan):
            print(f"written: {path}")

    def prepare(self) -> None:
        """The playground's inputs of the plan, for runs by the code and on the kind of device that it began on."""
        recorded = {name.removeprefix(f"{STAGES[-1]}."): value for name, value in self.record["configuration"].items()}
        check_software(recorded, "recorded", "name another --output-dir")
        kind = card().name if resolve_devices(os.environ).on_gpu else "cpu"
        hold(self.plan, self.folder, kind, self.record["configuration"].get(f"{STAGES[0]}.devices.kind", ""))
        numbers = [f"--{name.replace('_', '-')}={value}" for name, value in self.plan.pictures.items()]
        demo = [["smollm2"], [PROBES, *numbers], ["tower", "--data", PROBES]]
        self.part(f"inputs: {PROBES}", {"inputs": self.inputs(*(demo if self.demo else demo[1:2]))})

    def ended(self, name: str) -> None:
        """Records the seed of the run called `name`, if all its arms are trained and answered."""
        seed = next(run.seed for run in self.runs if run.name == name)
        runs = [run for run in self.runs if run.seed == seed]
        self.answered.add(name)
        if not self.answered.issuperset(run.name for run in runs):
            return
        add_runs(self.record, runs, lambda run: read_results(run.folder(HELD_OUT)), self.plan.digest)
        self.record["runs"].sort(key=lambda entry: self.plan.seeds.index(entry["seed"]))
        write_record(self.record, self.folder / FILE)


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

    def lane(self, run: Run) -> list[Step]:
        """Both stages, and answers to the validation questions."""
        steps = [self.stage(run, stage, more=self.threads()) for stage in STAGES]
        steps.append(self.held_out(run, self.pictures / VALIDATION, run.folder(VALIDATED)))
        for step in steps:
            step.title = f"{run.root.name}, {step.title}"
        return steps

    def work(self) -> None:
        """Trains what has no result yet, and says what is chosen."""
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
            title = f"{count_of(len(self.runs), 'run')}, {len(self.places())} at a time: stage 1, stage 2, answers"
            try:
                self.part(title, {lane_of(run): self.lane(run) for run in self.runs}, ended=self.ended)
            except StepError:
                diverged = [run for run in self.runs if has_diverged(run)]
                if not diverged:
                    raise
                for run in diverged:
                    self.add(run, {"right": None})
        chosen = best_points(self.record)
        rows = [
            {"right, %": arm} | {f"point {point}": f"{mean:.1f}" for point, mean in enumerate(means)}
            | {"chosen": chosen[arm]} for arm, means in right_by_point(self.record).items()
        ]  # fmt: skip
        print(f"\n{format_table(rows)}\nwritten: {file}")

    def ended(self, name: str) -> None:
        """Records the result of the run whose lane has this name; its weights are not needed any more."""
        run = next(run for run in self.runs if lane_of(run) == name)
        results = read_results(run.folder(VALIDATED))
        self.record["configuration"] = self.checked_configuration(run, results)
        percent = {name: task.score for name, task in results.tasks.items()}
        log_probabilities = [
            sample.log_probability for name in self.plan.tasks for sample in results.tasks[name].samples
        ]
        start = run.starts(STAGES[0])[0]
        seconds = sum(stage_of(run, stage)["seconds"] for stage in STAGES)
        result = {"right": float(np.mean([percent[name] for name in self.plan.tasks])), "percent": percent}
        result |= {
            "log probability": float(np.array(log_probabilities, dtype=float).mean()),
            "loss of stage 1": logged_by(run)["loss"][0],
        }
        result["hours"] = seconds / 3600
        result |= {"commit": start["configuration"]["code"]["commit"], "started": start["provenance"]["started"]}
        self.add(run, result | {"machine": start["provenance"]["machine"]})
        for weights in run.folder(STAGES[-1]).glob("*model*.safetensors"):
            weights.unlink()

    def checked_configuration(self, run: Run, results: Results) -> dict[str, Any]:
        """What all runs share but for their rates, weights and precision included.

        Raises:
            ValueError: it is not that of the recorded results.
        """
        configuration, names = run.configuration(STAGES[0]), [f"initial_weights.{n}" for n in (TOWER, LANGUAGE_MODEL)]
        shared = shared_configuration(run, results) | {name: configuration.get(name) for name in (BF16, *names)}
        if fields := changed(self.record["configuration"] or shared, shared, ("recorded", "now")):
            raise ValueError(f"{lane_of(run)} differs from the recorded results{fields}\nContinue at their commit.")
        return shared

    def add(self, run: Run, result: dict[str, Any]) -> None:
        """Writes a run's result, and after the last one the choice."""
        results: list[Record] = self.record["results"]
        results.append({"point": point_of(run), "seed": run.seed, "arm": run.arm} | result)
        results.sort(key=lambda own: (own["seed"], own["point"], self.arms.index(own["arm"])))  # however lanes ended
        write_text(self.folder / FILE, json.dumps(self.record, indent=1) + "\n")
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


def right_by_point(record: Record) -> dict[str, list[float]]:
    """Each arm's percent right at every point, the mean over the seeds; -inf where a training was given up."""
    right: dict[str, list[list[float]]] = {}
    for result in record["results"]:
        points = right.setdefault(result["arm"], [[] for _ in record["points"]])
        points[result["point"]].append(-math.inf if result["right"] is None else result["right"])
    return {arm: [float(np.mean(own)) for own in points] for arm, points in right.items()}


def best_points(record: Record) -> dict[str, int]:
    """Each arm's point of the most right answers.

    Raises:
        ValueError: at every point of some arm a training was given up.
    """
    means = right_by_point(record)
    if hopeless := [arm for arm, own in means.items() if not math.isfinite(max(own))]:
        raise ValueError(f"no point trains {', '.join(hopeless)}; plan other points")
    return {arm: own.index(max(own)) for arm, own in means.items()}


def planned_of(args: argparse.Namespace) -> Planned:
    """The study or the tuning of `--plan`.

    Raises:
        ValueError: not a plan, or the caller has set what it decides.
    """
    plan = read_plan(args.plan)
    for name in ("preset", "arms", "seeds", "tasks", "questions", "question_images"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')}: the plan {plan.file} decides it; leave it out")
    for name in ("MAX_STEPS", "GLOBAL_BATCH", "TASKS", *RATES):
        if os.environ.get(name):
            raise ValueError(f"{name}={os.environ[name]}: the plan {plan.file} decides it; leave it out")
    os.environ.setdefault("EXTRAS", EXTRAS)
    os.environ.setdefault("REPORT_TO", "none")
    folder = (args.output_dir or Path("outputs") / plan.file.stem).resolve()
    return (Tuning if plan.points else Planned)(plan.preset, plan.arms, plan.seeds, folder, plan=plan)
