"""A page to talk about pictures with one or two checkpoints: `python -m llava.serve.web --model-path CKPT`.

Next to each answer are a heatmap of the model's attention and the norms of visual and text tokens. Only this machine
reaches the page unless `--host` or `--share` says otherwise; the page loads nothing from elsewhere and reports nothing.
"""

import argparse
import sys

from llava.asking_flags import add_loading_arguments, add_model_arguments
from llava.utils.commands import Parser, exit_status, whole


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: start(argv), "closed")


def start(argv: list[str] | None) -> None:
    """Parses the command line, loads the model and runs it."""
    args = parser().parse_args(argv)
    from llava.serve.page import run  # takes seconds

    run(args)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m llava.serve.web", description=__doc__.splitlines()[0])
    add_model_arguments(top, several=True)
    add_loading_arguments(top)
    top.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all (default: 127.0.0.1)")
    top.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860)")
    top.add_argument("--share", action="store_true", help="also open Gradio's public tunnel to whoever has the link")
    top.add_argument("--max-upload", type=float, default=10, metavar="MB", help="largest picture taken (default: 10)")
    top.add_argument(
        "--max-new-tokens", type=whole(1), default=256, help="initial maximum of tokens per answer (default: 256)"
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
