"""The entries of finished run folders: of a quickstart, a comparison, an evaluation or a study (`results_record`)."""

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llava.compare.answers import UNTOUCHED
from llava.compare.arms import BASELINE, FIXED, PROJECTOR
from llava.compare.engine import DEMO
from llava.compare.paper import ARMS
from llava.compare.quickstart import ANSWERS
from llava.compare.quickstart_page import ALL
from llava.compare.report_tables import TOLERANCE, Statistics, batch_of, in_digits
from llava.compare.results_record import (
    ALIGNED,
    COMPARISON,
    EVALUATION,
    PARTS,
    QUICKSTART,
    RECIPES,
    SEED,
    STUDY,
    Entry,
    Rows,
    digest_of,
    row_commands,
)
from llava.compare.runs import ABSENT, Run, check_all, check_results
from llava.compare.study import recipe_of
from llava.compare.study_page import command as study_command
from llava.compare.study_record import FILE as STUDY_FILE
from llava.compare.study_record import logged, read_record, record_text
from llava.eval.evaluate import parser as evaluation
from llava.eval.paired import MEAN, score_benchmarks
from llava.eval.results import RESULTS_FILE, Results, TaskResult, read_results
from llava.launch.recipe import STAGES, resolved_run
from llava.train.arguments import changeable_flags, decides_numbers
from llava.train.checkpoint import finished_step
from llava.train.sections import ROUNDING
from llava.utils.digests import bytes_digest
from llava.utils.paths import ROOT
from llava.utils.provenance import RUN_FILE, differences, read_starts
from playground.options import PICTURES

DIGITS = 6
UNKNOWN_PROCESSOR = "processor not recorded"
# Prefixes of decisive flags that a device or an arm has; the batch is compared as a whole.
_OWN = (
    "bf16", "deepspeed", "fp16", "gradient_accumulation_steps", "local_rank", "mm_projector_norm", "per_device_train",
    "pretrain_mm_mlp_adapter", "seed",
)  # fmt: skip
_INPUTS = ("model_name_or_path", "vision_tower", "data_path")
"""Flags of which only the last part counts: inputs may be anywhere."""


def entry_of(folder: Path) -> Entry:
    """The entry of a run folder, or of a study's file.

    Raises:
        ValueError: scores are missing, belong to other weights or to other settings than the preset's, or do not agree
            with their samples.
    """
    make = next((make for fits, make in _KINDS if fits(folder)), None)
    if make is None:
        expected = "expected the folder of a finished quickstart, comparison, evaluation (outputs/eval/...) or study"
        trained = f"run bash scripts/evaluate.sh {folder}, and pass the folder that it writes"
        raise ValueError(f"{folder}: no scores; {trained if (folder / RUN_FILE).is_file() else expected}")
    made = in_few_digits(make(folder))
    entry = {part: made[part] for part in PARTS}
    return entry | {"digest": digest_of(entry)}


def in_few_digits(value: Any) -> Any:
    """The value with `DIGITS` digits in every float."""
    if isinstance(value, Mapping):
        return {name: in_few_digits(part) for name, part in value.items()}
    return [in_few_digits(part) for part in value] if isinstance(value, list | tuple) else in_digits(value, DIGITS)


def of_study(path: Path) -> Entry:
    """The entry of a study, from its record alone."""
    study = read_record(path)
    plan, scores = study["plan"], study["scores"]
    tasks = [*study["tasks"], MEAN]
    return {
        "kind": STUDY,
        "preset": plan["preset"],
        "arms": study["arms"],
        "seeds": study["seeds"],
        "data": [recipe_of(plan["preset"])[1]],
        "steps": plan["steps"],
        "changed": {},
        "tasks": study["tasks"],
        "overall": MEAN,
        "scores": {arm: {task: [sum(scores[arm][task]) / len(scores[arm][task]), None, None] for task in tasks}
                   for arm in study["arms"]},
        "differences": {arm: {task: [result["delta"], result["low"], result["high"], result["verdict"]]
                              for task, result in by_task.items()} for arm, by_task in study["results"].items()},
        "norms": {arm: norms_in(of_arm) for arm, of_arm in study["logged"].items()},
        "command": [study_command(plan)],
        "machine": f"{study['devices']}, {UNKNOWN_PROCESSOR}",
        "commit": study["trained_at"],
        "date": study["created"][:10],
        "files": {STUDY: {STUDY_FILE: hashlib.sha256(record_text(study).encode()).hexdigest()}},
    }  # fmt: skip


