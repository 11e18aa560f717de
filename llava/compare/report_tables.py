"""The content of a comparison's page: scores with differences and intervals, and a table for everything else."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare import paper
from llava.compare.runs import ABSENT, Run, evaluation_settings
from llava.eval.paired import MEAN, UNCHANGED, Difference, compare_benchmarks
from llava.eval.results import LLAVA_COMMIT, PAPER_COLUMNS, TaskResult
from llava.eval.tasks import TASKS, mean_of_groups
from llava.launch.recipe import STAGES

TITLES = {task: title for title, task in PAPER_COLUMNS.items()}
EXAMPLES = 6  # answers shown per benchmark and arm: won and lost
EVALUATION = "evaluation"
TOLERANCE = 0.05  # points by which a recorded score may differ from that of its samples
Rows = list[dict[str, Any]]


def each_alone(
    differences: Mapping[str, Sequence[np.ndarray]], strata: Sequence[np.ndarray | None]
) -> dict[str, tuple[list[Difference], Difference]]:
    """Every arm's results, each with intervals that are not corrected for the other arms."""
    return {arm: compare_benchmarks(by_task, strata) for arm, by_task in differences.items()}


class Statistics:
    """Scores, and every arm's differences from the baseline.

    Args:
        tasks_of: gives a run's tasks with their scores.
        compare: gives every arm's results, from all arms' differences and the tasks' strata.

    Attributes:
        tasks: benchmarks that all runs have, in the paper's order.
        scores: `scores[arm][task or mean]`, one percentage per seed.
        samples: `samples[arm]`, the scores [S, N] of each task's questions.
        results: `results[arm][task or mean]` of every arm but the baseline, the first.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        tasks_of: Callable[[Run], Mapping[str, TaskResult]] = lambda run: run.results.tasks,
        compare: Callable[..., dict[str, tuple[list[Difference], Difference]]] = each_alone,
    ):
        self.arms = list(dict.fromkeys(run.arm for run in runs))
        self.seeds = list(dict.fromkeys(run.seed for run in runs))
        self.baseline = self.arms[0]
        self.by_run = {(run.arm, run.seed): tasks_of(run) for run in runs}
        first = self.by_run[self.baseline, self.seeds[0]]
        self.tasks = sorted(first, key=lambda t: ([*PAPER_COLUMNS.values(), t].index(t), t))
        self.scores = {
            arm: {task: [self.by_run[arm, s][task].score for s in self.seeds] for task in self.tasks}
            for arm in self.arms
        }
        for scores in self.scores.values():
            scores[MEAN] = np.mean([scores[task] for task in self.tasks], axis=0).tolist()
        self.samples = {arm: [self._samples(arm, task) for task in self.tasks] for arm in self.arms}
        strata = [self.strata(task) for task in self.tasks]
        self.differences = {
            arm: [ours - base for ours, base in zip(self.samples[arm], self.samples[self.baseline], strict=True)]
            for arm in self.arms[1:]
        }
        self.results: dict[str, dict[str, Difference]] = {
            arm: dict(zip([*self.tasks, MEAN], [*each, mean], strict=True))
            for arm, (each, mean) in compare(self.differences, strata).items()
        }

    def first(self, task: str) -> TaskResult:
        return self.by_run[self.baseline, self.seeds[0]][task]

    def _samples(self, arm: str, task: str) -> np.ndarray:
        """Scores [S, N], questions in the baseline's order."""
        order = [sample.id for sample in self.first(task).samples]
        rows = []
        for seed in self.seeds:
            score_of = {sample.id: sample.score for sample in self.by_run[arm, seed][task].samples}
            rows.append([score_of[name] for name in order])
        scores = np.array(rows)
        self._check(arm, task, scores)
        return scores

    def _check(self, arm: str, task: str, scores: np.ndarray) -> None:
        """Raises ValueError unless the samples, which the intervals are about, give the score that the table shows."""
        kinds = self.strata(task)
        groups = [scores] if kinds is None else [scores[:, kinds == kind] for kind in np.unique(kinds)]
        means = 100 * np.mean([group.mean(axis=1) for group in groups], axis=0)
        recorded = np.array(self.scores[arm][task])
        if np.abs(means - recorded).max() > TOLERANCE:
            raise ValueError(
                f"{task}, {arm}: score {recorded.tolist()}, but its samples give {means.tolist()}; evaluate again"
            )

    def strata(self, task: str) -> np.ndarray | None:
        """The kind of each question where the benchmark's score is the mean over kinds."""
        if task in TASKS and TASKS[task].score is mean_of_groups:
            return np.array([str(sample.group) for sample in self.first(task).samples])
        return None


