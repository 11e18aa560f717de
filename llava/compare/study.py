"""A comparison from beginning to end: trains every arm and seed, scores them, measures, and writes the report.

Finished steps are kept, so the same call goes on after an interruption of any kind.
"""

import contextlib
import fcntl
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from llava.compare.stage import train_stage
from llava.launch.flag_check import arms as known_arms
from llava.launch.settings import ROOT, Refusal, one_of, whole_number
from llava.provenance import DONE

BASELINE, DEFAULT_INIT = "none", "_default"
FIRST_SEED = 42  # the paper's
STAGES = ("pretrain", "finetune")
ANALYSIS = "interface-norms layer-norms update-rates norm-params attention"
# What scripts/upstream_baseline.sh must not take from a comparison: LLaVA 1.2.2 cannot load the presets' models.
OWN_OF_UPSTREAM = (
    "MODEL_PATH VISION_TOWER MAX_STEPS PER_DEVICE_BATCH SEED BF16 MODEL_MAX_LENGTH TOLERANCE GRADIENT_CHECKPOINTING"
)


@dataclass
class Study:
    """What is compared, and where everything goes; variables of the environment apply to every run."""

    preset: str
    seeds: list[int]
    arms: list[str]
    tasks: str
    output: Path
    with_upstream: bool
    python: str
    times: list[tuple[str, float]] = field(default_factory=list)

    def folder(self, seed: int, arm: str) -> Path:
        return self.output / f"seed-{seed}" / arm

    def run(self) -> None:
        """Every step in order.

        Raises:
            Refusal, subprocess.CalledProcessError: a step failed.
        """
        began = time.monotonic()
        apply_preset(self)
        with locked(self.output):
            for title, do in self.steps():
                start = time.monotonic()
                print(f"\n=== {title}", flush=True)
                do()
                self.times.append((title, time.monotonic() - start))
        self.times.append(("all", time.monotonic() - began))
        print("\n=== time of each step")
        for title, seconds in self.times:
            print(f"{title:<44} {seconds:5.0f} s")
        report = self.output / "report"
        print(f"\npage: {report}.html   tables: {report}.md {report}-*.csv")

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Titles, and what is done."""
        yield "set up .venv", self.set_up
        for name in inputs_to_prepare(self.preset):
            yield f"prepare {name}", lambda name=name: call(self.python, "-m", "playground", name)
        if self.with_upstream:
            yield "upstream LLaVA, baseline", self.train_upstream
        for seed in self.seeds:
            for arm in self.arms:
                yield f"stage 1, {arm}, seed {seed}", lambda s=seed, a=arm: self.train("pretrain", s, a)
                yield f"stage 2, {arm}, seed {seed}", lambda s=seed, a=arm: self.train("finetune", s, a)
                yield f"evaluation, {arm}, seed {seed}", lambda s=seed, a=arm: self.evaluate(s, a)
        for command in os.environ.get("ANALYSIS", "").split() or ANALYSIS.split():
            yield f"analysis, {command}", lambda command=command: self.analyze(command)
        yield "report", lambda: self.comparison("report")

    def set_up(self) -> None:
        call("bash", "scripts/setup.sh")

    def train(self, stage: str, seed: int, arm: str) -> None:
        """Trains one stage, after code and packages have been compared with those of the finished ones."""
        folder, norm = self.folder(seed, arm), arm.removesuffix(DEFAULT_INIT)
        settings = {"PRESET": self.preset, "NORM": norm, "NORM_INIT": "" if norm == arm else "default"}
        settings |= {"SEED": str(seed), "RUN_NAME": f"{arm}-seed-{seed}-{stage}"}
        settings["PRETRAIN_ADAPTER"] = str(folder / "pretrain/mm_projector.bin")
        if self.preset == "demo":
            settings["DATA_PATH"] = f"playground/data/mixed/{stage}.json"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / stage / DONE).is_file():
            self.comparison("present")
        seconds = float(os.environ.get("WATCH_SECONDS", 3))
        train_stage(stage, folder / stage, folder / f"{stage}.log", settings, seconds)
        self.comparison("check", "--stage", stage)

    def evaluate(self, seed: int, arm: str) -> None:
        folder = self.folder(seed, arm)
        flags = ["--tasks", self.tasks] if self.tasks else []
        flags += ["--output-dir", str(folder / "eval"), *shlex.split(os.environ.get("EVALUATE_FLAGS", ""))]
        call("bash", "scripts/evaluate.sh", str(folder / "finetune"), *flags)

    def analyze(self, command: str) -> None:
        """One command at a time over the first seed's arms, so that a finished one is not measured again."""
        done = self.output / "analysis" / f"{command}.done"
        folders = {arm: self.folder(self.seeds[0], arm) / "finetune" for arm in self.arms}
        models = [f"{arm}={folder}" for arm, folder in folders.items()]
        newer = is_newer(done, [folder / DONE for folder in folders.values()])
        if newer and done.read_text().strip() == " ".join(models):
            print(f"{self.output}/analysis/{command} is complete, skipped")
            return
        call("bash", "scripts/analyze.sh", *models, COMMANDS=command, OUTPUT_DIR=str(self.output / "analysis"))
        done.write_text(" ".join(models) + "\n")

    def train_upstream(self) -> None:
        """The baseline by upstream LLaVA, in models and data of its own."""
        folder = self.output / "upstream"
        if (folder / DONE).is_file():
            print(f"{folder} is complete, skipped")
            return
        own = dict(word.split("=", 1) for word in shlex.split(os.environ.get("UPSTREAM_SETTINGS", "")))
        settings = dict.fromkeys(OWN_OF_UPSTREAM.split()) | own | {"ARMS": BASELINE, "OUTPUT_DIR": str(folder)}
        call("bash", "scripts/upstream_baseline.sh", **settings)
        (folder / DONE).touch()

    def comparison(self, command: str, *flags: str) -> None:
        """`check`, `present` or `report` of llava.eval.compare on all runs."""
        runs = ["--arms", ",".join(self.arms), "--seeds", ",".join(map(str, self.seeds))]
        call(self.python, "-m", "llava.eval.compare", command, "--output-dir", str(self.output), *runs, *flags)


