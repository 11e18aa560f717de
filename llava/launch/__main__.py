"""Starts training on any number of devices and nodes: `python3 -m llava.launch llava/train/train_mem.py FLAGS`.

scripts/pretrain.sh and scripts/finetune.sh end here, with the recipe's flags and then the caller's. Batch arithmetic,
launcher and precision follow from the devices. Until training starts, nothing but Python 3.11 is needed.

Exit status: 0, 2 for a refused setting or an input that is missing (of a dry run too), 85 where a signal ended the run
after a save (start it again), 130 after a second Ctrl-C, or else the launcher's.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from llava.launch.command import node_rank, preloads
from llava.launch.plan import Plan, as_json, command_text, resolve, show
from llava.launch.settings import Refusal, help_text, is_on, parse_flags, refuse_misspelt
from llava.launch.supervise import INTERRUPTED, supervise
from llava.utils.machine import available_cores
from llava.utils.paths import CODE, IS_CHECKOUT, ROOT

COMMAND_FILE = "command.sh"


def main(words: list[str], environment: Mapping[str, str]) -> int:
    """Runs what the words and variables say; returns the exit status."""
    if not words or {"-h", "--help"} & set(words):
        flags = parse_flags([word for word in words[1:] if word not in ("-h", "--help")])
        print(help_text(environment, flags.values()))
        return 0
    refuse_misspelt(environment)
    plan = resolve(environment, program(words[0]), words[1:], available_cores())
    as_data, is_dry = environment.get("DRY_RUN") == "json", is_on(environment.get("DRY_RUN", ""))
    print(as_json(plan) if as_data else show(plan), flush=True)
    if is_dry and not as_data:
        if plan.devices.on_gpu:
            print(memory_rows(plan, environment), flush=True)
        print("dry run: nothing was installed or started", flush=True)
    if plan.problems:
        raise Refusal(f"{len(plan.problems)} input(s) are MISSING or WRONG, see the list above")
    return 0 if is_dry else start(plan, environment)


def memory_rows(plan: Plan, environment: Mapping[str, str]) -> str:
    """What the run takes of a card by the trainer's estimate, which needs both models' configs and the packages."""
    words = [plan.python, "-m", "llava.train.memory", str(plan.devices.total)]
    words += [word for given in plan.flags.given.values() for word in given]
    try:
        run = subprocess.run(words, env={**environment, **plan.launch.environment}, capture_output=True, text=True)
    except OSError:
        run = None
    if run and run.returncode == 0:
        return f"memory of a card, by estimate\n{run.stdout.rstrip()}"
    return "memory of a card: no estimate without the packages and both models' configs; docs/scale.md has the presets'"


def start(plan: Plan, environment: Mapping[str, str]) -> int:
    """Prepares the environment, writes the command into the output folder, trains, and returns the exit status."""
    subprocess.run(["bash", str(ROOT / "scripts/setup.sh")], check=True)
    first_node = node_rank(environment) in ("", "0")
    is_new = not plan.output_dir.exists()
    try:
        plan.output_dir.mkdir(parents=True, exist_ok=True)
        run_before = run_file_stamp(plan.output_dir)
        if first_node and not any(plan.output_dir.iterdir()):
            record_command(plan)
    except OSError as error:
        raise Refusal(f"--output_dir {plan.output_dir} cannot be written: {error.strerror}; take another") from None
    variables = {**environment, **plan.launch.environment}
    if not plan.devices.on_gpu:
        variables |= (preloaded := preloads(environment, plan.python))
        if library := preloaded.get("LD_PRELOAD"):
            print(f"note: {library} loaded for speed on a CPU; LD_PRELOAD= turns that off", flush=True)
    alone = plan.launch.launcher == "python"
    code = supervise(plan.command(plan.entry), variables, plan.output_dir, first_node=first_node, alone=alone)
    # A folder in use keeps its command unless the trainer took this one: it may refuse it, or find the run finished.
    if first_node and run_file_stamp(plan.output_dir) != run_before:
        record_command(plan)
    if is_new and code == 2 and [path.name for path in plan.output_dir.iterdir()] == [COMMAND_FILE]:
        shutil.rmtree(plan.output_dir)  # the trainer has refused its flags
    return code


def program(path: str) -> str:
    """The path at which the launcher finds a file of this package, which `path` names as in the repository."""
    return path if IS_CHECKOUT else str(CODE / path)


def run_file_stamp(output_dir: Path) -> int | None:
    """When the trainer last wrote run.json into `output_dir`, in nanoseconds; None where it never has."""
    file = output_dir / "run.json"
    return file.stat().st_mtime_ns if file.exists() else None


def record_command(plan: Plan) -> None:
    """Writes `command.sh`, which runs the same command again."""
    lines = ["#!/usr/bin/env bash", f"cd {shlex.quote(os.getcwd())} || exit", command_text(plan, plan.entry)]
    Path(plan.output_dir, COMMAND_FILE).write_text("\n".join(lines) + "\n")


def exit_status() -> int:
    """Runs `main` on the command line and returns the exit status; a refusal is printed in one line."""
    try:
        status = main(sys.argv[1:], os.environ)
        sys.stdout.flush()  # here, or Python does it at its end, where nothing can be caught
        return status
    except BrokenPipeError:  # as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:  # scripts/setup.sh, which has said why
        return error.returncode
    except KeyboardInterrupt:
        print("interrupted: nothing was started", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(exit_status())
