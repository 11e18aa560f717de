"""The runs of a comparison: what each recorded, and the refusal of those that differ in more than the arm.

A comparison trains and scores into `<folder>/seed-<seed>/<arm>/{pretrain,finetune,eval}`.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llava.compare.arms import BASELINE, parse_arm
from llava.eval.answer import recorded
from llava.eval.results import LLAVA_COMMIT, Results, read_results
from llava.launch.recipe import STAGES
from llava.launch.settings import parse_flags
from llava.utils.digests import revision
from llava.utils.provenance import DONE, RUN_FILE, differences, read_starts
from llava.utils.versions import software

LOG_FILE = "train_log.jsonl"
QUESTIONS = "questions"
"""The name of the caller's own questions in the table."""
ABSENT = "(absent)"  # in place of a field that a run does not have
# Prefixes of the flags that decide where and how often something is written, by how many processes, and no weights.
WRITING = ("report_to", "save_", "logging_", "dataloader_num_workers", "dataloader_p")
NOT_IDENTITY = (*WRITING, "output_dir", "run_name", "pretrain_mm_mlp_adapter")
# Prefixes of the fields in which runs may differ.
RATE_FIELDS = ("training.learning_rate", "training.mm_projector_lr", "config.mm_projector_lr", "training.max_grad_norm")
ARM_FIELDS = (
    *(f"{part}.mm_projector_{name}" for part in ("model", "initial_weights", "config") for name in ("norm", "type")),
    *RATE_FIELDS,  # a plan may give each arm its own; `check_flags` refuses others
)
SEED_FIELDS = ("training.seed", "training.data_seed", "order", "initial_weights.mm_mlp_adapter")
# Stage 2 starts from stage 1 of its own arm, which `check_arm` demands.
OWN_STAGE_1 = ("model.pretrain_mm_mlp_adapter", "adapter", "initial_weights.mm_mlp_adapter", "config._name_or_path")


@dataclass(frozen=True)
class Run:
    """One arm trained with one seed; without a seed it has the recipe's, and its folder names none."""

    root: Path
    seed: int | None
    arm: str

    @property
    def name(self) -> str:
        return self.arm if self.seed is None else f"{self.arm}, seed {self.seed}"

    def folder(self, part: str) -> Path:
        return self.root / ("" if self.seed is None else f"seed-{self.seed}") / self.arm / part

    def has_finished(self, stage: str) -> bool:
        return (self.folder(stage) / DONE).is_file()

    def has_begun(self, stage: str) -> bool:
        """Whether the stage has recorded its start and logged a step."""
        record, log = (self.folder(stage) / name for name in (RUN_FILE, LOG_FILE))
        return record.is_file() and log.is_file() and '"loss":' in log.read_text()

    def starts(self, stage: str) -> list[dict[str, Any]]:
        return read_starts(self.folder(stage) / RUN_FILE)

    def flags(self, stage: str) -> dict[str, str]:
        """The flags that the stage was last started with."""
        words = shlex.split(self.starts(stage)[-1]["provenance"]["command"])
        first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
        return parse_flags(words[first:]).values()

    def log(self, stage: str, key: str = "loss") -> list[dict[str, float]]:
        """The lines of the stage's log that have `key`: its optimizer steps, or evaluations."""
        lines = map(json.loads, (self.folder(stage) / LOG_FILE).read_text().splitlines())
        return [line for line in lines if key in line]

    def configuration(self, stage: str) -> dict[str, Any]:
        """Everything that must be equal, by dotted name: what the run recorded, its config.json, the steps it took.

        The commit need not be equal: `code.digest` covers the files that training runs. Nor need the folder of the
        pictures: `data.pictures` covers their content.

        Raises:
            ValueError: the run was resumed with another configuration.
        """
        ignored = tuple(f"training.{flag}" for flag in WRITING)
        first, *later = [
            {name: value for name, value in flattened(start["configuration"]) if not name.startswith(ignored)}
            for start in self.starts(stage)
        ]
        for record in (first, *later):
            record.pop("code.commit", None)
            if "data.pictures" in record:
                record.pop("data.image_folder")
        for again in later:
            if fields := changed(first, again, ("at first", "later")):
                raise ValueError(
                    f"{self.name}, {stage}: continued with another configuration than it was started with"
                    f"{fields}\n{TRAIN_AGAIN.format(self.folder(stage))}"
                )
        config = json.loads((self.folder(stage) / "config.json").read_text())
        steps = max((int(line["step"]) for line in self.log(stage)), default=0)
        return first | dict(flattened(config, "config.")) | {"steps": steps}

    @cached_property
    def results(self) -> Results:
        return read_results(self.folder("eval"))

    @property
    def answers(self) -> Path:
        """The answers to the caller's own questions."""
        return self.folder("questions") / "answers.jsonl"

    @cached_property
    def own_results(self) -> Results:
        """The scores of `answers`, in the form of an evaluation's."""
        from llava.eval.score import task_result  # takes a second

        record = recorded(self.answers)
        if record is None:
            raise ValueError(f"{self.answers}: no record of its questions next to it; rerun the comparison")
        model = record["asked"].pop("--model-path")
        tasks = {QUESTIONS: task_result(self.answers)}
        fingerprint = model.rpartition("content ")[2]
        return Results(str(self.folder("finetune")), fingerprint, "", {}, record["asked"], "", tasks)


def is_finished(folder: Path) -> bool:
    """Whether the stage in `folder` ended, and its model is there."""
    return (folder / DONE).is_file() and any(folder.glob("*model*.safetensors"))  # LORA=1: adapter_model.safetensors


# --- what must be equal -----------------------------------------------------------------------------------------------

TRAIN_AGAIN = "Runs may differ in the arm and its rates alone. Remove {} and rerun the comparison."


