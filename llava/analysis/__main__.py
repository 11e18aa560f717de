"""`python -m llava.analysis <command>`: the paper's measurements, tables and figures, one command each."""

import argparse
import importlib
import sys
from pathlib import Path

from llava.analysis.models import named_model
from llava.commands import REFUSALS, Parser

# A command is the module of its name, with `add_arguments(parser)` and `run(args)`. Only the one asked for is imported.
COMMANDS = {
    "interface-norms": "norms of vision features, visual tokens and text embeddings (Tables 1, 2, 3)",
    "embedding-norms": "norms of text embeddings, read from the weight files alone (Tables 6, 7, 8)",
    "layer-norms": "norms of visual and text tokens per layer (Figure 4)",
    "update-rates": "how fast visual and text tokens turn per layer (Figures 2, 3, 4, 5)",
    "norm-params": "gain and bias of the projector's norm over checkpoints, from the files alone (Table 5)",
    "attention": "where a query looks in the picture, and how much attention visual tokens get (Appendix G)",
    "theory": "the paper's statements checked numerically, and its assumptions in a real model (sections 3 and B)",
    "interventions": "what visual tokens' norms do to a trained model at inference",
    "gradients": "gradients above and below the projector's norm (section 5.1)",
}


def parser(command: str | None) -> argparse.ArgumentParser:
    """The command-line parser; only `command` gets its own flags beside the shared ones."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--model",
        dest="models",
        metavar="[NAME=]PATH_OR_ID",
        action="append",
        type=named_model,
        default=[],
        help="checkpoint folder or hub id, with the name it has in tables and figures; may be given several times",
    )
    shared.add_argument("--data", help="samples to measure on (default: the playground's held-out scenes)")
    shared.add_argument("--output-dir", type=Path, default=Path("outputs/analysis"), help="folder of the results")
    shared.add_argument("--seed", type=int, default=42, help="of every random choice")
    top = Parser(prog="python -m llava.analysis", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=summary, add_help=False)
            continue
        module = importlib.import_module("llava.analysis." + name.replace("-", "_"))
        style = argparse.ArgumentDefaultsHelpFormatter
        sub = commands.add_parser(
            name, parents=[shared], help=summary, description=module.__doc__, formatter_class=style
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0, what the command returns, or 2 with one line where it refuses its arguments."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser(argv[0] if argv else None).parse_args(argv)
    args.argv = argv
    try:
        return args.run(args) or 0
    except REFUSALS as error:
        print(f"llava.analysis {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
