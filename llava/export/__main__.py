"""`python -m llava.export <command>`: a trained model in the formats that others read, one command each."""

import argparse
import logging
import sys

from llava.utils.commands import command_parser, exit_status

PACKAGE = "llava.export"
COMMANDS = {
    "hf": "a checkpoint as a folder of Hugging Face's LLaVA classes",
    "llava": "such a folder, or a published one of LLaVA 1.5, as a checkpoint of this tree",
    "card": "the model's README.md: recipe, norms, results, how to load it",
}


def parser(command: str | None) -> argparse.ArgumentParser:
    """The command-line parser; only `command` gets its own flags."""
    return command_parser(PACKAGE, __doc__, COMMANDS, command)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns 0 or its own status, 2 if it refuses its arguments, and 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: export(argv), called=" ".join([PACKAGE, *argv[:1]]))


def export(argv: list[str]) -> int | None:
    """Runs one command, and shows the package's log on stderr."""
    args = parser(argv[0] if argv else None).parse_args(argv)
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():  # a redrawn bar would fill a log
        transformers_logging.disable_progress_bar()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("llava").setLevel(logging.INFO)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
