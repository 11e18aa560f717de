"""A study's plan that was written down before its runs: one committed JSON file, which the study may not depart from.

    preset      what is trained (`study --preset`)
    arms        none first
    primary     the arms whose differences from none the study decides; none in an exploratory study
    seeds       every arm is trained with every seed; a fixed number, whatever comes out
    trials      trainings of the baseline, from which tasks and losses follow: `seed`; by task the `right` answers,
                `questions` and `chance` in percent; `samples` of stage 2 with the held-out `loss` there
    steps       optimizer steps of each stage
    tasks       the outcome is the mean over these, which every trial answers above chance; others are recorded only
    margin      points: an interval within it on both sides of zero means no relevant difference
    pilot       study.json of the pilot, relative to the plan

Seeds of the pilot and of trials are refused. The digest is in the record of every run. `planning` computes from the
pilot what the plan's seeds can show.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare.arms import parse_arms
from llava.compare.plan import POWER, Plan, shown_probability, smallest_shown, within_probability
from llava.compare.report import render
from llava.compare.report_tables import Rows
from llava.compare.study_page import END, by_hand
from llava.compare.study_record import read_record
from llava.eval.paired import confidence_of
from llava.launch.recipe import STAGES
from llava.utils.intervals import CONFIDENCE, share_interval

WIDER = (1.0, 1.5)  # three seeds hardly tell a deviation: what if the pilot's is too small by this factor


@dataclass(frozen=True)
class Registered:
    """The content of the file (see the module), where it is, and its digest."""

    preset: str
    arms: list[str]
    primary: list[str]
    seeds: list[int]
    trials: list[dict[str, Any]]
    steps: dict[str, int]
    tasks: list[str]
    margin: float
    pilot: str
    file: Path
    digest: str

    @property
    def confidence(self) -> float:
        """That of each primary interval, so that all together have 95 % (Bonferroni)."""
        return confidence_of(max(1, len(self.primary)))

    @property
    def seen(self) -> list[int]:
        """The seeds of the trials."""
        return [trial["seed"] for trial in self.trials]

    @property
    def losses(self) -> list[float]:
        """Held-out losses to reach: the trials' means after a third and two thirds of stage 2's evaluations."""
        curves = [trial["loss"] for trial in self.trials]
        return [round(float(np.mean([curve[part * len(curve) // 3] for curve in curves])), 3) for part in (1, 2)]

    @property
    def plan(self) -> Plan:
        """What the engine trains."""
        return Plan(self.preset, self.arms, self.seeds, self.steps, 0)


def read_registered(file: Path) -> Registered:
    """The plan in a file.

    Raises:
        ValueError: see `parsed`; or it contradicts itself, or asks for seeds that were already seen.
    """
    plan = parsed(file)
    _check(plan)
    return plan


def parsed(file: Path) -> Registered:
    """The content of a plan's file, not checked: a trial comes before the plan is whole.

    Raises:
        ValueError: no such file, or not a plan.
    """
    try:
        text = file.read_bytes()
        content = json.loads(text)
    except FileNotFoundError:
        raise ValueError(f"--plan {file}: no such file") from None
    except ValueError as error:
        raise ValueError(f"--plan {file}: not JSON ({error})") from error
    expected = {field.name for field in fields(Registered)} - {"file", "digest"}
    if not isinstance(content, dict) or content.keys() != expected:
        present = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"--plan {file}: expected {', '.join(sorted(expected))}; found {present}")
    return Registered(**content, file=file, digest=hashlib.sha256(text).hexdigest())


def _check(plan: Registered) -> None:
    where = f"--plan {plan.file}"
    parse_arms(",".join(plan.arms))
    if not set(plan.primary) <= set(plan.arms[1:]):
        raise ValueError(f"{where}: primary {plan.primary}: expected arms of {plan.arms[1:]}")
    if len(set(plan.seeds)) < max(2, len(plan.seeds)):
        raise ValueError(f"{where}: seeds {plan.seeds}: expected at least two, none twice")
    pilot = read_record(plan.file.parent / plan.pilot)
    if unseen := sorted(set(plan.primary) - pilot["scores"].keys()):
        raise ValueError(
            f"{where}: primary {unseen}: the pilot {plan.pilot} did not train them, so nothing can be planned"
        )
    if again := sorted(set(plan.seeds) & {*pilot["seeds"], *plan.seen}):
        raise ValueError(
            f"{where}: seeds {again} were seen before the plan was made (pilot {pilot['seeds']}, trials {plan.seen}); "
            "name others"
        )
    if plan.steps.keys() != set(STAGES) or min(plan.steps.values()) < 1:
        raise ValueError(f"{where}: steps {plan.steps}: expected a positive number for each of {', '.join(STAGES)}")
    if not 0 < plan.margin < math.inf:
        raise ValueError(f"{where}: margin {plan.margin}: expected a positive number of points")
    if not plan.trials:
        raise ValueError(f"{where}: no trials; python -m llava.compare plan {plan.file} --trial SEED makes one")
    if plan.tasks != (learnt := learnt_tasks(plan)) or not set(learnt) <= pilot["tasks"].keys():
        raise ValueError(f"{where}: tasks {plan.tasks}: expected those that the trials answer above chance, {learnt}")


# --- what trials and pilot say about the plan -------------------------------------------------------------------------


def learnt_tasks(plan: Registered) -> list[str]:
    """The tasks whose share of right answers has a 95 % interval above chance in every trial of the baseline."""
    return sorted(
        task for task in plan.trials[0]["tasks"] if all(_above_chance(trial["tasks"][task]) for trial in plan.trials)
    )


def _above_chance(task: Mapping[str, float]) -> bool:
    return 100 * share_interval(int(task["right"]), int(task["questions"]))[0] > task["chance"]


def trial_table(plan: Registered) -> Rows:
    """Right answers of the baseline in every trial, with the 95 % interval, chance, and what follows."""
    rows: Rows = []
    for trial in plan.trials:
        for task, facts in sorted(trial["tasks"].items()):
            low, high = (f"{100 * bound:.1f}" for bound in share_interval(facts["right"], facts["questions"]))
            row = {"seed": trial["seed"], "task": task, "questions": facts["questions"]}
            row |= {"% right": f"{100 * facts['right'] / facts['questions']:.1f}", "low": low, "high": high}
            row |= {"chance": f"{facts['chance']:.1f}", "in the outcome": "yes" if task in plan.tasks else "no"}
            rows.append(row)
    return rows


def pilot_differences(plan: Registered) -> dict[str, np.ndarray]:
    """Difference from the baseline in points of each arm that the pilot trained, for each of the pilot's seeds.

    It is the mean over the plan's tasks.
    """
    scores = read_record(plan.file.parent / plan.pilot)["scores"]
    means = {arm: np.mean([scores[arm][task] for task in plan.tasks], axis=0) for arm in plan.arms if arm in scores}
    return {arm: mean - means[plan.arms[0]] for arm, mean in means.items() if arm != plan.arms[0]}


def planned_deviation(plan: Registered) -> float:
    """Root mean square of the standard deviations of the primary arms' differences in the pilot."""
    differences = pilot_differences(plan)
    return math.sqrt(np.mean([differences[arm].var(ddof=1) for arm in plan.primary]))


