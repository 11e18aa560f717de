"""One engine for every experiment: arms x seeds x stages on some data, as steps in parallel lanes.

A subclass (in `run`, `planned` and `quickstart`) defines what its runs are trained on, its lanes and what it writes at
the end. The engine has locks, progress and signals. Finished steps are skipped, so that the same
command resumes after an interruption.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava.analysis.commands import NamedModel
from llava.compare.arms import parse_arm
from llava.compare.runs import Run, check_flags
from llava.compare.steps import Step, run_lanes, training
from llava.launch.command import preloads
from llava.launch.devices import resolve_devices
from llava.launch.recipe import STAGES, resolved_run
from llava.launch.settings import OF_ONE_STAGE
from llava.utils.locks import locked
from llava.utils.machine import available_cores
from llava.utils.paths import ROOT

DEMO = "demo"
EXTRAS = "train,playground,eval,analysis"  # of the environment of comparisons
_ARMS = "--arms sets it, as in layernorm@4x, layernorm-fixed or pre_layernorm_mlp2x_gelu"
_SET_BY = {
    "PRESET": "--preset sets it",
    "DEMO_DATA": "--preset, or the quickstart's --data, sets it",
    "SEED": "--seeds sets it",
    **dict.fromkeys(("PROJECTOR", "NORM", "NORM_INIT", "NORM_LEARNABLE"), _ARMS),
    "PRETRAIN_ADAPTER": "every stage 2 takes the adapter of its own stage 1",
    "OUTPUT_DIR": "--output-dir, or the quickstart's OUTPUT_ROOT, sets it",
    "RUN_NAME": "every run has its own name",
} | OF_ONE_STAGE


def refuse_ignored(runs: Iterable[Mapping[str, str]]) -> None:
    """Refuses a variable of the recipe whose value from the caller some run would not get.

    Args:
        runs: the variables that each run's script is called with, besides the caller's.

    Raises:
        ValueError: there is one; the message names it.
    """
    for settings in runs:
        for name, reason in _SET_BY.items():
            if name in settings and os.environ.get(name, settings[name]) != settings[name]:
                raise ValueError(f"{name}={os.environ[name]}: {reason}; leave the variable out")


def interpreter() -> str:
    """Python for a step's process: the caller's, or else the current one."""
    return os.environ.get("LLAVA_PYTHON") or sys.executable


@dataclass
class Experiment:
    """What is trained, and where.

    Attributes:
        preset: the recipe, a file of scripts/presets.
        data: name of the playground's pictures, for training or for questions.
        lock: file descriptor of the folder's lock, which started processes inherit.
    """

    preset: str
    arms: list[str]
    seeds: list[int]
    folder: Path
    data: str = ""
    lock: int = -1

    @property
    def demo(self) -> bool:
        return self.preset == DEMO

    @property
    def runs(self) -> list[Run]:
        return [Run(self.folder, seed, arm) for seed in self.seeds for arm in self.arms]

    # --- what a run is ------------------------------------------------------------------------------------------------

    def settings(self, run: Run, stage: str) -> dict[str, str]:
        """Variables of the stage's script; all others are the caller's."""
        own = {"PRESET": self.preset, "RUN_NAME": f"{run.arm}-{stage}"}
        if run.seed is not None:
            own |= {"SEED": str(run.seed), "RUN_NAME": f"{run.arm}-seed-{run.seed}-{stage}"}
        own |= {"OUTPUT_DIR": str(run.folder(stage).resolve())}
        own |= {"PRETRAIN_ADAPTER": str(run.folder(STAGES[0]).resolve() / "mm_projector.bin")}
        own |= dict.fromkeys(OF_ONE_STAGE, "") | parse_arm(run.arm).settings | self.data_settings(stage)
        return own | {name: str(value) for name, value in self.rates(run).get(stage, {}).items()}

    def rates(self, run: Run) -> Mapping[str, Mapping[str, object]]:
        """Variables by stage that are the run's own."""
        return {}

    def data_settings(self, stage: str) -> dict[str, str]:
        """Variables about data and steps."""
        return {}

    def every_settings(self) -> Iterator[dict[str, str]]:
        """The variables of every run."""
        return (self.settings(run, stage) for run in self.runs for stage in STAGES)

    def recipe(self, run: Run, stage: str) -> dict[str, Any]:
        """The command that a stage's script makes of the run's variables: its flags, its batch and more.

        Raises:
            ValueError: the script refuses them.
        """
        environment = {name: value for name, value in os.environ.items() if name.isupper()}
        return resolved_run(stage, **environment | self.settings(run, stage) | self.places()[0])

    def check_settings(self, *parts: str) -> None:
        """Refuses a folder whose runs were trained with other flags than a run would get now.

        Args:
            parts: folders of a run with another stage 1.

        Raises:
            ValueError: such a run; the message has the flags and both values. Or a script refuses its variables.
        """
        for stage in STAGES:
            flags: dict[str, dict[str, str]] = {}
            for run in self.runs:
                own = str(self.rates(run))
                flags[own] = flags.get(own) or self.recipe(run, stage)["flags"]
                for part in (stage, *(parts if stage == STAGES[0] else ())):
                    if run.has_begun(part):
                        check_flags(run, part, flags[own])

    # --- steps --------------------------------------------------------------------------------------------------------

    def places(self) -> list[dict[str, str]]:
        """Variables of each parallel lane; a preset that does not override this has a single lane."""
        return [{}]

    def threads(self) -> dict[str, str]:
        """The variable that shares the cores among the demo's lanes; none on GPUs."""
        if not self.demo or resolve_devices(os.environ).on_gpu or os.environ.get("OMP_NUM_THREADS"):
            return {}
        return {"OMP_NUM_THREADS": str(max(1, available_cores() // len(self.places())))}

    def stage(self, run: Run, stage: str, part: str = "", more: Mapping[str, str] | None = None) -> Step:
        """A stage of a run, into its folder `part`, with more variables of the stage's script."""
        folder = run.folder(part or stage)
        settings = self.settings(run, stage) | {"OUTPUT_DIR": str(folder.resolve())} | dict(more or {})
        comparable = [other for other in self.runs if other.root == run.root]
        title = f"{run.name}, {part or f'stage {STAGES.index(stage) + 1}'}"
        return training(title, stage, folder, settings, comparable)

    def python(self, title: str, log: Path, *words: object, **more: Any) -> Step:
        """A module of this tree, run by the caller's interpreter or else by this one; see `Step` for `more`."""
        python = interpreter()
        settings = {} if resolve_devices(os.environ).on_gpu else preloads(os.environ, python)
        return Step(title, [python, "-m", *map(str, words)], log, settings, **more)

    def held_out(self, run: Run, data: Path, place: Path) -> Step:
        """A run's answers to the held-out questions of `data`, kept in `place`."""
        paths = {"--checkpoint": run.folder(STAGES[-1]), "--data": data, "--output-dir": place}
        words = ["llava.compare", "answers"]
        words += [word for flag, path in paths.items() for word in (flag, os.path.relpath(path, ROOT))]  # its cwd
        words += ["--batch-size", 80 if self.demo else 8]
        step = self.python(f"{run.name}, answers", run.folder("answers.log"), *words)
        step.settings = {**step.settings, **self.threads()}
        return step

    def inputs(self, *commands: Sequence[str]) -> list[Step]:
        """The playground's commands that prepare inputs, each with its flags."""
        logs = self.folder / "inputs"
        return [self.python(f"inputs, {own[0]}", logs / f"{own[0]}.log", "playground", *own) for own in commands]

    def measurements(self, commands: Sequence[str], data: str | None, samples: object) -> dict[str, list[Step]]:
        """A lane for each measurement of the first seed's models, of those that it applies to."""
        from llava.analysis.all import command_line, fitting_models  # takes seconds

        runs = [run for run in self.runs if run.seed == self.runs[0].seed]
        models = [NamedModel(run.arm, str(run.folder(STAGES[-1]).resolve())) for run in runs]
        output, lanes = (self.folder / "analysis").resolve(), {}
        for name in commands:
            if fitting := fitting_models(name, models):
                words = [interpreter(), *command_line(name, fitting, output, data, samples)]
                lanes[name] = [Step(name, words, output / f"{name}.log", self.threads())]
        return lanes

    # --- the flow -----------------------------------------------------------------------------------------------------

    def part(
        self,
        title: str,
        work: Mapping[str, Sequence[Step]],
        places: Sequence[Mapping[str, str]] = (),
        ended: Callable[[str], object] = lambda lane: None,
    ) -> None:
        """Runs lanes, one in each place at a time, under a title.

        `ended` is called with the name of every lane that is done.
        """
        print(f"\n=== {title}", flush=True)
        keep_open = [self.lock] if self.lock >= 0 else []
        run_lanes(work, places or self.places(), keep_open, ended)

    def work(self) -> None:
        """Every part in its order."""
        raise NotImplementedError

    def run(self) -> None:
        """Does the work in the locked folder.

        Raises:
            ValueError: wrong settings, the folder is in use, or it holds another experiment.
            StepError: a step failed.
        """
        refuse_ignored(self.every_settings())
        with at_work(self.folder) as self.lock:
            self.work()


@contextmanager
def at_work(folder: Path) -> Iterator[int]:
    """Creates and locks the folder, and yields the lock's descriptor; SIGTERM ends the experiment, as Ctrl-C does.

    A training that outlives this process keeps the lock, so that no second training writes there.

    Raises:
        ValueError: another call, or a training that it left, holds the folder; or it cannot be written.
    """
    descriptors: list[int] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    busy = f"{folder} is in use by another call or by a training that it left"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / ".lock", busy, patience=60, on_acquired=descriptors.append))
        except OSError as error:
            problem = f"{folder} cannot be written: {error.strerror}"
            raise ValueError(f"{problem}; name another folder by --output-dir") from None
        yield descriptors[0] if descriptors else -1
