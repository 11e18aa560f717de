"""Comparisons of arms; `run` does everything, as scripts/compare.sh. See docs/compare.md.

Needs Python 3.10 and nothing else until it trains; `check` and `report` alone are `python -m llava.eval.compare`.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from llava.compare.stage import train_stage
from llava.compare.study import STAGES, Study, parse_arms, parse_seeds
from llava.launch.settings import ROOT, Refusal, one_of


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m llava.compare", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    summary = "train, score and measure several arms, and write the page"
    run = commands.add_parser("run", help=summary, description=summary, allow_abbrev=False)
    run.add_argument("--preset", default="llama-3.2-3b", help="of scripts/presets; default llama-3.2-3b")
    run.add_argument("--seeds", default="1", help="how many, from 42, or which, as in 1,2 or 7,; default 1")
    run.add_argument("--arms", default="none,layernorm,gwc_layernorm", help="joined by commas; first: none")
    run.add_argument(
        "--tasks", default="", help="of scripts/evaluate.sh; default the paper's nine; demo: scenes,stamps"
    )
    run.add_argument("--output-dir", type=Path, help="default outputs/compare-<preset>")
    run.add_argument(
        "--upstream", action="store_true", help="also train the baseline by upstream LLaVA, and compare losses"
    )
    summary = "one stage of one run, skipped when its folder is complete"
    stage = commands.add_parser("stage", help=summary, description=summary)
    stage.add_argument("stage", choices=STAGES)
    stage.add_argument("folder", type=Path)
    stage.add_argument("log", type=Path, help="file for the training's own messages")
    stage.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="variables of the stage's script")
    return top


def main() -> int:
    """0, 2 for what was refused, or the status of the command that failed."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if args.command == "stage":
            settings = dict(word.split("=", 1) for word in args.settings)
            train_stage(args.stage, args.folder, args.log, settings, float(os.environ.get("WATCH_SECONDS", 3)))
        else:
            study_of(args).run()
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:  # it has said why
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def study_of(args: argparse.Namespace) -> Study:
    """The comparison that the flags ask for.

    Raises:
        Refusal: one of them cannot be used.
    """
    one_of("PRESET", args.preset, sorted(path.stem for path in (ROOT / "scripts/presets").glob("*.sh")))
    output = args.output_dir or Path(f"outputs/compare-{args.preset}")
    python = os.environ.get("PYTHON_BIN") or ".venv/bin/python"
    return Study(args.preset, parse_seeds(args.seeds), parse_arms(args.arms), args.tasks, output, args.upstream, python)


if __name__ == "__main__":
    sys.exit(main())