# --- tables: lists of rows, the same in HTML, Markdown and CSV --------------------------------------------------------


def every_table(stats: Statistics, runs: Sequence[Run], llm: str | None, folder: Path) -> dict[str, Rows]:
    """The comparison's tables by name, without those that have no rows."""
    differing, shared = configuration_tables(runs)
    tables = {
        "results": results_table(stats, llm),
        "kinds": kinds_table(stats),
        "cost": cost_table(runs),
        "differences": differing,
        "settings": shared,
        "provenance": provenance_table(runs),
        "examples": examples_table(stats),
        "upstream": upstream_table(folder / "upstream/comparison.json"),
    }
    return {name: rows for name, rows in tables.items() if rows}


def results_table(stats: Statistics, llm: str | None) -> Rows:
    """One row per benchmark and arm, the mean last."""
    rows = []
    for task in [*stats.tasks, MEAN]:
        # The paper's mean is over its nine benchmarks; beside a mean over others it would mislead.
        printed = llm if task != MEAN or set(stats.tasks) == set(TITLES) else None
        for arm in stats.arms:
            scores, result = stats.scores[arm][task], stats.results.get(arm, {}).get(task)
            row = {"benchmark": TITLES.get(task, task), "arm": arm, "score": round(float(np.mean(scores)), 2)}
            row |= {"delta": result and round(result.delta, 2)}
            row |= {"low": result and round(result.low, 2), "high": result and round(result.high, 2)}
            row |= {"verdict": result.verdict if result else "baseline"}
            row |= {
                "won": result and result.won,
                "lost": result and result.lost,
                "p": result and float(f"{result.p:.2g}"),
            }
            row |= {f"seed {seed}": round(score, 2) for seed, score in zip(stats.seeds, scores, strict=True)}
            row |= {"paper": paper_score(printed, arm, task)}
            row |= {"paper delta": paper_delta(printed, arm, stats.baseline, task)}
            if task != MEAN:
                first = stats.first(task)
                samples = [sample for seed in stats.seeds for sample in stats.by_run[arm, seed][task].samples]
                row |= {"empty answers": sum(not sample.answer.strip() for sample in samples)}
                row |= {
                    "chance": first.chance and round(first.chance, 1),
                    "questions": len(first.samples),
                    "metric": first.metric,
                }
            rows.append(row)
    return rows


def paper_score(llm: str | None, arm: str, task: str) -> float | None:
    """The paper's number for the same language model, or None."""
    if llm is None:
        return None
    return paper.MEANS[llm].get(arm) if task == MEAN else paper.TABLE_4[llm].get(arm, {}).get(task)


def paper_delta(llm: str | None, arm: str, baseline: str, task: str) -> float | None:
    """The paper's difference between two arms, or None."""
    ours, base = paper_score(llm, arm, task), paper_score(llm, baseline, task)
    return None if ours is None or base is None or arm == baseline else round(ours - base, 2)


