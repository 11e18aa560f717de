"""The results of a study as one JSON file, from which its pages are generated."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist
from typing import Any, cast

import numpy as np

from llava.compare.arms import parse_arm
from llava.compare.learning import LEVELS, samples_to_reach
from llava.compare.plan import POWER, Plan
from llava.compare.report_tables import Rows, Statistics, analysis_tables, batch_of, seconds_of_steps
from llava.compare.runs import Run
from llava.compare.stage import Log
from llava.eval.paired import MEAN, Difference, compare_arms, confidence_of, score_intervals
from llava.eval.results import CONTROLS, Results, TaskResult, read_results
from llava.launch.recipe import STAGES
from llava.model.multimodal_projector.norm import NORM_TYPES, PAPER_ARMS
from llava.utils.files import write_text
from llava.utils.versions import git_commit

FILE = "study.json"
FORMAT = 2
Study = Mapping[str, Any]
"""The content of `study.json`."""
_PAIRS = [(name, other) for name, norm in NORM_TYPES.items() if norm for other in norm.contrasts]
# Their order decides which draws of the bootstrap a pair gets: what compensation alone does first, doses last.
CONTRASTS = (
    *sorted(_PAIRS, key=lambda pair: getattr(NORM_TYPES[pair[0]], "__base__", None) is not NORM_TYPES.get(pair[1])),
    *((name, f"{name}@{dose}") for name, norm in NORM_TYPES.items() if norm for dose in norm.doses),
)
"""Arms that are also compared with each other, the first minus the second, where both were trained."""
ANALYSIS = "analysis-"
"""Beginning of the names of the folders in which `llava.analysis` wrote."""
COLUMNS = {
    "interface-norms": ("model", "norms of", "mean"),
    "update-rates": ("model", "tokens", "cosine mean", "update mean"),
    "theory-model": ("model", "assumption", "median layer"),
    "interventions": ("model", "intervention", "KL (nats)", "cos of keys", "cos of values"),
    "attention": ("model", "visual share of attention", "share if uniform", "entropy / ln V", "most seen token"),
    "gradients": ("model", "gradient at", *PAPER_ARMS),
    "layer-norms": ("model", "tokens", "input mean", "end mean"),
    "layer-norms-sinks": (),  # those of update-rates
}
"""The columns that a study records of these tables; of other tables it records all."""
LOGGED = {
    "visual norm": "norm/llm_input",
    "text norm": "norm/text_embeddings",
    "gradient, LLM input": "grad_norm/llm_input",
    "gradient, vision features": "grad_norm/vision_features",
}
"""What the first seed's runs logged at their start and at the end of each stage."""


def answers_of(run: Run, control: str) -> Results:
    """A run's answers to the held-out questions under a control."""
    return read_results(run.folder("heldout") / control)


def record(runs: Sequence[Run], plan: Plan, folder: Path, benchmarks: bool) -> Study:
    """Everything about a finished study.

    Args:
        benchmarks: whether the runs were scored by `scripts/evaluate.sh` as well.
    """

    def tasks_of(run: Run) -> dict[str, TaskResult]:
        return answers_of(run, CONTROLS[0]).tasks | (run.results.tasks if benchmarks else {})

    stats = Statistics(runs, tasks_of, compare_arms)
    first = runs[0].configuration(STAGES[-1])
    model = {
        name: first[f"model.{name}"] for name in ("model_name_or_path", "vision_tower") if f"model.{name}" in first
    }
    others = len(stats.arms) - 1
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "trained_at": runs[0].starts(STAGES[-1])[0]["configuration"]["code"]["commit"],
        "plan": asdict(plan),
        "model": model,
        "devices": f"{first['devices.ranks']} x {first['devices.kind']}",
        "arms": stats.arms,
        "seeds": stats.seeds,
        "tasks": {
            task: {"questions": len(stats.first(task).samples), "chance": stats.first(task).chance}
            for task in stats.tasks
        },
        "samples": {stage: samples_seen(runs[0], stage) for stage in STAGES},
        "confidence": {"mean": confidence_of(others), "task": confidence_of(others * len(stats.tasks))},
        "scores": stats.scores,
        "results": {arm: as_json(by_task) for arm, by_task in stats.results.items()},
        "contrasts": contrasts(stats),
        "resolved": resolved(stats, confidence_of(others)),
        "dose": doses(stats.arms),
        "training": learning(runs),
        "controls": controls(runs),
        "logged": {run.arm: logged(run) for run in runs if run.seed == stats.seeds[0]},
        "measured": {
            place.name.removeprefix(ANALYSIS): measured(place) for place in sorted(folder.glob(f"{ANALYSIS}*"))
        },
        "hours": sum(sum(seconds_of_steps(run, stage)) for run in runs for stage in STAGES) / 3600,
    }


