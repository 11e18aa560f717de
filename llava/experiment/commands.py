"""Compares arms: `run` and `study` train, score and measure them; the other commands are their steps."""

import argparse
import sys
from pathlib import Path

from llava.experiment import run as whole
from llava.experiment import study, study_page, study_record
from llava.experiment.report import write_report
from llava.experiment.runs import STAGES, Run, check_present, check_results, check_runs
from llava.experiment.stage import StepError, train_stage
from llava.utils.commands import Parser, program_name
from llava.utils.paths import IS_CHECKOUT, NEEDS_CHECKOUT

_CHECKS = (
    ("check", "refuse runs that differ in more than the arm"),
    ("present", "refuse to go on with other code or packages than the finished runs had"),
    ("report", "check, and write the page"),
)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog=program_name("llava.compare"), description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    summary = "train, score and measure every arm, and write one page with a verdict"
    whole.add_arguments(commands.add_parser("run", help=summary, description=f"{summary}. See docs/compare.md."))
    summary = "train many arms with seeds and controls by a plan, and write one page on what that shows"
    study.add_arguments(commands.add_parser("study", help=summary, description=f"{summary}. See docs/compare.md."))
    summary = "write a study's page again from its study.json"
    command = commands.add_parser("page", help=summary, description=summary)
    command.add_argument("study", type=Path, metavar="STUDY_JSON", help="the file, or its folder")
    command.add_argument(
        "--measured",
        type=Path,
        metavar="STUDY_JSON",
        help="the same of a study that trained the first seed again: take what it measured inside the models",
    )
    command.add_argument("--docs", action="store_true", help="write docs/study.md and docs/study.json instead")
    for name, summary in _CHECKS:
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--output-dir", type=Path, required=True, help="folder with seed-<seed>/<arm>/<stage>")
        command.add_argument(
            "--arms", type=lambda text: text.split(","), required=True, help="joined by commas, none first"
        )
        command.add_argument("--seeds", type=listed, required=True, help="joined by commas")
        if name == "report":
            command.add_argument("--questions", action="store_true", help="with the answers to the caller's questions")
        if name == "check":
            command.add_argument(
                "--stage", choices=STAGES, required=True, help="the runs that have finished this stage are compared"
            )
    summary = "run and watch one training stage; a finished one is skipped"
    command = commands.add_parser("stage", help=summary, description=summary)
    command.add_argument("stage", choices=STAGES)
    command.add_argument("folder", type=Path)
    command.add_argument("log", type=Path)
    command.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="variables of the stage's script")
    return top


def listed(text: str) -> list[int]:
    """Seeds joined by commas.

    Raises:
        argparse.ArgumentTypeError: one of them is no number.
    """
    try:
        return [int(seed) for seed in text.removesuffix(",").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seeds joined by commas, as in 42,43; found {text!r}") from None


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, 2 if it refuses something or a step failed, and 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    if args.command in ("run", "study", "stage") and not IS_CHECKOUT:
        print(f"error: {args.command}: {NEEDS_CHECKOUT}", file=sys.stderr)
        return 2
    try:
        if args.command == "run":
            whole.run(args)
        elif args.command == "study":
            study.run(args)
        elif args.command == "page":
            _page(args)
        elif args.command == "stage":
            train_stage(args.stage, args.folder, args.log, dict(pair.split("=", 1) for pair in args.settings))
        else:
            _check(args)
    except (ValueError, OSError, StepError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _page(args: argparse.Namespace) -> None:
    found = study_record.read_record(args.study)
    if args.measured:
        found = study_record.with_measurements(found, study_record.read_record(args.measured))
    folder = args.study if args.study.is_dir() else args.study.parent
    for path in study_page.write_docs(found) if args.docs else study_page.write_page(found, folder):
        print(f"written: {path}")


def _check(args: argparse.Namespace) -> None:
    runs = [Run(args.output_dir, seed, arm) for seed in args.seeds for arm in args.arms]
    if args.command == "check":
        finished = [run for run in runs if run.has_finished(args.stage)]
        if finished:
            check_runs(finished, args.stage)
        print(f"{args.stage}: {len(finished)} run(s), equal in everything but the arm")
    elif args.command == "present":
        check_present(runs)
    else:
        for stage in STAGES:
            check_runs(runs, stage)
        check_results(runs)
        if args.questions:
            check_results(runs, lambda run: run.own_results)
        for path in write_report(runs, args.output_dir, args.questions):
            print(f"written: {path}")
