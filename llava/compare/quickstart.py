"""The quickstart: inputs, both stages of every arm in parallel, answers to held-out questions, and one page.

    inputs     language model | pictures, then the vision tower
    arms       stage 1, stage 2, answers | the same for the next arm
    page       table, figures, answers

`|` means in parallel: on a CPU as many arms train at once as cores and memory allow, each with its share of the cores;
on a GPU arms train in sequence. Finished steps are skipped: rerun the same command to resume.
"""

import argparse
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llava.compare.answers import UNTOUCHED
from llava.compare.engine import DEMO, Experiment, at_work, show_times
from llava.compare.lanes import StageStep, Step, StepError, runs_at_once
from llava.compare.runs import NOT_IDENTITY, Run
from llava.compare.stage import WHOLE_RUNS, last_step, refuse_ignored
from llava.launch.cpu import POLICY
from llava.launch.devices import count_of, resolve_devices
from llava.launch.recipe import STAGES
from llava.launch.settings import Refusal
from llava.utils.files import write_json
from llava.utils.machine import available_cores
from llava.utils.paths import IS_CHECKOUT, NEEDS_CHECKOUT
from llava.utils.plugins import load_named
from llava.utils.provenance import differences
from playground import smollm2
from playground.options import PICTURES
from playground.store import PlaygroundError, read_manifest, shown_python

ROOT_OF_INPUTS = Path("playground/data")
ANSWERS = "answers"  # folder of what each arm answered
TIMES = "times.json"  # seconds of every step
SET_UP = "set-up of .venv"
SETTINGS = "settings.json"  # next to a stage's folder: what decides it


