"""transformers' own test mixins: what passes on its LLaVA classes passes on the exported ones, with every norm.

`TRANSFORMERS_TESTS` is a folder; `bash scripts/test_all.sh mixins` sets it. It is a checkout of the installed release,
or the tests of that release's source distribution are unpacked there, which leaves `GenerationTesterMixin` out.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers
from paths import ROOT

from llava.model.multimodal_projector.norm import NORM_TYPES

RELEASE = f"transformers-{transformers.__version__}"
REQUIRED = "parameterized==0.9.0"  # by the mixins
PAIRS = [("stock", norm) for norm in NORM_TYPES]
"""Classes of `mixin_classes.py`: the library's, and the exported one that is held to it."""
LEAST = {"ModelTesterMixin": 80, "GenerationTesterMixin": 20}
"""So many tests at least pass on the stock class; fewer say that the mixins did not run."""
EXCEPTIONS = {
    "test_reverse_loading_mapping": "skips itself: no older release saved this model type's weights under other names",
    "test_can_init_all_missing_weights": "of a class outside transformers from_pretrained draws CLIP's missing linear "
    "layers with the usual deviation, not CLIP's own; an export has all weights",
}
"""Tests that pass on the stock class alone, each with the reason."""
LEFT_OUT = {  # by source distributions; the mixins import them
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TRANSFORMERS_TESTS" not in os.environ, reason="bash scripts/test_all.sh mixins runs them"),
]


def pip(*words: object) -> str:
    """Runs pip; returns what it says of a failure, or nothing."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "20", *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    return done.stderr.strip()[-300:] if done.returncode else ""


def release_of(checkout: Path) -> str:
    """The release of the checkout's own package."""
    lines = (checkout / "src/transformers/__init__.py").read_text().splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("__version__"))


def unpack(folder: Path) -> None:
    """Unpacks the tests of the installed release's source distribution; skips where it cannot be downloaded."""
    source = ["--no-binary", "transformers", "--no-build-isolation", RELEASE.replace("-", "==")]
    if fault := pip("download", "--no-deps", "--dest", folder, *source):
        pytest.skip(f"the source distribution of {RELEASE} cannot be had from PyPI here: {fault}")
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as tar:
        tests = [member for member in tar if member.name.startswith(f"{RELEASE}/tests/")]
        tar.extractall(folder, tests, filter="data")
    archive.unlink()
    for file, stub in LEFT_OUT.items():
        path = folder / RELEASE / "tests" / file
        path.parent.mkdir()
        path.write_text(stub)
    for package in ("", *(Path(file).parent for file in LEFT_OUT)):
        (folder / RELEASE / "tests" / package / "__init__.py").touch()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder whose `tests` is the library's package, and that of what it imports."""
    folder, packages = Path(os.environ["TRANSFORMERS_TESTS"]).resolve(), tmp_path_factory.mktemp("packages")
    if fault := pip("install", "-q", "--no-deps", "--no-compile", "--target", packages, REQUIRED):
        pytest.skip(f"{REQUIRED} cannot be had from PyPI here: {fault}")
    if (folder / "tests").is_dir():
        assert release_of(folder) == transformers.__version__, f"{folder} is a checkout of another release"
        return folder, packages
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RELEASE).is_dir():
        unpack(folder)
    return folder / RELEASE, packages


@pytest.fixture(scope="module")
def results(root, tmp_path_factory):
    """`outcomes[class][test]` and `mixin of[test]`, of all classes of `mixin_classes.py`."""
    file, path = tmp_path_factory.mktemp("mixins") / "outcomes.json", os.pathsep.join(map(str, (*root, ROOT)))
    env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "tests/helpers/mixin_classes.py", file]
    done = subprocess.run(command, cwd=root[0], env=env, capture_output=True, text=True, check=False)
    assert file.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(file.read_text())
    results["log"] = done.stdout
    for name in sorted(results["mixin of"]):
        found = [f"{kind} {outcomes.get(name)}" for kind, outcomes in results["outcomes"].items()]
        print(f"{results['mixin of'][name]}::{name}: {', '.join(found)}")
    return results


@pytest.mark.parametrize(("stock", "exported"), PAIRS)
@pytest.mark.parametrize("mixin", LEAST)
def test_what_passes_on_the_stock_class_passes_on_the_exported_one(results, mixin, stock, exported):
    names = {name for name, of in results["mixin of"].items() if of == mixin}
    if not names:
        pytest.skip(f"a source distribution leaves {mixin} out; set TRANSFORMERS_TESTS to a checkout of {RELEASE}")
    theirs, ours = results["outcomes"][stock], results["outcomes"][exported]
    passed = {name for name in names if theirs.get(name) == "passed"}
    assert len(passed) >= LEAST[mixin], results["log"][-3000:]
    missing = {name: ours.get(name) for name in passed if ours.get(name) != "passed"}
    assert {*missing} == {*EXCEPTIONS} & names, f"{missing}\n{results['log'][-6000:]}"
