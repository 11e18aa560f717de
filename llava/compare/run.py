"""Trains every arm with every seed on the same data, scores and measures them, and writes one page.

With `--plan FILE` the arms, seeds and steps are those of a plan that was written down before its runs. Each seed is
recorded when all its arms are trained and answered; nothing is compared before the last one.
"""

import argparse
import json
import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from llava.compare.answers import held_out
from llava.compare.arms import parse_arms, parse_seeds
from llava.compare.engine import Experiment
from llava.compare.plan import Plan, Settings, check_record, hold, read_plan
from llava.compare.record import FILE, Record, add_runs, new_record, read_record, write_record
from llava.compare.report import write_page
from llava.compare.runs import Run, check_results
from llava.compare.steps import Step, runs_at_once
from llava.eval.results import UNTOUCHED, Results, read_results
from llava.eval.tasks import PAPER_COLUMNS
from llava.launch.devices import count_of, resolve_devices
from llava.launch.recipe import STAGES
from llava.utils.machine import available_cores
from llava.utils.paths import ROOT
from playground.options import PICTURES

PRESET, ARMS = "llama-3.2-3b", "none,layernorm,gwc_layernorm"  # the paper's
_ANALYSIS = "interface-norms layer-norms update-rates norm-params attention"
PROBES = "probes"  # the pictures of planned studies
HELD_OUT = "heldout"  # folder of a planned run's answers
EVALUATIONS = 6  # of a planned run during stage 2, after a first one before it
ASKED = "asked.json"  # their records: the first held-out ones, whose kinds alternate
ASKED_IN_TRAINING = 64
VALIDATION = "validation.json"  # of the playground's probes: about pictures of neither training nor questions


