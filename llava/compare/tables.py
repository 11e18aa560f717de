"""What a record shows, as tables: lists of rows, the same in HTML and Markdown.

Arms are compared with the first, the baseline. From `FEWEST_SEEDS` seeds on the interval is Student's t over the seeds'
paired differences, and has a verdict; with fewer it covers the choice of questions only, and has none. A study by a
plan decides its primary comparisons alone, and compares nothing before its last seed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare import paper
from llava.compare.plan import Plan
from llava.compare.record import Record, in_digits
from llava.compare.runs import ABSENT
from llava.eval.paired import (
    FEWEST_SEEDS,
    IMPROVED,
    MEAN,
    WORSE,
    SeedDifference,
    compare_benchmarks,
    compare_seeds,
    score_by_seed,
)
from llava.eval.tasks import PAPER_COLUMNS, TASKS, mean_of_groups
from llava.utils.intervals import CONFIDENCE, share_interval

TITLES = {task: title for title, task in PAPER_COLUMNS.items()}
TOLERANCE = 0.05  # points by which a recorded score may differ from that of its samples
WITHIN, UNDECIDED = "no relevant difference", "undecided"
Rows = list[dict[str, Any]]


class Statistics:
    """Scores, and every arm's differences from the baseline.

    Args:
        plan: of the study that the record is of.

    Attributes:
        tasks: in the record's order.
        counted: tasks of the overall result, whose name is `overall`: their mean, or all their questions together.
        named: the tasks, and all their questions together if that is the overall result.
        decided: whether the intervals are over seeds.

    Raises:
        ValueError: the record lacks a seed of its plan, or samples do not give their recorded score.
    """

    def __init__(self, record: Record, plan: Plan | None = None):
        if plan and (missing := plan.missing(record)):
            raise ValueError(f"{plan.file}: seeds {missing} are missing; nothing is compared before the last one")
        self.record, self.plan = record, plan
        self.by_run = {(entry["arm"], entry["seed"]): entry for entry in record["runs"]}
        self.arms = list(dict.fromkeys(arm for arm, _ in self.by_run))
        self.seeds = list(dict.fromkeys(seed for _, seed in self.by_run))
        self.baseline = self.arms[0]
        self.tasks = list(record["questions"])
        self.counted = plan.tasks if plan else self.tasks
        self.overall = record.get("overall", MEAN)
        self.named = self.tasks + [self.overall] * (self.overall != MEAN)
        self.decided = len(self.seeds) >= FEWEST_SEEDS
        for arm in self.arms:
            for task in self.tasks:
                self._check(arm, task)

    def facts(self, task: str) -> Mapping[str, Any]:
        """What the record says of a task."""
        return self.record.get("tasks", {}).get(task, {})

    def samples(self, arm: str, task: str, name: str = "scores") -> np.ndarray:
        """The recorded values of each question [S, N], of all together for the overall result of questions."""
        parts = self.counted if task == self.overall else [task]
        return np.array([sum((self.by_run[arm, s][name][part] for part in parts), []) for s in self.seeds], dtype=float)

    def strata(self, task: str) -> np.ndarray | None:
        """The kind of each question where the benchmark's score is the mean over kinds."""
        if task in TASKS and TASKS[task].score is mean_of_groups:
            return np.array(list(map(str, self.facts(task)["kinds"])))
        return None

    def _check(self, arm: str, task: str) -> None:
        """Raises ValueError unless the samples, which the intervals are about, give the recorded score."""
        own = 100 * score_by_seed(self.samples(arm, task), self.strata(task))
        recorded = self.recorded(arm, task)
        if recorded and np.abs(own - recorded).max() > TOLERANCE:
            raise ValueError(f"{task}, {arm}: score {recorded}, but its samples give {own.tolist()}; evaluate again")

    def recorded(self, arm: str, task: str) -> list[float]:
        """The recorded score of each seed, in percent; empty where a run has none."""
        scores = [self.by_run[arm, seed].get("percent", {}).get(task) for seed in self.seeds]
        return [] if None in scores else scores

    @cached_property
    def scores(self) -> dict[str, dict[str, list[float]]]:
        """`scores[arm][task or overall]`, one percentage per seed."""
        scores: dict[str, dict[str, list[float]]] = {}
        for arm in self.arms:
            own = scores[arm] = {}
            for task in self.named:
                shares = self.samples(arm, task).mean(axis=1)
                own[task] = self.recorded(arm, task) or [100 * float(share) for share in shares]
            if self.overall == MEAN:
                own[MEAN] = np.mean([own[task] for task in self.counted], axis=0).tolist()
        return scores

    @cached_property
    def results(self) -> dict[str, dict[str, dict[str, Any]]]:
        """`results[arm][task or overall]` of every arm but the baseline: see `SeedDifference` and `Difference`."""
        results: dict[str, dict[str, dict[str, Any]]] = {}
        for arm in self.arms[1:]:
            changes = [self.samples(arm, name) - self.samples(self.baseline, name) for name in self.named]
            each, mean = compare_benchmarks(changes, [self.strata(name) for name in self.named])
            drawn = dict(zip(self.named, each, strict=True)) | ({MEAN: mean} if self.overall == MEAN else {})
            results[arm] = {name: asdict(result) | {"verdict": ""} for name, result in drawn.items()}
            if self.decided:
                for name, own in results[arm].items():
                    own |= self._over_seeds(arm, name)
            if self.overall == MEAN:  # of a plan over its own tasks
                counts = {name: sum(results[arm][task][name] for task in self.counted) for name in ("won", "lost")}
                results[arm][MEAN] |= counts
        return results

    def _over_seeds(self, arm: str, task: str) -> dict[str, Any]:
        """A comparison by Student's t; of a plan its primary ones alone have a verdict."""
        plan = self.plan
        primary = plan is not None and task == self.overall and arm in plan.primary
        confidence, margin = (plan.confidence, plan.margin) if plan and primary else (CONFIDENCE, 0.0)
        difference = compare_seeds(self.by_seed(arm, task, 100.0), confidence)
        words = verdict(difference, margin) if primary or plan is None else ""
        role = "primary" if primary else "exploratory"
        return asdict(difference) | {"confidence": confidence, "verdict": words, "role": role}

    def by_seed(self, arm: str, task: str, factor: float = 1.0, name: str = "scores") -> list[float]:
        """An arm's differences from the baseline, one for each seed."""
        changes = []
        for part in self.counted if task == MEAN else [task]:
            change = factor * self.samples(arm, part, name) - factor * self.samples(self.baseline, part, name)
            changes.append(score_by_seed(change, self.strata(part)))
        return np.mean(changes, axis=0).tolist()

    def paper_score(self, arm: str, task: str) -> float | None:
        """The paper's number for the same language model; its mean is over its nine benchmarks alone."""
        name = "pretrain.model.model_name_or_path"
        path = self.record["configuration"].get(name) or self.record["runs"][0].get("own", {}).get(name, "")
        llm = paper.language_model_of(str(path))
        if llm is None or (task == MEAN and set(self.tasks) != set(TITLES)):
            return None
        printed = paper.TABLE_4[llm].get(arm, {})
        return round(float(np.mean([*printed.values()])), 2) if printed and task == MEAN else printed.get(task)


