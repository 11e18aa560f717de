"""`python -m llava.compare run`: its steps in order, what a second call leaves out, what is refused."""

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import study_stub
from paths import ROOT
from run_inputs import inputs_in
from shell import kill, new_lines, only

from llava.compare.__main__ import main
from llava.compare.arms import Arm, parse_arm
from llava.compare.comparison import Comparison
from llava.compare.engine import DEMO
from llava.compare.plan import read_plan
from llava.compare.planned import Planned
from llava.compare.quickstart import Quickstart
from llava.compare.runs import is_finished
from llava.launch.settings import NAMES
from llava.utils.provenance import DONE


@pytest.fixture
def compare(tmp_path):
    """A function that runs the script, or with `start` starts it, and one that returns and clears the calls."""
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {study_stub.__file__} "$@"\n')
    python.chmod(0o755)
    env = {"LLAVA_PYTHON": python, "CALLS": calls, "DATA": tmp_path / "data.json"} | inputs_in(tmp_path)
    env |= {"NUM_GPUS": 1, "DEEPSPEED_CONFIG": "", "LAUNCHER": "python", "HOME": tmp_path, "PYTHONPATH": ROOT}
    env |= {"ANALYSIS": "theory", "BF16": "False"}

    def run(*flags, start=False, **extra):
        words = [sys.executable, "-m", "llava.compare", "run", "--output-dir", str(out), *flags]
        variables = only(**env | extra)
        if not start:
            return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        return subprocess.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)

    run.out = out
    return run, new_lines(calls)


def wait_for(line, seen):
    lines = []
    for _ in range(900):
        time.sleep(0.1)
        lines += seen()
        if line in lines:
            return
    raise AssertionError(f"{line} never came: {lines}")


@pytest.mark.slow
def test_every_step_in_order_and_a_rerun_trains_nothing(compare):
    run, seen = compare
    flags = ("--arms", "none,layernorm@default", "--seeds", "7,", "--tasks", "pope")
    done = run(*flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen() == [
        "train 7 none pretrain",
        "train 7 none finetune",
        "evaluate none",
        "train 7 layernorm@default pretrain",
        "train 7 layernorm@default finetune",
        "evaluate layernorm@default",
        "measure theory analysis",
    ]
    assert (run.out / "report.html").is_file()
    assert run(*flags).returncode == 0
    again = ["evaluate none", "evaluate layernorm@default", "measure theory analysis"]
    assert seen() == again  # which find out what is finished


@pytest.mark.slow
def test_runs_that_differ_stop_the_comparison_before_more_is_trained(compare):
    run, seen = compare
    done = run("--arms", "none,layernorm", OTHER="train 42 layernorm pretrain")
    assert done.returncode == 2 and "training.learning_rate: 1.0 (none, seed 42), 2.0 (layernorm" in done.stderr
    assert seen()[-1] == "train 42 layernorm pretrain"


@pytest.mark.slow
def test_killed_while_training_a_rerun_waits_for_the_training_and_resumes(compare):
    run, seen = compare
    process = run("--arms", "none,layernorm", start=True, HANGS="train 42 layernorm pretrain")
    wait_for("train 42 layernorm pretrain", seen)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(timeout=60)
    locked = run("--arms", "none,layernorm", LOCK_SECONDS=1)  # the training lives on and writes into the folder
    assert locked.returncode == 2 and "waiting for its end" in locked.stderr and not seen()
    assert "in use by another call or by a training that it left; wait for its end" in locked.stderr
    kill(family)
    done = run("--arms", "none,layernorm", LOCK_SECONDS=5)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = [line for line in seen() if line.startswith("train")]
    assert trained == [f"train 42 layernorm {stage}" for stage in ("pretrain", "finetune")]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset", "no"], "--preset: invalid choice: 'no'"),
        (["--seeds", "0"], "--seeds 0"),
        (["--seeds", "1,1"], "seed twice"),
        (["--arms", "none,batchnorm"], "'batchnorm' is not one of: none, layernorm"),
        (["--arms", "none,layernorm@0x"], "--mm_projector_norm_init"),
        (["--arms", "layernorm,none"], "baseline"),
        (["--arms", "none,none"], "arm twice"),
        (["--arms", "none,none@default"], "none@default"),
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


def test_the_demo_s_pictures_give_way_to_the_caller_s_data_and_stamps_are_fetched_only_for_their_task(tmp_path):
    comparison = Comparison(DEMO, ["none", "layernorm"], [42], tmp_path)
    assert not any("DATA_PATH" in settings for settings in comparison.every_settings())
    comparison.tasks = "scenes"
    assert comparison.prepared() == ["smollm2", "scenes", "tower", "heldout"]
    comparison.tasks = "stamps"
    assert comparison.prepared() == ["smollm2", "scenes", "stamps", "tower", "heldout"]


@pytest.mark.parametrize("weights", ["model.safetensors", "model-1-of-2.safetensors", "adapter_model.safetensors"])
def test_a_stage_is_finished_with_its_mark_and_its_weights_or_adapters(tmp_path, weights):
    assert not is_finished(tmp_path)
    (tmp_path / DONE).touch()
    assert not is_finished(tmp_path)
    (tmp_path / weights).touch()
    assert is_finished(tmp_path)


def test_an_arm_is_a_norm_and_its_initial_norm():
    assert parse_arm("none") == Arm("none", "")
    assert parse_arm("gwc_layernorm") == Arm("gwc_layernorm", "text_norm")
    assert parse_arm("rmsnorm@0.25x") == Arm("rmsnorm", "0.25x")
    assert parse_arm("layernorm@default") == Arm("layernorm", "default")
    assert parse_arm("rmsnorm-fixed") == Arm("rmsnorm", "text_norm", learnable=False)
    assert parse_arm("rmsnorm@4x-fixed") == Arm("rmsnorm", "4x", learnable=False)
