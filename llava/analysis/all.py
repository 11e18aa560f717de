"""Every measurement, table and figure of the paper for the given checkpoints, one command after the other.

A command runs in its own process, on the checkpoints it applies to. A failure is reported at the end; the others still
run.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llava.analysis.commands import ANY, COMMANDS, NORMED, OURS, PACKAGE, NamedModel, named_model, required_models
from llava.analysis.models import config_fields, is_ours
from llava.attach import RECORD
from llava.utils.commands import INTERRUPTED, whole
from llava.utils.processes import start, wait

QUICKSTART = Path("outputs/quickstart")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m llava.analysis all`."""
    where = f"checkpoint folder or hub id, optionally with its name in the figures (default: {QUICKSTART}/*/finetune)"
    parser.add_argument("models", metavar="[NAME=]CKPT", nargs="*", type=named_model, help=where)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/analysis"), help="folder of the results")
    parser.add_argument("--data", help="samples to measure on (default: the playground's held-out scenes)")
    parser.add_argument("--samples", type=whole(1), help="number of samples (default: few, see each command's --help)")
    only = "run only these commands, given as one argument: --commands 'theory attention'"
    parser.add_argument("--commands", default=" ".join(COMMANDS), help=only)


def run(args: argparse.Namespace) -> None:
    """Runs the commands. Raises ValueError: no checkpoint, or one without a config; some commands failed."""
    commands = args.commands.replace(",", " ").split()
    if not commands or (unknown := set(commands) - COMMANDS.keys()):
        listed = ", ".join(sorted(unknown)) if commands else "none"
        raise ValueError(f"--commands: expected names from {', '.join(COMMANDS)}; found {listed}")
    trained = [named_model(str(config.parent)) for config in sorted(QUICKSTART.glob("*/finetune/config.json"))]
    models = required_models(args.models or trained)
    fitting = {command: fitting_models(command, models) for command in commands}
    rest = (args.output_dir, args.data, args.samples)
    run_all({command: command_line(command, fits, *rest) if fits else [] for command, fits in fitting.items()})
    print(f"tables and figures: {args.output_dir}")


def run_all(lines: Mapping[str, Sequence[str]]) -> None:
    """Runs command lines, by command; those without words apply to no checkpoint.

    Raises:
        ValueError: some failed.
        KeyboardInterrupt: one was interrupted.
    """
    failed = []
    for command, words in lines.items():
        print(f"\n=== {command}", flush=True)
        if not words:
            print(f"skipped: no checkpoint {COMMANDS[command].models}", flush=True)
            continue
        code = wait(start([sys.executable, *words], os.environ, cwd=Path.cwd()))
        if code in (INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        failed += [command] * (code != 0)
    if failed:
        raise ValueError(f"failed: {' '.join(failed)}")


def fitting_models(command: str, models: Sequence[NamedModel]) -> list[NamedModel]:
    """The models that a command applies to, by their config.json; one without it is a ValueError."""

    def fits(fields: dict) -> bool:
        normed = RECORD in fields or fields.get("mm_projector_norm") not in (None, "none")
        return {ANY: True, OURS: is_ours(fields), NORMED: normed}[COMMANDS[command].models]

    return [model for model in models if fits(config_fields(model.path))]


def command_line(
    command: str, models: Sequence[NamedModel], output_dir: Path, data: str | None = None, samples: object = None
) -> list[str]:
    """The words after `python` of one command; `data` and `samples` go to those that take them."""
    words = ["-m", PACKAGE, command]
    for model in models:
        words += ["--model", f"{model.name}={model.path}"]
    values = {"data": data, "samples": samples}
    for flag in COMMANDS[command].flags:
        words += [f"--{flag}", str(values[flag])] if values[flag] else []
    return [*words, "--output-dir", str(output_dir)]
