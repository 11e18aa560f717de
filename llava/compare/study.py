"""The study: every arm, and the norm's dose, trained in parallel with seeds and controls, and one page about it.

    inputs     the playground's language model, pictures and tower
    plan       with `--hours`: a short pilot of the baseline decides steps and seeds (`llava.compare.plan`)
    runs       stage 1, stage 2, answers and controls | the same for the next arm and seed
    measured   `llava.analysis` before training | after stage 1 | after stage 2, on the first seed's models
    page       study.json, study.html, study.md (`llava.compare.study_record`, `study_page`)

`|` means in parallel: one process per GPU for the demo, on a CPU as many as cores and memory allow. Steps and checks
are those of every experiment (`llava.compare.engine`).
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from llava.compare import answers
from llava.compare.arms import SEEDS, parse_arms, parse_seeds
from llava.compare.comparison import Comparison
from llava.compare.engine import DEMO, at_work, show_times
from llava.compare.lanes import Step, runs_at_once
from llava.compare.plan import (
    FEWEST_SEEDS,
    FEWEST_STEPS,
    PLAN_FILE,
    Pilot,
    Plan,
    check_same,
    fitting,
    points_in_words,
    predicted_hours,
    read_plan,
)
from llava.compare.report_tables import seconds_of_steps
from llava.compare.runs import Run, check_results, check_runs
from llava.compare.stage import refuse_ignored
from llava.compare.study_page import write_page
from llava.compare.study_record import ANALYSIS, answers_of, record, write_record
from llava.eval.results import CONTROLS
from llava.launch.devices import count_of, resolve_devices
from llava.launch.recipe import STAGES
from llava.utils.machine import available_cores
from llava.utils.paths import ROOT
from llava.utils.provenance import DONE

ARMS = (
    "none,scale,scale-fixed,clip,rmsnorm,layernorm,layernorm@default,gwc_layernorm,gwc_rmsnorm,"
    "gwc_layernorm@0.25x,gwc_layernorm@4x,gwc_layernorm@16x"
)
QUICK_ARMS = "none,scale-fixed,gwc_layernorm,gwc_layernorm@4x"
PRESETS = {DEMO: (DEMO, "probes"), "stamps": (DEMO, "stamps")}
"""Recipe and pictures of presets that are not named after their recipe; others ask about the pictures of `demo`."""
EVALUATIONS = 6  # during stage 2, after a first evaluation before it
ASKED = "asked.json"  # their questions: the first held-out ones, whose kinds alternate
ASKED_IN_TRAINING, ASKED_IN_QUICK_TRAINING = 64, 24
QUICK_QUESTIONS = 54  # six of every kind of `probes`
QUESTIONS_UNDER_CONTROLS = 144  # these answers fall to chance, as few of every kind and seed show
QUICK_SHARE, QUICK_SEEDS = 1 / 6, 2
PILOT_SHARE = 1 / 4
START = "start"
"""Folder of a run's untrained model: one step of stage 1 at learning rate 0, for the first seed alone."""
MEASURED = {
    START: "interface-norms update-rates attention theory",
    STAGES[0]: "interface-norms update-rates attention theory",
    STAGES[1]: "interface-norms layer-norms update-rates norm-params attention gradients interventions theory",
}
"""What `llava.analysis` measures before training and after each stage."""


