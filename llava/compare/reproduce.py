"""The paper, item by item: fetches or trains what a table or figure needs, measures it, and sets it beside the paper.

    copies of published models and data    <output-dir>/hub, shared by all items (`published`)
    trained arms                           compare-<preset> next to <output-dir>, where scripts/compare.sh has them too
    an item's results and its page         <output-dir>/<item>, index.md

Rerun the same command to resume.
"""

import argparse
import os
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from llava.analysis.commands import PACKAGE
from llava.analysis.models import NamedModel, named_model
from llava.compare import trained_inputs
from llava.compare.comparison import Comparison
from llava.compare.engine import Experiment, at_work
from llava.compare.lanes import Step
from llava.compare.measurements import Command, command_line
from llava.compare.paper import ARMS
from llava.compare.published import DATASET, Published, State, download, problems, revisions, state_of
from llava.compare.reproduce_page import device, limit_notes, measured_numbers, page_of, samples_note, score_rows
from llava.compare.runs import Run
from llava.compare.stage import refuse_ignored
from llava.compare.time_estimates import (
    SHARE,
    TOKENS,
    hours,
    parameters_named,
    parameters_of,
    peak,
    training_hours,
)
from llava.eval.harness import token_fault
from llava.eval.results import RESULTS_FILE
from llava.eval.tasks import choose
from llava.launch.recipe import STAGES
from llava.utils.commands import module_of, whole
from llava.utils.files import write_text
from llava.utils.presentation import format_table
from llava.utils.versions import git_commit

SEED = 42  # the paper's
PAGE = "index.md"
CHECKPOINTS = "checkpoints"
"""The part of a run that is stage 1 with its checkpoints kept."""
KEPT = 10  # checkpoints of stage 1

MODELS = {
    "CLIP-ViT-L/14": Published("openai/clip-vit-large-patch14"),
    "SigLIP-SO400M": Published("google/siglip-so400m-patch14-384"),
    "SigLIP2-SO400M": Published("google/siglip2-so400m-patch14-384"),
    "MoonViT-SO-400M": Published("moonshotai/MoonViT-SO-400M"),
    "Llama-3.2-3B": Published("meta-llama/Llama-3.2-3B-Instruct"),
    "Qwen2-7B": Published("Qwen/Qwen2-7B-Instruct"),
    "Qwen2.5-7B": Published("Qwen/Qwen2.5-7B-Instruct"),
    "Qwen3-8B": Published("Qwen/Qwen3-8B"),
    "LLaVA-1.5": Published("llava-hf/llava-1.5-7b-hf"),
    "Qwen2-VL": Published("Qwen/Qwen2-VL-7B-Instruct"),
    "Qwen2.5-VL": Published("Qwen/Qwen2.5-VL-7B-Instruct"),
    "GLM-4.1V": Published("zai-org/GLM-4.1V-9B-Thinking"),
    "Kimi-VL": Published("moonshotai/Kimi-VL-A3B-Instruct"),
    "Ovis2.5": Published("AIDC-AI/Ovis2.5-9B"),
}
OWN_CODE = ("MoonViT-SO-400M", "Kimi-VL", "Ovis2.5")
"""Models whose code is in their repositories."""
NOT_TRIED = (
    "code of its own repository, written for transformers 4. The tests run tiny models of this form; its published "
    "code, weights, tokenizer and image processor have not been run."
)
READ_ONLY = ("Llama-3.2-3B", "Qwen2-7B", "Qwen2.5-7B", "Qwen3-8B")
"""Language models, of which the files are read; nothing runs."""
BENCHMARKS = (
    Published("lmms-lab-encoder/MMBench", DATASET, ("en/dev-*.parquet",)),
    Published("lmms-lab-encoder/POPE", DATASET, ("data/*.parquet",)),
    Published("Lin-Chen/MMStar", DATASET, ("*.parquet",)),
)
"""What the paper draws its samples from; it does not say how many from each, so `--data` takes them together."""
VISION_LLMS = ("LLaVA-1.5", "Qwen2.5-VL", "GLM-4.1V", "Kimi-VL")


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
    def on_samples(self) -> int:
        """How many of the commands run models on samples."""
        return sum(bool(module_of(PACKAGE, command).NEEDS.flags) for command in self.commands)

    @property
    def notes(self) -> list[str]:
        """What has to be said of its models."""
        return [f"{name}: {NOT_TRIED}" for name in self.models if name in OWN_CODE]


