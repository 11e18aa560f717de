"""`python -m llava.export <command>`: a trained model in the formats that others read, one command each."""

import argparse
import logging
import sys

from llava.export.commands import COMMANDS, module_of

INTERRUPTED = 130
"""The exit status on Ctrl-C, as shells count it."""


def parser(command: str | None) -> argparse.ArgumentParser:
    """The command-line parser; only `command` gets its own flags."""
    from llava.commands import Parser  # takes seconds, in which Ctrl-C may come

    top = Parser(prog="python -m llava.export", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=summary, add_help=False)
            continue
        module = module_of(name)
        style = argparse.ArgumentDefaultsHelpFormatter
        sub = commands.add_parser(name, help=summary, description=module.__doc__, formatter_class=style)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0, what it returns, 2 with one line where it refuses its arguments, 130 on Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    name = f"llava.export {argv[0]}" if argv else "llava.export"
    try:
        args = parser(argv[0] if argv else None).parse_args(argv)
        from transformers.utils import logging as transformers_logging

        from llava.commands import REFUSALS

        if not sys.stderr.isatty():  # a redrawn bar would fill a log
            transformers_logging.disable_progress_bar()
        logging.basicConfig(format="%(message)s")
        logging.getLogger("llava").setLevel(logging.INFO)
        try:
            return args.run(args) or 0
        except REFUSALS as error:
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
