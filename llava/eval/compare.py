"""Compares the runs of scripts/compare.sh: refuses those that are no fair pair, and writes the page of the others."""

import argparse
import sys
from pathlib import Path

from llava.eval.report import write_report
from llava.eval.runs import STAGES, Run, check_present, check_results, check_runs


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m llava.eval.compare", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("check", "refuse runs that differ in more than the arm"),
        ("present", "refuse other code or packages than the finished runs had"),
        ("report", "check, and write the page"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("--output-dir", type=Path, required=True, help="folder with seed-<seed>/<arm>/<stage>")
        command.add_argument(
            "--arms", type=lambda text: text.split(","), required=True, help="joined by commas; first: none"
        )
        command.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",") if s], required=True)
        if name == "check":
            command.add_argument(
                "--stage", choices=STAGES, required=True, help="runs that have finished it are compared"
            )
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0, or 2 for runs that cannot be compared."""
    args = parser().parse_args(argv)
    runs = [Run(args.output_dir, seed, arm) for seed in args.seeds for arm in args.arms]
    try:
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
            for path in write_report(runs, args.output_dir):
                print(f"written: {path}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
