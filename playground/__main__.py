"""`python -m playground <command>`: prepare small real inputs for training and questions."""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from llava.utils.commands import Parser
from llava.utils.paths import WORK
from playground.options import PICTURES, add_options, settings_from
from playground.store import PlaygroundError

INPUTS = ("smollm2", *PICTURES, "mixed", "tower", "heldout")
DEFAULT_ROOT = WORK / "playground/data"
INTERRUPTED = 130  # the exit status on Ctrl-C, as shells count it


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser: one sub-command per module, plus `all`."""
    shared = Parser(add_help=False)
    shared.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="folder that holds every output")
    shared.add_argument("--force", action="store_true", help="remake the output, even if it is complete")
    top = Parser(prog="python -m playground", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name in INPUTS:
        text = module_of(name).__doc__
        sub = commands.add_parser(name, parents=[shared], help=text, description=text)
        add_options(sub, module_of(name).Settings)
    summary = "Prepare what a training on pictures of one kind needs, with default settings: smollm2, pictures, tower."
    everything = commands.add_parser("all", parents=[shared], help=summary, description=summary)
    everything.add_argument("--data", choices=PICTURES, default=PICTURES[0], help="kind of the pictures")
    return top


def module_of(command: str) -> ModuleType:
    """A command's module."""
    return importlib.import_module(f"playground.{command}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parser().parse_args(argv)
        if args.command == "all":
            for name in ("smollm2", args.data):
                module_of(name).prepare(module_of(name).Settings(), args.root, args.force)
            tower = module_of("tower")
            tower.prepare(tower.Settings(data=args.data), args.root, args.force)
        else:
            module = module_of(args.command)
            module.prepare(settings_from(args, module.Settings), args.root, args.force)
    except PlaygroundError as error:
        print(f"playground {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"playground {' '.join(argv[:1])}: interrupted; rerun the same command to resume", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
