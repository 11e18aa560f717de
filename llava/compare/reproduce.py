"""The paper, item by item: fetches or trains what a table or figure needs, measures it, and sets it beside the paper.

    published models and data              the hub's cache
    trained arms                           compare-<preset> next to <output-dir>, where scripts/compare.sh has them too
    an item's results and its page         <output-dir>/<item>, index.md; <preset>/report.html where arms are scored

Rerun the same command to resume.
"""

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava.analysis.commands import COMMANDS, NamedModel, named_model
from llava.compare.arms import FIRST_SEED
from llava.compare.engine import at_work, refuse_ignored
from llava.compare.run import Comparison
from llava.compare.runs import Run
from llava.compare.steps import Step
from llava.eval.harness import token_fault
from llava.eval.results import RESULTS_FILE
from llava.eval.tasks import choose
from llava.launch.inputs import HUB, MISSING, WRONG
from llava.launch.recipe import STAGES
from llava.utils.commands import whole
from llava.utils.files import write_text
from llava.utils.machine import machine
from llava.utils.presentation import format_table
from llava.utils.versions import git_commit

PAGE = "index.md"
CHECKPOINTS = "checkpoints"
"""The part of a run that is stage 1 with its checkpoints kept."""
KEPT = 10  # checkpoints of stage 1