ITEMS = {
    "table1": Item(
        "norms of encoders' tokens and of text embeddings",
        ("interface-norms",),
        (
            "CLIP-ViT-L/14",
            "SigLIP-SO400M",
            "SigLIP2-SO400M",
            "MoonViT-SO-400M",
            "Qwen2.5-7B",
            "Qwen3-8B",
            "Llama-3.2-3B",
        ),
    ),
    "table2": Item("norms before and after the projector", ("interface-norms",), VISION_LLMS),
    "table3": Item("norms of Ovis 2.5's visual and text vocabulary", ("interface-norms",), ("Ovis2.5",)),
    "table4": Item("benchmarks", arms=tuple(ARMS), presets=("llama-3.2-3b", "qwen2.5-7b")),
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
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show what would be fetched and run, an estimate of the hours, and what is missing",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("outputs/reproduce"),
        help="default: %(default)s; the arms are trained next to it",
    )
    parser.add_argument(
        "--samples", type=whole(1), default=1000, help="samples to measure on (default: the paper's 1000)"
    )
    parser.add_argument("--data", help="samples from here, as in llava.analysis (default: MMBench, POPE and MM-Star)")
    parser.add_argument(
        "--model", type=named_model, action="append", default=[], metavar="NAME=PATH",
        help="take a published model from this folder; NAME as in the dry run",
    )  # fmt: skip
    parser.add_argument("--preset", help="train the arms by this preset (default: the paper's)")


