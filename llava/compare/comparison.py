"""The comparison: every arm trained with every seed, scored and measured, and one page with a verdict."""

import argparse
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from llava.compare.arms import BASELINE, SEEDS, parse_arms, parse_seeds
from llava.compare.engine import Experiment, at_work, show_times
from llava.compare.lanes import Step
from llava.compare.paper import ARMS
from llava.compare.report import write_report
from llava.compare.runs import Run, check_all
from llava.compare.stage import refuse_ignored
from llava.eval.score import check_questions
from llava.launch.recipe import STAGES
from llava.utils.paths import ROOT
from llava.utils.provenance import DONE

_ANALYSIS = "interface-norms layer-norms update-rates norm-params attention"
# Settings of a preset that must not reach its upstream baseline, which has its own models and data.
_NOT_UPSTREAMS = (
    "MODEL_PATH", "VISION_TOWER", "MAX_STEPS", "PER_DEVICE_BATCH", "SEED", "BF16", "MODEL_MAX_LENGTH", "TOLERANCE",
    "GRADIENT_CHECKPOINTING",
)  # fmt: skip


@dataclass
class Comparison(Experiment):
    """An experiment that is scored by the stock harnesses.

    Attributes:
        tasks: of scripts/evaluate.sh, joined by commas; empty: its own.
        upstream: whether upstream LLaVA also trains the baseline.
        questions: the user's own questions, evaluated in every run; their pictures are in `pictures_of_questions`.
    """

    tasks: str = ""
    upstream: bool = False
    questions: Path | None = None
    pictures_of_questions: Path | None = None

    def set_defaults(self) -> None:
        """Sets what the caller's variables leave open: the demo's tasks, steps and pictures, and the tracker."""
        own_data = bool(os.environ.get("DATA_PATH"))
        if self.demo:
            self.tasks = self.tasks or ("scenes" if own_data else "scenes,stamps")
        if self.demo and not own_data:
            # A quarter of the records are stamps: with half as many steps again, scenes get as many as in the
            # quickstart.
            os.environ["MAX_STEPS"] = os.environ.get("MAX_STEPS") or "120"
            os.environ.setdefault("IMAGE_FOLDER", "playground/data")
        os.environ.setdefault("EXTRAS", "train,playground,eval,analysis")
        os.environ.setdefault("REPORT_TO", "tensorboard")

    def data_settings(self, stage: str) -> dict[str, str]:
        """The demo's data are scenes and stamps mixed, unless the caller names others."""
        if not self.demo:
            return {}
        own = {} if os.environ.get("DATA_PATH") else {"DATA_PATH": f"playground/data/mixed/{stage}.json"}
        return own | {"DEMO_DATA": "scenes"}

    def evaluation(self, run: Run) -> Step:
        """Evaluates every task; the script skips finished ones."""
        # A model this small may have nothing to say about a photo; two small tasks start faster together.
        default = "--allow-empty --together --batch-size 8" if self.demo else ""
        flags = shlex.split(os.environ.get("EVALUATE_FLAGS") or default)
        words = ["bash", "scripts/evaluate.sh", str(run.folder("finetune").resolve())]
        words += ["--tasks", self.tasks] if self.tasks else []
        words += ["--output-dir", str(run.folder("eval").resolve()), *flags]
        return Step(f"{run.name}, evaluation", words, run.folder("eval.log"))

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

    def upstream_baseline(self) -> Step:
        """The baseline by upstream LLaVA, on its own models and data, since it cannot load the presets'."""
        own = dict(pair.split("=", 1) for pair in shlex.split(os.environ.get("UPSTREAM_SETTINGS", "")))
        folder = self.folder / "upstream"
        unset = [word for name in _NOT_UPSTREAMS if name not in own for word in ("-u", name)]
        words = ["env", *unset, "bash", "scripts/upstream_baseline.sh"]
        settings = own | {"ARMS": BASELINE, "OUTPUT_DIR": str(folder.resolve())}
        mark = folder / DONE
        return Step("upstream LLaVA, baseline", words, self.folder / "upstream.log", settings, mark.is_file, mark)

    def prepared(self) -> list[str]:
        """The playground's inputs for the preset, and for the analysis unless the caller names its data."""
        if self.demo:
            own_data = bool(os.environ.get("DATA_PATH"))
            stamps = [] if own_data and "stamps" not in self.tasks.split(",") else ["stamps"]  # a download of 160 MB
            return ["smollm2", "scenes", *stamps, "tower", *([] if own_data else ["mixed"]), "heldout"]
        return [] if os.environ.get("DATA") else ["scenes"]

    def work(self) -> None:
        """Every part in its order."""
        self.check_settings()
        self.part("inputs", {"inputs": self.inputs(*([name] for name in self.prepared()))})
        if self.upstream:
            self.part("upstream LLaVA, baseline", {"upstream": [self.upstream_baseline()]})
        self.part("stage 1, stage 2, evaluation", {run.name: self.lane(run) for run in self.runs})
        self.part("measurements, first seed", self.measurements(STAGES[-1], "analysis", _ANALYSIS))
        self.part("report", self.report)
        show_times({**self.times, "all": sum(self.parts.values())})
        print(f"\npage: {self.folder}/report.html   tables: {self.folder}/report.md {self.folder}/report-*.csv")

    def report(self) -> None:
        """Checks every run, and writes the page."""
        check_all(self.runs, bool(self.questions))
        for path in write_report(self.runs, self.folder, bool(self.questions)):
            print(f"written: {path}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `run`."""
    presets = sorted(path.stem for path in (ROOT / "scripts/presets").glob("*.sh"))
    parser.add_argument("--preset", choices=presets, default="llama-3.2-3b", help="recipe (default: %(default)s)")
    parser.add_argument(
        "--arms", default=",".join(ARMS), help="joined by commas, none first; with another initial norm as in "
        "layernorm@4x or layernorm@default (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seeds", default="1", help=f"{SEEDS} (default: 1)")
    parser.add_argument(
        "--tasks",
        help="tasks of scripts/evaluate.sh (default: the paper's nine; demo: scenes,stamps, or scenes with DATA_PATH)",
    )
    parser.add_argument("--questions", type=Path, help="your own questions with answers, also evaluated in every run")
    parser.add_argument("--question-images", type=Path, help="folder or zip file of their pictures (default: .)")
    parser.add_argument("--output-dir", type=Path, help="default: outputs/compare-<preset>")
    parser.add_argument(
        "--upstream", action="store_true", help="also train the baseline by upstream LLaVA, and stop if losses differ"
    )


def run(args: argparse.Namespace) -> None:
    """The command `run`.

    Raises:
        ValueError: wrong flags, or the folder is in use.
        StepError: a step failed.
    """
    arms, seeds = parse_arms(args.arms), parse_seeds(args.seeds)
    folder = args.output_dir or Path("outputs") / f"compare-{args.preset}"
    comparison = Comparison(args.preset, arms, seeds, folder, tasks=args.tasks or "", upstream=args.upstream)
    refuse_ignored(comparison.every_settings())
    if args.questions:
        comparison.questions = args.questions.resolve()
        comparison.pictures_of_questions = args.question_images and args.question_images.resolve()
        check_questions(str(comparison.questions), comparison.pictures_of_questions)
    comparison.set_defaults()
    with at_work(folder) as comparison.lock:
        comparison.work()
