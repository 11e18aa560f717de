"""The wheel, installed in its own folder: its commands run from anywhere, with recipes and templates inside."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
from paths import ROOT
from vision_language_models import our_checkpoint

from llava.utils.paths import NEEDS_CHECKOUT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A function that runs a console command of the installed wheel, from an empty folder far from the repository."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    own = ("LLAVA_PYTHON", "PYTHON", "PYTHONPATH")

    def run(name, *words, **variables):
        environment = {k: v for k, v in os.environ.items() if k not in own}
        environment |= {"PYTHONPATH": str(site), **{k: str(v) for k, v in variables.items()}}
        command = [str(site / "bin" / name), *map(str, words)]
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)

    run.site, run.cwd = site, elsewhere
    return run


def test_the_wheel_carries_what_the_recipes_need_and_nothing_of_the_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name.removeprefix("llava/recipes/") for name in names if name.startswith("llava/recipes/")}
    presets = {f"scripts/presets/{path.name}" for path in (ROOT / "scripts/presets").glob("*.sh")}
    configs = {f"deepspeed_configs/{path.name}" for path in (ROOT / "deepspeed_configs").glob("*.json")}
    scripts = {f"scripts/{name}.sh" for name in ("pretrain", "finetune", "lib", "setup")}
    assert inside == presets | configs | scripts
    templates = {f"llava/compare/templates/{path.name}" for path in (ROOT / "llava/compare/templates").iterdir()}
    assert templates <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"llava"}


def test_an_analysis_and_an_export_of_a_checkpoint(installed, tiny, tmp_path):
    checkpoint = our_checkpoint(tiny, tmp_path / "checkpoint", norm="gwc_layernorm")
    done = installed("llava-analysis", "norm-params", "--model", f"ours={checkpoint}")
    assert done.returncode == 0, done.stderr
    found = json.loads((installed.cwd / "outputs/analysis/norm-params.json").read_text())
    assert found["rows"][0]["model"] == "ours" and found["provenance"]["git_commit"] is None
    done = installed("llava-export", "hf", "--model-path", checkpoint, "--output-dir", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hf/modeling_llava_norm.py").is_file()


def test_a_recipe_runs_with_its_preset_and_deepspeed_configuration_inside(installed):
    done = installed("llava-recipe", "finetune", DRY_RUN="json", PRESET="qwen2.5-7b", NUM_GPUS=8, LORA=1)
    plan = json.loads(done.stdout)
    assert done.returncode == 2 and [each.split()[0] for each in plan["problems"]] == ["data", "adapter"], done.stderr
    assert plan["flags"]["lora_r"] == "128" and plan["preset"] == "qwen2.5-7b"
    config = installed.site / "llava/recipes/deepspeed_configs/zero3.json"
    assert plan["flags"]["deepspeed"] == str(config) and config.is_file()
    assert str(installed.site / "llava/train/train_mem.py") in plan["command"]
    assert plan["flags"]["output_dir"] == "checkpoints/qwen2.5-7b-gwc_layernorm-finetune-lora"
    demo = installed("llava-recipe", "pretrain", DRY_RUN=1, PRESET="demo", COLUMNS=300)
    assert f"in a clone of the repository run: {sys.executable} -m playground all --data scenes" in demo.stdout


def test_what_a_wheel_cannot_do_is_reported_in_one_line(installed):
    done = installed("llava-compare", "quickstart", "--output-dir", "out")
    assert done.returncode in (1, 2) and done.stderr == f"error: quickstart: {NEEDS_CHECKOUT}\n"