def inputs_to_prepare(preset: str) -> list[str]:
    """What the playground makes for a comparison: all inputs of the demo, else only what the analysis measures on."""
    if preset == "demo":
        return ["smollm2", "scenes", "stamps", "tower", "mixed", "heldout"]
    return [] if os.environ.get("DATA") else ["scenes"]


def apply_preset(study: Study) -> None:
    """What a comparison's runs need beyond the preset's own values; the caller's environment wins."""
    os.environ.setdefault("EXTRAS", "train,playground,eval,analysis")
    os.environ.setdefault("REPORT_TO", "tensorboard")
    if os.environ.get("LLAVA_PYTHON"):
        os.environ["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    if study.preset == "demo":
        # A quarter of the records are stamps: half as many steps again leave the scenes what the quickstart gives them.
        os.environ["MAX_STEPS"] = os.environ.get("MAX_STEPS") or "120"
        os.environ.setdefault("IMAGE_FOLDER", "playground/data")
        study.tasks = study.tasks or "scenes,stamps"
        # So small a model may have nothing to say about a photo; two small tasks start faster together.
        os.environ["EVALUATE_FLAGS"] = os.environ.get("EVALUATE_FLAGS") or "--allow-empty --together --batch-size 8"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder; a training that outlives this process keeps the lock, as two would write into one folder.

    Raises:
        Refusal: it is held for LOCK_SECONDS (60).
    """
    (folder / "analysis").mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + float(os.environ.get("LOCK_SECONDS", 60))
    with (folder / ".lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise Refusal(
                        f"{folder} is in use by another comparison or by a training that it left; wait for its end"
                    ) from None
                time.sleep(0.2)
        yield


def call(*command: str, **variables: str | None) -> None:
    """Runs a command from the root; a variable that is None is not passed on.

    Raises:
        subprocess.CalledProcessError: it failed, and has said why.
    """
    env = {name: value for name, value in (os.environ | variables).items() if value is not None}
    subprocess.run(command, cwd=ROOT, env=env, check=True, close_fds=False)


def is_newer(file: Path, others: list[Path]) -> bool:
    """Whether `file` exists and was written after all the others."""
    return file.is_file() and all(o.is_file() and file.stat().st_mtime_ns > o.stat().st_mtime_ns for o in others)


def parse_seeds(text: str) -> list[int]:
    """`2`: the paper's and the one after it; `7,` or `1,2`: these.

    Raises:
        Refusal: it is neither, or a seed stands twice.
    """
    parts = text.removesuffix(",").split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise Refusal(f"--seeds {text}: expected a count, as in 2, or a list, as in 1,2 or 7,")
    if "," not in text:
        return list(range(FIRST_SEED, FIRST_SEED + whole_number("--seeds", text, 1)))
    if len(set(parts)) < len(parts):
        raise Refusal(f"--seeds {text} names a seed twice")
    return [int(part) for part in parts]


def parse_arms(text: str) -> list[str]:
    """The arms, the baseline first.

    Raises:
        Refusal: there is no such norm, or an arm stands twice, or no baseline first.
    """
    arms = text.split(",")
    for arm in arms:
        one_of("NORM", arm.removesuffix(DEFAULT_INIT), known_arms())
    if BASELINE + DEFAULT_INIT in arms:
        raise Refusal(f"--arms {BASELINE}{DEFAULT_INIT}: without a norm there is no gain to start at 1")
    if len(set(arms)) < len(arms):
        raise Refusal(f"--arms {text} names an arm twice")
    if arms[0] != BASELINE or len(arms) == 1:
        raise Refusal(f"--arms {text}: expected {BASELINE}, the baseline, first, and at least one more")
    return arms
