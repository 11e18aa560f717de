"""A page to talk about pictures with one or two checkpoints: `python -m llava.serve.web --model-path CKPT`.

Below each answer is a heat map of the model's attention. Only this machine reaches the page unless `--host` says
otherwise; the page loads nothing from elsewhere and reports nothing.
"""

import argparse
import sys

from llava.asking_flags import add_model_arguments
from llava.serve.cli import add_chat_arguments
from llava.utils.commands import Parser, exit_status


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: run(parser().parse_args(argv)))


def run(args: argparse.Namespace) -> None:
    """Loads what the command needs, and serves the page."""
    from llava.serve.page import serve  # takes seconds

    serve(args)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m llava.serve.web", description=__doc__.splitlines()[0])
    add_model_arguments(top, several=True)
    add_chat_arguments(top, temperature=0, max_new_tokens=256)
    top.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all (default: 127.0.0.1)")
    top.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860)")
    return top


if __name__ == "__main__":
    sys.exit(main())