@dataclass
class Comparison(Experiment):
    """An experiment that is scored by the stock harnesses.

    Attributes:
        tasks: of scripts/evaluate.sh, joined by commas; empty: its own.
        questions: the user's own questions, evaluated in every run; their pictures are in `pictures_of_questions`.
    """

    tasks: str = ""
    questions: Path | None = None
    pictures_of_questions: Path | None = None

    def set_defaults(self) -> None:
        """Sets what the caller's variables leave open: the demo's tasks, packages and the tracker."""
        self.tasks = self.tasks or os.environ.get("TASKS") or ("scenes" if self.demo else "")
        os.environ.setdefault("EXTRAS", "train,playground,eval,analysis")
        os.environ.setdefault("REPORT_TO", "tensorboard")

    def data_settings(self, stage: str) -> dict[str, str]:
        """The demo's pictures; what `DATA_PATH` names is trained on in their place."""
        return {"DEMO_DATA": "scenes"} if self.demo else {}

    def evaluation(self, run: Run) -> Step:
        """Evaluates every task; finished ones are skipped."""
        # A model this small may have nothing to say about a photo; two small tasks start faster together.
        default = "--allow-empty --together --batch-size 8" if self.demo else ""
        flags = shlex.split(os.environ.get("EVALUATE_FLAGS") or default)
        words = ["llava.eval.evaluate", run.folder("finetune").resolve()]
        words += ["--tasks", self.tasks] if self.tasks else []
        words += ["--output-dir", run.folder("eval").resolve(), *flags]
        return self.python(f"{run.name}, evaluation", run.folder("eval.log"), *words)

    def own_questions(self, run: Run) -> Step:
        """The user's own questions."""
        words = ["llava.eval.answer", "--model-path", run.folder("finetune").resolve(), "--data", self.questions]
        words += ["--image-folder", self.pictures_of_questions] if self.pictures_of_questions else []
        log = run.folder("questions.log")
        return self.python(f"{run.name}, questions", log, *words, "--output", run.answers.resolve())

    def lane(self, run: Run) -> list[Step]:
        """The steps of one run."""
        asked = [self.own_questions(run)] if self.questions else []
        return [*(self.stage(run, stage) for stage in STAGES), self.evaluation(run), *asked]

    def prepared(self) -> list[str]:
        """The playground's inputs of preset and tasks, and for the analysis unless the caller names its data."""
        asked = [name for name in PICTURES if name in self.tasks.split(",")]
        sets = ["scenes"] * (self.demo or not os.environ.get("DATA")) + asked
        model, tower = (["smollm2"], ["tower"]) if self.demo else ([], [])
        return [*model, *dict.fromkeys(sets), *tower, *["heldout"] * bool(asked)]

    def work(self) -> None:
        """Every part in its order."""
        self.check_settings()
        self.part("inputs", {"inputs": self.inputs(*([name] for name in self.prepared()))})
        self.part("stage 1, stage 2, evaluation", {run.name: self.lane(run) for run in self.runs})
        commands = os.environ.get("ANALYSIS", _ANALYSIS).split()
        data, samples = os.environ.get("DATA"), os.environ.get("SAMPLES")
        self.part("measurements, first seed", self.measurements(commands, data, samples))
        self.report()
        print(f"\npage: {self.folder}/report.html   tables: {self.folder}/report.md {self.folder}/report-*.csv")

    def report(self) -> None:
        """Checks every run, and writes the record and the page."""
        if self.questions:
            check_results(self.runs, lambda run: run.own_results)
        record = new_record(title=f"{', '.join(self.arms)} by {self.preset}", times=self.times)
        add_runs(record, self.runs, lambda run: {UNTOUCHED: self.results_of(run)})
        write_record(record, self.folder / FILE)
        write_page(record, self.folder)

    def results_of(self, run: Run) -> Results:
        """A run's scores, the caller's own questions among them, in the paper's order."""
        tasks = run.results.tasks | (run.own_results.tasks if self.questions else {})
        order = [*PAPER_COLUMNS.values()]
        names = sorted(tasks, key=lambda name: ([*order, name].index(name), name))
        return replace(run.results, tasks={name: tasks[name] for name in names})


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `run`."""
    presets = sorted(path.stem for path in (ROOT / "scripts/presets").glob("*.sh"))
    parser.add_argument("--preset", choices=presets, help=f"recipe (default: {PRESET})")
    seeds = "number of seeds (42, 43, ...), or a list, as in 1,2 or 7,"
    norms = "with another initial norm as in layernorm@4x or layernorm@default"
    parser.add_argument("--arms", help=f"joined by commas, none first; {norms} (default: {ARMS})")
    parser.add_argument("--seeds", help=f"{seeds} (default: 1)")
    parser.add_argument("--tasks", help="tasks of scripts/evaluate.sh (default: the paper's nine; demo: scenes)")
    parser.add_argument("--questions", type=Path, help="your own questions with answers, also evaluated in every run")
    parser.add_argument("--question-images", type=Path, help="folder or zip file of their pictures (default: .)")
    parser.add_argument("--plan", type=Path, help="train a committed plan seed by seed; it decides the flags above")
    parser.add_argument("--output-dir", type=Path, help="default: outputs/compare-<preset>, or outputs/<plan>")


def run(args: argparse.Namespace) -> None:
    """The command `run`."""
    comparison = planned_of(args) if args.plan else comparison_of(args)
    comparison.set_defaults()
    comparison.run()


def comparison_of(args: argparse.Namespace) -> Comparison:
    """The comparison that the flags describe.

    Raises:
        ValueError: they do not describe one.
    """
    preset = args.preset or PRESET
    arms, seeds = parse_arms(args.arms or ARMS), parse_seeds(args.seeds or "1")
    folder = args.output_dir or Path("outputs") / f"compare-{preset}"
    comparison = Comparison(preset, arms, seeds, folder, tasks=args.tasks or "")
    if args.questions:
        from llava.eval.score import check_questions  # takes a second

        comparison.questions = args.questions.resolve()
        comparison.pictures_of_questions = args.question_images and args.question_images.resolve()
        check_questions(str(comparison.questions), comparison.pictures_of_questions)
    return comparison


def planned_of(args: argparse.Namespace) -> Planned:
    """The study of `--plan`.

    Raises:
        ValueError: not a plan, or the caller has set what it decides.
    """
    plan = read_plan(args.plan)
    for name in ("preset", "arms", "seeds", "tasks", "questions"):
        if getattr(args, name):
            raise ValueError(f"--{name}: the plan {plan.file} decides it; leave it out")
    if steps := os.environ.get("MAX_STEPS"):
        raise ValueError(f"MAX_STEPS={steps}: the plan {plan.file} decides it; leave it out")
    os.environ.setdefault("REPORT_TO", "none")
    folder = (args.output_dir or Path("outputs") / plan.file.stem).resolve()
    from llava.compare.tuning import Tuning  # which builds on this module

    return (Tuning if plan.points else Planned)(plan.preset, plan.arms, plan.seeds, folder, plan=plan)