@dataclass
class Quickstart(Experiment):
    """An experiment with the recipe's seed, on inputs that it prepares.

    Attributes:
        root: folder of the prepared inputs.
    """

    root: Path = ROOT_OF_INPUTS

    @classmethod
    def of(cls, data: str, arms: list[str], folder: Path, root: Path = ROOT_OF_INPUTS) -> "Quickstart":
        """The quickstart on these pictures.

        Raises:
            ValueError: an unknown norm, a variable that the quickstart sets, or one that a stage's script refuses.
        """
        from llava.model.multimodal_projector.norm import NORM_TYPES  # takes seconds

        load_named()  # a plug-in's norm is an arm too
        if unknown := [arm for arm in arms if arm not in NORM_TYPES]:
            raise ValueError(f"NORM={unknown[0]} is not one of: {', '.join(NORM_TYPES)}")
        quickstart = cls(DEMO, arms, [], folder, data, root=root)
        refuse_ignored(quickstart.every_settings())
        quickstart.recipes  # noqa: B018 (refused before anything runs)
        return quickstart

    # --- what a run is ------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> list[Run]:
        return [Run(self.folder, None, arm) for arm in self.arms]

    def settings(self, run: Run, stage: str) -> dict[str, str]:
        """Variables of scripts/pretrain.sh and finetune.sh; the caller's values take precedence."""
        data = self.root / self.data
        own = {
            "MODEL_PATH": self.root / smollm2.FOLDER,
            "VISION_TOWER": self.root / f"siglip-{self.data}",
            "DATA_PATH": data / f"{stage}.json",
            "REPORT_TO": "none",
        }
        settings = {name: os.environ.get(name) or str(value) for name, value in own.items()}
        settings["IMAGE_FOLDER"] = os.environ.get("IMAGE_FOLDER", str(data / "images"))  # empty: the rows hold them
        settings |= {"PRESET": DEMO, "DEMO_DATA": self.data, "PROJECTOR": "", "NORM": run.arm, **WHOLE_RUNS}
        settings["OUTPUT_DIR"] = str(run.folder(stage).resolve())
        settings["PRETRAIN_ADAPTER"] = str(run.folder(STAGES[0]).resolve() / "mm_projector.bin")
        return settings | self.threads(len(self.places()))

    def places(self) -> list[dict[str, str]]:
        """On a CPU as many lanes as cores and memory allow; GPUs train one arm at a time."""
        on_gpu = resolve_devices(os.environ).on_gpu
        return [{}] * (1 if on_gpu else runs_at_once(len(self.arms), available_cores()))

    @cached_property
    def recipes(self) -> dict[tuple[str, str], dict[str, Any]]:
        """See `recipe`, by arm and stage.

        Raises:
            ValueError: a script refuses its variables.
        """
        recipes = {(run.arm, stage): self.recipe(run, stage) for run in self.runs for stage in STAGES}
        for recipe in recipes.values():
            if not (steps := recipe["flags"]["max_steps"]).removeprefix("-").isdecimal():
                raise ValueError(f"MAX_STEPS={steps} is not a whole number")
        return recipes

    def stage(self, run: Run, stage: str, part: str = "", more: Mapping[str, str] | None = None) -> StageStep:
        step, recipe = super().stage(run, stage, part, more), self.recipes[run.arm, stage]
        step.title, step.compared = f"{run.arm}, stage {1 + STAGES.index(stage)}", ()
        step.steps, step.batch = max(0, int(recipe["flags"]["max_steps"])), recipe["batch"]["global"]
        return step

    def answers(self, run: Run) -> Step:
        data, place, log = self.root / self.data, self.folder / ANSWERS / run.arm, run.folder("answers.log")
        step = self.held_out(run, data, place, log, controls=(UNTOUCHED,))
        step.settings = {**step.settings, **self.threads(len(self.places()))}
        return step

    # --- the flow -----------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Every part in its order.

        Raises:
            StepError, PlaygroundError: a step failed, or the folder holds another quickstart.
        """
        self.prepare()
        self.keep_settings()
        width = len(self.places())
        order = "in sequence" if width == 1 else f"{width} at a time"
        title = f"{count_of(len(self.arms), 'arm')}, {order}: stage 1, stage 2, answers"
        lanes = {run.arm: [*(self.stage(run, stage) for stage in STAGES), self.answers(run)] for run in self.runs}
        self.part(title, lanes)
        self.page()

    def prepare(self) -> None:
        """The language model | pictures, then the tower. All cores train the tower, so waiting threads may sleep."""
        root = ("--root", str(self.root))
        model, pictures, tower = self.inputs(
            ("smollm2", *root), (self.data, *root), ("tower", "--data", self.data, *root)
        )
        for step, title in ((model, "language model"), (pictures, f"pictures, {self.data}"), (tower, "vision tower")):
            policy = {name: os.environ.get(name, value) for name, value in POLICY.items()}
            step.title, step.settings = title, {**step.settings, **policy}
        width = 1 if resolve_devices(os.environ).on_gpu else 2
        lanes = {"language model": [model], "tower": [pictures, tower]}
        self.part("inputs: language model, pictures, vision tower", lanes, width)

    def page(self) -> None:
        """Writes the page, without the time of its own step, and prints the table."""
        self.times["all"] = self.times.get(SET_UP, 0.0) + sum(self.parts.values())
        keep_longest(self.times, self.folder / TIMES)
        arms = [word for arm in self.runs for word in ("--arm", arm.arm, *(str(arm.folder(stage)) for stage in STAGES))]
        data = ("--data", self.root / self.data, "--output-dir", self.folder)
        step = self.python("page", self.folder / "page.log", "playground", "compare", *arms, *data)
        self.part("page", {"page": [step]})
        print("\n" + (self.folder / "table.md").read_text())

    # --- a folder holds one quickstart --------------------------------------------------------------------------------

    def keep_settings(self) -> None:
        """Writes next to every stage's folder what decides it.

        Raises:
            PlaygroundError: the folder holds a stage with other settings.
        """
        now = {self.folder / arm / stage: self.made_from(arm, stage) for arm, stage in self.recipes}
        for folder, made_from in now.items():
            if last_step(folder):
                refuse_other(folder, made_from)
        for folder, made_from in now.items():
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_json(settings_file(folder), made_from)

    def made_from(self, arm: str, stage: str) -> dict[str, Any]:
        """The stage's flags and its inputs' settings by name; for stage 2 also those of stage 1."""
        flags = self.recipes[arm, stage]["flags"]
        settings = {name: value for name, value in flags.items() if not name.startswith(NOT_IDENTITY)}
        for name in ("model_name_or_path", "vision_tower"):
            settings[f"made as, {name}"] = (read_manifest(Path(flags[name])) or {}).get("settings")
        settings["made as, data"] = (read_manifest(Path(flags["data_path"]).parent) or {}).get("settings")
        if stage != STAGES[0]:
            settings |= {f"stage 1, {name}": value for name, value in self.made_from(arm, STAGES[0]).items()}
        return settings


def settings_file(folder: Path) -> Path:
    """The file that records what decides the stage in `folder`."""
    return folder.with_name(f"{folder.name}-{SETTINGS}")


def refuse_other(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Raises PlaygroundError if other settings decided `folder`, with what differs."""
    try:
        before = json.loads(settings_file(folder).read_text())
    except (OSError, ValueError):
        raise PlaygroundError(f"{folder} was not made by the quickstart; remove it, or set OUTPUT_ROOT") from None
    if changed := differences(before, made_from):
        listed = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in list(changed.items())[:3])
        more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise PlaygroundError(
            f"{folder} was made with different settings ({listed}{more}); remove it, or choose another OUTPUT_ROOT"
        )


