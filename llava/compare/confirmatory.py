"""A study that was planned in writing: seeds trained as the plan has them, each recorded once all its arms are done.

registered          the plan: docs/study-plan.json
study_runs          the recorded runs, next to the plan: study-runs.json
confirmatory_page   the comparisons, after the last seed: study-runs.md
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from llava.compare.confirmatory_page import write_page
from llava.compare.engine import at_work
from llava.compare.registered import Registered, parsed, read_registered, show
from llava.compare.report_tables import batch_of
from llava.compare.runs import Run
from llava.compare.study import Study, is_answered, recipe_of
from llava.compare.study_record import answers_of
from llava.compare.study_runs import (
    Record,
    changed_plan,
    entry_of,
    missing_seeds,
    read_runs,
    runs_file,
    with_runs,
    write_runs,
)
from llava.eval.results import CONTROLS
from llava.launch.recipe import STAGES

DIGEST = "plan.sha256"
"""In the output folder: the digest of the plan that its runs follow."""


def run(args: argparse.Namespace) -> None:
    """The command `study --plan`.

    Raises:
        ValueError: other flags than the plan, another plan than the recorded runs', or the folder is in use.
        StepError: a step failed.
    """
    plan = read_registered(args.plan)
    decided = ("arms", "seeds", "hours", "quick")
    if given := [f"--{name}" for name in decided if getattr(args, name)]:
        raise ValueError(f"{given[0]}: the plan {plan.file} decides it; leave it out")
    if args.preset != plan.preset:
        raise ValueError(f"--preset {args.preset}: the plan {plan.file} has {plan.preset}; pass that")
    folder = (args.output_dir or Path("outputs") / plan.file.stem).resolve()
    study = study_of(plan, folder, plan.arms, plan.seeds)
    record = read_runs(plan)
    if args.so_far:
        write_page(plan, record)
        return
    with at_work(folder) as study.lock:
        hold_plan(plan, folder)
        study.make_inputs()
        if args.repeat is not None:
            repeat(study, plan, record, args.repeat)
            return
        if seeds := missing_seeds(plan, record):
            study.seeds = seeds
            study.train(ended=partial(record_complete, study, plan, record))


def record_complete(study: Study, plan: Registered, record: Record, ended: str) -> None:
    """Adds the seed of the run `ended` to the record and the page of runs, if all its arms are answered."""
    seed = next(run.seed for run in study.runs if run.name == ended)
    assert seed is not None  # a study's runs have seeds
    part = replace(study, seeds=[seed])
    if seed in missing_seeds(plan, record) and all(map(is_answered, part.runs)):
        part.check_all()
        with_runs(plan, record, part.runs)
        write_runs(plan, record)
        write_page(plan, record)


def study_of(plan: Registered, folder: Path, arms: list[str], seeds: list[int]) -> Study:
    """The plan's trainings, set up for these arms and seeds."""
    recipe, data = recipe_of(plan.preset)
    study = Study(recipe, arms, seeds, folder.resolve(), data, plan=plan.plan, measures_start=False)
    study.set_up()
    return study


def hold_plan(plan: Registered, folder: Path) -> None:
    """Ties the output folder to the plan.

    Raises:
        ValueError: its runs were begun by another plan.
    """
    mark = folder / DIGEST
    before = mark.read_text().strip() if mark.is_file() else plan.digest
    if before != plan.digest:
        raise ValueError(changed_plan(plan, mark, before))
    mark.write_text(f"{plan.digest}\n")


def repeat(study: Study, plan: Registered, record: Record, seed: int) -> None:
    """Trains a recorded seed in an empty folder, and compares every score and log-probability with the record.

    Raises:
        ValueError: the seed is not recorded, or a run is not the same.
    """
    recorded = {entry["arm"]: entry for entry in record["runs"] if entry["seed"] == seed}
    if not recorded:
        raise ValueError(f"--repeat {seed}: not a recorded seed of {runs_file(plan)}")
    part = replace(study, seeds=[seed])
    if begun := [run for run in part.runs if run.has_begun(STAGES[0])]:
        raise ValueError(f"--repeat {seed}: {begun[0].folder(STAGES[0])} has it already; choose another --output-dir")
    part.train()
    again = {run.arm: entry_of(run, plan) for run in part.runs}
    changed = {arm: changed_parts(entry, recorded[arm]) for arm, entry in again.items()}
    for arm, parts in changed.items():
        said = "every score, log-probability and loss is the recorded one"
        if parts:
            said = f"not as recorded: {', '.join(parts)}"
        print(f"{arm}, seed {seed}: {said}")
    differing = [arm for arm, parts in changed.items() if parts]
    if differing:
        runs = (recorded[plan.arms[0]], again[plan.arms[0]])
        before, now = (f"{entry['precision']} on {entry['machine']}" for entry in runs)
        elsewhere = f"; the seed was trained in {before}, now in {now}, which rounds differently"
        raise ValueError(
            f"--repeat {seed}: {', '.join(differing)} differ from {runs_file(plan)}{elsewhere * (before != now)}"
        )


def changed_parts(entry: Record, before: Record) -> list[str]:
    """What a repeated run has otherwise than it is recorded, in words."""
    parts = []
    for name, words in (("scores", "scores"), ("log_probabilities", "log-probabilities")):
        pairs = [pair for task, own in entry[name].items() for pair in zip(own, before[name][task], strict=True)]
        if count := sum(own != other for own, other in pairs):
            parts.append(f"{count} of {len(pairs)} {words}")
    return parts + ["losses of stage 2"] * (entry["training"] != before["training"])


# --- the trial --------------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> None:
    """The command `plan`: checks a plan and shows what it can decide, or makes a trial for it.

    Raises:
        ValueError: see `read_registered`; or the trial's seed is one of the plan's.
        StepError: a step of the trial failed.
    """
    if args.trial is None:
        show(parsed(args.plan), args.docs)
        read_registered(args.plan)
        return
    plan = parsed(args.plan)
    if args.trial in plan.seeds:
        raise ValueError(f"--trial {args.trial}: a seed of {args.plan}; take another")
    study = study_of(plan, Path("outputs") / f"{plan.file.stem}-trial", [plan.arms[0]], [args.trial])
    with at_work(study.folder) as study.lock:
        study.make_inputs()
        study.train()
    print(f"\nfor trials in {args.plan}:\n{json.dumps(trial_of(study.runs[0]))}")


def trial_of(run: Run) -> dict[str, object]:
    """What a plan keeps of a trial."""
    tasks = sorted(answers_of(run, CONTROLS[0]).tasks.items())
    lines = [line for line in run.evaluations(STAGES[-1]) if "eval/accuracy" in line]
    return {
        "seed": run.seed,
        "tasks": {
            name: {
                "right": sum(sample.score == 1 for sample in task.samples),
                "questions": len(task.samples),
                "chance": round(task.chance or 0.0, 1),
            }
            for name, task in tasks
        },
        "samples": [line["step"] * batch_of(run, STAGES[-1]) for line in lines],
        "loss": [round(line["eval/loss"], 3) for line in lines],
    }
