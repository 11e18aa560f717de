"""The quickstart: inputs, both stages of every arm in parallel, answers to held-out questions, and one page.

    inputs     language model | pictures, then the vision tower
    arms       stage 1, stage 2, answers | the same for the next arm
    page       table, figures, answers

`|` means in parallel: on a CPU as many arms train at once as cores and memory allow, each with its share of the cores;
on a GPU arms train in sequence. Finished steps are skipped: rerun the same command to resume.
"""

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llava.compare.answers import RECORDS, UNTOUCHED, Question, held_out
from llava.compare.engine import DEMO, WHOLE_RUNS, Experiment, at_work, refuse_ignored, show_times
from llava.compare.record import FILE, add_run, new_record, read_record, write_record
from llava.compare.report import write_page
from llava.compare.runs import LOG_FILE, Run, check_results, check_runs
from llava.compare.steps import StageStep, Step, runs_at_once
from llava.eval.results import Results, read_results
from llava.launch.devices import count_of, resolve_devices
from llava.launch.recipe import STAGES
from llava.utils.files import write_text
from llava.utils.machine import available_cores
from llava.utils.plugins import load_named
from playground import smollm2
from playground.options import PICTURES
from playground.store import shown_python

ROOT_OF_INPUTS = Path("playground/data")
ANSWERS = "answers"  # folder of what each arm answered
ALL = "all questions"
SCORES = "held-out accuracy, % (95 % interval)"
PAGE = "index.html"
VARIABLES = ("ARMS", "OUTPUT_ROOT")
"""The script's variables for `--arms` and `--output-dir`."""
MEASURED = 24  # pictures on which update rates are measured
EXAMPLES = 3  # pictures on the page


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
        step.title = f"{run.arm}, stage {1 + STAGES.index(stage)}"
        step.steps, step.batch = max(0, int(recipe["flags"]["max_steps"])), recipe["batch"]["global"]
        return step

    def answers(self, run: Run) -> Step:
        step = self.held_out(run, self.root / self.data, self.folder / ANSWERS / run.arm, (UNTOUCHED,))
        step.settings = {**step.settings, **self.threads(len(self.places()))}
        return step

    def results_of(self, run: Run) -> Results:
        return read_results(self.folder / ANSWERS / run.arm / UNTOUCHED)

    # --- the flow -----------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Every part in its order.

        Raises:
            ValueError: the folder holds another quickstart.
            StepError: a step failed.
        """
        self.check_settings()
        self.prepare()
        width = len(self.places())
        order = "in sequence" if width == 1 else f"{width} at a time"
        title = f"{count_of(len(self.arms), 'arm')}, {order}: stage 1, stage 2, answers"
        lanes = {run.arm: [*(self.stage(run, stage) for stage in STAGES), self.answers(run)] for run in self.runs}
        self.part(title, lanes)
        self.page()

    def prepare(self) -> None:
        """The language model | pictures, then the tower."""
        root = ("--root", str(self.root))
        model, *pictures = self.inputs(("smollm2", *root), (self.data, *root), ("tower", "--data", self.data, *root))
        width = 1 if resolve_devices(os.environ).on_gpu else 2
        self.part("inputs: language model, pictures, vision tower", {"model": [model], "tower": pictures}, width)

    def page(self) -> None:
        """Checks the runs, writes the record and the page, and prints the table."""
        for stage in STAGES:
            check_runs(self.runs, stage)
        check_results(self.runs, self.results_of)
        data = self.root / self.data / RECORDS
        self.part("update rates", self.measurements(STAGES[-1], "analysis", ["update-rates"], str(data), MEASURED))
        times = self.times | {"all": sum(self.parts.values())}
        if (file := self.folder / FILE).is_file():  # a skipped step takes no time: the longer one is kept
            before = read_record(file).get("times", {})
            times = before | {name: max(seconds, before.get(name, 0.0)) for name, seconds in times.items()}
        record = new_record(
            title=f"{' and '.join(self.arms)} on {self.data}", overall=ALL, times=times, examples=self.examples(),
            talk=self.talk(), logs=self.logs(),
        )  # fmt: skip
        for run in self.runs:
            add_run(record, run, self.results_of(run))
        write_record(record, file)
        write_page(record, self.folder, page=PAGE)
        write_text(self.folder / "table.md", table_of(record) + "\n")
        print("\n" + (self.folder / "table.md").read_text())

    def examples(self) -> list[dict[str, str]]:
        """Held-out questions about different pictures, at first one of each kind."""
        chosen: dict[str, Question] = {}
        records = held_out(self.root / self.data)
        for record in records:
            if record["kind"] not in chosen and record["image"] not in {other["image"] for other in chosen.values()}:
                chosen[record["kind"]] = record
        pictures = {record["image"] for record in chosen.values()}
        others = [record for record in records if record["image"] not in pictures]
        images = self.root / self.data / "images"
        return [
            {"task": record["kind"], "id": record["id"], "picture": str(images / record["image"])}
            | {"question": record["conversations"][0]["value"].replace("<image>\n", "")}
            for record in [*chosen.values(), *others][:EXAMPLES]
        ]

    def talk(self) -> str:
        """The command that talks to the last arm about a picture."""
        picture = self.examples()[0]["picture"]
        words = ["--model-path", f"{self.folder / self.arms[-1]}/finetune", "--image-file", picture]
        return shlex.join([shown_python(), "-m", "llava.serve.cli", *words])

    def logs(self) -> list[tuple[str, str]]:
        """Titles and relative paths of every stage's logs."""
        files = [(run.arm, stage, file) for run in self.runs for stage in STAGES
                 for file in (run.folder(stage) / LOG_FILE, run.folder(stage).with_suffix(".log"))]  # fmt: skip
        return [
            (f"{arm}, {stage}: {file.name}", os.path.relpath(file, self.folder))
            for arm, stage, file in files
            if file.is_file()
        ]