def verdict(difference: SeedDifference, margin: float) -> str:
    """What an interval decides; it may exclude zero and still lie within the margin."""
    parts = [IMPROVED] * (difference.low > 0) + [WORSE] * (difference.high < 0)
    parts += [WITHIN] * (-margin < difference.low and difference.high < margin)
    return ", ".join(parts) or UNDECIDED


# --- tables -----------------------------------------------------------------------------------------------------------


def every_table(stats: Statistics) -> dict[str, Rows]:
    """A record's tables by name, without those that have no rows."""
    record = stats.record
    tables = {
        "scores": scores_table(stats),
        "differences": differences_table(stats),
        "log-probabilities": nats_table(stats),
        "logged": logged_table(stats),
        "runs": runs_table(record),
        "cost": cost_table(record),
        "configuration": own_table(record),
        "shared": [{"field": name, "value": json.dumps(value)} for name, value in record["configuration"].items()],
    }
    return {name: rows for name, rows in tables.items() if rows}


def scores_table(stats: Statistics) -> Rows:
    """Percent right by task and arm, with 95 % intervals for one run of right-or-wrong answers, and the paper's."""
    rows: Rows = []
    for task in [*stats.tasks, stats.overall]:
        row: dict[str, Any] = {"benchmark": TITLES.get(task, task)}
        for arm in stats.arms:
            row[arm] = f"{np.mean(stats.scores[arm][task]):.1f}"
            is_share = task != MEAN and stats.strata(task) is None  # of questions, not a mean over their kinds
            if len(stats.seeds) == 1 and is_share and not set(own := stats.samples(arm, task)[0]) - {0.0, 1.0}:
                low, high = (100 * bound for bound in share_interval(int(own.sum()), len(own)))
                row[arm] += f" ({low:.0f} to {high:.0f})"
        printed = {f"{arm}, paper": stats.paper_score(arm, task) for arm in stats.arms}
        row |= {name: score for name, score in printed.items() if score is not None}
        row |= {"chance": None if (chance := chance_of(stats, task)) is None else f"{chance:.1f}"}
        if task in stats.tasks:
            row |= {"questions": len(stats.record["questions"][task]), "metric": stats.facts(task).get("metric")}
        rows.append(row)
    return rows


