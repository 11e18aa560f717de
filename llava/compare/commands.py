"""Trains arms side by side, scores and measures them, and writes one page; see docs/compare.md."""

import sys

from llava.compare.steps import StepError
from llava.utils.commands import command_parser
from llava.utils.paths import IS_CHECKOUT, NEEDS_CHECKOUT

PACKAGE = "llava.compare"
SUMMARIES = {
    "run": "train, score and measure every arm with every seed, or a written plan's, and write one page",
    "quickstart": "prepare small inputs, train arms on them, and write one page about their answers",
    "reproduce": "fetch or train what a table or figure of the paper needs, measure it, and compare it with the paper",
    "answers": "answer held-out questions with one checkpoint, also with the picture taken away",
    "report": "write a record's page, or compare two records of the same runs",
}
ANYWHERE = ("answers", "report")
"""The commands that need no checkout around the package."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, 2 where it refuses (ValueError, OSError) or a step fails, and 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    # Only the command's own module is imported: some take seconds.
    args = command_parser(PACKAGE, __doc__, SUMMARIES, argv[0] if argv else None).parse_args(argv)
    if args.command not in ANYWHERE and not IS_CHECKOUT:
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
