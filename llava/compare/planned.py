"""A planned study: what is trained was written down first, and nothing is compared before its last seed."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from llava.compare.answers import held_out
from llava.compare.comparison import Comparison
from llava.compare.plan import Plan, Settings, check_record, hold
from llava.compare.record import FILE, Record, add_runs, new_record, read_record, write_record
from llava.compare.report import write_page
from llava.compare.runs import Run
from llava.compare.steps import Step, runs_at_once
from llava.eval.results import Results, read_results
from llava.launch.devices import count_of, resolve_devices
from llava.launch.recipe import STAGES
from llava.utils.machine import available_cores
from llava.utils.paths import ROOT

PROBES = "probes"  # the pictures of planned studies
HELD_OUT = "heldout"  # folder of a planned run's answers
EVALUATIONS = 6  # of a planned run during stage 2, after a first one before it
ASKED = "asked.json"  # their records: the first held-out ones, whose kinds alternate
ASKED_IN_TRAINING = 64
VALIDATION = "validation.json"  # of the playground's probes: about pictures of neither training nor questions


@dataclass
class Planned(Comparison):
    """A comparison by a written plan: its runs train in parallel, and answer held-out questions, also under controls.

    Attributes:
        plan: what is trained.
        record: what is recorded of complete seeds.
        answered: runs whose lanes have ended in this call.
    """

    plan: Plan = field(kw_only=True)
    record: Record = field(default_factory=new_record)
    answered: set[str] = field(default_factory=set)

    @property
    def runs(self) -> list[Run]:
        return [replace(run, own=self.plan.own_fields) for run in super().runs]

    @property
    def asked(self) -> Path:
        """Records whose loss is measured during stage 2: the plan's validation set, or else some held-out questions."""
        return self.pictures / VALIDATION if self.plan.pictures.get("num_validation") else self.folder / ASKED

    def rates(self, run: Run) -> Settings:
        """What the plan decides for the run's arm."""
        return self.plan.settings.get(run.arm, {})

    @property
    def pictures(self) -> Path:
        return ROOT / "playground/data" / PROBES

    def data_settings(self, stage: str) -> dict[str, str]:
        """Pictures, steps, and in stage 2 the records of evaluations during training."""
        settings = {"MAX_STEPS": str(self.plan.steps[stage])} | ({"DEMO_DATA": PROBES} if self.demo else {})
        if stage == "finetune":
            held_out = {
                "EVAL_DATA_PATH": str(self.asked),
                "EVAL_IMAGE_FOLDER": str(self.pictures / "images"),
                "EVAL_STEPS": str(1 / EVALUATIONS),
                "EVAL_ON_START": "True",
            }
            settings |= {name: os.environ.get(name) or value for name, value in held_out.items()}
        return settings

    def lane(self, run: Run) -> list[Step]:
        """The steps of one run."""
        threads = self.threads(len(self.places()))
        answers = self.held_out(run, self.pictures, run.folder(HELD_OUT), self.plan.controls)
        return [*(self.stage(run, stage, more=threads) for stage in STAGES), answers]

    def places(self) -> list[dict[str, str]]:
        """Variables of the runs that train side by side."""
        devices = resolve_devices(os.environ)
        if not self.demo:
            return [{}]
        if not devices.on_gpu:
            return [{}] * runs_at_once(len(self.runs), available_cores())
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = seen if len(seen) >= devices.ranks and all(seen) else list(map(str, range(devices.ranks)))
        return [{"CUDA_VISIBLE_DEVICES": name, "NUM_GPUS": "1"} for name in names[: devices.ranks]]

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
            if not os.environ.get("EVAL_DATA_PATH") and self.asked.name == ASKED:
                records = held_out(self.pictures)[:ASKED_IN_TRAINING]
                self.asked.write_text(json.dumps(records), encoding="utf-8")
            title = f"{count_of(len(self.runs), 'run')}, {len(self.places())} at a time: stage 1, stage 2, answers"
            self.part(title, {run.name: self.lane(run) for run in self.runs}, ended=self.ended)
        for path in write_page(self.record, self.folder, self.plan):
            print(f"written: {path}")

    def prepare(self) -> None:
        """The playground's inputs, with the plan's numbers of pictures."""
        numbers = [f"--{name.replace('_', '-')}={value}" for name, value in self.plan.pictures.items()]
        demo = [["smollm2"], [PROBES, *numbers], ["tower", "--data", PROBES]]
        self.part(f"inputs: {PROBES}", {"inputs": self.inputs(*(demo if self.demo else demo[1:2]))})

    def ended(self, name: str) -> None:
        """Records the seed of the run called `name`, if all its arms are trained and answered."""
        seed = next(run.seed for run in self.runs if run.name == name)
        runs = [run for run in self.runs if run.seed == seed]
        self.answered.add(name)
        if not self.answered.issuperset(run.name for run in runs) or seed not in self.plan.missing(self.record):
            return
        add_runs(self.record, runs, self.answers_of, plan=self.plan.digest)
        self.record["runs"].sort(key=lambda entry: self.plan.seeds.index(entry["seed"]))
        write_record(self.record, self.folder / FILE)

    def answers_of(self, run: Run) -> dict[str, Results]:
        """A run's answers by control."""
        return {control: read_results(run.folder(HELD_OUT) / control) for control in self.plan.controls}
