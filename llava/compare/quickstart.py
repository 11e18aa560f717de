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
from dataclasses import dataclass, field
from pathlib import Path

from llava.compare.answers import RECORDS, held_out
from llava.compare.engine import DEMO, Experiment
from llava.compare.record import FILE, Record, add_runs, new_record, write_record
from llava.compare.report import PAGE, write_page
from llava.compare.runs import Run
from llava.compare.steps import Step, runs_at_once
from llava.eval.results import read_results
from llava.launch.devices import count_of, resolve_devices
from llava.launch.recipe import STAGES
from llava.utils.machine import available_cores
from llava.utils.paths import ROOT
from llava.utils.presentation import format_table
from playground.options import PICTURES
from playground.store import shown_python

ANSWERS = "answers"  # folder of what each arm answered
ALL = "all questions"
MEASURED = 24  # pictures on which update rates are measured


@dataclass
class Quickstart(Experiment):
    """An experiment with the recipe's seed, on inputs that it prepares in the folder `root`."""

    root: Path = field(default_factory=lambda: ROOT / "playground/data")

    @property
    def runs(self) -> list[Run]:
        return [Run(self.folder, None, arm) for arm in self.arms]

    def data_settings(self, stage: str) -> dict[str, str]:
        """Variables about data and threads; the preset has those of models."""
        own = {"DEMO_DATA": self.data, "REPORT_TO": os.environ.get("REPORT_TO") or "none"}
        return own | self.threads()

    def places(self) -> list[dict[str, str]]:
        """On a CPU as many lanes as cores and memory allow; GPUs train one arm at a time."""
        on_gpu = resolve_devices(os.environ).on_gpu
        return [{}] * (1 if on_gpu else runs_at_once(len(self.arms), available_cores()))

    def lane(self, run: Run) -> list[Step]:
        """The steps of one arm."""
        answers = self.held_out(run, self.root / self.data, self.folder / ANSWERS / run.arm)
        return [*(self.stage(run, stage) for stage in STAGES), answers]

    def work(self) -> None:
        """Every part in its order."""
        self.check_settings()
        self.prepare()
        arms = f"{count_of(len(self.arms), 'arm')}, {len(self.places())} at a time"
        self.part(f"2 of 3, {arms}: stage 1, stage 2, answers", {run.arm: self.lane(run) for run in self.runs})
        self.page()

    def prepare(self) -> None:
        """The language model | pictures, then the tower."""
        root = ["--root", str(self.root)]
        model, *pictures = self.inputs(["smollm2", *root], [self.data, *root], ["tower", "--data", self.data, *root])
        self.part(
            "1 of 3, inputs: language model, pictures, vision tower", {"model": [model], "tower": pictures}, [{}, {}]
        )

    def page(self) -> None:
        """Checks the runs, writes the record and the page, and prints the table."""
        data = self.root / self.data / RECORDS
        self.part("3 of 3, update rates", self.measurements(["update-rates"], str(data), MEASURED))
        title = f"{' and '.join(self.arms)} on {self.data}"
        record = new_record(title=title, overall=ALL, talk=self.talk())
        add_runs(record, self.runs, lambda run: read_results(self.folder / ANSWERS / run.arm))
        record["examples"] = self.examples(record)
        write_record(record, self.folder / FILE)
        write_page(record, self.folder)
        print(f"\n{table_of(record)}")

    def examples(self, record: Record) -> list[dict[str, str]]:
        """For the page, the first three questions that some arms answer rightly and others not, and three others."""
        chosen: dict[bool, list[dict[str, str]]] = {True: [], False: []}
        for question in held_out(self.root / self.data):
            task = question["kind"]
            number = record["questions"][task].index(question["id"])
            differ = len({entry["scores"][task][number] for entry in record["runs"]}) > 1
            asked = question["conversations"][0]["value"].replace("<image>\n", "")
            picture = str(self.root / self.data / "images" / question["image"])
            chosen[differ].append({"task": task, "id": question["id"], "picture": picture, "question": asked})
        return chosen[True][:3] + chosen[False][:3]

    def talk(self) -> str:
        """The command that talks to the last arm about a picture."""
        picture = self.root / self.data / "images" / held_out(self.root / self.data)[0]["image"]
        words = ["--model-path", f"{self.folder / self.arms[-1]}/finetune", "--image-file", str(picture)]
        return shlex.join([shown_python(), "-m", "llava.serve.cli", *words])


def table_of(record: Record) -> str:
    """Scores and what the arms logged: a column for each arm, and what chance gives."""
    from llava.compare.tables import Statistics, logged_table, scores_table

    stats = Statistics(record)
    rows = [
        {"held-out accuracy, % (95 % interval)": row["benchmark"]}
        | {name: row[name] for name in (*stats.arms, "chance")}
        for row in scores_table(stats)
    ]
    for row in logged_table(stats):
        rows.append({[*rows[0]][0]: row["logged"]} | {arm: f"{row[arm]:.3g}" for arm in stats.arms})
    return format_table(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quickstart`."""
    parser.add_argument("--data", choices=PICTURES, default=PICTURES[0], help="pictures of training and questions")
    arms = os.environ.get("ARMS") or "none gwc_layernorm"
    parser.add_argument("--arms", default=arms, help="arms to train (variable: ARMS)")
    where = "default: outputs/quickstart, or outputs/quickstart-<data> (variable: OUTPUT_ROOT)"
    parser.add_argument("--output-dir", type=Path, default=os.environ.get("OUTPUT_ROOT") or None, help=where)


def run(args: argparse.Namespace) -> None:
    """Runs the whole quickstart and prints where everything is."""
    arms = args.arms.replace(",", " ").split()
    if not arms or len(set(arms)) < len(arms):
        raise ValueError(f"--arms {args.arms!r}: expected names of arms, each once")
    name = "quickstart" if args.data == PICTURES[0] else f"quickstart-{args.data}"
    folder = args.output_dir or Path("outputs") / name
    quickstart = Quickstart(DEMO, arms, [], folder, args.data)
    quickstart.run()
    print(f"\npage          {folder}/{PAGE}; its record: {FILE}")
    print(f"checkpoints   {folder}/<arm>/{{pretrain,finetune}}")
    print("logs          beside them: <arm>/*.log, <arm>/<stage>/train_log.jsonl")
    print("the paper     every table and figure: bash scripts/analyze.sh (docs/analysis.md)")
    print(f"talk to the last arm:\n{quickstart.talk()}")
