"""`python -m playground <command>`: prepare small real inputs, and compare what was trained on them."""

import argparse
import sys
from pathlib import Path

from playground import compare, heldout, mixed, scenes, smollm2, stamps, tower
from playground.options import add_options, settings_from
from playground.store import PlaygroundError

COMMANDS = {"smollm2": smollm2, "scenes": scenes, "stamps": stamps, "mixed": mixed, "tower": tower, "heldout": heldout}
QUICKSTART = ("smollm2", "scenes", "tower")
DEFAULT_ROOT = Path(__file__).resolve().parent / "data"


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser: one sub-command per module, plus `all`."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="folder that holds every output")
    shared.add_argument("--force", action="store_true", help="make it again, even if it is complete")
    top = argparse.ArgumentParser(prog="python -m playground", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    style = argparse.ArgumentDefaultsHelpFormatter
    for name, module in COMMANDS.items():
        text = module.__doc__
        sub = commands.add_parser(name, parents=[shared], help=text, description=text, formatter_class=style)
        add_options(sub, module.Settings)
    text = compare.__doc__
    compare.add_arguments(commands.add_parser("compare", help=text, description=text, formatter_class=style))
    summary = f"Prepare {', '.join(QUICKSTART)} with their default settings."
    commands.add_parser("all", parents=[shared], help=summary, description=summary, formatter_class=style)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = parser().parse_args(argv)
    try:
        if args.command == "compare":
            compare.run(args)
        elif args.command == "all":
            for name in QUICKSTART:
                COMMANDS[name].prepare(COMMANDS[name].Settings(), args.root, args.force)
        else:
            module = COMMANDS[args.command]
            module.prepare(settings_from(args, module.Settings), args.root, args.force)
    except PlaygroundError as error:
        print(f"playground {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
