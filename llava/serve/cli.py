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
    return exit_status(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> None:
    """Loads what the command needs, and chats."""
    from llava.serve.conversation import chat  # takes seconds

    chat(args)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m llava.serve.cli", description=__doc__.splitlines()[0])
    add_model_arguments(top)
    add_chat_arguments(top, temperature=0.2, max_new_tokens=512)
    top.add_argument("--image-file", required=True, help="path or http(s) address of the picture")
    top.add_argument("--debug", action="store_true", help="show prompt and answer as the model sees them")
    return top


def add_chat_arguments(parser: argparse.ArgumentParser, temperature: float, max_new_tokens: int) -> None:
    """The flags of the answers, on the page too."""
    add_loading_arguments(parser)
    parser.add_argument("--temperature", type=float, default=temperature, help="0 takes the likeliest token")
    what = "maximum tokens of an answer"
    parser.add_argument("--max-new-tokens", type=whole(1), default=max_new_tokens, help=what)


if __name__ == "__main__":
    sys.exit(main())