def planning(plan: Registered) -> dict[str, Rows]:
    """The trials, the pilot's paired differences, and what the plan's seeds can show by them, as tables by title.

    The last two are left out without primary arms.
    """
    tables = {"The baseline in trials": trial_table(plan)} if plan.trials else {}
    if not plan.primary:
        return tables
    seeds = read_record(plan.file.parent / plan.pilot)["seeds"]
    rows: Rows = []
    for arm, values in pilot_differences(plan).items():
        rows.append({"arm": arm} | {f"seed {seed}": f"{value:.1f}" for seed, value in zip(seeds, values, strict=True)})
        rows[-1] |= {"mean": f"{values.mean():.1f}", "standard deviation": f"{values.std(ddof=1):.1f}"}
    power: Rows = []
    for factor in WIDER:
        for count in sorted({8, len(plan.seeds)}):
            deviation = factor * planned_deviation(plan)
            facts = (deviation, count, plan.confidence)
            power.append(
                {
                    "seeds": count,
                    "standard deviation": f"{deviation:.1f}",
                    f"shown with {100 * POWER:.0f} %": f"{smallest_shown(*facts):.1f}",
                    f"{plan.margin:g} points are shown, %": f"{100 * shown_probability(plan.margin, *facts):.0f}",
                    "no difference is seen as such, %": f"{100 * within_probability(plan.margin, *facts):.0f}",
                }
            )
    return tables | {"The pilot's paired differences": rows, "What the seeds can show": power}


# --- the command and the page -----------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `plan`."""
    parser.add_argument("plan", type=Path, metavar="PLAN_JSON", help="the plan, as for study --plan")
    parser.add_argument("--docs", action="store_true", help="write it into the page next to the plan, PLAN.md, instead")
    parser.add_argument("--trial", type=int, metavar="SEED", help="train the baseline, and print an entry of trials")


def show(plan: Registered, docs: bool) -> None:
    """Prints what a plan can decide, or writes it into its page."""
    if docs:
        page = plan.file.with_suffix(".md")
        page.write_text(with_planning(page, plan), encoding="utf-8")
        print(f"written: {page}")
    else:
        print(render("page.md.jinja", numbers=planning(plan)).strip())


def with_planning(page: Path, plan: Registered) -> str:
    """The page's text with its generated part made again."""
    start = start_of(page)
    before, after = by_hand(page, start)
    return f"{before}{start}\n\n{generated(plan)}\n\n{END}{after}"


def start_of(page: Path) -> str:
    """The line before the generated part of a plan's page."""
    return f"<!-- generated: python -m llava.compare plan docs/{page.stem}.json --docs -->"


def generated(plan: Registered) -> str:
    """The generated part: the file's content, and `planning`."""
    decided = f"Primary: {' and '.join(plan.primary)} against {plan.arms[0]}." if plan.primary else "None is primary."
    corrected = (
        f"each primary interval: {100 * plan.confidence:.1f} %; of all others: " if plan.primary else "intervals: "
    )
    facts = [
        f"Arms: {', '.join(plan.arms)}. {decided}",
        f"Seeds: {', '.join(map(str, plan.seeds))} ({len(plan.seeds)}).",
        f"Steps: {' and '.join(f'{count} in {stage}' for stage, count in plan.steps.items())}.",
        f"Tasks of the outcome: {', '.join(plan.tasks)}{'' if plan.trials else ' (the trials decide; none yet)'}.",
        f"Confidence of {corrected}{100 * CONFIDENCE:.0f} %.",
        f"Margin: {plan.margin:g} points.",
    ]
    if plan.trials:
        facts += [
            f"Held-out losses: {', '.join(f'{loss:g}' for loss in plan.losses)} nats per token.",
            f"Seeds of trials: {', '.join(map(str, plan.seen))}. They are refused, as are the pilot's.",
        ]
    return render("page.md.jinja", notes={"The plan in numbers": facts}, numbers=planning(plan)).strip()