def write_record(study: Study, folder: Path) -> Path:
    """Writes `study.json` atomically; returns its path."""
    path = folder / FILE
    write_text(path, record_text(study))
    return path


def record_text(study: Study) -> str:
    """The content of `study.json`, a line for each part."""
    dense = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    lines = (f"{dense(name)}: {dense(part)}" for name, part in study.items())
    return "{{\n{}\n}}\n".format(",\n".join(lines))


def read_record(path: Path) -> Study:
    """The content of a `study.json`, by the file or its folder.

    Raises:
        ValueError: no such file, or not one of this format.
    """
    path = path / FILE if path.is_dir() else path
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; python -m llava.compare study writes it") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); rerun the study, which keeps its runs") from error
    if not isinstance(study, dict) or study.get("format") != FORMAT:
        raise ValueError(f"{path}: not a study of format {FORMAT}; rerun the study, which keeps its runs")
    return study


# --- differences ------------------------------------------------------------------------------------------------------


def as_json(by_task: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Results by task, with their verdicts."""
    return {task: asdict(difference) | {"verdict": difference.verdict} for task, difference in by_task.items()}


def contrasts(stats: Statistics) -> dict[str, dict[str, dict[str, object]]]:
    """Arms of `CONTRASTS` against each other; their intervals are corrected for their number."""
    zero = [np.zeros_like(scores) for scores in next(iter(stats.differences.values()))]
    by_arm = {stats.baseline: zero} | stats.differences
    pairs = [pair for pair in CONTRASTS if set(pair) <= by_arm.keys()]
    differences = {
        f"{ours} minus {theirs}": [a - b for a, b in zip(by_arm[ours], by_arm[theirs], strict=True)]
        for ours, theirs in pairs
    }
    strata = [stats.strata(task) for task in stats.tasks]
    compared = compare_arms(differences, strata) if differences else {}
    return {
        name: as_json(dict(zip([*stats.tasks, MEAN], [*each, mean], strict=True)))
        for name, (each, mean) in compared.items()
    }


def resolved(stats: Statistics, confidence: float) -> dict[str, float]:
    """The points over all tasks that the study would have shown in four of five repetitions, by its own intervals."""
    normal = NormalDist()
    edge = normal.inv_cdf((1 + confidence) / 2)
    widths = {arm: (by_task[MEAN].high - by_task[MEAN].low) / 2 for arm, by_task in stats.results.items()}
    return {arm: half * (1 + normal.inv_cdf(POWER) / edge) for arm, half in widths.items()}


def doses(arms: Sequence[str]) -> dict[str, float]:
    """The arms whose initial norm is a multiple of the text's, with that multiple, in ascending order."""
    by_arm = {}
    for name in arms:
        arm = parse_arm(name)
        norm = NORM_TYPES[arm.norm]
        if norm and norm.doses and arm.learnable and (arm.init == "text_norm" or arm.init.endswith("x")):
            by_arm[name] = 1.0 if arm.init == "text_norm" else float(arm.init.removesuffix("x"))
    return dict(sorted(by_arm.items(), key=lambda item: item[1]))


# --- training ---------------------------------------------------------------------------------------------------------


def samples_seen(run: Run, stage: str) -> int:
    return batch_of(run, stage) * run.configuration(stage)["steps"]


def learning(runs: Sequence[Run]) -> dict[str, Any]:
    """Accuracy over the samples of stage 2 for every arm and seed, and the samples to reach given accuracies."""
    stage = STAGES[-1]
    points = {run: {line["step"]: line for line in run.evaluations(stage) if "eval/accuracy" in line} for run in runs}
    # A signal may have cut an evaluation short; a point counts where every run has it.
    shared = sorted(set.intersection(*(set(by_step) for by_step in points.values())))
    if len(shared) < 2:
        raise ValueError(f"{stage}: all runs share {shared or 'no'} steps of evaluation in training; retrain them")
    samples = [step * batch_of(runs[0], stage) for step in shared]
    curves: dict[str, list[list[float]]] = {}
    for run, by_step in points.items():
        curves.setdefault(run.arm, []).append([by_step[step]["eval/accuracy"] for step in shared])
    questions = int(points[runs[0]][shared[0]]["eval/questions"])
    tasks = answers_of(runs[0], CONTROLS[0]).tasks
    asked = sum(len(task.samples) for task in tasks.values())
    chance = sum(cast(float, task.chance) * len(task.samples) for task in tasks.values()) / asked / 100
    last = float(np.mean([curve[-1] for curve in curves[runs[0].arm]]))
    reached = []
    for level in LEVELS if last > chance else ():
        accuracy = chance + level * (last - chance)
        for arm, curve in curves.items():
            needed, low, high = samples_to_reach(accuracy, samples, np.array(curve), questions)
            reached.append({"accuracy": accuracy, "arm": arm, "samples": needed, "low": low, "high": high})
    return {"samples": samples, "questions": questions, "chance": chance, "curves": curves, "reached": reached}


def logged(run: Run) -> dict[str, list[float | None]]:
    """What `LOGGED` names: at the start, and at the end of each stage."""
    logs = [run.log(stage) for stage in STAGES]
    return {name: start_and_ends(logs, key) for name, key in LOGGED.items()}


def start_and_ends(logs: Sequence[Log], key: str, absent: float | None = None) -> list[Any]:
    """What was logged under `key` at the start, and at the end of each stage."""
    values = [[line[key] for line in log if key in line] or [absent] for log in logs]
    return [values[0][0], *(stage[-1] for stage in values)]


# --- controls and measurements ----------------------------------------------------------------------------------------


def controls(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """Percent of right answers of every arm under every control, all tasks together, with `score_intervals`."""
    arms, seeds = dict.fromkeys(run.arm for run in runs), dict.fromkeys(run.seed for run in runs)
    by_run = {(run.arm, run.seed): run for run in runs}
    by_control: dict[str, dict[str, dict[str, float]]] = {}
    for control in CONTROLS:
        scores = {arm: np.array([_scores(by_run[arm, seed], control) for seed in seeds]) for arm in arms}
        by_control[control] = {
            arm: dict(zip(("score", "low", "high"), values, strict=True))
            for arm, values in score_intervals(scores).items()
        }
    return by_control


def _scores(run: Run, control: str) -> list[float]:
    """The scores of a run's answers under a control, in the order of tasks and ids."""
    tasks = answers_of(run, control).tasks
    return [score for task in sorted(tasks) for _, score in sorted((s.id, s.score) for s in tasks[task].samples)]


def has_intervals(study: Study) -> bool:
    """Whether the scores with the picture taken away have intervals: docs/study.json lost the answers they need."""
    return all("low" in score for by_arm in study["controls"].values() for score in by_arm.values())


def measured(folder: Path) -> dict[str, Rows]:
    """The rows of what `llava.analysis` measured in the arms, by table.

    Tables with a row per layer are left out, as are columns that `COLUMNS` does not name: the analysis has them.
    """
    tables = {}
    for name, rows in analysis_tables(folder).items():
        columns = COLUMNS.get(name)
        if columns != () and "model" in rows[0] and "layer" not in rows[0]:
            tables[name] = [{column: row[column] for column in columns or row} for row in rows]
    return tables
