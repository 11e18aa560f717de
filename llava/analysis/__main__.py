"""`python -m llava.analysis <command>`: the paper's measurements, tables and figures, one command each."""

import argparse
import signal
import sys
from pathlib import Path

from llava.analysis.commands import ALL, PACKAGE, SUMMARIES, named_model
from llava.utils.commands import Parser, add_plugin_argument, command_parser, exit_status
from llava.utils.presentation import import_pyplot


def parser(command: str | None) -> argparse.ArgumentParser:
    """The command-line parser; only `command` gets its own flags besides the shared ones."""
    shared = Parser(add_help=False)
    shared.add_argument(
        "--model",
        dest="models",
        metavar="[NAME=]PATH_OR_ID",
        action="append",
        type=named_model,
        default=[],
        help="checkpoint folder or hub id, with the name it has in tables and figures; may be given several times",
    )
    shared.add_argument("--data", help="samples to measure on (default: the playground's held-out scenes)")
    shared.add_argument("--output-dir", type=Path, default=Path("outputs/analysis"), help="folder of the results")
    add_plugin_argument(shared)
    shared.add_argument("--seed", type=int, default=42, help="seed of every random choice")
    return command_parser(PACKAGE, __doc__, SUMMARIES, command, [] if command == ALL else [shared])


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns 0 or the command's own status, 2 if it refuses its arguments, and 130 after Ctrl-C.

    SIGTERM interrupts it as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    argv = sys.argv[1:] if argv is None else argv
    called = " ".join([PACKAGE, *argv[:1]])
    return exit_status(lambda: run(argv), f"{called}: interrupted; rerun the same command to resume", called)


def run(argv: list[str]) -> int | None:
    """Parses and runs one command."""
    args = parser(argv[0] if argv else None).parse_args(argv)
    args.argv = argv
    import_pyplot()  # figures come last; without Matplotlib nothing is measured
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