def table_of(record: Mapping[str, Any]) -> str:
    """Scores and what the arms logged: a column for each arm, and what chance gives."""
    from llava.compare.tables import Statistics, logged_table, scores_table

    stats = Statistics(dict(record))
    rows = [["", *stats.arms, ""], [SCORES, *[""] * len(stats.arms), "chance"]]
    for row in scores_table(stats):
        rows.append([f"  {row['benchmark']}", *(row[arm] for arm in stats.arms), row["chance"]])
    rows += [[row["logged"], *(f"{row[arm]:.3g}" for arm in stats.arms), ""] for row in logged_table(stats)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    header, *lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quickstart`."""
    parser.add_argument("--data", choices=PICTURES, default=PICTURES[0], help="pictures of training and questions")
    arms, folder = (os.environ.get(name) for name in VARIABLES)
    parser.add_argument("--arms", default=arms or "none gwc_layernorm", help="norms to train (variable: ARMS)")
    parser.add_argument("--root", type=Path, default=ROOT_OF_INPUTS, help="folder of the prepared inputs")
    where = "default: outputs/quickstart, or outputs/quickstart-<data> (variable: OUTPUT_ROOT)"
    parser.add_argument("--output-dir", type=Path, default=folder and Path(folder), help=where)


def run(args: argparse.Namespace) -> None:
    """Runs the whole quickstart and prints where everything is.

    Raises:
        ValueError: wrong settings, or a folder of another quickstart.
        StepError: a step failed.
    """
    for name in VARIABLES:  # the stages' scripts have other names for them, and would ask
        os.environ.pop(name, None)
    arms = args.arms.replace(",", " ").split()
    if not arms or len(set(arms)) < len(arms):
        raise ValueError(f"--arms {args.arms!r}: expected names of norms, each once")
    name = "quickstart" if args.data == PICTURES[0] else f"quickstart-{args.data}"
    folder = args.output_dir or Path("outputs") / name
    quickstart = Quickstart.of(args.data, arms, folder, args.root)
    with at_work(folder) as quickstart.lock:
        quickstart.work()
    show_times({**quickstart.times, "all": sum(quickstart.parts.values())})
    print(f"\npage          {folder}/{PAGE}    table, record: table.md, {FILE}")
    print(f"checkpoints   {folder}/<arm>/{{pretrain,finetune}}    logs: <arm>/*.log, <arm>/<stage>/train_log.jsonl")
    print(f"talk to it    {quickstart.talk()}")
    print("every table and figure of the paper    bash scripts/analyze.sh    (docs/analysis.md)")