def of_quickstart(folder: Path) -> Entry:
    """The entry of the quickstart in `folder`, with the scores of its page."""
    page = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    runs = [Run(folder, None, arm) for arm in page["arms"]]
    refuse_missing(folder, runs, lambda run: place_of_answers(run) / RESULTS_FILE)
    check_results(runs, answers_of)
    for run in runs:
        check_page(folder, run.arm, page["arms"][run.arm]["accuracy_percent"], answers_of(run).tasks)
    scores = {
        arm: {
            kind: [percent, *of_arm["accuracy_interval"][kind]] for kind, percent in of_arm["accuracy_percent"].items()
        }
        for arm, of_arm in page["arms"].items()
    }
    paired = {arm: {kind: [result["points"], *result["interval"], result["verdict"]]
                      for kind, result in by_kind.items()} for arm, by_kind in page["differences"].items()}  # fmt: skip
    seeds = sorted({run.configuration(STAGES[0])["training.seed"] for run in runs})
    entry: Entry = {"kind": QUICKSTART, **facts(runs, seeds), "overall": ALL}
    entry |= {"tasks": tasks_in(answers_of(runs[0]).tasks), "scores": scores, "differences": paired}
    entry |= {"files": files_of(runs, place_of_answers)}
    variables = [] if entry["arms"] == [BASELINE, "gwc_layernorm"] else [f"ARMS={shlex.quote(' '.join(entry['arms']))}"]
    variables += [] if seeds == [SEED] else [f"SEED={seed}" for seed in seeds]
    flags = [f"--data {name}" for name in PICTURES[1:] if name in entry["data"]]
    return entry | {"command": [" ".join([*variables, "bash scripts/quickstart.sh", *flags])]}


def place_of_answers(run: Run) -> Path:
    return run.root / ANSWERS / run.arm / UNTOUCHED


def answers_of(run: Run) -> Results:
    """What an arm of the quickstart answered."""
    return read_results(place_of_answers(run))


def check_page(folder: Path, arm: str, shown: Mapping[str, float], tasks: Mapping[str, TaskResult]) -> None:
    """Raises ValueError unless the scores of the quickstart's page are those of the answers."""
    count = sum(len(task.samples) for task in tasks.values())
    right = {name: sum(sample.score for sample in task.samples) / len(task.samples) for name, task in tasks.items()}
    right[ALL] = sum(sample.score for task in tasks.values() for sample in task.samples) / count
    now = {name: 100 * share for name, share in right.items()}
    if now.keys() != shown.keys() or any(abs(now[name] - shown[name]) > TOLERANCE for name in now):
        raise ValueError(
            f"{folder / RESULTS_FILE}: {arm} has {dict(shown)}, but its answers give {now}; rerun the quickstart: it "
            "writes the page again"
        )


def of_comparison(folder: Path) -> Entry:
    """The entry of a comparison, with differences paired by question."""
    seeds = sorted(int(place.name.removeprefix("seed-")) for place in folder.glob("seed-*"))
    arms = arms_in(folder, seeds)
    runs = [Run(folder, seed, arm) for seed in seeds for arm in arms]
    entry = of_runs(folder, COMPARISON, runs, seeds)
    words = ["--preset", entry["preset"]]
    words += [] if arms == list(ARMS) else ["--arms", ",".join(arms)]
    words += [] if seeds == [SEED] else ["--seeds", ",".join(map(str, seeds)) + "," * (len(seeds) == 1)]
    return entry | {"command": [f"bash scripts/compare.sh {' '.join(words)}"]}


def arms_in(folder: Path, seeds: Sequence[int]) -> list[str]:
    """The arms of a comparison's folder: the baseline and the paper's first."""
    names = {place.parent.name for seed in seeds for place in folder.glob(f"seed-{seed}/*/{STAGES[0]}")}
    known = [arm for arm in ARMS if arm in names]
    return [*dict.fromkeys([BASELINE, *known]), *sorted(names - set(known) - {BASELINE})]


@dataclass(frozen=True)
class EvaluatedRun(Run):
    """A run that was trained and evaluated by commands of its own: `root` has the scores, its stages are elsewhere."""

    stages: tuple[Path, Path]

    def folder(self, part: str) -> Path:
        return dict(zip(STAGES, self.stages, strict=True)).get(part, self.root)


