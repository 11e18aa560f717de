"""The wheels that benchmarks/gpu_check.sh collects for a machine without network."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

from benchmarks import common
from llava.utils import versions

SCRIPT = ROOT / "benchmarks/gpu_check.sh"
NEEDED = set(re.search(r'^NEEDED="([^"]*)"', SCRIPT.read_text(), re.MULTILINE)[1].split())
# What every supported release of PyTorch and transformers requires. Newer releases require more (pydantic), so that the
# requirements of the releases that are installed here do not say what the other machine has.
BARE = ("torch", "triton", "transformers", "numpy", "packaging", "pyyaml", "tqdm", "filelock", "huggingface-hub",
        "safetensors", "tokenizers")  # fmt: skip


def closure(names, python: str, without) -> set[str]:
    """`names` and all that they require on Linux with that Python, except `without`, by the installed metadata."""
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    complete, new = set(), set(map(canonicalize_name, names)) - set(without)
    while new:
        complete |= new
        lines = [line for name in new for d in list(metadata.distributions(name=name))[:1] for line in d.requires or ()]
        applies = [r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate(machine)]
        new = {canonicalize_name(r.name) for r in applies} - complete - set(without)
    return complete


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_list_is_all_that_this_tree_and_deepspeed_require_beyond_pytorch(python):
    pytest.importorskip("deepspeed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [Requirement(line).name for line in project["dependencies"]]
    assert closure([*ours, "deepspeed", "liger-kernel", "pytest"], python, BARE) == NEEDED


@pytest.mark.slow
def test_the_parts_import_nothing_that_is_neither_there_nor_in_a_wheel(tmp_path):
    """A folder of links holds only the wheels' packages, and what PyTorch and transformers require less pydantic."""
    pytest.importorskip("deepspeed")
    for name in closure(BARE, "{}.{}".format(*sys.version_info), {"pydantic"}) | NEEDED:
        for distribution in list(metadata.distributions(name=name))[:1]:  # setuptools brings copies of some
            for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                if not (tmp_path / top).is_symlink():
                    (tmp_path / top).symlink_to(distribution.locate_file(top))
    modules = "deepspeed, deepspeed.ops.adam, deepspeed.runtime.zero.stage3, pytest, peft, llava.train.train"
    modules += ", llava.train.llava_trainer, benchmarks.train_step, benchmarks.gpu_check"
    command = [sys.executable, "-S", "-c", f"import {modules}; from transformers import LlamaModel, SiglipVisionModel"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_without_git_has_the_commit_noted_beside_its_wheels(monkeypatch, tmp_path):
    source = tmp_path / "tree/llava/model.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1\n")
    monkeypatch.setattr(versions, "CODE", tmp_path / "tree")
    monkeypatch.setattr(common, "git_commit", lambda ignored: "8c1f+changes")
    common.write_commit(tmp_path)
    monkeypatch.setattr(common, "git_commit", lambda ignored: None)
    assert common.commit() is None
    monkeypatch.setenv("WHEELS", str(tmp_path))
    assert common.environment()["commit"] == "8c1f+changes"
    source.write_text("a = 2\n")
    assert common.commit() is None


def test_a_wrong_call_for_wheels_says_what_is_expected(tmp_path):
    (tmp_path / "old.whl").touch()
    calls = {(): "expected: wheels FOLDER --python 3.12", (tmp_path, "--python", "3"): "expected: wheels FOLDER"}
    calls[tmp_path, "--python", "3.12"] = "is not empty"
    for words, message in calls.items():
        done = subprocess.run(["bash", SCRIPT, "wheels", *words], capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr
