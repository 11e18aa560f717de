"""Help comes at once, a dry run's command is the one that runs, and refusals take one line."""

import shutil
import subprocess
import sys

import pytest
import torch
from paths import ROOT
from shell import bash, only

from llava.eval import evaluate


def test_the_help_of_a_script_makes_no_environment_and_says_how_to_make_one(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "llava").symlink_to(ROOT / "llava")
    for script in ("pretrain", "compare"):
        told = bash(str(tmp_path / f"scripts/{script}.sh"), "--help", cwd=tmp_path, LLAVA_PYTHON=sys.executable)
        assert told.returncode == 0 and told.stdout.startswith("usage: "), told.stderr
    told = bash(str(tmp_path / "scripts/compare.sh"), "--help", cwd=tmp_path, LLAVA_PYTHON="")
    assert not (tmp_path / ".venv").exists()
    assert told.returncode == 2 and "bash scripts/setup.sh" in told.stderr


LISTED = """
import atexit, runpy, sys
atexit.register(lambda: print(*(name for name, module in sys.modules.items() if module), file=sys.stderr))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["llava.serve.cli", "llava.eval.evaluate"])
def test_help_imports_no_package_that_takes_time(module):
    command = [sys.executable, "-c", LISTED, module, "--help"]
    run = subprocess.run(command, cwd=ROOT, env=only(), capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    imported = set(run.stderr.splitlines()[-1].split())
    assert "llava" in imported and not imported & {"torch", "transformers", "gradio", "deepspeed", "numpy", "pyarrow"}


def test_gpus_that_this_machine_lacks_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert evaluate.main(["x", "--num-gpus", "99"]) == 2
    assert "--num-gpus 99: this machine has 2; expected 0 (CPU) to 2" in capsys.readouterr().err
