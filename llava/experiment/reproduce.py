"""The paper, item by item: fetches or trains what a table or figure needs, measures it, and sets it beside the paper.

    copies of published models and data    <output-dir>/hub, shared by all items (`published`)
    trained arms                           outputs/compare-<preset>, shared with scripts/compare.sh
    an item's results and its page         <output-dir>/<item>, index.md

Rerun the same command to resume.
"""

import argparse
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from llava.analysis.commands import PACKAGE
from llava.analysis.models import NamedModel, named_model
from llava.experiment.comparison import Comparison
from llava.experiment.engine import DEMO, Experiment, at_work
from llava.experiment.lanes import Step
from llava.experiment.measurements import Command, command_line
from llava.experiment.measuring_time import SHARE, TOKENS, hours, parameters_named, parameters_of, peak
from llava.experiment.paper import ARMS
from llava.experiment.published import DATASET, Published, State, download, problems, revisions, state_of
from llava.experiment.reproduce_page import device, measured_numbers, page_of, score_rows
from llava.experiment.runs import Run
from llava.experiment.stage import refuse_ignored
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
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/reproduce"), help="default: %(default)s")
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
        states: what the hub has of everything that is fetched.
    """

    args: argparse.Namespace
    item: Item
    states: list[State] = field(default_factory=list)

    @property
    def hub(self) -> Path:
        return self.args.output_dir / "hub"

    @property
    def results(self) -> Path:
        return self.args.output_dir / self.args.item

    @property
    def trained(self) -> list[Comparison]:
        """The experiments that train the arms."""
        presets = (self.args.preset,) if self.args.preset else self.item.presets
        arms = list(self.item.arms)
        return [Comparison(name, arms, [SEED], Path("outputs") / f"compare-{name}") for name in presets if arms]

    def fetched(self) -> list[Published]:
        """What comes from the hub."""
        replaced = {model.name for model in self.args.model}
        models = [MODELS[name] for name in self.item.models if name not in replaced]
        return models + ([*BENCHMARKS] if self.item.on_samples and not self.args.data else [])

    def models(self) -> list[NamedModel]:
        """The published models, from the caller's folders or the copies."""
        replaced = {model.name: model for model in self.args.model}
        places = {name: MODELS[name].copy_in(self.hub) for name in self.item.models}
        return [replaced.get(name) or NamedModel(name, str(place)) for name, place in places.items()]

    def ask_hub(self) -> list[str]:
        """Sets `states`; returns what the hub cannot answer."""
        faults = []
        for source in self.fetched():
            try:
                self.states.append(state_of(source, self.hub))
            except (OSError, ValueError) as error:
                faults.append(str(error))
        return faults

    # --- steps --------------------------------------------------------------------------------------------------------

    def train(self, comparison: Comparison) -> None:
        """Trains the arms as far as the item needs them; what is finished is skipped."""
        refuse_ignored(comparison.every_settings())
        os.environ.setdefault("REPORT_TO", "tensorboard")
        with at_work(comparison.folder) as comparison.lock:
            if comparison.preset == DEMO:
                comparison.part("inputs", {"inputs": comparison.inputs(["all", "--data", "scenes"])})
                comparison.part("inputs, stamps", {"inputs": comparison.inputs(["all", "--data", "stamps"])})
            comparison.check_settings()
            lanes = {run.name: self.lane(comparison, run) for run in comparison.runs}
            comparison.part(f"{comparison.preset}: {', '.join(comparison.arms)}", lanes)

    def lane(self, comparison: Comparison, run: Run) -> list[Step]:
        """The steps of one arm."""
        if self.item.stage == CHECKPOINTS:
            steps = int(comparison.recipe(run, STAGES[0])["flags"].get("max_steps", -1))
            every = str(max(1, (steps if steps > 0 else 2180) // KEPT))  # 558K samples in batches of 256
            keep = {"SAVE_STRATEGY": "steps", "SAVE_STEPS": every, "SAVE_TOTAL_LIMIT": str(KEPT + 1)}
            return [comparison.stage(run, STAGES[0], CHECKPOINTS, keep)]
        stages = STAGES[: STAGES.index(self.item.stage) + 1]
        scored = [] if self.item.commands else [comparison.evaluation(run)]
        return [*(comparison.stage(run, stage) for stage in stages), *scored]

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
        numbers = measured_numbers(self.results) if item.commands else []
        for comparison in [] if item.commands else self.trained:
            numbers += score_rows(comparison.preset, comparison.runs)
        notes = "".join(f"{note}\n\n" for note in item.notes)
        notes += f"{args.samples} samples; " if item.on_samples else ""
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
    faults += problems(task.states, task.hub)
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

    if task.states:
        names = {published.repository: name for name, published in MODELS.items()}
        rows = []
        for state in task.states:
            name = names.get(state.published.repository, "samples")
            runs = name in task.item.models and name not in READ_ONLY and samples
            rows.append({
                "name": name,
                "repository": state.published.repository,
                "revision": state.revision[:12],
                "GB": sum(state.files.values()) / 1e9,
                "to download": state.missing / 1e9,
                "hours": measuring(parameters_of(state.files)) if runs else None,
            })  # fmt: skip
        print()
        print(format_table(rows))
    for comparison in task.trained:
        print(f"\ntrains in {comparison.folder}, unless they are there: {', '.join(comparison.arms)}")
        stages = STAGES[: STAGES.index(task.item.stage) + 1] if task.item.stage in STAGES else STAGES[:1]
        recipes = [comparison.recipe(comparison.runs[0], stage) for stage in stages]
        for problem in dict.fromkeys(problem for recipe in recipes for problem in recipe["problems"]):
            print(f"missing: {problem}")
        print(f"hours and memory (estimates): python -m benchmarks.scale --preset {comparison.preset}")
        measured = len(comparison.arms) * (KEPT if task.item.stage == CHECKPOINTS else 1)
        each = measuring(parameters_named(recipes[0]["flags"]["model_name_or_path"])) if samples else None
        if each is not None:
            print(f"hours to measure them (estimate): {measured * each:.2g}")
    if samples:
        print(f"\n{device_sentence(task.args.samples, tflops)}")
    print()
    for words in task.measured_words():
        print(shlex.join(["python", *words[1:]]))
    for note in task.item.notes:
        print(f"note: {note}")


def device_sentence(samples: int, tflops: float | None) -> str:
    """What the hours of measuring are computed from."""
    if tflops is None:
        return f"hours of measuring: not estimated, the peak of {device()} is not known"
    return (
        f"hours: an estimate of the measuring on {device()}: 2 x parameters (at most) x {TOKENS} tokens x {samples} "
        f"samples for each command, at {SHARE:.0%} of {tflops:.4g} TFLOP/s"
    )