def chance_of(stats: Statistics, task: str) -> float | None:
    """Percent that guessing gives, where the record has it."""
    if task in stats.tasks:
        return stats.facts(task).get("chance")
    chances = [stats.facts(part).get("chance") for part in stats.counted]
    if None in chances:
        return None
    counts = [len(stats.record["questions"][part]) if stats.overall != MEAN else 1 for part in stats.counted]
    return float(np.average(np.array(chances, dtype=float), weights=counts))


def differences_table(stats: Statistics) -> Rows:
    """Every arm minus the baseline, in points: interval, verdict and seeds."""
    rows: Rows = []
    for arm, by_task in stats.results.items():
        for task, result in by_task.items():
            row: dict[str, Any] = {"arm": arm, "benchmark": TITLES.get(task, task)}
            row |= {name: round(result[name], 2) for name in ("delta", "low", "high")}
            row |= {"verdict": result["verdict"]} if stats.decided else {}
            row |= {"role": result["role"]} if stats.plan else {}
            row |= {"won": result["won"], "lost": result["lost"], "p": in_digits(result["p"], 2)}
            if len(stats.seeds) > 1:
                row |= {f"seed {s}": round(d, 2) for s, d in zip(stats.seeds, result["by_seed"], strict=True)}
            rows.append(row)
    return rows


def nats_table(stats: Statistics) -> Rows:
    """Every arm's difference in the expected answers' log-probability, where all runs have it and seeds suffice."""
    if not stats.decided or not all("log_probabilities" in entry for entry in stats.record["runs"]):
        return []
    rows: Rows = []
    for arm in stats.arms[1:]:
        result = asdict(compare_seeds(stats.by_seed(arm, MEAN, 1.0, "log_probabilities")))
        row = {"arm": arm} | {name: round(result[name], 3) for name in ("delta", "low", "high", "deviation")}
        rows.append(row | {"p": in_digits(result["p"], 2)})
    return rows


def logged_table(stats: Statistics) -> Rows:
    """The first seed's last losses, and norms at the LLM's input, a column for each arm."""
    runs = {arm: stats.by_run[arm, stats.seeds[0]].get("logged") for arm in stats.arms}
    labels = [(f"final loss, stage {stage}", "loss", stage - 1) for stage in (1, 2)]
    places = {"start": 0, "after stage 1": 1, "after stage 2": 2}
    labels += [(f"visual token norm, {words}", "visual norm", place) for words, place in places.items()]
    labels += [(f"text token norm, {words}", "text norm", places[words]) for words in ("start", "after stage 2")]
    return [
        {"logged": label} | {arm: in_digits(run[key][place], 3) for arm, run in runs.items() if run}
        for label, key, place in labels
        if all(runs.values())
    ]


def runs_table(record: Record) -> Rows:
    """Where each run comes from: machine, precision, commit, time and digests."""
    names = ("seed", "arm", "started", "hours", "machine", "precision", "commit", "tower", "weights")
    return [{name: entry[name] for name in names} for entry in record["runs"]]


def cost_table(record: Record) -> Rows:
    """What every stage took by its log, the time of the evaluation, and the commands."""
    rows: Rows = []
    for entry in record["runs"]:
        run = {"arm": entry["arm"], "seed": entry["seed"]}
        for name, stage in entry.get("stages", {}).items():
            took = {key: in_digits(value, 4) for key, value in stage.items() if key not in ("starts", "curves")}
            starts = [[str(start[key]) for start in stage["starts"]] for key in ("started", "commit", "command")]
            started, commit, command = (", ".join(dict.fromkeys(values)) for values in starts)
            rows.append(run | {"step": name} | took | {"started": started, "commit": commit, "command": command})
        if evaluation := entry.get("evaluation"):
            rows.append(run | {"step": "evaluation", "started": evaluation["created"]} | evaluation)
    return rows