def of_evaluation(folder: Path) -> Entry:
    """The entry of a single checkpoint's evaluation."""
    checkpoint = ROOT / read_results(folder).checkpoint
    configuration = read_starts(checkpoint / RUN_FILE)[0]["configuration"]
    model, seed = configuration["model"], configuration["training"]["seed"]
    adapter = ROOT / (model["pretrain_mm_mlp_adapter"] or "")
    stages = (adapter if adapter.is_dir() else adapter.parent, checkpoint)
    run = EvaluatedRun(folder, seed, arm_of(model), stages)
    entry = of_runs(folder, EVALUATION, [run], [seed])
    if entry["preset"] not in RECIPES:
        known = ", ".join(RECIPES)
        raise ValueError(
            f"{folder}: an evaluation alone fills a row of {known}, and this is a run of {entry['preset']}; pass the "
            "folder of its quickstart, comparison or study"
        )
    return entry | {"command": row_commands(entry["preset"], run.arm, seed)[:-1]}


def arm_of(model: Mapping[str, Any]) -> str:
    """The name of the arm with these flags, which `parse_arm` reads."""
    norm, init, projector = (model[f"mm_projector_{name}"] for name in ("norm", "norm_init", "type"))
    if norm == BASELINE:
        return norm if projector == PROJECTOR else projector
    return norm + ("" if init == ALIGNED else f"@{init}") + ("" if model["mm_projector_norm_learnable"] else FIXED)


def of_runs(folder: Path, kind: str, runs: Sequence[Run], seeds: Sequence[int]) -> Entry:
    """The entry of runs that the stock harnesses scored."""
    refuse_missing(folder, runs, lambda run: run.folder("eval") / RESULTS_FILE)
    check_all(runs)
    if limit := runs[0].results.settings.get("limit"):
        raise ValueError(f"{folder}: scored on the first {limit} questions of each task; evaluate without --limit")
    entry = {"kind": kind, **facts(runs, seeds)}
    rows = RECIPES.get(entry["preset"])
    if rows is not None:
        refuse_other_recipe(folder, entry, runs, rows)
    stats = Statistics(runs, lambda run: {task: result for task, result in run.results.tasks.items()
                                          if rows is None or task in rows.tasks})  # fmt: skip
    scored = score_benchmarks(stats.samples, [stats.strata(task) for task in stats.tasks])
    names = [*stats.tasks, MEAN]
    return entry | {
        "tasks": tasks_in(stats.by_run[stats.baseline, stats.seeds[0]]),
        "overall": MEAN,
        "scores": {arm: dict(zip(names, [*each, mean], strict=True)) for arm, (each, mean) in scored.items()},
        "differences": {arm: {task: [result.delta, result.low, result.high, result.verdict]
                              for task, result in by_task.items()} for arm, by_task in stats.results.items()},
        "files": files_of(runs, lambda run: run.folder("eval")),
    }  # fmt: skip


def refuse_missing(folder: Path, runs: Sequence[Run], scores: Callable[[Run], Path]) -> None:
    """Raises ValueError if a stage of a run did not finish, or has no scores."""
    missing = [f"{run.name}: {stage}" for run in runs for stage in STAGES if not has_ended(run, stage)]
    missing += [f"{run.name}: scores" for run in runs if not scores(run).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: missing: {'; '.join(missing)}; rerun the command that made the folder, which does only what is "
            "missing"
        )


def has_ended(run: Run, stage: str) -> bool:
    """Whether the stage was trained to its end; an experiment marks that, and else the trainer's manifest says it."""
    if isinstance(run, EvaluatedRun):
        return run.has_begun(stage) and finished_step(run.folder(stage)) is not None
    return run.has_begun(stage) and run.has_finished(stage)


def refuse_other_recipe(folder: Path, entry: Entry, runs: Sequence[Run], rows: Rows) -> None:
    """Raises ValueError unless the runs are the recipe's, scored on all of its tasks as its command scores them."""
    if entry["changed"]:
        raise ValueError(f"{folder}: not the recipe {entry['preset']}: {entry['changed']} (stage: flag: recipe, run)")
    for run in runs:
        if missing := [task for task in rows.tasks if task not in run.results.tasks]:
            again = f"{rows.evaluate} {run.results.checkpoint} --output-dir {run.folder('eval')}"
            raise ValueError(f"{folder}: missing: {run.name}: scores of {', '.join(missing)}; run: {again}")
        if changed := other_settings(run):
            raise ValueError(f"{folder}: {run.name} was scored with other settings: {changed} (usual, this)")


def other_settings(run: Run) -> dict[str, tuple[object, object]]:
    """The settings, besides a limit, by which a run's scores differ from those that its row's command gives."""
    config = json.loads((run.folder(STAGES[-1]) / "config.json").read_text(encoding="utf-8"))
    usual = {"conv_template": config.get("mm_conv_version"), "mmlu_fewshot": evaluation().get_default("mmlu_fewshot")}
    return differences(usual, {name: run.results.settings.get(name, ABSENT) for name in usual}, ABSENT)


# --- what the runs recorded -------------------------------------------------------------------------------------------


