"""The wheels that benchmarks/gpu_check.sh collects for a machine without network."""

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