MODELS = {
    "CLIP-ViT-L/14": "openai/clip-vit-large-patch14",
    "SigLIP-SO400M": "google/siglip-so400m-patch14-384",
    "SigLIP2-SO400M": "google/siglip2-so400m-patch14-384",
    "MoonViT-SO-400M": "moonshotai/MoonViT-SO-400M",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B-Instruct",
    "Qwen2-7B": "Qwen/Qwen2-7B-Instruct",
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B-Instruct",
    "Qwen3-8B": "Qwen/Qwen3-8B",
    "LLaVA-1.5": "llava-hf/llava-1.5-7b-hf",
    "Qwen2-VL": "Qwen/Qwen2-VL-7B-Instruct",
    "Qwen2.5-VL": "Qwen/Qwen2.5-VL-7B-Instruct",
    "GLM-4.1V": "zai-org/GLM-4.1V-9B-Thinking",
    "Kimi-VL": "moonshotai/Kimi-VL-A3B-Instruct",
    "Ovis2.5": "AIDC-AI/Ovis2.5-9B",
}
WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
"""The files that are needed of a model."""
OWN_CODE = ("MoonViT-SO-400M", "Kimi-VL", "Ovis2.5")
"""Models whose code is in their repositories."""
NOT_TRIED = (
    "code of its own repository, written for transformers 4. The tests run tiny models of this form; its published "
    "code, weights, tokenizer and image processor have not been run."
)
BENCHMARKS = {
    "lmms-lab-encoder/MMBench": ("en/dev-*.parquet",),
    "lmms-lab-encoder/POPE": ("data/*.parquet",),
    "Lin-Chen/MMStar": ("*.parquet",),
}
"""What the paper draws its samples from; it does not say how many from each, so `--data` takes them together."""
ENCODERS = ("CLIP-ViT-L/14", "SigLIP-SO400M", "SigLIP2-SO400M", "MoonViT-SO-400M")
VISION_LLMS = ("LLaVA-1.5", "Qwen2.5-VL", "GLM-4.1V", "Kimi-VL")
ARMS = ("none", "layernorm", "gwc_layernorm")  # of Table 4


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        shows: what it shows.
        commands: of `llava.analysis`; empty: the benchmarks' scores.
        models: published ones, by their names in `MODELS`.
        arms: trained ones instead.
        stage: how far the arms are trained, and which of their folders is measured.
        presets: what the arms are trained by.
    """

    shows: str
    commands: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    stage: str = STAGES[-1]
    presets: tuple[str, ...] = ("llama-3.2-3b",)

    @property
    def on_samples(self) -> bool:
        """Whether its commands run models on samples."""
        return any(COMMANDS[command].flags for command in self.commands)

    @property
    def notes(self) -> list[str]:
        """What has to be said of its models."""
        return [f"{name}: {NOT_TRIED}" for name in self.models if name in OWN_CODE]


ITEMS = {
    "table1": Item(
        "norms of encoders' tokens and of text embeddings",
        ("interface-norms",),
        (*ENCODERS, "Qwen2.5-7B", "Qwen3-8B", "Llama-3.2-3B"),
    ),
    "table2": Item("norms before and after the projector", ("interface-norms",), VISION_LLMS),
    "table3": Item("norms of Ovis 2.5's visual and text vocabulary", ("interface-norms",), ("Ovis2.5",)),
    "table4": Item("benchmarks", arms=ARMS, presets=("llama-3.2-3b", "qwen2.5-7b")),
    "table5": Item(
        "gain and bias after stage 1", ("norm-params",), arms=("layernorm@default", "layernorm"), stage=STAGES[0]
    ),
    "table6": Item(
        "norms of text embeddings, and the tokens of largest norm (Tables 6, 7, 8)",
        ("embedding-norms",),
        ("Qwen2-7B", "Qwen2-VL", "Qwen2.5-7B", "Qwen2.5-VL"),
    ),
    "fig2": Item("update rates in Ovis 2.5", ("update-rates",), ("Ovis2.5",)),
    "fig3": Item("update rates in four models", ("update-rates",), VISION_LLMS),
    "fig4": Item(
        "norms and update rates after stage 2", ("layer-norms", "update-rates"), arms=("none", "gwc_layernorm")
    ),
    "fig5": Item("update rates over stage 1", ("update-rates",), arms=("none", "gwc_layernorm"), stage=CHECKPOINTS),
    "appendix-g": Item("where a query looks", ("attention",), arms=("none", "gwc_layernorm")),
    "theory": Item("the theory's assumptions and predictions", ("theory",), ("LLaVA-1.5", "Qwen2.5-VL")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("item", choices=ITEMS, help="the paper's table or figure")
    parser.add_argument("--dry-run", action="store_true", help="show what would be fetched and run, and its size")
    where = "default: %(default)s; the arms are trained next to it"
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/reproduce"), help=where)
    count = "samples to measure on (default: the paper's 1000)"
    parser.add_argument("--samples", type=whole(1), default=1000, help=count)
    parser.add_argument("--data", help="samples from here, as in llava.analysis (default: MMBench, POPE and MM-Star)")
    folder = "take a published model from this folder; NAME as in the dry run"
    parser.add_argument("--model", type=named_model, action="append", default=[], metavar="NAME=PATH", help=folder)
    parser.add_argument("--preset", help="train the arms by this preset (default: the paper's)")


class Reproduction:
    """One item with the caller's choices.

    Attributes:
        models: the published models: the hub's, or the caller's folders.
        published: the hub's among them, and the data that samples are drawn from unless the caller names others: by
            repository the options of `snapshot_download`.
        trained: the experiments that train the arms, where scripts/compare.sh has them.
        stages: the stages in which the arms are trained.
        recipes: by preset, what the script of each stage makes of the first arm's variables.
        files: of each repository, as the hub lists them (`DryRunFileInfo`).
        folders: of each repository in the hub's cache, once it is downloaded.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.item = args, ITEMS[args.item]
        self.results = args.output_dir / args.item
        presets = (args.preset,) if args.preset else self.item.presets
        arms, place = list(self.item.arms), args.output_dir.parent
        self.trained = [Comparison(name, arms, [FIRST_SEED], place / f"compare-{name}") for name in presets if arms]
        self.stages = STAGES if self.item.stage == STAGES[-1] else STAGES[:1]
        self.recipes: dict[str, list[dict[str, Any]]] = {}
        for comparison in self.trained:
            comparison.set_defaults()
            first = comparison.runs[0]
            self.recipes[comparison.preset] = [comparison.recipe(first, stage) for stage in self.stages]
        own = {model.name: model.path for model in args.model}
        self.models = [NamedModel(name, own.get(name, MODELS[name])) for name in self.item.models]
        self.published: dict[str, dict[str, Any]] = {
            MODELS[name]: {"allow_patterns": WEIGHTS} for name in self.item.models if name not in own
        }
        if self.item.on_samples and not args.data:
            self.published |= {n: {"repo_type": "dataset", "allow_patterns": p} for n, p in BENCHMARKS.items()}
        self.files: dict[str, list[Any]] = {}
        self.folders: dict[str, str] = {}

    def ask_hub(self) -> list[str]:
        """Sets `files`; returns why the hub cannot give some, and why arms could not be scored."""
        from huggingface_hub import constants, snapshot_download

        faults = []
        for repository, options in self.published.items():
            try:
                files = snapshot_download(repository, dry_run=not constants.HF_HUB_OFFLINE, **options)
                self.files[repository] = files if isinstance(files, list) else []  # offline they are here already
            except OSError as error:
                cause = " ".join(str(error.__cause__ or error).split())
                faults.append(f"{repository}: {cause}; one that is gated needs access and: hf auth login")
        return faults + [fault for comparison in self.trained if (fault := self.scoring_fault(comparison))]

    def scoring_fault(self, comparison: Comparison) -> str:
        """Why the arms could not be scored after their training, or nothing."""
        scored = all((run.folder("eval") / RESULTS_FILE).is_file() for run in comparison.runs)
        local = comparison.demo or "--data-dir" in os.environ.get("EVALUATE_FLAGS", "")
        return "" if self.item.commands or scored or local else token_fault(choose(comparison.tasks))

    def download(self) -> None:
        """Downloads what is missing of each repository's files; sets `folders`."""
        from huggingface_hub import snapshot_download

        self.folders = {name: snapshot_download(name, **options) for name, options in self.published.items()}

    def train(self, comparison: Comparison) -> None:
        """Trains the arms as far as the item needs them; what is finished is skipped."""
        refuse_ignored(comparison.every_settings())
        with at_work(comparison.folder) as comparison.lock:
            comparison.check_settings(CHECKPOINTS)
            comparison.part("inputs", {"inputs": self.inputs(comparison)})
            lanes = {run.name: self.lane(comparison, run) for run in comparison.runs}
            comparison.part(f"{comparison.preset}: {', '.join(comparison.arms)}", lanes)
            if not self.item.commands:
                comparison.report(self.results / comparison.preset)

    def inputs(self, comparison: Comparison) -> list[Step]:
        """Prepares what the demo is trained on, or fetches the recipes' data where they are missing."""
        if comparison.demo:
            return comparison.inputs(*([name] for name in comparison.prepared()))
        logs, names = comparison.folder / "inputs", missing_data(self.recipes[comparison.preset])
        return [comparison.python(f"inputs, {n}", logs / f"{n}.log", "llava.data.prepare", n) for n in names]

    def lane(self, comparison: Comparison, run: Run) -> list[Step]:
        """The steps of one arm."""
        if self.item.stage == CHECKPOINTS:
            keep = {"SAVE_STRATEGY": "steps", "SAVE_STEPS": str(1 / KEPT), "SAVE_TOTAL_LIMIT": str(KEPT + 1)}
            return [comparison.stage(run, STAGES[0], CHECKPOINTS, keep)]
        scored = [] if self.item.commands else [comparison.evaluation(run)]
        return [*(comparison.stage(run, stage) for stage in self.stages), *scored]

    def measurements(self) -> dict[str, list[str]]:
        """The words after `python` of each of the item's commands."""
        from llava.analysis.all import command_line  # takes seconds

        models, more = [*self.models], []
        for comparison in self.trained:
            folders = {run.arm: run.folder(self.item.stage).resolve() for run in comparison.runs}
            if self.item.stage == CHECKPOINTS:
                more = [word for folder in folders.values() for word in ("--checkpoints", str(folder))]
            else:
                models += [NamedModel(arm, str(folder)) for arm, folder in folders.items()]
            if self.item.stage != STAGES[-1] and "norm-params" not in self.item.commands:
                more += ["--model-base", self.recipes[comparison.preset][0]["flags"]["model_name_or_path"]]
        more += ["--trust-remote-code"] * any(name in OWN_CODE for name in self.item.models)
        data = self.args.data or ",".join(self.folders.get(name, name) for name in BENCHMARKS)
        return {
            command: command_line(command, models, self.results, data, self.args.samples) + more
            for command in self.item.commands
        }

    def page(self) -> str:
        """The item's page."""
        import torch  # after the measurements, which are processes of their own

        from llava.compare.record import read_record
        from llava.compare.reproduce_page import page_of, paper_rows, samples_note, score_rows
        from llava.compare.tables import Statistics, caveats

        item = self.item
        places = {repository: Path(folder).name for repository, folder in self.folders.items()}
        places |= {model.name: model.path for model in self.args.model}
        numbers, notes = paper_rows(self.results) if item.commands else [], item.notes
        for comparison in self.trained:
            places |= {f"{run.arm}, {comparison.preset}": str(run.folder(item.stage)) for run in comparison.runs}
            if not item.commands:
                stats = Statistics(read_record(self.results / comparison.preset))
                numbers, notes = numbers + score_rows(comparison.preset, stats), notes + caveats(stats)
        if item.on_samples:
            notes += [samples_note(self.results)]
            places |= {"samples": self.args.data} if self.args.data else {}
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else machine()
        notes += [f"{device}; commit {git_commit()}."]
        sources = [{"model or data": name, "revision or folder": place} for name, place in places.items()]
        return page_of(f"{self.args.item}: {item.shows}", numbers, self.results, sources, notes)