@dataclass
class Study(Comparison):
    """A comparison with a plan, whose runs train in parallel.

    Attributes:
        plan: see `Plan`.
        quick: few questions in training and few samples measured.
        measures_start: saves the first seed's models before training.
        beside: number of runs among which the cores are shared, if more than run here: the pilot, though alone, must
            not train faster than the study.
    """

    plan: Plan | None = None
    quick: bool = False
    measures_start: bool = True
    beside: int = 1

    @property
    def pictures(self) -> Path:
        return ROOT / "playground/data" / self.data

    @property
    def asked_in_training(self) -> int:
        return ASKED_IN_QUICK_TRAINING if self.quick else ASKED_IN_TRAINING

    # --- what a run is ------------------------------------------------------------------------------------------------

    def data_settings(self, stage: str) -> dict[str, str]:
        """Pictures, steps, and in stage 2 the questions of evaluations during training."""
        settings = {"MAX_STEPS": str(self.plan.steps[stage])} if self.plan else {}
        if self.demo:
            settings["DEMO_DATA"] = self.data
        if stage == "finetune":
            held_out = {
                "EVAL_DATA_PATH": str(self.folder / ASKED),
                "EVAL_IMAGE_FOLDER": str(self.pictures / "images"),
                "EVAL_STEPS": str(1 / EVALUATIONS),
                "EVAL_GENERATE": str(self.asked_in_training),
                "EVAL_ON_START": "True",
            }
            settings |= {name: os.environ.get(name) or value for name, value in held_out.items()}
        return settings

    def lane(self, run: Run) -> list[Step]:
        """The steps of one run."""
        assert self.plan is not None
        threads = self.threads(max(self.beside, len(self.places())))
        steps: list[Step] = [self.stage(run, stage, more=threads) for stage in STAGES]
        if self.measures_start and run.seed == self.seeds[0]:
            untrained = {**threads, "MAX_STEPS": "1", "LEARNING_RATE": "0"}
            steps.insert(0, self.stage(run, STAGES[0], START, untrained))
        flags = ["--questions", self.plan.questions, "--control-questions", QUESTIONS_UNDER_CONTROLS]
        flags += [] if self.demo else ["--batch-size", 8]
        step = self.held_out(run, self.pictures, run.folder("heldout"), run.folder("heldout.log"), *flags)
        step.settings = threads
        return [*steps, step]

    def places(self) -> list[dict[str, str]]:
        """Variables of the runs that train side by side."""
        if not resolve_devices(os.environ).on_gpu:
            at_once = runs_at_once(len(self.runs), available_cores()) if self.demo else 1
            return [{}] * at_once
        if not self.demo:
            return [{}]
        count = resolve_devices(os.environ).ranks
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = seen if len(seen) >= count and all(seen) else [str(number) for number in range(count)]
        return [{"CUDA_VISIBLE_DEVICES": name, "NUM_GPUS": "1"} for name in names[:count]]

    # --- the flow -----------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Sets the variables of every step.

        Raises:
            ValueError: the caller has set one that the study decides.
        """
        if steps := os.environ.pop("MAX_STEPS", ""):
            raise ValueError(f"MAX_STEPS={steps}: a study plans its steps; leave it out, and give --hours or --quick")
        refuse_ignored(self.every_settings())
        os.environ.setdefault("EXTRAS", "train,playground,eval,analysis")
        os.environ.setdefault("REPORT_TO", "none")

    def make_inputs(self) -> None:
        """Prepares model, pictures and tower."""
        words = ["all", "--data", self.data] if self.demo else [self.data]
        self.part(f"inputs: {self.data}", {"inputs": self.inputs(words)})

    def train(self, ended: Callable[[str], object] = lambda run: None) -> None:
        """Trains and answers every run, and checks that the runs may be compared.

        Args:
            ended: called with the name of every run that is trained and answered.
        """
        self.check_settings()
        if not os.environ.get("EVAL_DATA_PATH"):
            records = json.loads((self.pictures / "heldout.json").read_text(encoding="utf-8"))
            self.folder.mkdir(exist_ok=True)
            (self.folder / ASKED).write_text(json.dumps(records[: self.asked_in_training]), encoding="utf-8")
        title = f"{count_of(len(self.runs), 'run')}, {len(self.places())} at a time: stage 1, stage 2, answers"
        self.part(title, {run.name: self.lane(run) for run in self.runs}, ended=ended)
        self.check_all()

    def check_all(self) -> None:
        """Refuses runs, or answers, that may not be compared."""
        for stage in STAGES:
            check_runs(self.runs, stage)
        for control in CONTROLS:
            check_results(self.runs, partial(answers_of, control=control))

    def work(self) -> None:
        """Every part in its order, from the plan on."""
        self.train()
        if not self.demo:
            self.part("benchmarks", {run.name: [self.evaluation(run)] for run in self.runs}, width=1)
            check_results(self.runs)
        lanes: dict[str, list[Step]] = {}
        for stage, commands in MEASURED.items():
            lanes |= self.measurements(stage, f"{ANALYSIS}{stage}", commands)
        self.part("measurements, first seed", lanes)
        self.part("page", self.page)

    def page(self) -> None:
        """Writes study.json, and the page from it."""
        assert self.plan is not None
        study = record(self.runs, self.plan, self.folder, not self.demo)
        print(f"written: {write_record(study, self.folder)}")
        for path in write_page(study, self.folder):
            print(f"written: {path}")

    # --- the plan -----------------------------------------------------------------------------------------------------

    def full_steps(self) -> dict[str, int]:
        """The recipe's steps of each stage; -1 where it counts epochs."""
        steps = {stage: int(self.recipe(self.runs[0], stage)["flags"]["max_steps"]) for stage in STAGES}
        if self.quick:
            return {stage: max(FEWEST_STEPS, int(count * QUICK_SHARE)) for stage, count in steps.items()}
        return steps

    def planned(self, hours: float | None, seeds: Sequence[int] | None) -> Plan:
        """The plan for these hours, by a pilot; without hours the recipe's steps, and the requested or fewest seeds."""
        full = self.full_steps()
        questions = QUICK_QUESTIONS if self.quick else 0
        requested = seeds or (parse_seeds(str(QUICK_SEEDS)) if self.quick else None)
        fewest = list(requested or parse_seeds(str(FEWEST_SEEDS)))
        if hours is None:
            return Plan(self.preset_name, self.arms, fewest, full, questions)
        short = {
            stage: max(FEWEST_STEPS, int(PILOT_SHARE * count)) if count > 0 else PILOT_STEPS
            for stage, count in full.items()
        }
        trial = Plan(self.preset_name, self.arms[:1], self.seeds[:1], short, questions)
        at_once = len(replace(self, seeds=fewest).places())
        pilot_study = replace(
            self,
            arms=trial.arms,
            seeds=trial.seeds,
            plan=trial,
            folder=self.folder / "pilot",
            measures_start=False,
            beside=at_once,
        )
        print("\n=== pilot")
        pilot_study.train()
        run = pilot_study.runs[0]
        pilot = pilot_of(run)
        full = {stage: count if count > 0 else epoch_steps(run, stage) for stage, count in full.items()}
        steps, count = fitting(hours, pilot, full, len(self.arms), at_once, len(requested) if requested else None)
        chosen = list(requested or parse_seeds(str(count)))
        hours_taken = predicted_hours(pilot, steps, len(self.arms) * count, at_once)
        plan = Plan(self.preset_name, self.arms, chosen, steps, questions, hours, hours_taken, pilot=pilot)
        return plan.with_seeds(chosen)

    @property
    def preset_name(self) -> str:
        return next((name for name, recipe in PRESETS.items() if recipe == (self.preset, self.data)), self.preset)


