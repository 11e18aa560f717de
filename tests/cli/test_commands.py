"""What all commands have in common: checked precisions, refusals of one line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

from llava.analysis import __main__ as analysis
from llava.eval import evaluate
from llava.model import merge_lora


def refusal(main, argv: list[str], capsys) -> str:
    """The one line on stderr of a command that exits with status 2."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (analysis.main, ["interface-norms", "--model", "x"]),
        (merge_lora.main, ["--model-path", "x", "--save-model-path", "y"]),
    ],
)
def test_unknown_precision_is_refused_in_one_line(main, argv, capsys):
    line = refusal(main, [*argv, "--dtype", "float33"], capsys)
    assert "--dtype" in line and "float33" in line and "bfloat16" in line


@pytest.mark.parametrize(
    ("count", "said"),
    [("-1", "--num-gpus: expected a whole number of at least 0, found '-1'"),
     ("99", "--num-gpus 99: this machine has 2; expected 0 (CPU) to 2")],
)  # fmt: skip
def test_gpus_that_this_machine_lacks_are_refused(count, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert said in refusal(evaluate.main, ["x", "--num-gpus", count], capsys)


# --- the scripts ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_tree(tmp_path):
    """A copy of the scripts without an environment, and a PATH whose Python and pip leave a trace."""
    shutil.copytree(ROOT / "scripts", tmp_path / "tree/scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / "tree")
    (tmp_path / "bin").mkdir()
    for name in ("python", "python3", "pip", "uv", "deepspeed", "torchrun"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/tree/called\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "tree", f"{tmp_path}/bin:{os.environ['PATH']}"


def call(tree: Path, path: str, *command: str) -> subprocess.CompletedProcess:
    """Calls a script from a folder below the root, by a relative path that is wrong from anywhere else."""
    options = {"cwd": tree / "scripts/presets", "env": {"PATH": path, "HOME": str(tree)}, "timeout": 60}
    return subprocess.run(["bash", *command], capture_output=True, text=True, **options)


@pytest.mark.parametrize("script", ["setup", "upstream_baseline"])
def test_an_argument_of_a_script_that_takes_none_is_refused_first(fresh_tree, script):
    tree, path = fresh_tree
    before = sorted(tree.rglob("*"))
    run = call(tree, path, f"../{script}.sh", "--epochs")
    assert run.returncode == 2 and "--epochs" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert sorted(tree.rglob("*")) == before


def test_the_chats_help_loads_no_library_that_takes_seconds():
    code = "import sys; from llava.serve import cli; cli.parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "transformers", "numpy", "PIL"} & set(done.stdout.split())
