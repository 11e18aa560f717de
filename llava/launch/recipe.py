"""A recipe's numbers for whoever needs them: they stand in the scripts and presets, and are read from there."""

import json
import os
import subprocess
from typing import Any

from llava.launch.settings import ROOT


def resolved_run(stage: str, *flags: str, **variables: Any) -> dict[str, Any]:
    """What `scripts/<stage>.sh` would run with these variables and no others, as `DRY_RUN=json` prints it.

    Raises:
        ValueError: the script refuses; the message is its own.
    """
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHON") if name in os.environ}
    env = kept | {name: str(value) for name, value in variables.items()} | {"DRY_RUN": "json"}
    command = ["bash", str(ROOT / f"scripts/{stage}.sh"), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("error: "))
    return json.loads(done.stdout)
