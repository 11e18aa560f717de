"""Trains every arm with every seed on the same data, scores and measures them, and writes one page.

With `--plan FILE` the arms, seeds and steps are those of a plan that was written down before its runs. Each seed is
recorded when all its arms are trained and answered; nothing is compared before the last one.
"""

import argparse
import os
from pathlib import Path

from llava.compare.arms import parse_arms, parse_seeds
from llava.compare.comparison import Comparison
from llava.compare.plan import read_plan
from llava.compare.planned import Planned
from llava.compare.tuning import Tuning
from llava.utils.paths import ROOT

PRESET, ARMS = "llama-3.2-3b", "none,layernorm,gwc_layernorm"  # the paper's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `run`."""
    presets = sorted(path.stem for path in (ROOT / "scripts/presets").glob("*.sh"))
    parser.add_argument("--preset", choices=presets, help=f"recipe (default: {PRESET})")
    seeds = "number of seeds (42, 43, ...), or a list, as in 1,2 or 7,"
    norms = "with another initial norm as in layernorm@4x or layernorm@default"
    parser.add_argument("--arms", help=f"joined by commas, none first; {norms} (default: {ARMS})")
    parser.add_argument("--seeds", help=f"{seeds} (default: 1)")
    parser.add_argument("--tasks", help="tasks of scripts/evaluate.sh (default: the paper's nine; demo: scenes)")
    parser.add_argument("--questions", type=Path, help="your own questions with answers, also evaluated in every run")
    parser.add_argument("--question-images", type=Path, help="folder or zip file of their pictures (default: .)")
    parser.add_argument("--plan", type=Path, help="train a committed plan seed by seed; it decides the flags above")
    parser.add_argument("--output-dir", type=Path, help="default: outputs/compare-<preset>, or outputs/<plan>")


def run(args: argparse.Namespace) -> None:
    """The command `run`."""
    comparison = planned_of(args) if args.plan else comparison_of(args)
    comparison.set_defaults()
    comparison.run()


def comparison_of(args: argparse.Namespace) -> Comparison:
    """The comparison that the flags describe.

    Raises:
        ValueError: they do not describe one.
    """
    preset = args.preset or PRESET
    arms, seeds = parse_arms(args.arms or ARMS), parse_seeds(args.seeds or "1")
    folder = args.output_dir or Path("outputs") / f"compare-{preset}"
    comparison = Comparison(preset, arms, seeds, folder, tasks=args.tasks or "")
    if args.questions:
        from llava.eval.score import check_questions  # takes a second

        comparison.questions = args.questions.resolve()
        comparison.pictures_of_questions = args.question_images and args.question_images.resolve()
        check_questions(str(comparison.questions), comparison.pictures_of_questions)
    return comparison


def planned_of(args: argparse.Namespace) -> Planned:
    """The study of `--plan`.

    Raises:
        ValueError: not a plan, or the caller has set what it decides.
    """
    plan = read_plan(args.plan)
    for name in ("preset", "arms", "seeds", "tasks", "questions"):
        if getattr(args, name):
            raise ValueError(f"--{name}: the plan {plan.file} decides it; leave it out")
    if steps := os.environ.get("MAX_STEPS"):
        raise ValueError(f"MAX_STEPS={steps}: the plan {plan.file} decides it; leave it out")
    os.environ.setdefault("REPORT_TO", "none")
    folder = (args.output_dir or Path("outputs") / plan.file.stem).resolve()
    return (Tuning if plan.points else Planned)(plan.preset, plan.arms, plan.seeds, folder, plan=plan)
