"""A conversation about a picture in the terminal: `python -m llava.serve.cli --model-path CKPT --image-file FILE`.

Answers are streamed and earlier turns are remembered. Ctrl-C stops an answer; `/quit`, an empty line or Ctrl-D
ends the chat; `/help` lists the commands.
"""

import argparse
import sys

from llava.asking_flags import add_loading_arguments, add_model_arguments
from llava.utils.commands import Parser, exit_status, whole


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: start(argv))


def start(argv: list[str] | None) -> None:
    """Parses the command line, loads the model and runs it."""
    args = parser().parse_args(argv)
    from llava.serve.conversation import run  # takes seconds

    run(args)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m llava.serve.cli", description=__doc__.splitlines()[0])
    add_model_arguments(top)
    add_loading_arguments(top)
    top.add_argument("--image-file", required=True, help="path or http(s) address of the picture")
    top.add_argument("--temperature", type=float, default=0.2, help="0 takes the likeliest token (default: 0.2)")
    top.add_argument("--max-new-tokens", type=whole(1), default=512, help="maximum tokens of an answer (default: 512)")
    top.add_argument("--debug", action="store_true", help="show prompt and answer as the model sees them")
    return top


if __name__ == "__main__":
    sys.exit(main())
