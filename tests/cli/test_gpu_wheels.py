"""The wheels that benchmarks/gpu_check.sh collects for a machine without network."""

import os
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

from benchmarks import gpu_wheels

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


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_the_list_is_all_that_this_tree_and_deepspeed_require_beyond_pytorch(python):
    pytest.importorskip("deepspeed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [Requirement(line).name for line in project["dependencies"]]
    assert closure([*ours, "deepspeed", "liger-kernel", "pytest"], python, BARE) == set(gpu_wheels.NEEDED)


def test_a_large_wheel_travels_in_pieces_and_is_installed_when_all_have_come(monkeypatch, tmp_path):
    def pip(verb, *words):
        target = words[words.index("--target") + 1]
        (target / "folder").mkdir(parents=True)
        (target / "b.pth").write_text("folder\n")
        (target / "folder/in_folder.py").touch()
        installed.append({path.name: path.read_bytes() for path in joined(words)})

    def joined(words):
        return [word for word in words if str(word).endswith(".whl")]

    small, large, there, installed = tmp_path / "ours/a.whl", tmp_path / "ours/b.whl", tmp_path / "there", []
    small.parent.mkdir()
    small.write_bytes(b"small")
    large.write_bytes(bytes(range(100)) * 3)
    gpu_wheels.write_pieces([large, small], tmp_path / "pieces", 128)
    sizes = {path.parents[1].name: sum(p.stat().st_size for p in path.parent.iterdir())
             for path in (tmp_path / "pieces").glob("*/ours/*")}  # fmt: skip
    assert sizes == {"1": 128, "2": 128, "3": 49}
    monkeypatch.setattr(gpu_wheels, "pip", pip)
    monkeypatch.setattr(gpu_wheels, "TARGETS", {"ours": tmp_path / "packages"})
    there.mkdir()
    for number, names in enumerate(({"a.whl"}, {"a.whl"}, {"a.whl", "b.whl"}), 1):
        (tmp_path / f"pieces/{number}").rename(there / str(number))  # one call carries one folder
        gpu_wheels.install(there)
        assert installed[-1].keys() == names
    gpu_wheels.install(there)
    # A wheel may name a further folder in a `.pth` file.
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    subprocess.run([sys.executable, "-c", "import in_folder"], env=environment, check=True)
    assert len(installed) == 2 and installed[-1] == {"a.whl": b"small", "b.whl": bytes(range(100)) * 3}
