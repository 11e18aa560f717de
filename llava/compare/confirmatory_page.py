"""What a finished study by a written plan shows, and its page, `study-runs.md`.

Nothing is compared before the last seed. The primary test is Student's t over the seeds' paired differences, because
seeds are few and are what varies between trainings; its questions are those asked. A second interval also draws
questions.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from llava.compare import figures
from llava.compare.learning import first_reached
from llava.compare.registered import Registered
from llava.compare.report import render
from llava.compare.report_tables import Rows, in_digits
from llava.compare.study_runs import Record, missing_seeds, runs_file
from llava.eval.paired import IMPROVED, WORSE, SeedDifference, compare_seeds, resampled_interval
from llava.utils.files import write_text
from llava.utils.intervals import CONFIDENCE

WITHIN, UNDECIDED = "no relevant difference", "undecided"


# --- the comparisons --------------------------------------------------------------------------------------------------


def outcomes(plan: Registered, record: Record, name: str, factor: float = 1.0) -> dict[str, list[np.ndarray]]:
    """For every arm but the baseline its differences from it, [S, N] for each of the plan's tasks.

    Args:
        name: `scores` or `log_probabilities`.
        factor: by which they are multiplied.
    """
    by_run = {(entry["arm"], entry["seed"]): entry[name] for entry in record["runs"]}

    def values(arm: str) -> list[np.ndarray]:
        return [factor * np.array([by_run[arm, seed][task] for seed in plan.seeds], dtype=float) for task in plan.tasks]

    base = values(plan.arms[0])
    return {arm: [own - other for own, other in zip(values(arm), base, strict=True)] for arm in plan.arms[1:]}


def compared(plan: Registered, record: Record) -> Rows:
    """Every comparison, the primary ones first: accuracy in points, then the log-probability in nats."""
    rows: Rows = []
    for outcome, name, factor in (
        ("accuracy, points", "scores", 100.0),
        ("log-probability, nats", "log_probabilities", 1.0),
    ):
        for arm, by_task in outcomes(plan, record, name, factor).items():
            primary = name == "scores" and arm in plan.primary
            confidence = plan.confidence if primary else CONFIDENCE
            difference = compare_seeds(np.mean([d.mean(axis=1) for d in by_task], axis=0).tolist(), confidence)
            low, high = resampled_interval(by_task, confidence)
            rows.append({"outcome": outcome, "arm": arm, "role": "primary" if primary else "exploratory"})
            rows[-1] |= asdict(difference) | {"confidence": confidence, "low, questions too": low}
            rows[-1] |= {"high, questions too": high}
            rows[-1] |= {"verdict": verdict(difference, plan.margin) if primary else ""}
    return sorted(rows, key=lambda row: row["role"] != "primary")


def verdict(difference: SeedDifference, margin: float) -> str:
    """What the interval of a primary comparison decides; it may exclude zero and still lie within the margin."""
    parts = [IMPROVED] * (difference.low > 0) + [WORSE] * (difference.high < 0)
    parts += [WITHIN] * (-margin < difference.low and difference.high < margin)
    return ", ".join(parts) or UNDECIDED


def reached(plan: Registered, record: Record) -> Rows:
    """Samples of stage 2 until a held-out loss is reached: mean over the seeds, and the paired difference from none."""
    rows: Rows = []
    for loss in plan.losses:
        needed = {arm: [] for arm in plan.arms}
        for entry in record["runs"]:
            curve = entry["training"]
            needed[entry["arm"]].append(
                float(first_reached(-loss, curve["samples"], -np.array(curve["loss"])[None])[0])
            )
        for arm, values in needed.items():
            row: dict[str, Any] = {"loss": loss, "arm": arm, "not reached by": sum(map(math.isinf, values))}
            base = needed[plan.arms[0]]
            if not any(map(math.isinf, [*values, *base])):
                row["samples"] = float(np.mean(values))
                if arm != plan.arms[0]:
                    paired = compare_seeds([a - b for a, b in zip(values, base, strict=True)])
                    row |= {"difference": paired.delta, "low": paired.low, "high": paired.high}
            rows.append(row)
    return rows


# --- the page ---------------------------------------------------------------------------------------------------------


def write_page(plan: Registered, record: Record) -> None:
    """Writes the page next to the runs, and after the last seed its figure."""
    missing = missing_seeds(plan, record)
    page = runs_file(plan).with_suffix(".md")
    tables = {"Runs": run_table(record)}
    text = f"The runs of [{plan.file.stem}.md]({plan.file.stem}.md), whose digest is {plan.digest[:12]}.\n\n"
    if missing:
        text += f"{len(missing)} of {len(plan.seeds)} seeds are missing. Nothing is compared before the last one.\n"
    else:
        rows = compared(plan, record)
        drawn = {row["arm"]: row for row in rows if row["outcome"].startswith("accuracy")}
        (page.parent / "figures").mkdir(exist_ok=True)
        figure = f"figures/{page.stem}.svg"
        (page.parent / figure).write_bytes(figures.differences(drawn, plan.arms, len(plan.primary), plan.margin))
        text += f"![Each row is an arm's difference from none, with its interval and its seeds.]({figure})\n\n"
        text += caption(plan)
        tables = result_tables(plan, record, rows) | tables
    numbers = render("page.md.jinja", numbers=tables).strip()
    write_text(page, f"# The study's runs\n\n{text}\n{numbers}\n")
    print(f"written: {page}")


def caption(plan: Registered) -> str:
    """What the figure shows, in words."""
    corrected = f"Bars above the line: {100 * plan.confidence:.1f} % intervals of the primary arms; below: "
    return (
        f"*Right answers, each arm minus {plan.arms[0]}.* {corrected if plan.primary else 'Bars: '}"
        f"{100 * CONFIDENCE:.0f} %. Circles: seeds. Grey: the margin, {plan.margin:g} points.\n"
    )


def result_tables(plan: Registered, record: Record, rows: Rows) -> dict[str, Rows]:
    """The tables of a finished study."""
    shown = ("delta", "low", "high", "low, questions too", "high, questions too", "deviation")
    comparisons = [
        {name: row[name] for name in ("outcome", "arm", "role", "verdict")}
        | {"confidence, %": f"{100 * row['confidence']:.1f}"}
        | {name: f"{row[name]:.{2 if row['outcome'].startswith('accuracy') else 3}f}" for name in shown}
        | {"p": f"{row['p']:.2g}"}
        for row in rows
    ]
    seeds = [
        {"outcome": row["outcome"], "arm": row["arm"]}
        # Rounded first: equal scores may differ by a rounding error.
        | {
            f"seed {seed}": in_digits(round(value, 9) + 0.0, 3)
            for seed, value in zip(plan.seeds, row["by_seed"], strict=True)
        }
        for row in rows
    ]
    whole = ("samples", "difference", "low", "high")
    samples = [{k: round(value) if k in whole else value for k, value in row.items()} for row in reached(plan, record)]
    return {
        "Comparisons with none": comparisons,
        "Differences of each seed": seeds,
        "Samples of stage 2 to reach a held-out loss": samples,
        "Percent right": means(plan, record, "scores", 100.0),
        "Percent right, the picture changed or taken away": controls(plan, record),
        "Mean log-probability of the expected answer, nats": means(plan, record, "log_probabilities", 1.0),
    }


def means(plan: Registered, record: Record, name: str, factor: float) -> Rows:
    """The mean of every arm over its seeds for each task that was asked, and over the tasks of the outcome."""
    by_arm: dict[str, list[Mapping[str, list[float]]]] = {}
    for entry in record["runs"]:
        by_arm.setdefault(entry["arm"], []).append(entry[name])
    rows: Rows = []
    for arm, runs in by_arm.items():
        by_task = {task: factor * float(np.mean([run[task] for run in runs])) for task in record["questions"]}
        by_task["outcome"] = float(np.mean([by_task[task] for task in plan.tasks]))
        rows.append({"arm": arm} | {task: in_digits(value, 3) for task, value in by_task.items()})
    return rows


def controls(plan: Registered, record: Record) -> Rows:
    """Every arm's mean over the plan's tasks and its seeds under each control, with the picture too."""
    by_arm: dict[str, list[dict[str, float]]] = {}
    for entry in record["runs"]:
        whole = 100 * float(np.mean([np.mean(entry["scores"][task]) for task in plan.tasks]))
        own = {
            name: float(np.mean([by_task[task] for task in plan.tasks])) for name, by_task in entry["controls"].items()
        }
        by_arm.setdefault(entry["arm"], []).append({"picture": whole} | own)
    return [
        {"arm": arm} | {name: in_digits(float(np.mean([run[name] for run in runs])), 3) for name in runs[0]}
        for arm, runs in by_arm.items()
    ]


def run_table(record: Record) -> Rows:
    """Machine, precision, commit and hours of every run, and the digest of its tower."""
    names = ("seed", "arm", "started", "hours", "machine", "precision", "commit", "tower")
    return [{name: entry[name] for name in names} for entry in record["runs"]]
