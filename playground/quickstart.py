"""The quickstart: inputs, both stages of every arm side by side, answers to held-out questions, and one page.

    inputs     language model | pictures, then the vision tower
    arms       stage 1, stage 2, answers | the same for the next arm
    page       table, figures, answers

`|` stands for side by side: on a CPU as many arms train at once as there are cores and memory for, each with its share
of the cores; on a GPU one after the other. Finished steps are kept: the same call goes on where the last one ended.
"""

import argparse
import json
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llava.experiment.lanes import StageStep, Step, StepError, run_lanes, runs_at_once
from llava.experiment.stage import STAGES, WHOLE_RUNS, interpreter, last_step, locked, refuse_ignored
from llava.launch.cpu import POLICY
from llava.launch.devices import available_cores, count_of, resolve_devices
from llava.launch.recipe import resolved_run
from llava.launch.settings import Refusal
from llava.utils.files import write_json
from llava.utils.paths import IS_CHECKOUT, NEEDS_CHECKOUT
from llava.utils.provenance import differences
from playground import answers, smollm2
from playground.options import PICTURES
from playground.store import PlaygroundError, read_manifest, shown_python

ROOT_OF_INPUTS = Path("playground/data")
TIMES = "times.json"  # seconds of every step
SETTINGS = "settings.json"  # beside a stage's folder: what it is made from
# Flags that decide where and how often something is written, and nothing about the result.
_NO_SETTINGS = ("output_dir", "run_name", "report_to", "save_", "logging_", "pretrain_mm_mlp_adapter", "dataloader_")


