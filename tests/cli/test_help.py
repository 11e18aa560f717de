"""Help needs no environment, and says how to make one; GPUs that are not there are refused."""

import shutil
import sys

import torch
from paths import ROOT
from shell import bash

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


def test_gpus_that_this_machine_lacks_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert evaluate.main(["x", "--num-gpus", "99"]) == 2
    assert "--num-gpus 99: this machine has 2; expected 0 (CPU) to 2" in capsys.readouterr().err
