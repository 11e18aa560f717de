"""Scripts in an environment of which the test says every variable."""

import os
import subprocess
from pathlib import Path

from paths import ROOT


def only(**env: object) -> dict[str, str]:
    """An environment with nothing but these variables, so that the caller's cannot change the outcome."""
    measured = {k: v for k, v in os.environ.items() if k.startswith("COVERAGE_")}  # COVERAGE=1 bash scripts/test.sh
    return (
        measured
        | {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
        | {k: str(v) for k, v in env.items()}
    )


def bash(*command: str, cwd: Path = ROOT, path: str = os.environ["PATH"], **env: object) -> subprocess.CompletedProcess:
    """Runs a script with only the given variables."""
    variables = only(**env) | {"PATH": path}
    return subprocess.run(["bash", *command], cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)
