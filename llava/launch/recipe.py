"""The recipes' numbers for other parts of this tree, and the command that runs a recipe from an installed package.

The numbers stand in the scripts and presets, and are read from there.
"""

import json
import os
import subprocess
import sys
from typing import Any

from llava.utils.paths import IS_CHECKOUT, ROOT

STAGES = ("pretrain", "finetune")
INTERPRETER = {"LLAVA_PYTHON": sys.executable, "PYTHON": sys.executable}
"""The variables that make the scripts of an installed package use this interpreter."""


def resolved_run(stage: str, /, *flags: str, **variables: object) -> dict[str, Any]:
    """What `scripts/<stage>.sh` would run with these variables and no others, as `DRY_RUN=json` prints it.

    Its inputs need not be there; `problems` lists those that are not.

    Raises:
        ValueError: the script refuses; the message is its own.
    """
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHON") if name in os.environ}
    env = (
        inherited
        | ({} if IS_CHECKOUT else INTERPRETER)
        | {name: str(value) for name, value in variables.items()}
        | {"DRY_RUN": "json"}
    )
    command = ["bash", str(ROOT / f"scripts/{stage}.sh"), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if not done.stdout:  # with inputs that are not there yet the status is 2, and the run is printed
        raise ValueError(done.stderr.strip().removeprefix("error: "))
    return json.loads(done.stdout)


def main() -> int:
    """`llava-recipe STAGE`: replaces this process by `scripts/<stage>.sh`; returns 2 where there is no such stage."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(f"usage: [NAME=value ...] llava-recipe {'|'.join(STAGES)} [--flag value ...]")
        print("Runs a stage's recipe with this environment; llava-recipe STAGE --help explains the variables.")
        return 0
    if sys.argv[1:2] not in ([stage] for stage in STAGES):
        stage = sys.argv[1] if sys.argv[1:] else "nothing"
        print(f"error: llava-recipe {stage}: expected {' or '.join(STAGES)}; see --help", file=sys.stderr)
        return 2
    stage, *flags = sys.argv[1:]
    os.execvpe("bash", ["bash", str(ROOT / f"scripts/{stage}.sh"), *flags], INTERPRETER | os.environ)