class Quickstart:
    """What is trained, from what, and where it goes.

    Attributes:
        root: folder of the prepared inputs.
        times: seconds of every step, by its title.
    """

    def __init__(
        self,
        data: str,
        arms: Sequence[str],
        folder: Path,
        root: Path = ROOT_OF_INPUTS,
        set_up_seconds: float = 0.0,
    ):
        self.data, self.arms, self.folder, self.root = data, list(arms), folder, root
        self.started = time.monotonic() - set_up_seconds
        self.times = {"set-up of .venv": set_up_seconds} if set_up_seconds else {}
        self.on_gpu = resolve_devices(os.environ).on_gpu
        self.width = 1 if self.on_gpu else runs_at_once(len(self.arms), available_cores())
        refuse_ignored(self.settings(arm, stage) for arm in self.arms for stage in STAGES)
        self.recipes = {(arm, stage): self.recipe(arm, stage) for arm in self.arms for stage in STAGES}

    # --- what a step is -----------------------------------------------------------------------------------------------

    def settings(self, arm: str, stage: str) -> dict[str, str]:
        """Variables of scripts/pretrain.sh and finetune.sh; those that the caller set stay as they are."""
        data = self.root / self.data
        own = {
            "MODEL_PATH": self.root / smollm2.FOLDER,
            "VISION_TOWER": self.root / f"siglip-{self.data}",
            "DATA_PATH": data / f"{stage}.json",
            "REPORT_TO": "none",
        }
        found = {name: os.environ.get(name) or str(value) for name, value in own.items()}
        found["IMAGE_FOLDER"] = os.environ.get("IMAGE_FOLDER", str(data / "images"))  # empty: the rows hold them
        found |= {"PRESET": "demo", "DEMO_DATA": self.data, "NORM": arm, **WHOLE_RUNS}
        found["OUTPUT_DIR"] = str(self.folder.resolve() / arm / stage)
        found["PRETRAIN_ADAPTER"] = str(self.folder.resolve() / arm / "pretrain/mm_projector.bin")
        return found | self.threads(self.width)

    def threads(self, lanes: int) -> dict[str, str]:
        """Variables that give each lane its share of the cores; those that the caller set stay."""
        if self.on_gpu or os.environ.get("OMP_NUM_THREADS"):
            return {}
        return {"OMP_NUM_THREADS": str(max(1, available_cores() // lanes))}

    def recipe(self, arm: str, stage: str) -> dict[str, Any]:
        """The run (flags, batch and more) that the stage's script makes of its variables.

        Raises:
            ValueError: the script refuses them.
        """
        environment = {name: value for name, value in os.environ.items() if name.isupper()}
        found = resolved_run(stage, **environment | self.settings(arm, stage))
        if not (steps := found["flags"]["max_steps"]).removeprefix("-").isdecimal():
            raise ValueError(f"MAX_STEPS={steps} is not a whole number")
        return found

    def stage(self, arm: str, stage: str) -> StageStep:
        recipe, folder = self.recipes[arm, stage], self.folder / arm / stage
        return StageStep(
            f"{arm}, stage {1 + STAGES.index(stage)}",
            ["bash", f"scripts/{stage}.sh"],
            folder.with_suffix(".log"),
            self.settings(arm, stage),
            stage=stage,
            folder=folder,
            steps=max(0, int(recipe["flags"]["max_steps"])),
            batch=recipe["batch"]["global"],
        )

    def answers(self, arm: str) -> Step:
        checkpoint, data = str(self.folder / arm / "finetune"), self.root / self.data

        def is_done() -> bool:
            return answers.is_recorded(arm, checkpoint, data, self.folder)

        command = _python("answers", "--arm", arm, checkpoint, *self.measured_on())
        log = self.folder / arm / "answers.log"
        return Step(f"{arm}, answers", command, log, self.threads(self.width), is_done)

    def measured_on(self) -> list[str]:
        return ["--data", str(self.root / self.data), "--output-dir", str(self.folder)]

    # --- the flow -----------------------------------------------------------------------------------------------------

    def run(self, lock: int) -> None:
        """Runs every step.

        Raises:
            StepError, PlaygroundError: a step failed, or the folder holds something else.
        """
        self.title("inputs: language model, pictures, vision tower")
        self.times |= run_lanes(self.input_lanes(), 1 if self.on_gpu else 2)
        self.keep_settings()
        said = "one after the other" if self.width == 1 else f"{self.width} at a time"
        self.title(f"{count_of(len(self.arms), 'arm')}, {said}: stage 1, stage 2, answers")
        lanes = {arm: [*(self.stage(arm, stage) for stage in STAGES), self.answers(arm)] for arm in self.arms}
        self.times |= run_lanes(lanes, self.width, [lock])
        self.title("page")
        self.page()

    def input_lanes(self) -> dict[str, list[Step]]:
        """The language model beside pictures and tower. All cores train the tower, so waiting threads may sleep."""

        def step(title: str, *words: str) -> Step:
            log = self.folder / "inputs" / f"{words[0]}.log"
            return Step(
                title,
                _python(*words, "--root", str(self.root)),
                log,
                {name: os.environ.get(name, v) for name, v in POLICY.items()},
            )

        return {
            "language model": [step("language model", "smollm2")],
            "tower": [step(f"pictures, {self.data}", self.data), step("vision tower", "tower", "--data", self.data)],
        }

    def page(self) -> None:
        """Writes the page, which cannot have the time of its own step, and prints the table."""
        self.times["all"] = time.monotonic() - self.started
        keep_longest(self.times, self.folder / TIMES)
        arms = [word for arm in self.arms for word in self.arm_words(arm)]
        step = Step("page", _python("compare", *arms, *self.measured_on()), self.folder / "page.log")
        run_lanes({"page": [step]}, 1)
        print("\n" + (self.folder / "table.md").read_text())

    def arm_words(self, arm: str) -> list[str]:
        return ["--arm", arm, *(str(self.folder / arm / stage) for stage in STAGES)]

    def title(self, text: str) -> None:
        print(f"\n=== {text}", flush=True)

    # --- a folder holds one quickstart --------------------------------------------------------------------------------

    def keep_settings(self) -> None:
        """Writes beside every stage's folder what it is made from.

        Raises:
            PlaygroundError: the folder holds a stage that was made from something else.
        """
        now = {place: self.made_from(*place) for place in self.recipes}
        for (arm, stage), made_from in now.items():
            folder = self.folder / arm / stage
            if last_step(folder):
                refuse_other(folder, made_from)
        for (arm, stage), made_from in now.items():
            (self.folder / arm).mkdir(parents=True, exist_ok=True)
            write_json(settings_file(self.folder / arm / stage), made_from)

    def made_from(self, arm: str, stage: str) -> dict[str, Any]:
        """Flags of the stage and settings of its inputs by name; of stage 2 also those of stage 1."""
        flags = self.recipes[arm, stage]["flags"]
        found = {name: value for name, value in flags.items() if not name.startswith(_NO_SETTINGS)}
        for name in ("model_name_or_path", "vision_tower"):
            found[f"made as, {name}"] = (read_manifest(Path(flags[name])) or {}).get("settings")
        found["made as, data"] = (read_manifest(Path(flags["data_path"]).parent) or {}).get("settings")
        if stage != STAGES[0]:
            found |= {f"stage 1, {name}": value for name, value in self.made_from(arm, STAGES[0]).items()}
        return found


def settings_file(folder: Path) -> Path:
    """The file that says what the stage in `folder` is made from."""
    return folder.with_name(f"{folder.name}-{SETTINGS}")


def refuse_other(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Raises PlaygroundError where `folder` was made from something else, naming what differs."""
    try:
        before = json.loads(settings_file(folder).read_text())
    except (OSError, ValueError):
        raise PlaygroundError(f"{folder} was not made by the quickstart; remove it, or set OUTPUT_ROOT") from None
    if changed := differences(before, made_from):
        listed = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (old, new) in list(changed.items())[:3])
        more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise PlaygroundError(
            f"{folder} was made with other settings ({listed}{more}); remove it, or set OUTPUT_ROOT to another folder"
        )


def keep_longest(times: Mapping[str, float], file: Path) -> None:
    """Adds `times` to those in `file`; the longer one stays, since a step that was finished before takes no time."""
    before = json.loads(file.read_text()) if file.is_file() else {}
    write_json(file, before | {name: max(seconds, before.get(name, 0.0)) for name, seconds in times.items()})


def _python(*words: str) -> list[str]:
    # A command of this package, run by the caller's own interpreter if there is one, else by this one.
    return [interpreter(), "-m", "playground", *words]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m playground quickstart`."""
    parser.add_argument("--data", choices=PICTURES, default=PICTURES[0], help="pictures that are asked about")
    parser.add_argument("--arms", default="none gwc_layernorm", help="norms to train, separated by spaces")
    parser.add_argument("--root", type=Path, default=ROOT_OF_INPUTS, help="folder of the prepared inputs")
    parser.add_argument("--output-dir", type=Path, required=True, help="where everything goes")
    parser.add_argument("--set-up-seconds", type=float, default=0.0, help="seconds that set-up took before this call")


def run(args: argparse.Namespace) -> None:
    """Runs the whole quickstart and prints where everything is.

    Raises:
        PlaygroundError: wrong settings, a folder that holds something else, or a step that failed.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    if not IS_CHECKOUT:
        raise PlaygroundError(NEEDS_CHECKOUT)
    arms = args.arms.replace(",", " ").split()
    if not arms or len(set(arms)) < len(arms):
        raise PlaygroundError(f"--arms {args.arms!r}: expected names of norms, each once")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        quickstart = Quickstart(args.data, arms, args.output_dir, args.root, args.set_up_seconds)
        make_folder(args.output_dir)
        with locked(args.output_dir) as lock:
            quickstart.run(lock)
    except StepError as error:
        raise PlaygroundError(f"{error}\nthe same command goes on from here") from None
    except (ValueError, Refusal) as error:
        raise PlaygroundError(str(error)) from None
    show_end(quickstart)


def make_folder(folder: Path) -> None:
    """Makes the output folder; raises PlaygroundError where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise PlaygroundError(
            f"{folder} cannot be written: {error.strerror}; set OUTPUT_ROOT to another folder"
        ) from None


def show_end(quickstart: Quickstart) -> None:
    """Prints the times, and where everything is."""
    folder, data = quickstart.folder, quickstart.root / quickstart.data
    print("=== time of each step")
    quickstart.times["all"] = time.monotonic() - quickstart.started
    for title, seconds in quickstart.times.items():
        print(f"  {title:<28} {seconds:5.0f} s")
    picture = next(iter(sorted((data / "images").glob("*"))), "PICTURE")
    words = ["--model-path", f"{folder / quickstart.arms[-1]}/finetune", "--image-file", str(picture)]
    print(f"\npage          {folder}/index.html    table, results: table.md, results.json")
    print(f"checkpoints   {folder}/<arm>/{{pretrain,finetune}}    logs: <arm>/*.log, <arm>/<stage>/train_log.jsonl")
    print(f"talk to it    {shlex.join([shown_python(), '-m', 'llava.serve.cli', *words])}")
    print("every table and figure of the paper    bash scripts/analyze.sh    (docs/analysis.md)")
