"""What the commands share: one line for what is refused, and checked values of `--device` and `--dtype`."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

REFUSALS = (ValueError, OSError, ImportError, NotImplementedError)
"""What a command's work raises about its arguments."""
DTYPES = ("float32", "bfloat16", "float16")
"""Choices of `--dtype`."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, without the list of all flags."""

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with status 2."""
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def exit_status(command: Callable[[argparse.Namespace], object], args: argparse.Namespace) -> int:
    """Runs `command(args)`; 0, or 2 where it refuses its arguments, with one line on stderr instead of a traceback."""
    try:
        command(args)
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """`--device`, which must be one of this machine."""
    parser.add_argument(
        "--device", type=device_name, help="such as cuda or cpu (default: an accelerator if there is one)"
    )


def device_name(text: str) -> str:
    """The value of `--device`.

    Raises:
        argparse.ArgumentTypeError: this machine has no such device.
    """
    names = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        names += [kind, *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]
    if text not in names:
        raise argparse.ArgumentTypeError(f"this machine has no device {text!r}; expected one of {', '.join(names)}")
    return text
