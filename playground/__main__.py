"""`python -m playground <command>`: prepare small real inputs for training and questions."""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from llava.utils.commands import INTERRUPTED, Parser
from llava.utils.paths import WORK
from playground.options import FLAGS, PICTURES
from playground.store import PlaygroundError

COMMANDS = ("smollm2", *PICTURES, "tower", "heldout")
DEFAULT_ROOT = WORK / "playground/data"


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser: one sub-command per module, plus `all`."""
    shared = Parser(add_help=False)
    shared.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="folder of every output")
    shared.add_argument("--force", action="store_true", help="remake the output, even if it is complete")
    top = Parser(prog="python -m playground", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name in COMMANDS:
        text = module_of(name).__doc__
        sub = commands.add_parser(name, parents=[shared], help=text, description=text)
        for flag, meaning in FLAGS.get(name, {}).items():
            default, choices = getattr(module_of(name).Settings, flag), PICTURES if flag == "data" else None
            words = {"type": type(default), "default": default, "choices": choices}
            sub.add_argument(f"--{flag.replace('_', '-')}", help=meaning, **words)
    summary = "Prepare what a training on pictures of one kind needs, with default settings: smollm2, pictures, tower."
    everything = commands.add_parser("all", parents=[shared], help=summary, description=summary)
    everything.add_argument("--data", choices=PICTURES, default=PICTURES[0], help="kind of the pictures")
    return top


def module_of(command: str) -> ModuleType:
    """A command's module."""
    return importlib.import_module(f"playground.{command}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = parser().parse_args(argv)
    settings = {flag: getattr(args, flag) for flag in FLAGS.get(args.command, ())}
    commands = {args.command: settings}
    if args.command == "all":
        commands = {"smollm2": {}, args.data: {}, "tower": {"data": args.data}}
    try:
        for name, values in commands.items():
            module_of(name).prepare(module_of(name).Settings(**values), args.root, args.force)
    except (PlaygroundError, ImportError) as error:
        print(f"playground {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"playground {args.command}: interrupted; rerun the same command to resume", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