PILOT_STEPS = 20  # of a recipe that counts epochs


def recipe_of(preset: str) -> tuple[str, str]:
    """The recipe and the pictures of a study's preset."""
    return PRESETS.get(preset, (preset, PRESETS[DEMO][1]))


def is_answered(run: Run) -> bool:
    """Whether the run has answers of its current weights under every control, by the current code."""
    return run.has_finished("finetune") and answers.is_answered(run.folder("finetune"), run.folder("heldout"))


def pilot_of(run: Run) -> Pilot:
    """Time and accuracy of a finished short run."""
    overhead, per_step = 0.0, {}
    for stage in STAGES:
        seconds = seconds_of_steps(run, stage)
        wall = float((run.folder(stage) / DONE).read_text() or sum(seconds))
        per_step[stage] = sum(seconds) / len(seconds)
        overhead += max(0.0, wall - sum(seconds))
    overhead += sum(task.seconds for control in CONTROLS for task in answers_of(run, control).tasks.values())
    tasks = answers_of(run, CONTROLS[0]).tasks
    right = {name: task.score / 100 for name, task in tasks.items()}
    return Pilot(overhead, per_step, right, {name: len(task.samples) for name, task in tasks.items()})


def epoch_steps(run: Run, stage: str) -> int:
    """Optimizer steps of an epoch, from the progress of a short run."""
    last = run.log(stage)[-1]
    return max(1, round(last["step"] / last["epoch"]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `study`."""
    recipes = {path.stem for path in (ROOT / "scripts/presets").glob("*.sh")}
    parser.add_argument(
        "--preset",
        choices=sorted(recipes | PRESETS.keys()),
        default=DEMO,
        help="what is trained (default: %(default)s)",
    )
    defaults = f"default: {ARMS}; --quick: {QUICK_ARMS}".replace(",", ", ")  # so that a line can end between two
    parser.add_argument("--arms", help=f"joined by commas, none first ({defaults})")
    parser.add_argument("--seeds", help=f"{SEEDS} (default: 3, or what fits); more can be added later")
    parser.add_argument("--hours", type=float, help="fit steps and seeds to about this many hours")
    parser.add_argument("--quick", action="store_true", help="run every part, with few steps, questions and arms")
    parser.add_argument("--plan", type=Path, help="run this plan, a committed JSON file; see docs/study-plan.md")
    parser.add_argument(
        "--repeat", type=int, metavar="SEED", help="with --plan: retrain a recorded seed, and compare every answer"
    )
    parser.add_argument("--so-far", action="store_true", help="train nothing: write the page from completed seeds")
    parser.add_argument("--output-dir", type=Path, help="default: outputs/study-<preset>, with -quick")


def run(args: argparse.Namespace) -> None:
    """The command `study`.

    Raises:
        ValueError: wrong flags, flags that contradict the folder's plan, or the folder is in use.
        StepError: a step failed.
    """
    if args.hours is not None and not 0 < args.hours < math.inf:
        raise ValueError(f"--hours {args.hours:g}: expected a positive number")
    arms = parse_arms(args.arms or (QUICK_ARMS if args.quick else ARMS))
    seeds = parse_seeds(args.seeds) if args.seeds else None
    name = f"study-{args.preset}{'-quick' if args.quick else ''}"
    folder = (args.output_dir or Path("outputs") / name).resolve()
    recipe, data = recipe_of(args.preset)
    study = Study(recipe, arms, seeds or parse_seeds("1"), folder, data, quick=args.quick)
    study.set_up()
    plan = study.plan = resumed_plan(folder, args, arms, seeds)
    if plan is not None:
        study.arms, study.seeds = plan.arms, plan.seeds
    if args.so_far:
        so_far(study)
        return
    with at_work(folder) as study.lock:
        os.environ.setdefault("DATA", str(study.pictures / "heldout.json"))
        if args.quick:
            os.environ.setdefault("SAMPLES", "4")
        study.make_inputs()
        study.plan = plan or study.planned(args.hours, seeds)
        study.plan.write(folder)
        study.seeds = study.plan.seeds
        show_plan(study.plan, folder)
        study.work()
    show_times({**study.parts, "all": sum(study.parts.values())})
    print(
        f"\npage: {folder}/study.html   numbers: {folder}/study.json   for the repository: "
        f"python -m llava.compare page {folder}/study.json --docs"
    )


def resumed_plan(folder: Path, args: argparse.Namespace, arms: list[str], seeds: list[int] | None) -> Plan | None:
    """The plan in the folder, if any, with the seeds that `--seeds` adds to its own.

    Raises:
        ValueError: a flag contradicts it.
    """
    plan = read_plan(folder)
    if plan is None:
        return None
    if seeds and seeds[: len(plan.seeds)] == plan.seeds:
        plan = plan.with_seeds(seeds)
    requested = {"preset": args.preset, "hours": args.hours, "seeds": seeds}
    check_same(plan, requested | ({"arms": arms} if args.arms else {}), folder)
    if args.quick != bool(plan.questions):
        made = "with" if plan.questions else "without"
        raise ValueError(
            f"{folder / PLAN_FILE} was made {made} --quick; choose another --output-dir, or run it {made} --quick"
        )
    return plan


def so_far(study: Study) -> None:
    """Writes the page from completed seeds, in which every arm is trained and answered; others may still be training.

    Raises:
        ValueError: there is no such seed.
    """
    done = [seed for seed in study.seeds if all(is_answered(Run(study.folder, seed, arm)) for arm in study.arms)]
    if not done or study.plan is None:
        raise ValueError(f"--so-far: {study.folder} has no completed seed, with every arm trained and answered")
    study.seeds = done
    study.check_all()
    study.page()


def show_plan(plan: Plan, folder: Path) -> None:
    """Prints the plan with the smallest differences that it would show."""
    steps = " + ".join(str(count) if count > 0 else "an epoch's" for count in plan.steps.values())
    seeds = ", ".join(map(str, plan.seeds))
    print(f"\nplan ({folder / 'plan.json'}): {len(plan.arms)} arms, seeds {seeds}, {steps} steps")
    if plan.predicted_hours is not None:
        print(f"  training and answers: about {plan.predicted_hours:.2g} of {plan.hours:g} hours")
    if plan.smallest:
        print("  smallest difference in points that it would show (power 80 %, corrected for all verdicts):")
    for task, points in (plan.smallest or {}).items():
        print(f"    {task:<12} {points_in_words(points)}")