def facts(runs: Sequence[Run], seeds: Sequence[int]) -> Entry:
    """What was trained, how far it is from its preset, where and when."""
    first = runs[0]
    preset = preset_of(Path(first.configuration(STAGES[-1])["model.model_name_or_path"]).name)
    configurations = {stage: first.configuration(stage) for stage in STAGES}
    start = first.starts(STAGES[0])[0]
    devices, provenance = start["configuration"]["devices"], start["provenance"]
    processor = provenance.get("machine", UNKNOWN_PROCESSOR)
    folders = [Path(str(configurations[stage]["data.data_path"])).parent.name for stage in STAGES]
    return {
        "preset": preset,
        "arms": list(dict.fromkeys(run.arm for run in runs)),
        "seeds": list(seeds),
        "data": list(dict.fromkeys(folders)),
        "steps": {stage: configurations[stage]["steps"] for stage in STAGES},
        "changed": changed_flags(first, preset),
        "norms": {run.arm: norms_in(logged(run)) for run in runs if run.seed == first.seed},
        "machine": processor if devices["kind"] == "cpu" else f"{devices['ranks']} x {devices['kind']}",
        "commit": " and ".join(sorted({str(start["configuration"]["code"]["commit"])
                                       for run in runs for stage in STAGES for start in run.starts(stage)})),
        "date": provenance["started"][:10],
    }  # fmt: skip


def norms_in(of_arm: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """Norms of visual and of text tokens at the end, from those of `LOGGED`."""
    return {kind: of_arm[f"{kind} norm"][-1] for kind in ("visual", "text")}


@cache
def preset_of(model: str) -> str:
    """The preset that trains this language model, given by the last part of its path.

    Raises:
        ValueError: there is none.
    """
    presets = (DEMO, *RECIPES)
    for preset in presets:
        if Path(resolved_run(STAGES[-1], PRESET=preset)["flags"]["model_name_or_path"]).name == model:
            return preset
    raise ValueError(f"{model}: no preset trains this language model; presets with results: {', '.join(presets)}")


def changed_flags(run: Run, preset: str) -> dict[str, dict[str, list[str]]]:
    """The flags by stage that differ from the preset's, each with the preset's value and the run's.

    Left out are those that change no more than rounding, and those of a device or an arm; of inputs the name counts.
    """
    changed = {}
    for stage in STAGES:
        own = run.flags(stage)
        pictures = Path(own["data_path"]).parent.name
        variables = {"PRESET": preset, "NORM": own["mm_projector_norm"]}
        variables |= {"DEMO_DATA": pictures} if preset == DEMO and pictures in PICTURES else {}
        recipe = resolved_run(stage, *RECIPES.get(preset, Rows()).flags, **variables)
        expected = compared(recipe["flags"]) | {"global batch": str(recipe["batch"]["global"])}
        found = differences(expected, compared(own) | {"global batch": str(batch_of(run, stage))}, ABSENT)
        changed |= {stage: {name: list(pair) for name, pair in found.items()}} if found else {}
    return changed


def compared(flags: Mapping[str, str]) -> dict[str, str]:
    """The flags that decide a run's numbers, and more than their rounding; of inputs the names."""
    decisive = {
        name: value
        for name, value in flags.items()
        if decides_numbers(name) and changeable_flags().get(name) != ROUNDING and not name.startswith(_OWN)
    }
    return decisive | {name: Path(flags[name]).name for name in _INPUTS if name in flags}


def tasks_in(tasks: Mapping[str, TaskResult]) -> Entry:
    """Number of questions and chance of each task."""
    return {name: {"questions": len(task.samples), "chance": task.chance} for name, task in tasks.items()}


def files_of(runs: Sequence[Run], scores: Callable[[Run], Path]) -> dict[str, dict[str, str]]:
    """The digests of each run's records and scores."""
    return {
        run.name: {f"{stage}/{RUN_FILE}": bytes_digest(run.folder(stage) / RUN_FILE) for stage in STAGES}
        | {RESULTS_FILE: bytes_digest(scores(run) / RESULTS_FILE)}
        for run in runs
    }


def _holds(folder: Path, key: str) -> bool:
    """Whether the folder's `results.json` has this key."""
    try:
        return key in json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Entry]], ...] = (
    (lambda place: place.is_file() or (place / STUDY_FILE).is_file(), of_study),
    (lambda place: any(place.glob("seed-*")), of_comparison),
    (lambda place: _holds(place, "differences"), of_quickstart),
    (lambda place: _holds(place, "checkpoint"), of_evaluation),
)
"""What is recognised in a folder, and what reads it."""
