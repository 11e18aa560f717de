"""Trains arms side by side, scores and measures them, and writes one page; see docs/compare.md."""

import sys

from llava.compare.steps import StepError
from llava.utils.commands import command_parser
from llava.utils.paths import CODE, IS_CHECKOUT, NEEDS_CHECKOUT

PACKAGE = "llava.compare"
SUMMARIES = {
    "run": "train, score and measure every arm with every seed, or a written plan's, and write one page",
    "quickstart": "prepare small inputs, train arms on them, and write one page about their answers",
    "reproduce": "fetch or train what a table or figure of the paper needs, measure it, and compare it with the paper",
    "answers": "answer held-out questions with one checkpoint",
    "report": "write a record's page, or compare two records of the same runs",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, 2 where it refuses (ValueError, OSError) or a step fails, and 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not IS_CHECKOUT and argv[:1] and argv[0] in SUMMARIES.keys() - {"report"}:
        print(f"error: {argv[0]}: {NEEDS_CHECKOUT}", file=sys.stderr)
        return 2
    sys.path.append(str(CODE))  # `playground` is imported from the clone, whatever folder the caller stands in
    # Only the command's own module is imported: some take seconds.
    args = command_parser(PACKAGE, __doc__, SUMMARIES, argv[0] if argv else None).parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, StepError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: rerun the same command to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
