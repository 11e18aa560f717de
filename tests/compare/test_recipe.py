"""`llava.Recipe`: the scripts' run from Python, its failures, and both stages with an answer."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT
from PIL import Image
from run_inputs import inputs_in

from llava import Recipe, asking
from llava.launch.recipe import STAGES
from llava.utils import plugins

# In place of Python: a rank that prints and fails.
STAND_IN_TRAINER = f"""#!{sys.executable}
print("step 1", flush=True)
raise SystemExit("loss is not finite")
"""


@pytest.fixture
def stand_in(tmp_path):
    """Variables of a stage 1 whose trainer is a stand-in."""
    python = tmp_path / "python"
    python.write_text(STAND_IN_TRAINER)
    python.chmod(0o755)
    own = {"LLAVA_PYTHON": python, "OUTPUT_DIR": tmp_path / "out"}
    return {name: str(value) for name, value in (own | inputs_in(tmp_path)).items()}


def printed(stage, *flags, **variables):
    """What `DRY_RUN=json` prints."""
    own = {"DRY_RUN": "json", "LLAVA_PYTHON": sys.executable, "PYTHON": sys.executable}
    command = ["bash", ROOT / f"scripts/{stage}.sh", *flags]
    return json.loads(subprocess.run(command, env=os.environ | own | variables, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_equals_what_the_script_prints_with_the_same_variables(stage, monkeypatch):
    for name in ("LLAVA_PYTHON", "PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WARMUP_RATIO", "0.25")  # the environment counts as in a shell
    recipe = Recipe("demo", norm="rmsnorm", num_gpus=0, deepspeed_config=None)
    plan = recipe.plan(stage, "--max_grad_norm", "0.5", learning_rate=2e-4, max_steps=7)
    given = {"NORM": "rmsnorm", "PRESET": "demo", "NUM_GPUS": "0", "DEEPSPEED_CONFIG": ""}
    given |= {"LEARNING_RATE": "0.0002", "MAX_STEPS": "7"}
    assert plan == printed(stage, "--max_grad_norm", "0.5", **given)
    assert plan["flags"]["warmup_ratio"] == "0.25" and plan["flags"]["max_grad_norm"] == "0.5"
    assert "max_steps" not in recipe.variables and recipe.plan(stage)["flags"]["max_steps"] != "7"


def test_keywords_values_and_stages_that_mean_nothing_are_refused():
    for name, meant in (("nrom", "did you mean norm[?]"), ("dry_run", "plan[(]stage[)] returns what would run")):
        with pytest.raises(TypeError, match=f"^{name}.*{meant}"):
            Recipe("demo").plan("pretrain", **{name: 1})
    with pytest.raises(TypeError, match=r"^tunable_parts=\['mm_mlp_adapter'\]: expected text"):
        Recipe(tunable_parts=["mm_mlp_adapter"])
    with pytest.raises(ValueError, match="^output_dir=x: both stages would write there"):
        Recipe(output_dir="x")
    with pytest.raises(ValueError, match="^stage 'train' is not one of: pretrain, finetune"):
        Recipe("demo").plan("train")


def test_a_recipe_in_another_clone_is_refused_by_both_paths(tmp_path, monkeypatch):
    (tmp_path / "llava/compare").mkdir(parents=True)
    (tmp_path / "llava/compare/recipe.py").touch()
    monkeypatch.chdir(tmp_path / "llava")
    with pytest.raises(ValueError, match=f"^{tmp_path} is a clone of its own, but Python imports llava from {ROOT}"):
        Recipe("demo")


def test_a_failed_run_is_an_error_below_what_it_printed(stand_in, monkeypatch, capfd):
    for name, value in stand_in.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="^pretrain failed with status 1; "):
        Recipe("demo", num_gpus=0).pretrain()
    printed = capfd.readouterr()
    assert printed.out.startswith(f"pretrain: the scripts of {ROOT}\n") and "step 1\n" in printed.out
    assert "loss is not finite\n" in printed.out + printed.err


@pytest.mark.slow
def test_both_stages_and_an_answer(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAVA_PYTHON", sys.executable)
    monkeypatch.setattr(plugins, "digests", {})
    data, own = tiny / "data", tmp_path / "own.py"
    own.write_text("")
    shared = {"model_path": tiny / "llama", "vision_tower": tiny / "siglip", "image_folder": data / "images"}
    shared |= {"plugins": own}
    recipe = Recipe("demo", norm="gwc_layernorm", num_gpus=0, max_steps=1, bf16=False, report_to="none", **shared)
    recipe.pretrain(data_path=data / "pretrain.json", output_dir=tmp_path / "first")
    assert (tmp_path / "first/mm_projector.bin").is_file()
    monkeypatch.setenv("PRETRAIN_ADAPTER", "of another run")
    assert recipe.plan("finetune")["flags"]["pretrain_mm_mlp_adapter"] == f"{tmp_path}/first/mm_projector.bin"
    assert recipe.finetune(data_path=data / "finetune.json", output_dir=tmp_path / "second") is recipe

    loads, load = [], asking.load_assistant
    monkeypatch.setattr(asking, "load_assistant", lambda *words: loads.append(words) or load(*words))
    Image.new("RGB", (20, 16), "red").save(tmp_path / "red.png")
    answers = [recipe.ask(tmp_path / "red.png", "Which colour?", max_new_tokens=4) for _ in range(2)]
    assert loads == [(str(tmp_path / "second"),)] and [*plugins.digests] == ["own.py"]
    turns = [[{"from": "human", "value": "<image>\nWhich colour?"}]]
    picture = Image.open(tmp_path / "red.png")
    expected = load(str(tmp_path / "second")).answer(turns, [picture], do_sample=False, max_new_tokens=4)
    assert answers == expected * 2
    with pytest.raises(ValueError, match="^picture .*none.png: no such file"):
        recipe.ask(tmp_path / "none.png", "Which colour?")
