"""What the commands share: subcommands by module, errors of one line, `--device` and `--dtype`.

Imports nothing slow, so that `--help` is quick and Ctrl-C works while the libraries load.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from llava.utils.plugins import load

INTERRUPTED = 130
"""The exit status on Ctrl-C, as shells count it."""
REFUSALS = (ValueError, OSError, ImportError, NotImplementedError)
"""The exceptions by which a command refuses its arguments."""
DTYPES = ("float32", "bfloat16", "float16")
"""Choices of `--dtype`."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description, and adds a flag's default to its help where that does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        says_nothing = action.nargs == 0 or action.default in (None, "", argparse.SUPPRESS) or action.default == []
        return text if says_nothing or "default" in text else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all flags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", Help)
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with status 2."""
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def program_name(package: str) -> str:
    """The program as the user called it: a console command such as `llava-export`, or else `python -m <package>`."""
    called = Path(sys.argv[0]).name
    return called if called.startswith("llava-") else f"python -m {package}"


def module_of(package: str, command: str) -> ModuleType:
    """The module of a package's command, with `add_arguments(parser)` and `run(args)`."""
    return importlib.import_module(f"{package}.{command.replace('-', '_')}")


def command_parser(
    package: str,
    description: str | None,
    summaries: Mapping[str, str],
    command: str | None,
    parents: Sequence[Parser] = (),
) -> Parser:
    """The parser of a package whose commands are its modules.

    Args:
        command: the command that is run. Only its module is imported, so no other command has its flags.
        parents: parsers whose flags the command has too.
    """
    top = Parser(prog=program_name(package), description=description)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in summaries.items():
        if name != command:
            commands.add_parser(name, help=summary, add_help=False)
            continue
        module = module_of(package, name)
        sub = commands.add_parser(name, parents=list(parents), help=summary, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def exit_status(work: Callable[[], object], interrupted: str = "interrupted", called: str = "error") -> int:
    """Does `work()` and returns the exit status: what it returns or 0, 2 where it refuses, 130 on Ctrl-C.

    A refusal is one line on stderr that begins with `called`; Ctrl-C prints `interrupted`.
    """
    try:
        status = work()
    except REFUSALS as error:
        print(f"{called}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def whole(smallest: int) -> Callable[[str], int]:
    """The type of a flag that takes a whole number of at least `smallest`."""

    def number(text: str) -> int:
        try:
            if (value := int(text)) >= smallest:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {smallest}, found {text!r}")

    return number


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """`--device`."""
    parser.add_argument("--device", help="such as cuda or cpu (default: an accelerator if there is one)")


def add_plugin_argument(parser: argparse.ArgumentParser) -> None:
    """`--plugin`, which loads the files as it is parsed."""

    def loaded(text: str) -> str:
        try:
            load(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("--plugin ")) from error
        return text

    what = "Python file with your own parts that the checkpoint needs; executed. May be given several times"
    parser.add_argument("--plugin", action="append", type=loaded, help=what)
