"""Trains every arm with every seed on the same data, scores and measures them, and writes one page.

With `--plan FILE` the arms, seeds and steps are those of a plan that was written down before its runs. Each seed is
recorded when all its arms are trained and answered; nothing is compared before the last one.
"""

import argparse
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from llava.analysis.commands import COMMANDS
from llava.compare.arms import parse_arms, parse_seeds
from llava.compare.engine import EXTRAS, Experiment
from llava.compare.planned import planned_of
from llava.compare.record import FILE, add_runs, new_record, write_record
from llava.compare.report import write_page
from llava.compare.runs import Run, check_results
from llava.compare.steps import Step
from llava.eval import evaluate
from llava.eval.results import Results
from llava.eval.tasks import PAPER_COLUMNS, choose
from llava.launch.recipe import STAGES
from llava.utils.paths import ROOT
from playground.options import PICTURES

PRESET, ARMS = "llama-3.2-3b", "none,layernorm,gwc_layernorm"  # the paper's
_ANALYSIS = "interface-norms layer-norms update-rates norm-params attention"


@dataclass
class Comparison(Experiment):
    """Every arm with every seed on the same data, scored by the stock harnesses and measured.

    Attributes:
        tasks: of scripts/evaluate.sh, joined by commas; empty: its own.
        questions: the user's own questions, evaluated in every run; their pictures are in `pictures_of_questions`.
    """

    tasks: str = ""
    questions: Path | None = None
    pictures_of_questions: Path | None = None

    def set_defaults(self) -> None:
        """Checks the caller's variables, and sets what they leave open: tasks, measurements, packages, the tracker."""
        self.evaluation_flags()
        self.tasks = self.tasks or os.environ.get("TASKS") or ("scenes" if self.demo else "")
        os.environ.setdefault("ANALYSIS", _ANALYSIS)
        os.environ.setdefault("EXTRAS", EXTRAS)
        os.environ.setdefault("REPORT_TO", "tensorboard")

    def data_settings(self, stage: str) -> dict[str, str]:
        """The demo's pictures; what `DATA_PATH` names is trained on in their place."""
        return {"DEMO_DATA": "scenes"} if self.demo else {}

    def evaluation(self, run: Run) -> Step:
        """Evaluates every task; finished ones are skipped."""
        words = ["llava.eval.evaluate", run.folder("finetune").resolve()]
        words += ["--tasks", self.tasks] if self.tasks else []
        words += ["--output-dir", run.folder("eval").resolve(), *self.evaluation_flags()]
        return self.python(f"{run.name}, evaluation", run.folder("eval.log"), *words)

    def evaluation_flags(self) -> list[str]:
        """The flags of scripts/evaluate.sh from `EVALUATE_FLAGS`; raises ValueError for one that it does not have."""
        default = "--together --batch-size 8" if self.demo else ""  # two small tasks start faster together
        flags = shlex.split(os.environ.get("EVALUATE_FLAGS") or default)
        if unknown := evaluate.parser().parse_known_args(["CKPT", *flags])[1]:
            raise ValueError(f"EVALUATE_FLAGS: scripts/evaluate.sh has no {' '.join(unknown)}; see its --help")
        return flags

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
        data, samples = os.environ.get("DATA"), os.environ.get("SAMPLES")
        self.part("measurements, first seed", self.measurements(os.environ["ANALYSIS"].split(), data, samples))
        self.report(self.folder)
        print(f"\npage: {self.folder}/report.html   tables: {self.folder}/report.md")

    def report(self, folder: Path) -> None:
        """Checks every run, and writes the record and the page into `folder`."""
        if self.questions:
            check_results(self.runs, lambda run: run.own_results)
        record = new_record(title=f"{', '.join(self.arms)} by {self.preset}")
        add_runs(record, self.runs, self.results_of)
        folder.mkdir(parents=True, exist_ok=True)
        write_record(record, folder / FILE)
        write_page(record, folder)

    def results_of(self, run: Run) -> Results:
        """A run's scores on the tasks of this call, and the caller's own questions, in the paper's order."""
        asked = {task.name for task in choose(self.tasks or None)}  # another call may have left more
        tasks = {name: task for name, task in run.results.tasks.items() if name in asked}
        tasks |= run.own_results.tasks if self.questions else {}
        order = [*PAPER_COLUMNS.values()]
        names = sorted(tasks, key=lambda name: ([*order, name].index(name), name))
        return replace(run.results, tasks={name: tasks[name] for name in names})


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
    for name, flag in (("ARMS", "--arms"), ("OUTPUT_ROOT", "--output-dir")):
        if os.environ.get(name):
            raise ValueError(f"{name}={os.environ[name]}: only the quickstart reads it; leave it out, and give {flag}")
    experiment = planned_of(args) if args.plan else comparison_of(args)
    experiment.run()


def comparison_of(args: argparse.Namespace) -> Comparison:
    """The comparison that the flags describe.

    Raises:
        ValueError: they do not describe one.
    """
    preset = args.preset or PRESET
    arms, seeds = parse_arms(args.arms or ARMS), parse_seeds(args.seeds or "1")
    folder = args.output_dir or Path("outputs") / f"compare-{preset}"
    comparison = Comparison(preset, arms, seeds, folder, tasks=args.tasks or "")
    comparison.set_defaults()
    if comparison.tasks:
        comparison.tasks = ",".join(task.name for task in choose(comparison.tasks))
    if unknown := set(os.environ["ANALYSIS"].split()) - COMMANDS.keys():
        raise ValueError(f"ANALYSIS: expected some of {', '.join(COMMANDS)}; found {', '.join(sorted(unknown))}")
    if args.question_images and not args.questions:
        raise ValueError("--question-images needs --questions")
    if args.questions:
        from llava.eval.score import check_questions  # takes a second

        comparison.questions = args.questions.resolve()
        comparison.pictures_of_questions = args.question_images and args.question_images.resolve()
        check_questions(str(comparison.questions), comparison.pictures_of_questions)
    return comparison
