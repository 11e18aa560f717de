"""Compares arms: `run` and `study` train, score and measure them; the other commands are their steps."""

import argparse
import sys
from pathlib import Path

from llava.compare import (
    comparison,
    confirmatory,
    registered,
    reproduce,
    results_page,
    study,
    study_page,
    study_record,
)
from llava.compare.arms import SEEDS, parse_seeds
from llava.compare.report import write_report
from llava.compare.runs import Run, check_all, check_runs
from llava.compare.stage import StepError
from llava.launch.recipe import STAGES
from llava.utils.commands import Parser, program_name
from llava.utils.paths import IS_CHECKOUT, NEEDS_CHECKOUT, ROOT


def parser() -> argparse.ArgumentParser:
    top = Parser(prog=program_name("llava.compare"), description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str, run, more: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary + more)
        command.set_defaults(run=run)
        return command

    summary = "train, score and measure every arm, and write one page with a verdict"
    comparison.add_arguments(add("run", summary, comparison.run, ". See docs/compare.md."))
    summary = "train many arms by a plan, with seeds and controls, and write one page about the result"
    study.add_arguments(add("study", summary, planned_or_not, ". See docs/compare.md."))
    summary = "check a plan that was written down before its runs, and show what it can decide"
    registered.add_arguments(add("plan", summary, confirmatory.plan, ". See docs/study-plan.md."))
    summary = "fetch or train what a table or figure of the paper needs, measure it, and compare it with the paper"
    reproduce.add_arguments(add("reproduce", summary, reproduce.run, ". See docs/analysis.md."))
    summary = "rewrite a study's pages from its study.json, or the pages of results"
    command = add("page", summary, page, ". See docs/results.md.")
    command.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="FOLDER",
        help="a study's folder or file; with --docs any finished runs",
    )
    command.add_argument(
        "--docs",
        action="store_true",
        help="add the results of the folders to docs/results.json and write docs/results.md; of a study also "
        "docs/study-pilot.md, docs/study-pilot-numbers.md and docs/study.json",
    )
    check_command = add("check", "refuse runs that differ in more than the arm", check)
    report_command = add("report", "check, and write the page", report)
    for command in (check_command, report_command):
        command.add_argument("--output-dir", type=Path, required=True, help="folder with seed-<seed>/<arm>/<stage>")
        command.add_argument(
            "--arms", type=lambda text: text.split(","), required=True, help="joined by commas, none first"
        )
        command.add_argument("--seeds", required=True, help=SEEDS)
    report_command.add_argument("--questions", action="store_true", help="include the answers to your own questions")
    check_command.add_argument(
        "--stage", choices=STAGES, required=True, help="compare the runs that have finished this stage"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, 2 after a refusal or a failed step, and 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    needs_checkout = args.command in ("run", "study", "plan", "reproduce") or vars(args).get("docs")
    if needs_checkout and not IS_CHECKOUT:
        print(f"error: {args.command}: {NEEDS_CHECKOUT}", file=sys.stderr)
        return 2
    try:
        args.run(args)
    except (ValueError, OSError, StepError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: rerun the same command to resume", file=sys.stderr)
        return 130
    return 0


def planned_or_not(args: argparse.Namespace) -> None:
    """The command `study`, with a plan of its own or a written one."""
    if args.repeat is not None and args.plan is None:
        raise ValueError("--repeat: expected --plan FILE as well")
    (study if args.plan is None else confirmatory).run(args)


def page(args: argparse.Namespace) -> None:
    """The command `page`."""
    if args.docs:
        written = results_page.publish(args.folders, ROOT / "docs")
    elif len(args.folders) == 1:
        (place,) = args.folders
        folder = place if place.is_dir() else place.parent
        written = study_page.write_page(study_record.read_record(place), folder)
    else:
        raise ValueError(f"page: {len(args.folders)} folders; expected a study's, or --docs and any number")
    for path in written:
        print(f"written: {path}")


def runs_of(args: argparse.Namespace) -> list[Run]:
    return [Run(args.output_dir, seed, arm) for seed in parse_seeds(args.seeds) for arm in args.arms]


def check(args: argparse.Namespace) -> None:
    """The command `check`."""
    finished = [run for run in runs_of(args) if run.has_finished(args.stage)]
    if finished:
        check_runs(finished, args.stage)
    print(f"{args.stage}: {len(finished)} run(s), equal in everything but the arm")


def report(args: argparse.Namespace) -> None:
    """The command `report`."""
    check_all(runs_of(args), args.questions)
    for path in write_report(runs_of(args), args.output_dir, args.questions):
        print(f"written: {path}")