@dataclass
class Reproduction:
    """One item with the caller's choices.

    Attributes:
        args: the command line.
        states: what the hub has of the copies.
        trainings: what the hub has of what the trainings take from it.
    """

    args: argparse.Namespace
    item: Item
    states: list[State] = field(default_factory=list)
    trainings: list[State] = field(default_factory=list)

    @property
    def hub(self) -> Path:
        return self.args.output_dir / "hub"

    @property
    def results(self) -> Path:
        return self.args.output_dir / self.args.item

    @cached_property
    def trained(self) -> list[Comparison]:
        """The experiments that train the arms, where scripts/compare.sh has them."""
        presets = (self.args.preset,) if self.args.preset else self.item.presets
        arms, place = list(self.item.arms), self.args.output_dir.parent
        trained = [Comparison(name, arms, [SEED], place / f"compare-{name}") for name in presets if arms]
        for comparison in trained:
            comparison.set_defaults()
        return trained

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages in which the arms are trained."""
        return STAGES[: STAGES.index(self.item.stage) + 1] if self.item.stage in STAGES else STAGES[:1]

    def recipes(self, comparison: Comparison) -> list[dict[str, Any]]:
        """What the script of each stage makes of the first arm's variables."""
        return [comparison.recipe(comparison.runs[0], stage) for stage in self.stages]

    def fetched(self) -> list[Published]:
        """What is copied from the hub."""
        replaced = {model.name for model in self.args.model}
        models = [MODELS[name] for name in self.item.models if name not in replaced]
        return models + ([*BENCHMARKS] if self.item.on_samples and not self.args.data else [])

    def models(self) -> list[NamedModel]:
        """The published models, from the caller's folders or the copies."""
        replaced = {model.name: model for model in self.args.model}
        places = {name: MODELS[name].copy_in(self.hub) for name in self.item.models}
        return [replaced.get(name) or NamedModel(name, str(place)) for name, place in places.items()]

    def ask_hub(self) -> list[str]:
        """Sets `states` and `trainings`; returns what the hub cannot answer."""
        faults = []
        taken = [each for comparison in self.trained for each in trained_inputs.from_hub(self.recipes(comparison))]
        for states, sources in ((self.states, self.fetched()), (self.trainings, dict.fromkeys(taken))):
            for source in sources:
                try:
                    states.append(state_of(source, self.hub))
                except (OSError, ValueError) as error:
                    faults.append(str(error))
        return faults + [fault for comparison in self.trained if (fault := self.scoring_fault(comparison))]

    def scoring_fault(self, comparison: Comparison) -> str:
        """Why the arms could not be scored after their training, or nothing."""
        scored = all((run.folder("eval") / RESULTS_FILE).is_file() for run in comparison.runs)
        local = comparison.demo or "--data-dir" in os.environ.get("EVALUATE_FLAGS", "")
        return "" if self.item.commands or scored or local else token_fault(choose(comparison.tasks))

    # --- steps --------------------------------------------------------------------------------------------------------

    def train(self, comparison: Comparison) -> None:
        """Trains the arms as far as the item needs them; what is finished is skipped."""
        refuse_ignored(comparison.every_settings())
        with at_work(comparison.folder) as comparison.lock:
            comparison.check_settings()
            comparison.part("inputs", {"inputs": self.inputs(comparison)})
            lanes = {run.name: self.lane(comparison, run) for run in comparison.runs}
            comparison.part(f"{comparison.preset}: {', '.join(comparison.arms)}", lanes)

    def inputs(self, comparison: Comparison) -> list[Step]:
        """Prepares what the demo is trained on, or fetches the recipes' data where they are missing."""
        if comparison.demo:
            return comparison.inputs(*([name] for name in comparison.prepared()))
        folder, names = comparison.folder / "inputs", trained_inputs.missing_data(self.recipes(comparison))
        return [
            comparison.python(f"inputs, {name}", folder / f"{name}.log", "llava.data.prepare", name) for name in names
        ]

    def lane(self, comparison: Comparison, run: Run) -> list[Step]:
        """The steps of one arm."""
        if self.item.stage == CHECKPOINTS:
            steps = int(comparison.recipe(run, STAGES[0])["flags"].get("max_steps", -1))
            every = str(max(1, (steps if steps > 0 else 2180) // KEPT))  # 558K samples in batches of 256
            keep = {"SAVE_STRATEGY": "steps", "SAVE_STEPS": every, "SAVE_TOTAL_LIMIT": str(KEPT + 1)}
            return [comparison.stage(run, STAGES[0], CHECKPOINTS, keep)]
        scored = [] if self.item.commands else [comparison.evaluation(run)]
        return [*(comparison.stage(run, stage) for stage in self.stages), *scored]

    def measured_words(self) -> list[list[str]]:
        """The command line of each measurement."""
        flags = argparse.Namespace(data=self.data(), samples=self.args.samples, output_dir=self.results)
        models, more = self.models() if self.item.models else [], []
        for comparison in self.trained:
            folders = {run.arm: run.folder(self.item.stage).resolve() for run in comparison.runs}
            if self.item.stage == CHECKPOINTS:
                more = [word for folder in folders.values() for word in ("--checkpoints", str(folder))]
            else:
                models += [NamedModel(arm, str(folder)) for arm, folder in folders.items()]
            if self.item.stage != STAGES[-1] and "norm-params" not in self.item.commands:
                more += [
                    "--model-base",
                    comparison.recipe(comparison.runs[0], STAGES[0])["flags"]["model_name_or_path"],
                ]
        more += ["--trust-remote-code"] * any(name in OWN_CODE for name in self.item.models)
        needs = {command: module_of(PACKAGE, command).NEEDS for command in self.item.commands}
        return [command_line(command, models, needs[command], flags) + more for command in self.item.commands]

    def data(self) -> str | None:
        """The samples, as `--data` of `llava.analysis`."""
        places = [str(place) for place in (source.copy_in(self.hub) for source in BENCHMARKS)]
        return self.args.data or (",".join(places) if self.item.on_samples else None)

    def measure(self) -> None:
        """Runs the item's commands.

        Raises:
            ValueError: some failed.
        """
        experiment, errors = Experiment("", [], [], self.results), []
        for command, words in zip(self.item.commands, self.measured_words(), strict=True):
            step = Command(command, words, None, cwd=Path.cwd(), errors=errors)
            experiment.part(command, {command: [step]})
        if errors:
            raise ValueError(f"{self.args.item}: failed: {' '.join(errors)}; rerun the same command to resume")

    def page(self) -> str:
        """The item's page."""
        args, item, pinned = self.args, self.item, revisions(self.hub)
        runs = [(run, comparison.preset) for comparison in self.trained for run in comparison.runs]
        sources = [(source.repository, pinned[source.repository]) for source in self.fetched()]
        sources += [(model.name, model.path) for model in args.model]
        sources += [(f"{run.arm}, {preset}", str(run.folder(item.stage))) for run, preset in runs]
        sources += [("samples", args.data)] if args.data and item.on_samples else []
        numbers, said = measured_numbers(self.results) if item.commands else [], item.notes
        for comparison in [] if item.commands else self.trained:
            numbers += score_rows(comparison.preset, comparison.runs)
            said = said + limit_notes(comparison.preset, comparison.runs)
        notes = "".join(f"{note}\n\n" for note in said)
        notes += samples_note(self.results, args.samples) if item.on_samples else ""
        notes += f"{device()}; commit {git_commit()}."
        return page_of(f"{args.item}: {item.shows}", numbers, sorted(self.results.glob("*.png")), sources, notes)


# --- the command ------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """The command `reproduce`.

    Raises:
        ValueError: wrong flags; access or disk space is missing; a measurement failed.
        OSError: the hub does not answer.
        StepError: a training failed.
    """
    item = ITEMS[args.item]
    unknown = [model.name for model in args.model if model.name not in item.models]
    if unknown:
        known = ", ".join(item.models) or "none: its arms are trained"
        raise ValueError(f"--model {unknown[0]}: expected a published model of {args.item}: {known}")
    if args.preset and not item.arms:
        raise ValueError(f"--preset {args.preset}: {args.item} trains nothing")
    task = Reproduction(args, item)
    faults = task.ask_hub()
    faults += problems([*task.states, *task.trainings], task.hub)
    if args.dry_run:
        show(task)
    if faults:
        raise ValueError("\n".join(faults))
    if args.dry_run:
        return
    for comparison in task.trained:
        task.train(comparison)
    with at_work(task.results):
        download(task.states, task.hub)
        task.measure()
        page = task.page()
        write_text(task.results / PAGE, page)
    print(f"\n{page}\nwritten: {task.results / PAGE}")


def show(task: Reproduction) -> None:
    """Prints what would be fetched, trained and measured, and about how long it takes."""
    print(f"{task.args.item}: {task.item.shows}")
    samples, tflops = task.args.samples * task.item.on_samples, peak()

    def measuring(parameters: float | None) -> float | None:
        return hours(parameters, samples, tflops) if parameters and tflops else None

    names = {published.repository: name for name, published in MODELS.items()}
    names |= {published.repository: "samples" for published in BENCHMARKS}
    rows = []
    for state in [*task.states, *task.trainings]:
        name = names.get(state.published.repository, "training")
        runs = name in task.item.models and name not in READ_ONLY and samples
        rows.append({
            "name": name,
            "repository": state.published.repository,
            "revision": state.revision[:12],
            "GB": sum(state.files.values()) / 1e9,
            "to download": state.missing / 1e9,
            "hours": measuring(parameters_of(state.files)) if runs else None,
        })  # fmt: skip
    if rows:
        print(f"\n{format_table(rows)}")
    for comparison in task.trained:
        show_training(task, comparison, tflops)
        measured = len(comparison.arms) * (KEPT if task.item.stage == CHECKPOINTS else 1)
        model = task.recipes(comparison)[0]["flags"]["model_name_or_path"]
        each = measuring(parameters_named(model)) if samples else None
        if each is not None:
            print(f"hours to measure them (estimate): {measured * each:.2g}")
    if samples:
        print(f"\n{device_sentence(task.args.samples, tflops)}")
    print()
    for words in task.measured_words():
        print(shlex.join(["python", *words[1:]]))
    for note in task.item.notes:
        print(f"note: {note}")


def show_training(task: Reproduction, comparison: Comparison, tflops: float | None) -> None:
    """Prints what the arms of a preset are trained on, by which commands, and about how long it takes."""
    recipes = task.recipes(comparison)
    print(f"\ntrains in {comparison.folder}, unless they are there: {', '.join(comparison.arms)}")
    for step in task.inputs(comparison):
        print(f"first: {shlex.join(['python', *step.command[1:]])}")
    for problem in dict.fromkeys(trained_inputs.callers(recipes)):
        print(f"missing: {problem}")
    stages = zip(task.stages, recipes, strict=True)
    each = [training_hours(stage, recipe, tflops) if tflops else None for stage, recipe in stages]
    if comparison.demo:
        print("hours to train them: docs/first-hour.md has measured times")
    elif None in each:
        print("hours to train them: not estimated; docs/scale.md has estimates")
    else:
        shown = " + ".join(f"{time:.2g}" for time in each)
        print(f"hours to train each (estimate, for the devices here): {shown}; docs/scale.md has other devices")
    if not task.item.commands:
        evaluation = comparison.evaluation(comparison.runs[0]).command
        print(f"then for each, not estimated: {shlex.join(evaluation)}")


def device_sentence(samples: int, tflops: float | None) -> str:
    """What the hours of measuring are computed from."""
    if tflops is None:
        return f"hours of measuring: not estimated, the peak of {device()} is not known"
    return (
        f"hours: an estimate of the measuring on {device()}: 2 x parameters (at most) x {TOKENS} tokens x {samples} "
        f"samples for each command, at {SHARE:.0%} of {tflops:.4g} TFLOP/s"
    )