def kinds_table(stats: Statistics) -> Rows:
    """Mean score over the seeds for every kind of question."""
    rows = []
    for task in stats.tasks:
        by_arm = {arm: [stats.by_run[arm, seed][task].by_group() for seed in stats.seeds] for arm in stats.arms}
        for kind in by_arm[stats.baseline][0]:
            row = {"benchmark": TITLES.get(task, task), "kind": kind}
            row |= {"questions": sum(sample.group == kind for sample in stats.first(task).samples)}
            row |= {arm: round(float(np.mean([groups[kind] for groups in seeds])), 1) for arm, seeds in by_arm.items()}
            rows.append(row)
    return rows


def batch_of(run: Run, stage: str) -> int:
    """Samples of an optimizer step."""
    c = run.configuration(stage)
    per_device = c["training.per_device_train_batch_size"] * c["training.gradient_accumulation_steps"]
    return per_device * c["devices.ranks"]


def seconds_of_steps(run: Run, stage: str) -> list[float]:
    """Seconds of the stage's steps, from each line of its log to the next."""
    log, batch = run.log(stage), batch_of(run, stage)
    before = [0, *(line["step"] for line in log[:-1])]
    return [(line["step"] - b) * batch / line["samples_per_second"] for line, b in zip(log, before, strict=True)]


def cost_table(runs: Sequence[Run]) -> Rows:
    """Hours, tokens and memory of every stage from its log, and the time of the evaluation."""
    rows = []
    for run in runs:
        for stage in STAGES:
            c, log = run.configuration(stage), run.log(stage)
            seconds = seconds_of_steps(run, stage)
            tokens = sum(t * line["tokens_per_second"] for t, line in zip(seconds, log, strict=True))
            row = {
                "arm": run.arm,
                "seed": run.seed,
                "step": stage,
                "devices": f"{c['devices.ranks']} x {c['devices.kind']}",
            }
            row |= {"device hours": round(sum(seconds) * c["devices.ranks"] / 3600, 3), "optimizer steps": c["steps"]}
            row |= {"tokens": round(tokens), "tokens/s": round(tokens / sum(seconds)) if seconds else None}
            rows.append(row | {"peak memory, GiB": round(max((line["peak_memory_gib"] for line in log), default=0), 2)})
        devices = max(1, run.results.settings.get("num_gpus") or 1)
        seconds = sum(task.seconds for task in run.results.tasks.values())
        rows.append(
            {"arm": run.arm, "seed": run.seed, "step": "evaluation", "device hours": round(seconds * devices / 3600, 3)}
        )
    return rows


def provenance_table(runs: Sequence[Run]) -> Rows:
    """Where each step comes from."""
    rows = []
    for run in runs:
        for stage in STAGES:
            for start in run.starts(stage):
                rows.append({"run": run.name, "step": stage, "time": start["provenance"]["started"]})
                rows[-1] |= {"commit": start["configuration"]["code"]["commit"]}
                rows[-1] |= {"command": start["provenance"]["command"], "weights": None}
        results = run.results
        rows.append(
            {
                "run": run.name,
                "step": "evaluation",
                "time": results.created,
                "commit": results.versions.get(LLAVA_COMMIT),
            }
        )
        rows[-1] |= {"command": results.command, "weights": results.fingerprint}
    return rows


def configuration_tables(runs: Sequence[Run]) -> tuple[Rows, Rows]:
    """Fields in which the runs differ, with each run's value, and those that all share; of the evaluation too."""
    differing: Rows = []
    shared: Rows = []
    for stage in (*STAGES, EVALUATION):
        by_run = {
            run.name: evaluation_settings(run.results) if stage == EVALUATION else run.configuration(stage)
            for run in runs
        }
        for field in sorted({name for configuration in by_run.values() for name in configuration}):
            values = [configuration.get(field, ABSENT) for configuration in by_run.values()]
            if all(value == values[0] for value in values):
                shared.append({"stage": stage, "field": field, "value": json.dumps(values[0])})
            else:
                differing.append({"stage": stage, "field": field, **dict(zip(by_run, map(str, values), strict=True))})
    return differing, shared