def flattened(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested mappings with their dotted names."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flattened(item, f"{name}{key}" if name.endswith(".") or not name else f"{name}.{key}")
    else:
        yield name, value


def changed(
    first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str], allowed: tuple[str, ...] = ()
) -> str:
    """A line per field that differs, with both values; empty where only fields that begin with `allowed` do."""
    fields = differences(first, second, ABSENT).items()
    lines = (f"\n  {field}: {a!r} ({names[0]}), {b!r} ({names[1]})" for field, (a, b) in fields
             if not field.startswith(allowed))  # fmt: skip
    return "".join(lines)


def check_runs(runs: Sequence[Run], stage: str) -> None:
    """Compares every run of a stage with the baseline of its seed, and the baselines with the first seed's.

    Raises:
        ValueError: a field that must be equal is not; the message has the field and both values.
    """
    for run in runs:
        check_arm(run, stage)
    first = runs[0]
    baselines = {run.seed: run for run in reversed(runs) if run.arm == first.arm}
    for run in runs[1:]:
        # Another arm is compared with its seed's baseline, another seed's baseline with the first one.
        other = first if run.arm == first.arm else baselines.get(run.seed, first)
        allowed = ARM_FIELDS if run.arm != other.arm else ()
        if parse_arm(run.arm).projector != parse_arm(other.arm).projector:
            allowed += ("initial_weights.mm_mlp_adapter",)
        allowed += SEED_FIELDS if run.seed != other.seed else ()
        allowed += OWN_STAGE_1 if stage == "finetune" else ()
        names, again = (other.name, run.name), TRAIN_AGAIN.format(run.folder(stage))
        if fields := changed(other.configuration(stage), run.configuration(stage), names, allowed):
            raise ValueError(f"{stage}: runs to be compared differ{fields}\n{again}")


def check_flags(run: Run, stage: str, flags: Mapping[str, str]) -> None:
    """Raises ValueError if the stage was trained with other flags than `flags`, but for those of its arm and seed."""
    own = (*NOT_IDENTITY, "mm_projector_norm", "mm_projector_type", "local_rank")
    own += () if run.seed is None else ("seed",)
    if fields := changed(run.flags(stage), flags, ("trained", "now"), own):
        raise ValueError(
            f"{run.folder(stage)} was trained with different flags{fields}\n"
            "Set the variables as they were, or choose another --output-dir."
        )


def check_present(runs: Sequence[Run]) -> None:
    """Raises ValueError if code or packages have changed since the finished stages were trained."""
    for run, stage in [(run, stage) for run in runs for stage in STAGES if run.has_finished(stage)]:
        check_software(run.configuration(stage), run.name, f"remove {run.root} and retrain every run")


def check_software(configuration: Mapping[str, Any], owner: str, otherwise: str) -> None:
    """Raises ValueError if code or packages are not those in a stage's configuration, which is `owner`'s."""
    recorded = {name: configuration[name] for name in configuration if name.startswith(("code.", "versions."))}
    packages = [name.removeprefix("versions.") for name in recorded if name.startswith("versions.")]
    present = dict(flattened(software(packages)))
    if fields := changed(recorded, {name: present[name] for name in recorded}, (owner, "now")):
        raise ValueError(f"new runs would not be comparable{fields}\nRestore that state, or {otherwise}.")


def check_arm(run: Run, stage: str) -> None:
    """Raises ValueError unless folder name and run agree, and stage 2 starts from its own stage 1."""
    actual = run.configuration(stage)
    arm = parse_arm(run.arm)
    expected = {} if run.seed is None else {"training.seed": run.seed}
    expected |= {"model.mm_projector_norm": arm.norm, "model.mm_projector_type": arm.projector}
    if arm.norm != BASELINE:
        expected |= {"model.mm_projector_norm_init": arm.init, "model.mm_projector_norm_learnable": arm.learnable}
    if stage == "finetune":
        expected["adapter"] = hashlib.sha256((run.folder("pretrain") / "mm_projector.bin").read_bytes()).hexdigest()
    if fields := changed(expected, {name: actual.get(name) for name in expected}, ("expected", "found")):
        raise ValueError(f"{run.folder(stage)}: folder name and run disagree{fields}")


def check_results(runs: Sequence[Run], results_of: Callable[[Run], Results] = lambda run: run.results) -> None:
    """Raises ValueError unless all runs have the same questions and settings, and their current weights."""
    first = results_of(runs[0])
    for run in runs:
        own = results_of(run)
        now = revision(str(run.folder("finetune")))
        if own.fingerprint != now:
            raise ValueError(
                f"{run.name}, evaluation: used different weights ({own.fingerprint}) than {run.folder('finetune')} "
                f"has now ({now}); rerun the evaluation"
            )
        if fields := changed(evaluation_settings(first), evaluation_settings(own), (runs[0].name, run.name)):
            raise ValueError(f"evaluation: runs were evaluated differently{fields}")
        for task in first.tasks:
            ids = [[sample.id for sample in results.tasks[task].samples] for results in (first, own)]
            if sorted(ids[0]) != sorted(ids[1]):
                only = sorted(set(ids[0]) ^ set(ids[1]))[:5]
                raise ValueError(
                    f"{task}: {runs[0].name} and {run.name} have different samples, such as {only}; evaluate again"
                )


def evaluation_settings(results: Results) -> dict[str, object]:
    """What decides the questions and how answers are counted, by dotted name."""
    tasks = {name: {"data": task.data, "metric": task.metric} for name, task in results.tasks.items()}
    versions = {name: version for name, version in results.versions.items() if name != LLAVA_COMMIT}
    return dict(flattened({"settings": results.settings, "versions": versions, "tasks": tasks}))
