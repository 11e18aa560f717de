"""A tuning: over two sittings, what its record has, that the questions do not decide, and the study at its choice."""

import json
import shutil
import sys

import pytest
import study_stub
from paths import ROOT
from run_inputs import inputs_in
from shell import new_lines

from llava.compare.__main__ import main
from llava.compare.plan import read_plan
from llava.compare.planned import Planned, best_points

ARMS, SEED, BEST = ["none", "layernorm"], 301, {"none": 2e-3, "layernorm": 5e-4}
POINTS = [{"pretrain": {"LEARNING_RATE": rate}, "finetune": {"PROJECTOR_LR": rate}} for rate in (2e-3, 5e-4)]
POINTS.append({"pretrain": {}, "finetune": {"PROJECTOR_LR": 0.5, "MAX_GRAD_NORM": 0}})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with pictures, whose validation records say each arm's best rate, and a stub for all that is called."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {study_stub.__file__} "$@"\n')
    python.chmod(0o755)
    env = inputs_in(tmp_path) | {"LLAVA_PYTHON": python, "CALLS": tmp_path / "calls", "BF16": "False", "NUM_GPUS": 0}
    for name, value in (env | {"OMP_NUM_THREADS": 1, "DIVERGES": 0.5}).items():
        monkeypatch.setenv(name, str(value))
    pictures = tmp_path / "pictures"
    (pictures / "images").mkdir(parents=True)
    (pictures / "heldout.json").write_text("[]")
    (pictures / "validation.json").write_text(json.dumps(BEST))
    monkeypatch.setattr(Planned, "pictures", pictures)
    return tmp_path


def planned(folder, name="tuning", **changes):
    """A plan's file."""
    content = {"preset": "demo", "arms": ARMS, "primary": [], "seeds": [SEED], "margin": 3, "tasks": ["color"]}
    content |= {"steps": {"pretrain": 4, "finetune": 6}, "pictures": {"num_validation": 4}}
    (folder / f"{name}.json").write_text(json.dumps(content | changes))
    return folder / f"{name}.json"


def tuned(folder, to):
    """The record of a tuning into the folder `to`."""
    plan = folder / "tuning.json"
    plan = plan if plan.exists() else planned(folder, points=POINTS)
    assert main(["run", "--plan", str(plan), "--output-dir", str(folder / to)]) == 0
    return json.loads((folder / to / "record.json").read_text())


@pytest.mark.slow
def test_each_arm_gets_its_own_rates_whatever_the_questions_are_and_the_study_is_trained_at_them(folder, monkeypatch):
    calls = new_lines(folder / "calls")
    record = tuned(folder, "out")
    assert record["choice"] == {"none": POINTS[0], "layernorm": POINTS[1]}
    assert [result["loss"] is None for result in record["results"]].count(True) == len(ARMS)
    assert not any(line.startswith("answer") for line in calls())

    # A second sitting, beside other questions: what is recorded is not trained again, and the choice is the same.
    (folder / "pictures/heldout.json").write_text(json.dumps([{"id": "other"}]))
    half = {name: part for name, part in record.items() if name != "choice"} | {"results": record["results"][:1]}
    (folder / "again").mkdir()
    (folder / "again/record.json").write_text(json.dumps(half))
    again = tuned(folder, "again")
    assert ("train 301 none pretrain" in calls()) and again["results"][0] == record["results"][0]

    def losses(content):
        return {(result["arm"], result["point"]): result["loss"] for result in content["results"]}

    assert losses(again) == losses(record) and again["choice"] == record["choice"]
    (folder / "pictures/validation.json").write_text(json.dumps({"none": 5e-4, "layernorm": 2e-3}))
    assert tuned(folder, "swapped")["choice"] == {"none": POINTS[1], "layernorm": POINTS[0]}

    shutil.copy(folder / "out/record.json", folder / "chosen.json")
    monkeypatch.setenv("RIGHT", json.dumps({"none": 0.4, "layernorm": 0.8}))
    final = {"seeds": [1, 2, 3], "primary": ["layernorm"], "pilot": "chosen.json", "controls": ["untouched"]}
    with pytest.raises(ValueError, match=r"seeds \[301\] were seen"):
        read_plan(planned(folder, "seen", **final | {"seeds": [1, 2, SEED]}, settings=record["choice"]))
    with pytest.raises(ValueError, match="the tuning chosen.json chose"):
        read_plan(planned(folder, "other", **final, settings={"none": POINTS[1]}))
    plan = planned(folder, "final", **final, settings=record["choice"])
    assert main(["run", "--plan", str(plan), "--output-dir", str(folder / "final")]) == 0
    runs = json.loads((folder / "final/record.json").read_text())["runs"]
    rate = "finetune.training.mm_projector_lr"
    assert {(run["arm"], run["own"][rate]) for run in runs} == {("none", "0.002"), ("layernorm", "0.0005")}
    page = (folder / "final/report.md").read_text()
    assert "improved" in page and "its own rates" in page and "one set of learning rates" not in page


def test_a_point_counts_by_its_mean_over_the_seeds_and_not_at_all_where_a_training_was_given_up():
    tried = [("none", 0, 1.0), ("none", 0, 2.0), ("none", 1, 0.1), ("none", 1, None), ("none", 2, 1.6)]
    results = [{"arm": arm, "point": point, "loss": loss} for arm, point, loss in tried]
    assert best_points({"points": POINTS, "results": results}) == {"none": 0}
    results.append({"arm": "clip", "point": 0, "loss": None})
    with pytest.raises(ValueError, match="no point trains clip"):
        best_points({"points": POINTS[:1], "results": results[-1:]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"none": {"finetune": {"GLOBAL_BATCH": 4}}}}, "expected, by stage, values of LEARNING_RATE"),
        ({"settings": {"clip": {}}}, "for the plan's arms"),
        ({"points": [{"finetuning": {}}]}, "expected, by stage"),
    ],
)
def test_settings_may_hold_rates_of_the_plans_arms_alone(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        read_plan(planned(folder, **{"seeds": [1, 2, 3]} | changes))


@pytest.mark.parametrize(("variable", "changes"), [("EVAL_DATA_PATH", {}), ("", {"pictures": {}})])
def test_a_tuning_decides_its_held_out_records(folder, monkeypatch, capsys, variable, changes):
    if variable:
        monkeypatch.setenv(variable, str(folder / "pictures/heldout.json"))
    plan = planned(folder, **{"points": POINTS} | changes)
    assert main(["run", "--plan", str(plan), "--output-dir", str(folder / "out")]) == 2
    assert (variable or "num_validation") in capsys.readouterr().err