def missing_data(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The data sets of `llava.data.prepare` of which stages lack files; `recipes` are as `DRY_RUN=json` prints them."""
    from llava.data.prepare import SOURCES  # takes a second

    inputs = [each for recipe in recipes for each in recipe["inputs"]]
    paths = [Path(each["value"]) for each in inputs if each["state"] in (MISSING, WRONG)]
    return [n for n, source in SOURCES.items() if any(path.is_relative_to(source.folder) for path in paths)]


# --- the command ------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """The command `reproduce`."""
    from llava.analysis.all import run_all  # takes seconds

    item = ITEMS[args.item]
    unknown = [model.name for model in args.model if model.name not in item.models]
    if unknown:
        known = ", ".join(item.models) or "none: its arms are trained"
        raise ValueError(f"--model {unknown[0]}: expected a published model of {args.item}: {known}")
    if args.preset and not item.arms:
        raise ValueError(f"--preset {args.preset}: {args.item} trains nothing")
    task = Reproduction(args)
    faults = task.ask_hub()
    if args.dry_run:
        show(task)
    if faults:
        raise ValueError("\n".join(faults))
    if args.dry_run:
        return
    for comparison in task.trained:
        task.train(comparison)
    with at_work(task.results):
        task.download()
        run_all(task.measurements())
        page = task.page()
        write_text(task.results / PAGE, page)
    print(f"\n{page}\nwritten: {task.results / PAGE}")


def show(task: Reproduction) -> None:
    """Prints what would be fetched, trained and measured."""
    print(f"{task.args.item}: {task.item.shows}")
    names = {repository: name for name, repository in MODELS.items()}
    rows = [
        {
            "name": names.get(repository, "samples"),
            "repository": repository,
            "GB": sum(file.file_size for file in files) / 1e9,
            "to download": sum(file.file_size for file in files if file.will_download) / 1e9,
        }
        for repository, files in task.files.items()
    ]
    if rows:
        print(f"\n{format_table(rows)}")
    for comparison in task.trained:
        print(f"\ntrains in {comparison.folder}, unless they are there: {', '.join(comparison.arms)}")
        for step in task.inputs(comparison):
            print(f"first: {shlex.join(['python', *step.command[1:]])}")
        inputs = [each for recipe in task.recipes[comparison.preset] for each in recipe["inputs"]]
        for name, hint in {each["value"]: each["hint"] for each in inputs if each["state"] == HUB}.items():
            print(f"from the hub: {name} {hint}".rstrip())
        if not task.item.commands:
            print(f"then for each: {shlex.join(comparison.evaluation(comparison.runs[0]).command)}")
    print()
    for words in task.measurements().values():
        print(shlex.join(["python", *words]))
    for note in task.item.notes:
        print(f"note: {note}")
