"""Every measurement, table and figure of the paper for the given checkpoints: an experiment that trains nothing.

A failed command is reported at the end; the others still run.
"""

import argparse
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llava.analysis import loading
from llava.analysis.commands import ANY, COMMANDS, NORMED, OURS, PACKAGE, Needs
from llava.analysis.models import NamedModel, named_model, required_models
from llava.compare.engine import Experiment, show_times
from llava.compare.lanes import Step
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.utils.commands import INTERRUPTED, module_of, whole

QUICKSTART = Path("outputs/quickstart")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m llava.analysis all`."""
    parser.add_argument(
        "models",
        metavar="[NAME=]CKPT",
        nargs="*",
        type=named_model,
        help=f"checkpoint folder or hub id, optionally with its name in the figures (default: {QUICKSTART}/*/finetune)",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/analysis"), help="folder of the results")
    parser.add_argument("--data", help="samples to measure on (default: the playground's held-out scenes)")
    parser.add_argument("--samples", type=whole(1), help="number of samples (default: few, see each command's --help)")
    parser.add_argument(
        "--commands",
        type=chosen,
        default=tuple(COMMANDS),
        help="run only these commands, given as one argument: --commands 'theory attention'",
    )


def chosen(text: str) -> tuple[str, ...]:
    """The value of `--commands`, separated by spaces or commas."""
    names = tuple(text.replace(",", " ").split())
    if not names or (unknown := [name for name in names if name not in COMMANDS]):
        listed = ", ".join(unknown) if names else "none"
        raise argparse.ArgumentTypeError(f"expected names from {', '.join(COMMANDS)}; found {listed}")
    return names


@dataclass
class Command(Step):
    """A command of `llava.analysis`, which prints its tables to the terminal; its failure is recorded in `errors`."""

    errors: list[str] = field(default_factory=list)

    def failed(self, code: int) -> None:
        """Records a failure; an interrupted command interrupts the experiment."""
        if code in (INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        self.errors.append(self.title)


def run(args: argparse.Namespace) -> None:
    """Runs every command in its own process, and prints how long each took.

    Raises:
        ValueError: no checkpoint, or one without a config; some commands failed.
        KeyboardInterrupt: a command was interrupted.
    """
    models = required_models(args.models or quickstart_models())
    fields = {model: loading.config_fields(model.path) for model in models}
    experiment, errors = Experiment("", [], [], args.output_dir), []
    for command in args.commands:
        needs = module_of(PACKAGE, command).NEEDS
        fitting = [model for model in models if fits(needs, fields[model])]
        words = command_line(command, fitting, needs, args)
        step = Command(command, words, None, cwd=Path.cwd(), errors=errors)
        experiment.part(command, {command: [step] if fitting else []})
        if not fitting:
            print(f"skipped: no checkpoint {needs.models}", flush=True)
    show_times({**experiment.times, "all": sum(experiment.parts.values())})
    print(f"tables and figures: {args.output_dir}")
    if errors:
        raise ValueError(f"failed: {' '.join(errors)}")


def quickstart_models() -> list[NamedModel]:
    """What scripts/quickstart.sh has trained.

    Raises:
        ValueError: it has trained nothing.
    """
    folders = sorted(config.parent for config in QUICKSTART.glob("*/finetune/config.json"))
    if not folders:
        raise ValueError(f"no checkpoint given, and {QUICKSTART} has none; run bash scripts/quickstart.sh")
    return [named_model(str(folder)) for folder in folders]


def fits(needs: Needs, fields: dict[str, Any]) -> bool:
    """Whether a command applies to a model with these fields of config.json."""
    normed = NORM_TYPES.get(fields.get("mm_projector_norm", "none")) is not None
    return {ANY: True, OURS: loading.is_ours(fields), NORMED: normed}[needs.models]


def command_line(command: str, models: list[NamedModel], needs: Needs, args: argparse.Namespace) -> list[str]:
    """The command line of one command."""
    words = [sys.executable, "-m", PACKAGE, command]
    for model in models:
        words += ["--model", f"{model.name}={model.path}"]
    for flag in needs.flags:
        if (value := getattr(args, flag)) is not None:
            words += [f"--{flag}", str(value)]
    return [*words, "--output-dir", str(args.output_dir)]
