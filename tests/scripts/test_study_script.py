"""`python -m llava.compare study`: its parts in order, its plan, what a second call leaves out, and its page."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import study_stub
from paths import ROOT
from run_inputs import inputs_in
from shell import kill, new_lines, only
from warm_python import warm_python

from llava.compare.commands import main
from llava.compare.study import MEASURED
from llava.launch.recipe import STAGES

ARMS = "none,gwc_layernorm"


@pytest.fixture
def study(tmp_path):
    """A function that runs the study, or with `start` starts it; `seen()` returns its calls since the last one."""
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {study_stub.__file__} "$@"\n')
    python.chmod(0o755)
    data = tmp_path / "data.json"
    env = {"LLAVA_PYTHON": python, "CALLS": calls, "RIGHT": json.dumps({"none": 0.4, "gwc_layernorm": 0.8})}
    env |= inputs_in(tmp_path) | {"DATA": data}
    env |= {"EVAL_DATA_PATH": data, "EVAL_IMAGE_FOLDER": tmp_path, "NUM_GPUS": 0, "BF16": "False"}
    env = only(**env, HOME=tmp_path, PYTHONPATH=ROOT, OMP_NUM_THREADS=1)

    def run(*flags, start=False, **extra):
        python = sys.executable if start else warm_python()  # what is killed is a process of its own
        words = [python, "-m", "llava.compare", "study", "--preset", "stamps", "--output-dir", out, *flags]
        options = {"cwd": ROOT, "env": {k: str(v) for k, v in (env | extra).items()}}
        if start:
            return subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True, **options)
        return subprocess.run(words, capture_output=True, text=True, check=False, **options)

    run.out, run.seen = out, new_lines(calls)
    return run


@pytest.mark.slow
def test_quick_runs_every_part_and_a_rerun_trains_and_measures_nothing(study):
    done = study("--quick", "--hours", "0.5", "--arms", ARMS)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = study.seen()
    assert calls[:4] == ["prepare all", "train 42 none pretrain", "train 42 none finetune", "answer none"]  # the pilot
    trained = [line for line in calls[4:] if line.startswith("train")]
    assert sorted(trained) == sorted(
        f"train {seed} {arm} {stage}"
        for seed in (42, 43)
        for arm in ARMS.split(",")
        for stage in ("start", "pretrain", "finetune")[seed - 42 :]
    )
    assert sum(line.startswith("answer") for line in calls[4:]) == 4
    measured = [line for line in calls if line.startswith("measure")]
    assert sorted(measured) == sorted(
        f"measure {command} analysis-{part}" for part, commands in MEASURED.items() for command in commands.split()
    )
    plan = json.loads((study.out / "plan.json").read_text())
    assert plan["seeds"] == [42, 43] and plan["pilot"]["questions"] == {"binding": 100, "color": 100, "count": 100}
    assert f"    mean         {plan['smallest']['mean']:.1f}\n" in done.stdout

    record = json.loads((study.out / "study.json").read_text())
    assert record["results"]["gwc_layernorm"]["mean"]["verdict"] == "improved"
    assert record["controls"]["blank"]["gwc_layernorm"]["score"] < 40
    assert [point["arm"] for point in record["training"]["reached"][:2]] == ARMS.split(",")
    assert '<td class="improved">improved</td>' in (study.out / "study.html").read_text()
    assert "| improved |" in (study.out / "study-numbers.md").read_text()
    assert (study.out / "figures/study-rescaling.svg").is_file()

    again = study("--quick", "--hours", "0.5", "--arms", ARMS)
    assert again.returncode == 0, again.stdout + again.stderr
    assert not [line for line in study.seen() if line.startswith(("train", "measure"))]
    for flags, message in ((["--quick", "--hours", "3"], "--hours 3.0: "), (["--hours", "0.5"], "with --quick")):
        other = study(*flags)
        assert other.returncode == 2 and message in other.stderr and "plan.json" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_killed_while_training_a_rerun_resumes(study, sent):
    flags = ("--quick", "--arms", ARMS, "--seeds", "7,8")
    process = study(*flags, start=True, ANALYSIS="theory", HANGS="train 8 none finetune")
    lines = []
    for _ in range(1200):
        time.sleep(0.1)
        lines += study.seen()
        if "train 8 none finetune" in lines:
            break
    assert "train 8 none finetune" in lines
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(sent)
    process.wait(timeout=60)
    kill(family)
    early = study("--quick", "--so-far")
    assert early.returncode == 0, early.stdout + early.stderr
    assert json.loads((study.out / "study.json").read_text())["seeds"] == [7]
    assert "1 seed of 2 not trained yet" in (study.out / "study.html").read_text()
    done = study(*flags, ANALYSIS="theory", LOCK_SECONDS=20)
    assert done.returncode == 0, done.stdout + done.stderr
    again = [line for line in study.seen() if line.startswith("train")]
    assert "train 8 none finetune" in again and "train 8 none pretrain" not in again
    assert "train 7 none pretrain" not in again and (study.out / "study.html").is_file()


@pytest.mark.slow
def test_seeds_can_be_added_to_a_finished_study_and_none_can_be_taken_away(study):
    flags = ("--quick", "--arms", "none,clip")
    early = study(*flags, "--so-far")
    assert early.returncode == 2 and "--so-far" in early.stderr and not (study.out / "study.json").exists()
    assert study(*flags, "--seeds", "7,", RIGHT='{"none": 0.4, "clip": 0.4}').returncode == 0
    study.seen()
    more = study(*flags, "--seeds", "7,9", RIGHT='{"none": 0.4, "clip": 0.4}')
    assert more.returncode == 0, more.stdout + more.stderr
    trained = [line for line in study.seen() if line.startswith("train")]
    assert sorted(trained) == sorted(f"train 9 {arm} {stage}" for arm in ("none", "clip") for stage in STAGES)
    assert json.loads((study.out / "study.json").read_text())["seeds"] == [7, 9]
    fewer = study(*flags, "--seeds", "9,")
    assert fewer.returncode == 2 and "--seeds [9]" in fewer.stderr and "plan.json" in fewer.stderr
    study.seen()
    refused = study(*flags, "--seeds", "7,9", LEARNING_RATE="0.5")
    assert refused.returncode == 2 and study.seen() == ["prepare all"]
    assert f"{study.out}/seed-7/none/pretrain was trained with different flags\n  learning_rate: " in refused.stderr
    assert "(trained), '0.5' (now)" in refused.stderr


@pytest.mark.slow
def test_a_written_plan_is_run_seed_by_seed_recorded_resumed_and_repeated(study, tmp_path):
    file, runs, arms = tmp_path / "study-plan.json", tmp_path / "study-runs.json", ["none", "clip", "layernorm"]
    plan = {"preset": "stamps", "arms": arms, "primary": ["layernorm"], "seeds": [101, 102, 103]}
    tasks = {task: {"right": 90, "questions": 96, "chance": 25.0} for task in ("color", "count")}
    plan["trials"] = [{"seed": 7, "tasks": tasks, "samples": [0, 40, 80], "loss": [2.0, 1.45, 1.2]}]
    plan |= {"steps": {"pretrain": 4, "finetune": 6}, "tasks": ["color", "count"], "margin": 3}
    file.write_text(json.dumps(plan | {"pilot": str(ROOT / "docs/study.json")}))
    right = json.dumps({"none": 0.4, "clip": 0.4, "layernorm": 0.8})
    stopped = study("--plan", file, start=True, RIGHT=right, HANGS="train 103 clip finetune")
    while "train 103 clip finetune" not in (calls := study.seen()) and stopped.poll() is None:
        time.sleep(0.2)
    assert stopped.poll() is None, "the study ended before seed 103"
    family = psutil.Process(stopped.pid).children(recursive=True)
    stopped.terminate()
    stopped.wait(timeout=60)
    kill(family)
    recorded = {entry["seed"] for entry in json.loads(runs.read_text())["runs"]}
    assert recorded and 103 not in recorded and calls
    assert "Nothing is compared before the last one" in (tmp_path / "study-runs.md").read_text()

    shutil.rmtree(study.out)  # the machine is lost: what is recorded is not trained again
    done = study("--plan", file, RIGHT=right, LOCK_SECONDS=20)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = {int(line.split()[1]) for line in study.seen() if line.startswith("train")}
    assert trained == {101, 102, 103} - recorded
    record = json.loads(runs.read_text())
    assert [(run["seed"], run["arm"]) for run in record["runs"]] == [(s, arm) for s in plan["seeds"] for arm in arms]
    assert all(len(run["log_probabilities"]["count"]) == 100 for run in record["runs"])
    assert "| accuracy, points | layernorm | primary | improved |" in (tmp_path / "study-runs.md").read_text()
    before = runs.read_text()
    assert study("--plan", file).returncode == 0 and runs.read_text() == before
    assert not [line for line in study.seen() if line.startswith("train")]

    again = study("--plan", file, "--repeat", "102", "--output-dir", tmp_path / "again", RIGHT=right)
    assert again.returncode == 0 and again.stdout.count("is the recorded one") == len(arms), again.stderr
    other = study("--plan", file, "--repeat", "101", "--output-dir", tmp_path / "again", RIGHT='{"clip": 0.9}')
    assert other.returncode == 2 and f"--repeat 101: none, clip, layernorm differ from {runs}\n" in other.stderr
    assert re.search(r"none, seed 101: not as recorded: [1-9]\d* of 300 scores, ", other.stdout)
    runs.write_text(before.replace('"precision":"', '"precision":"other '))
    other = study("--plan", file, "--repeat", "101", "--output-dir", tmp_path / "third", RIGHT='{"clip": 0.9}')
    assert other.returncode == 2 and "the seed was trained in other " in other.stderr
    file.write_text(file.read_text().replace('"margin": 3', '"margin": 4'))
    changed = study("--plan", file)
    assert changed.returncode == 2 and "may not change after its first run" in changed.stderr
    refused = study("--plan", file, "--arms", "none,clip")
    assert refused.returncode == 2 and "--arms: the plan" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--repeat", "3"], "--repeat: expected --plan FILE as well"),
        (["--preset", "no"], "--preset: invalid choice: 'no'"),
        (["--hours", "0"], "--hours 0: expected a positive number"),
        (["--hours", "inf"], "--hours inf: expected a positive number"),
        (["--hours", "soon"], "--hours: invalid float value"),
        (["--arms", "layernorm,none"], "baseline"),
        (["--seeds", "0"], "--seeds 0"),
    ],
)
def test_wrong_flags_are_refused_by_name_before_anything_is_made(tmp_path, capsys, flags, named):
    try:
        status = main(["study", "--output-dir", str(tmp_path / "out"), *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_page_of_something_else_is_refused_by_name(tmp_path, capsys):
    for name, content, problem in (("a", None, "no such file"), ("b", "{", "not JSON"), ("c", "{}", "format 2")):
        file = Path(tmp_path, name)
        if content is not None:
            file.write_text(content)
        assert main(["page", str(file)]) == 2
        error = capsys.readouterr().err
        assert problem in error and str(file) in error
