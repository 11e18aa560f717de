"""The whole comparison: trains every arm with every seed, scores them, measures them, and writes the page.

Every step keeps what it finished, so that the same command goes on after an interruption.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llava.eval.score import check_questions
from llava.experiment.arms import parse_arm, parse_arms, parse_seeds
from llava.experiment.lanes import Measurement
from llava.experiment.paper import ARMS
from llava.experiment.runs import Run
from llava.experiment.stage import (
    STAGES,
    WHOLE_RUNS,
    StepError,
    interpreter,
    locked,
    refuse_ignored,
    train_stage,
)
from llava.utils.paths import ROOT
from llava.utils.processes import end
from llava.utils.provenance import DONE

DEMO = "demo"
_ANALYSIS = "interface-norms layer-norms update-rates norm-params attention"
# Settings of a preset's runs that its upstream baseline, which has models and data of its own, must not see.
_NOT_UPSTREAMS = (
    "MODEL_PATH", "VISION_TOWER", "MAX_STEPS", "PER_DEVICE_BATCH", "SEED", "BF16", "MODEL_MAX_LENGTH", "TOLERANCE",
    "GRADIENT_CHECKPOINTING",
)  # fmt: skip


@dataclass
class Comparison:
    """What is compared, where, and by what.

    Attributes:
        questions: the caller's own questions, asked in every run; their pictures lie below `pictures_of_questions`.
        lock: file descriptor that says the folder is in use; what is started inherits it.
        times: seconds of every step so far, with its title.
    """

    preset: str
    arms: list[str]
    seeds: list[int]
    tasks: str
    folder: Path
    upstream: bool
    lock: int = -1
    questions: Path | None = None
    pictures_of_questions: Path | None = None
    times: list[tuple[str, float]] = field(default_factory=list)

    @property
    def demo(self) -> bool:
        return self.preset == DEMO

    def run(self, seed: int, arm: str) -> Run:
        return Run(self.folder, seed, arm)

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, title: str, action: Callable[..., None], *args: object) -> None:
        """Runs one step under its title and remembers its time."""
        print(f"\n=== {title}", flush=True)
        start = time.monotonic()
        action(*args)
        self.times.append((title, time.monotonic() - start))

    def call(self, *command: object, **settings: str) -> None:
        """Runs a program from the repository's root; when this process is to stop, the program may save first.

        Raises:
            StepError: it failed.
        """
        words = [str(word) for word in command]
        process = subprocess.Popen(words, cwd=ROOT, env=os.environ | settings, pass_fds=[self.lock])
        try:
            process.wait()
        finally:
            end([process])
        if process.returncode:
            raise StepError(f"status {process.returncode}: {shlex.join(words)}")

    def python(self, module: str, *words: object, **settings: str) -> None:
        """Runs a module by the caller's own interpreter, or else by this one."""
        self.call(interpreter(), "-m", module, *words, **settings)

    def check(self, command: str, *words: object) -> None:
        names = ["--arms", ",".join(self.arms), "--seeds", ",".join(map(str, self.seeds))]
        self.python("llava.compare", command, "--output-dir", self.folder, *names, *words)

    def settings(self, stage: str, seed: int, arm: str) -> dict[str, str]:
        """Variables of the stage's script; all others are the caller's."""
        run = self.run(seed, arm)
        own = {"PRESET": self.preset, "SEED": str(seed), "RUN_NAME": f"{arm}-seed-{seed}-{stage}"}
        own |= {"OUTPUT_DIR": str(run.folder(stage).resolve())}
        own |= {"PRETRAIN_ADAPTER": str(run.folder("pretrain").resolve() / "mm_projector.bin")}
        return own | WHOLE_RUNS | parse_arm(arm).settings | self.data_settings(stage)

    def data_settings(self, stage: str) -> dict[str, str]:
        """Variables about the training data: the demo's are scenes and stamps mixed, unless the caller names others."""
        if not self.demo:
            return {}
        own = {} if os.environ.get("DATA_PATH") else {"DATA_PATH": f"playground/data/mixed/{stage}.json"}
        return own | {"DEMO_DATA": "scenes"}

    def every_settings(self) -> Iterator[dict[str, str]]:
        """The variables of every run."""
        return (self.settings(stage, seed, arm) for seed in self.seeds for arm in self.arms for stage in STAGES)

    def train(self, stage: str, seed: int, arm: str) -> None:
        """Trains one stage of one run; refuses if finished runs could not be compared with it."""
        folder = self.run(seed, arm).folder(stage)
        settings = self.settings(stage, seed, arm)
        if not (folder / DONE).is_file():
            self.check("present")
        train_stage(stage, folder, folder.with_suffix(".log"), settings, keep_open=[self.lock])
        self.check("check", "--stage", stage)

    def evaluate(self, seed: int, arm: str) -> None:
        """Asks one run the questions of every task and scores the answers; finished tasks are kept."""
        run = self.run(seed, arm)
        # A model this small may have nothing to say about a photo; two small tasks start faster together.
        default = "--allow-empty --together --batch-size 8" if self.demo else ""
        flags = shlex.split(os.environ.get("EVALUATE_FLAGS") or default)
        tasks = ["--tasks", self.tasks] if self.tasks else []
        checkpoint, output = run.folder("finetune").resolve(), run.folder("eval").resolve()
        self.call("bash", "scripts/evaluate.sh", checkpoint, *tasks, "--output-dir", output, *flags)

    def ask(self, seed: int, arm: str) -> None:
        """Asks one run the caller's own questions; answers are kept."""
        run = self.run(seed, arm)
        words = ["--model-path", run.folder("finetune").resolve(), "--data", self.questions]
        words += ["--image-folder", self.pictures_of_questions] if self.pictures_of_questions else []
        self.python("llava.eval.answer", *words, "--output", run.answers.resolve())

    def measurement(self, command: str, stage: str, place: str) -> Measurement:
        """One measurement of the first seed's models of a stage."""
        models = {arm: self.run(self.seeds[0], arm).folder(stage).resolve() for arm in self.arms}
        return Measurement.of(f"{command}, {stage}", command, (self.folder / place).resolve(), models)

    def analyze(self, command: str) -> None:
        """Runs one measurement of the first seed's finished models, unless its result is newer than these models."""
        wanted = self.measurement(command, STAGES[-1], "analysis")
        if wanted.is_done():
            print(f"{wanted.mark.with_suffix('')} is complete, skipped")
            return
        self.call(*wanted.command, **wanted.settings)
        wanted.succeeded()

    def train_upstream(self) -> None:
        """Trains the baseline with upstream LLaVA, on models and data of its own, since it cannot load the presets'."""
        done = self.folder / "upstream" / DONE
        if done.is_file():
            print(f"{done.parent} is complete, skipped")
            return
        own = dict(pair.split("=", 1) for pair in shlex.split(os.environ.get("UPSTREAM_SETTINGS", "")))
        settings = {name: value for name, value in os.environ.items() if name not in _NOT_UPSTREAMS}
        settings |= own | {"ARMS": "none", "OUTPUT_DIR": str(done.parent.resolve())}
        command = ["bash", "scripts/upstream_baseline.sh"]
        if subprocess.run(command, cwd=ROOT, env=settings, pass_fds=[self.lock], check=False).returncode:
            raise StepError("the upstream baseline failed")
        done.touch()

    def prepared(self) -> list[str]:
        """The playground's inputs that the preset needs, and the analysis if the caller gives no data for it."""
        if self.demo:
            own_data = bool(os.environ.get("DATA_PATH"))
            stamps = [] if own_data and "stamps" not in self.tasks.split(",") else ["stamps"]  # a download of 160 MB
            return ["smollm2", "scenes", *stamps, "tower", *([] if own_data else ["mixed"]), "heldout"]
        return [] if os.environ.get("DATA") else ["scenes"]

    def run_all(self) -> None:
        """Every step in order."""
        for name in self.prepared():
            self.step(f"prepare {name}", self.python, "playground", name)
        if self.upstream:
            self.step("upstream LLaVA, baseline", self.train_upstream)
        for seed in self.seeds:
            for arm in self.arms:
                for number, stage in enumerate(STAGES, 1):
                    self.step(f"stage {number}, {arm}, seed {seed}", self.train, stage, seed, arm)
                self.step(f"evaluation, {arm}, seed {seed}", self.evaluate, seed, arm)
                if self.questions:
                    self.step(f"questions, {arm}, seed {seed}", self.ask, seed, arm)
        for command in os.environ.get("ANALYSIS", _ANALYSIS).split():
            self.step(f"analysis, {command}", self.analyze, command)
        self.step("report", self.check, "report", *(["--questions"] if self.questions else []))
        print("\n=== time of each step")
        for title, seconds in [*self.times, ("all", sum(seconds for _, seconds in self.times))]:
            print(f"{title:<44} {seconds:5.0f} s")
        print(f"\npage: {self.folder}/report.html   tables: {self.folder}/report.md {self.folder}/report-*.csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `run`."""
    presets = sorted(path.stem for path in (ROOT / "scripts/presets").glob("*.sh"))
    parser.add_argument("--preset", choices=presets, default="llama-3.2-3b", help="recipe (default: %(default)s)")
    parser.add_argument(
        "--arms", default=",".join(ARMS), help="joined by commas, none first; with another initial norm as in "
        "layernorm@4x or layernorm@default (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seeds", default="1", help="how many (42, 43, ...), or which, as in 1,2 (default: 1)")
    parser.add_argument(
        "--tasks",
        help="tasks of scripts/evaluate.sh (default: the paper's nine; demo: scenes,stamps, or scenes with DATA_PATH)",
    )
    parser.add_argument("--questions", type=Path, help="own questions with their answers, also asked in every run")
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
    of_demo = "scenes" if os.environ.get("DATA_PATH") else "scenes,stamps"
    tasks = args.tasks or (of_demo if args.preset == DEMO else "")
    comparison = Comparison(args.preset, arms, seeds, tasks, folder, args.upstream)
    refuse_ignored(comparison.every_settings())
    if args.questions:
        comparison.questions = args.questions.resolve()
        comparison.pictures_of_questions = args.question_images and args.question_images.resolve()
        check_questions(str(comparison.questions), comparison.pictures_of_questions)
    if args.preset == DEMO and not os.environ.get("DATA_PATH"):
        # A quarter of the records are stamps: half as many steps again leave the scenes what the quickstart gives them.
        os.environ["MAX_STEPS"] = os.environ.get("MAX_STEPS") or "120"
        os.environ.setdefault("IMAGE_FOLDER", "playground/data")
    os.environ.setdefault("EXTRAS", "train,playground,eval,analysis")
    os.environ.setdefault("REPORT_TO", "tensorboard")
    (folder / "analysis").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with locked(folder) as comparison.lock:
        comparison.run_all()