def own_table(record: Record) -> Rows:
    """Fields of the configuration in which the runs differ, with each run's value."""
    own = {name_of(entry): entry.get("own", {}) for entry in record["runs"]}
    rows: Rows = []
    for field in sorted({name for values in own.values() for name in values}):
        values = [values.get(field, ABSENT) for values in own.values()]
        if any(value != values[0] for value in values):
            rows.append({"field": field, **dict(zip(own, map(str, values), strict=True))})
    return rows


def name_of(entry: Mapping[str, Any]) -> str:
    return entry["arm"] if entry["seed"] is None else f"{entry['arm']}, seed {entry['seed']}"


def measured_tables(folder: Path, record: Record | None = None) -> dict[str, Rows]:
    """The tables that `llava.analysis` wrote, by name, in four digits to be read; its files have all.

    With a `record` only those of its runs' weights: an earlier call may have left others.
    """
    contents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    weights = {entry["weights"] for entry in record["runs"]} if record else set()
    return {
        name: [{column: in_digits(value, 4) for column, value in row.items()} for row in content["rows"]]
        for name, content in contents.items()
        if isinstance(content, dict) and content.get("rows")
        if not record or all(model["revision"] in weights for model in content["provenance"]["models"])
    }


# --- in words ---------------------------------------------------------------------------------------------------------


def summaries(stats: Statistics) -> list[str]:
    """A sentence for every arm's overall result."""
    name = stats.overall if stats.overall != MEAN else f"mean of {len(stats.counted)}"
    lines = []
    for arm, by_task in stats.results.items():
        result = by_task[stats.overall]
        bounds = f"{result['low']:+.2f} to {result['high']:+.2f}"
        text = f"{arm} minus {stats.baseline}, {name}: {result['delta']:+.2f} points "
        text += f"({100 * result.get('confidence', CONFIDENCE):g} % interval {bounds})"
        lines.append(f"{text}: {result['verdict']}" if result["verdict"] else text)
    return lines


def caveats(stats: Statistics) -> list[str]:
    """What limits this comparison."""
    notes = []
    if stats.decided:
        notes.append(
            f"Intervals are Student's t over the {len(stats.seeds)} seeds' paired differences; the questions are those "
            f"asked. “{UNDECIDED}” means that no difference is shown, and none within the interval is excluded."
        )
        if not stats.plan:
            notes.append("Verdicts are not corrected for their number: one in twenty is wrong if no arm differs.")
    else:
        seeds = "One seed" if len(stats.seeds) == 1 else f"{len(stats.seeds)} seeds"
        notes.append(
            f"{seeds}: the intervals cover the choice of questions only, not what another training would have given. "
            f"So there is no verdict, and the arms cannot be ranked; that takes at least {FEWEST_SEEDS} seeds."
        )
    rates = rates_by_arm(stats.record)
    if len(set(rates.values())) > 1:
        notes += [f"{arm} was trained at its own rates: {words}." for arm, words in rates.items()]
    elif words := rates[stats.baseline]:
        notes.append(f"Every arm was trained with one set of learning rates ({words}); their order depends on them.")
    if limit := stats.record["runs"][0].get("evaluation", {}).get("limit"):
        notes.append(f"Only the first {limit} samples of every benchmark were evaluated: these are not real scores.")
    return notes


def rates_by_arm(record: Record) -> dict[str, str]:
    """The learning rates of each arm, in words that are empty where the record has none."""
    names = {
        "in stage 1": "pretrain.training.learning_rate",
        "in stage 2": "finetune.training.learning_rate",
        "for the projector there": "finetune.training.mm_projector_lr",
    }
    rates = {}
    for entry in record["runs"]:
        values = record["configuration"] | entry.get("own", {})
        known = {where: values[name] for where, name in names.items() if values.get(name) is not None}
        rates[entry["arm"]] = ", ".join(f"{rate:g} {where}" for where, rate in known.items())
    return rates
