"""`python -m llava.compare run --plan`: seed by seed over several sittings, what each leaves out, and the page."""

import json
import re
import shutil
import signal

import pytest
from comparison_runs import Caller
from shell import kill

from llava.compare.__main__ import main

ARMS, SEEDS = ["none", "layernorm"], [101, 102, 103]


@pytest.fixture
def plan(tmp_path):
    """A plan of two arms and three seeds."""
    content = {"preset": "demo", "arms": ARMS, "primary": ["layernorm"], "seeds": SEEDS, "margin": 3}
    content |= {"trials": [{"seed": 7, "loss": [2.0, 1.45, 1.2]}], "tasks": ["color", "count"]}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content | {"steps": {"pretrain": 4, "finetune": 6}}))
    return file


def trained(calls):
    return [line for line in calls if line.startswith("train")]


@pytest.mark.slow
def test_a_plan_is_run_over_three_sittings_one_killed_and_compared_after_the_last_seed(plan, tmp_path):
    right = json.dumps({"none": 0.4, "layernorm": 0.8})
    study = Caller(tmp_path, "run", EVAL_DATA_PATH=tmp_path / "data.json", EVAL_IMAGE_FOLDER=tmp_path, RIGHT=right)
    record, page = study.out / "record.json", study.out / "report.md"

    def stopped_at(line, sent):
        calls, *_, family = study.signalled(line, sent, "--plan", plan, HANGS=line, LOCK_SECONDS=20)
        kill(family)
        return calls

    first = stopped_at("train 102 layernorm finetune", signal.SIGTERM)
    assert "train 101 none pretrain" in first
    study.seen()
    second = stopped_at("train 103 none finetune", signal.SIGKILL)
    assert "train 102 layernorm pretrain" not in second and not set(trained(first)[:2]) & set(second)
    recorded = {entry["seed"] for entry in json.loads(record.read_text())["runs"]}
    assert 101 in recorded and 103 not in recorded and not page.exists()
    study.seen()

    kept = tmp_path / "kept.json"  # the machine is lost: what is recorded is not trained again
    shutil.copy(record, kept)
    shutil.rmtree(study.out)
    study.out.mkdir()
    shutil.copy(kept, record)
    done = study("--plan", plan, LOCK_SECONDS=20)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {int(line.split()[1]) for line in trained(study.seen())} == set(SEEDS) - recorded
    content = json.loads(record.read_text())
    assert [(run["seed"], run["arm"]) for run in content["runs"]] == [(s, arm) for s in SEEDS for arm in ARMS]
    assert all(len(run["log_probabilities"]["count"]) == 100 for run in content["runs"])
    assert re.search(r"layernorm minus none, mean of 2: \+\d.* interval.*: improved", page.read_text())
    before = record.read_text()
    assert study("--plan", plan).returncode == 0 and record.read_text() == before and not study.seen()

    again = tmp_path / "again"
    assert study("--plan", plan, "--output-dir", again, RIGHT='{"none": 0.4, "layernorm": 0.7}').returncode == 0
    assert main(["report", str(study.out), "--against", str(again)]) == 2
    plan.write_text(plan.read_text().replace('"margin": 3', '"margin": 4'))
    changed = study("--plan", plan)
    assert changed.returncode == 2 and "may not change after its first run" in changed.stderr
    refused = study("--plan", plan, "--arms", "none,clip")
    assert refused.returncode == 2 and "--arms: the plan" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset", "demo"], "--preset: the plan"),
        (["--seeds", "1,2,3"], "--seeds: the plan"),
        (["--tasks", "scenes"], "--tasks: the plan"),
    ],
)
def test_flags_that_the_plan_decides_are_refused_before_anything_is_made(plan, tmp_path, capsys, flags, named):
    assert main(["run", "--plan", str(plan), "--output-dir", str(tmp_path / "out"), *flags]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_number_of_steps_beside_the_plan_is_refused(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MAX_STEPS", "3")
    assert main(["run", "--plan", str(plan), "--output-dir", str(tmp_path / "out")]) == 2
    assert "MAX_STEPS=3: the plan" in capsys.readouterr().err