def keep_longest(times: Mapping[str, float], file: Path) -> None:
    """Adds `times` to those in `file`; the longer time is kept, since a skipped step takes none."""
    before = json.loads(file.read_text()) if file.is_file() else {}
    write_json(file, before | {name: max(seconds, before.get(name, 0.0)) for name, seconds in times.items()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m playground quickstart`."""
    parser.add_argument("--data", choices=PICTURES, default=PICTURES[0], help="pictures of training and questions")
    parser.add_argument("--arms", default="none gwc_layernorm", help="norms to train, separated by spaces")
    parser.add_argument("--root", type=Path, default=ROOT_OF_INPUTS, help="folder of the prepared inputs")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the results")
    parser.add_argument("--set-up-seconds", type=float, default=0.0, help="seconds of the set-up before this command")


def run(args: argparse.Namespace) -> None:
    """Runs the whole quickstart and prints where everything is.

    Raises:
        PlaygroundError: wrong settings, a folder of another quickstart, or a failed step.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    if not IS_CHECKOUT:
        raise PlaygroundError(NEEDS_CHECKOUT)
    arms = args.arms.replace(",", " ").split()
    if not arms or len(set(arms)) < len(arms):
        raise PlaygroundError(f"--arms {args.arms!r}: expected names of norms, each once")
    try:
        quickstart = Quickstart.of(args.data, arms, args.output_dir, args.root)
        if args.set_up_seconds:
            quickstart.times[SET_UP] = args.set_up_seconds
        with at_work(args.output_dir) as quickstart.lock:
            quickstart.work()
    except StepError as error:
        raise PlaygroundError(f"{error}\nrerun the same command to resume") from None
    except (ValueError, Refusal) as error:
        raise PlaygroundError(str(error)) from None
    show_end(quickstart)


def show_end(quickstart: Quickstart) -> None:
    """Prints the times, and where everything is."""
    folder, data = quickstart.folder, quickstart.root / quickstart.data
    quickstart.times["all"] = quickstart.times.get(SET_UP, 0.0) + sum(quickstart.parts.values())
    show_times(quickstart.times)
    picture = next(iter(sorted((data / "images").glob("*"))), "PICTURE")
    words = ["--model-path", f"{folder / quickstart.arms[-1]}/finetune", "--image-file", str(picture)]
    print(f"\npage          {folder}/index.html    table, results: table.md, results.json")
    print(f"checkpoints   {folder}/<arm>/{{pretrain,finetune}}    logs: <arm>/*.log, <arm>/<stage>/train_log.jsonl")
    print(f"talk to it    {shlex.join([shown_python(), '-m', 'llava.serve.cli', *words])}")
    print("every table and figure of the paper    bash scripts/analyze.sh    (docs/analysis.md)")
