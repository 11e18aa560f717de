"""`python -m llava.compare run`: its steps in order, what a second call leaves out, what is refused."""

import json
import os
import signal
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from comparison_runs import Caller
from paths import ROOT
from shell import kill

from llava.compare.__main__ import main
from llava.compare.arms import Arm, parse_arm
from llava.compare.engine import DEMO
from llava.compare.plan import read_plan
from llava.compare.planned import Planned
from llava.compare.quickstart import Quickstart
from llava.compare.run import Comparison
from llava.compare.runs import is_finished
from llava.launch.settings import NAMES
from llava.utils.provenance import DONE


@pytest.mark.slow
def test_every_step_in_order_a_killed_call_leaves_a_lock_and_a_rerun_resumes_or_trains_nothing(tmp_path):
    call = Caller(tmp_path, "run", NUM_GPUS=1, LAUNCHER="python", ANALYSIS="theory", DATA=tmp_path / "data.json")
    flags = ("--arms", "none,layernorm@default", "--seeds", "7,", "--tasks", "pope")
    last = "train 7 layernorm@default pretrain"
    calls, _, _, family = call.signalled(last, signal.SIGKILL, *flags, HANGS=last)
    assert calls == ["train 7 none pretrain", "train 7 none finetune", "evaluate none", last]
    locked = call(*flags, LOCK_SECONDS=1)  # the training lives on and writes into the folder
    assert locked.returncode == 2 and "waiting for its end" in locked.stderr and not call.seen()
    assert "in use by another call or by a training that it left; wait for its end" in locked.stderr
    kill(family)
    done = call(*flags, LOCK_SECONDS=5)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = ["evaluate none", "evaluate layernorm@default", "measure theory analysis"]
    lines = call.seen()
    assert [line for line in lines if line.startswith("train")] == [last, "train 7 layernorm@default finetune"]
    assert [line for line in lines if not line.startswith("train")] == measured
    assert (call.out / "report.html").is_file()
    assert call(*flags).returncode == 0 and call.seen() == measured  # which find out what is finished


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset", "no"], "--preset: invalid choice: 'no'"),
        (["--seeds", "0"], "--seeds 0"),
        (["--arms", "none,batchnorm"], "'batchnorm' is not one of: none, layernorm"),
        (["--arms", "none,layernorm@0x"], "--mm_projector_norm_init"),
        (["--arms", "layernorm,none"], "baseline"),
        (["--epochs", "3"], "--epochs"),
    ],
)
def test_wrong_arguments_are_refused_by_name_before_anything_runs(tmp_path, capsys, flags, named):
    try:
        status = main(["run", "--output-dir", str(tmp_path / "out"), *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


COMMANDS = {
    "compare, demo": lambda folder: ["llava.compare", "run", "--preset", "demo", "--output-dir", folder],
    "compare, recipe": lambda folder: ["llava.compare", "run", "--output-dir", folder],
    "plan": lambda folder: ["llava.compare", "run", "--plan", str(PLAN), "--output-dir", folder],
    "quickstart": lambda folder: ["llava.compare", "quickstart", "--output-dir", folder],
}
PLAN = ROOT / "docs/data/study-plan.json"
PLANNED = {"plan": {"MAX_STEPS"}}
VALUES = {"DRY_RUN": "1"}


def settings_of_runs(command: str, folder: Path) -> list[dict[str, str]]:
    """The variables that each run's script is called with, besides the caller's."""
    arms, seeds, demo = ["none", "layernorm"], [42, 43], DEMO if command != "compare, recipe" else "llama-3.2-3b"
    if command == "quickstart":
        experiment = Quickstart(demo, arms, [], folder, "scenes")
    elif command == "plan":
        experiment = Planned(demo, arms, seeds, folder, plan=read_plan(PLAN))
    else:
        experiment = Comparison(demo, arms, seeds, folder)
    return list(experiment.every_settings())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_variable_of_the_recipe_is_honoured_in_every_run_or_refused(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(Quickstart, "recipe", lambda *_: {})
    on_cpu = SimpleNamespace(on_gpu=False)
    for module in ("quickstart", "engine"):
        monkeypatch.setattr(f"llava.compare.{module}.resolve_devices", lambda environment: on_cpu)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    refused = set()
    for name in sorted(NAMES):
        value = VALUES.get(name, "/own/value")
        with monkeypatch.context() as own:
            own.setenv(name, value)
            try:
                reached = {(os.environ | settings)[name] for settings in settings_of_runs(command, tmp_path)}
            except ValueError as error:  # the quickstart refuses as soon as it is made
                assert f"{name}={value}: " in str(error)
                refused.add(name)
                continue
            if reached == {value} and name not in PLANNED.get(command, ()):
                continue
            module, *words = COMMANDS[command](str(tmp_path / "out"))
            assert import_module(f"{module}.__main__").main(words) != 0
            assert f"{name}={value}: " in capsys.readouterr().err
            refused.add(name)
    assert not (tmp_path / "out").exists()
    assert {"PRESET", "NORM", "OUTPUT_DIR", "DRY_RUN"} <= refused
    assert not refused & {"DATA_PATH", "IMAGE_FOLDER", "MODEL_PATH", "LEARNING_RATE", "EVAL_DATA_PATH", "LORA"}


@pytest.mark.parametrize("weights", ["model.safetensors", "model-1-of-2.safetensors", "adapter_model.safetensors"])
def test_a_stage_is_finished_with_its_mark_and_its_weights_or_adapters(tmp_path, weights):
    assert not is_finished(tmp_path)
    (tmp_path / DONE).touch()
    assert not is_finished(tmp_path)
    (tmp_path / weights).touch()
    assert is_finished(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question_id": 1, "text": "Is it?"}, "no expected answer"),
        ({"question_id": 1, "text": "Is it?", "expected": "3", "kind": "yes_no"}, "'3' cannot be the expected answer"),
        ({"question_id": 0, "text": "Is it?", "expected": "3"}, "the id 0 is also that of"),
    ],
)
def test_own_questions_without_a_score_are_refused_before_anything_runs(tmp_path, capsys, record, message):
    good = {"question_id": 0, "text": "Was it?", "expected": "yes"}
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(question) + "\n" for question in (good, record)))
    words = ["run", "--output-dir", str(tmp_path / "out"), "--questions", str(tmp_path / "mine.jsonl")]
    assert main([*words, "--question-images", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--questions" in error and message in error and not (tmp_path / "out").exists()


def test_an_arm_is_a_norm_and_its_initial_norm():
    assert parse_arm("none") == Arm("none", "")
    assert parse_arm("gwc_layernorm") == Arm("gwc_layernorm", "text_norm")
    assert parse_arm("rmsnorm@0.25x") == Arm("rmsnorm", "0.25x")
    assert parse_arm("layernorm@default") == Arm("layernorm", "default")
    assert parse_arm("rmsnorm-fixed") == Arm("rmsnorm", "text_norm", learnable=False)
    assert parse_arm("rmsnorm@4x-fixed") == Arm("rmsnorm", "4x", learnable=False)