def examples_table(stats: Statistics) -> Rows:
    """Some questions that an arm won and some that it lost, with both answers, first seed."""
    rows, seed = [], stats.seeds[0]
    for arm in stats.arms[1:]:
        for task in stats.tasks:
            base = {sample.id: sample for sample in stats.first(task).samples}
            pairs = [(sample, base[sample.id]) for sample in stats.by_run[arm, seed][task].samples]
            won = [pair for pair in pairs if pair[0].score > pair[1].score][: EXAMPLES // 2]
            lost = [pair for pair in pairs if pair[0].score < pair[1].score][: EXAMPLES // 2]
            for outcome, chosen in (("won", won), ("lost", lost)):
                for ours, theirs in chosen:
                    row = {"arm": arm, "benchmark": TITLES.get(task, task), "outcome": outcome, "question": ours.id}
                    rows.append(
                        row | {"expected": ours.target, "answer": ours.answer, "baseline's answer": theirs.answer}
                    )
    return rows


def upstream_table(path: Path) -> Rows:
    """How closely this tree's losses follow upstream LLaVA's, where `scripts/upstream_baseline.sh` compared them."""
    arms = json.loads(path.read_text())["arms"] if path.is_file() else {}
    return [
        {
            "arm": arm,
            "stage": stage,
            "steps": len(losses["ours"]),
            "largest difference of the loss": losses["largest_loss_difference"],
        }
        for arm, stages in arms.items()
        for stage, losses in stages.items()
    ]


def analysis_tables(folder: Path) -> dict[str, Rows]:
    """The tables that `scripts/analyze.sh` wrote, by name, in four digits to be read; its files have all."""
    contents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: [{column: in_digits(value, 4) for column, value in row.items()} for row in content["rows"]]
        for name, content in contents.items()
        if isinstance(content, dict) and content.get("rows")
    }


def in_digits(value: Any, digits: int) -> Any:
    """A float rounded to this many significant digits; anything else as it is."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


# --- in words --------------------------------------------------------------------------------------------------------


def caveats(stats: Statistics, runs: Sequence[Run]) -> list[str]:
    """What limits the verdicts of this comparison."""
    count = len(stats.results) * (len(stats.tasks) + 1)
    notes = [
        f"“{UNCHANGED}” means that the interval contains zero: no difference is shown, and none within it is excluded."
    ]
    notes.append(
        f"Of {count} verdicts at 95 % about {count / 20:.1f} would not be “{UNCHANGED}” by chance if no arm differed."
    )
    if len(stats.seeds) == 1:
        notes.append("One seed: the intervals cover the choice of questions, not the variance between training runs.")
    elif len(stats.seeds) < 5:
        notes.append(
            f"{len(stats.seeds)} seeds: how much training runs vary is only roughly known, so intervals may be too "
            "narrow."
        )
    if len(stats.seeds) > 1:
        notes.append(
            "p leaves aside how training runs vary, so it may be small where no difference is shown: "
            "verdicts are those of the intervals."
        )
    if limit := runs[0].results.settings.get("limit"):
        notes.append(f"Only the first {limit} samples of every benchmark were evaluated: these are not real scores.")
    return notes


def headline_table(results: Rows, llm: str | None) -> list[dict[str, Any]]:
    """The results in the layout of the paper's Table 4: rows of arms, then the paper's; a cell per benchmark."""
    arms = {row["arm"]: [other for other in results if other["arm"] == row["arm"]] for row in results}
    rows: list[dict[str, Any]] = [{"name": arm, "kind": "ours", "cells": cells} for arm, cells in arms.items()]
    for arm, cells in arms.items():
        if any(cell["paper"] is not None for cell in cells):
            numbers = [{"score": cell["paper"], "delta": cell["paper delta"]} for cell in cells]
            rows.append({"name": f"paper: {llm}, {paper.ARMS[arm]}", "kind": "paper", "cells": numbers})
    return rows
