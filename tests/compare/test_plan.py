"""A written plan: what is refused, its test's error rates, its record over several sittings, and a tuning."""

import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest
import study_stub
import training
from comparison_runs import Caller
from paths import ROOT
from run_inputs import inputs_in
from shell import kill, new_lines

from llava.compare.__main__ import main
from llava.compare.plan import check_record, hold, read_plan
from llava.compare.planned import Planned, best_points
from llava.compare.record import FILE, add_run, differing, read_record, shared_configuration, write_record
from llava.compare.report import write_page
from llava.compare.runs import RATE_FIELDS, Run
from llava.compare.tables import UNDECIDED, WITHIN, Statistics, differences_table, verdict
from llava.eval.paired import IMPROVED, compare_seeds, confidence_of
from llava.eval.results import Answered, Results, TaskResult
from llava.utils.intervals import student_cdf, student_quantile
from llava.utils.provenance import differences

DATA = ROOT / "docs/data"
PLAN = DATA / "study-plan.json"
STUDIES = {
    "study-plan": "study-runs",
    "study-exploratory": "study-exploratory-runs",
    "study-3-plan": "study-3-plan-runs",
    "study-3-shared": "study-3-shared-runs",
}
SECOND = {"study-2-short": "study-2-short-runs", "study-2-shared": "study-2-shared-runs"}  # the columns of its table
TASKS = ("binding", "color", "count", "position", "shape")
ARMS, SEEDS, TRIED, BEST = ["none", "layernorm"], [101, 102, 103], 301, {"none": 2e-3, "layernorm": 5e-4}
POINTS = [{"pretrain": {"LEARNING_RATE": rate}, "finetune": {"PROJECTOR_LR": rate}} for rate in (2e-3, 5e-4)]
POINTS.append({"pretrain": {}, "finetune": {"PROJECTOR_LR": 0.5, "MAX_GRAD_NORM": 0}})


@pytest.fixture
def plan_with(tmp_path):
    """A function that gives the committed plan, changed and in a folder of its own."""
    shutil.copy(DATA / "study.json", tmp_path)

    def read(**changes):
        file = tmp_path / "study-plan.json"
        content = json.loads(PLAN.read_text()) | {"tasks": list(TASKS)} | changes
        content = {name: value for name, value in content.items() if value is not None}
        file.write_text(json.dumps(content))
        return read_plan(file)

    return read


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [101, 102, 43]}, r"seeds \[43\] were seen before the plan was made \(pilot \[42, 43, 44\]"),
        ({"seeds": [101, 102]}, "at least 3"),
        ({"seeds": ["101", "102", "103"]}, "at least 3 numbers"),
        ({"primary": ["scale"]}, r"primary \['scale'\]: expected arms of"),
        ({"margin": None}, "not a plan: .*'margin'"),
        ({"tasks": ["colour", "count"]}, r"tasks \['colour', 'count'\]: expected some of color, shape"),
    ],
)
def test_plans_that_contradict_themselves_or_name_seen_seeds_are_refused(plan_with, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_with(**changes)


def test_a_plan_that_changed_after_the_first_run_is_refused(plan_with, tmp_path):
    plan = plan_with()
    hold(plan_with(margin=plan.margin + 2), tmp_path)  # a call that is refused before it trains
    hold(plan, tmp_path, "cpu")
    record = simulated(plan)
    check_record(plan, record, tmp_path)
    assert plan.missing(record) == []
    other = plan_with(margin=plan.margin + 1)
    for check in (lambda: check_record(other, record, tmp_path), lambda: hold(other, tmp_path)):
        with pytest.raises(ValueError, match="may not change after its first run") as refused:
            check()
        assert plan.digest[:12] in str(refused.value) and other.digest[:12] in str(refused.value)


def test_a_seed_is_not_trained_by_other_code_than_the_recorded_seeds(plan_with, tmp_path, monkeypatch):
    monkeypatch.setattr(Planned, "part", lambda *_: None)
    plan = plan_with()
    study = Planned(plan.preset, plan.arms, plan.seeds, tmp_path, plan=plan)
    study.record["configuration"] = {"finetune.code.digest": "a", "answers.versions.torch": "0"}
    with pytest.raises(ValueError, match=r"code.digest: 'a' \(recorded\), .* \(now\)\nRestore that state, or name"):
        study.prepare()


def test_a_plan_that_began_on_one_kind_of_device_is_not_continued_on_another(plan_with, tmp_path):
    plan = plan_with()
    for kind in ("", "NVIDIA H200", "", "NVIDIA H200"):
        hold(plan, tmp_path, kind)
    with pytest.raises(ValueError, match="runs were begun on NVIDIA H200, this is cpu; .*: continue on NVIDIA H200"):
        hold(plan, tmp_path, "cpu")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match="runs were begun on cpu, this is NVIDIA H200"):
        hold(plan, elsewhere, "NVIDIA H200", recorded="cpu")


@pytest.mark.parametrize(("gib", "cores", "lanes"), [(139, 16, 8), (24, 16, 3), (139, 4, 4), (4, 1, 1)])
def test_one_gpu_trains_as_many_runs_as_it_and_the_cores_carry(plan_with, monkeypatch, tmp_path, gib, cores, lanes):
    plan = plan_with(preset="demo")
    module = "llava.compare.planned."
    monkeypatch.setenv("NUM_GPUS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(f"{module}card", lambda: SimpleNamespace(total_memory=gib * 2**30))
    monkeypatch.setattr(f"{module}available_cores", lambda: cores)
    monkeypatch.setattr(f"{module}runs_at_once", min)
    study = Planned(plan.preset, plan.arms, plan.seeds, tmp_path, plan=plan)
    assert study.places() == [{"CUDA_VISIBLE_DEVICES": "0", "NUM_GPUS": "1"}] * lanes


def test_half_a_seed_and_damaged_records_are_refused(plan_with, tmp_path):
    plan = plan_with()
    record = simulated(plan)
    del record["runs"][1]
    with pytest.raises(ValueError, match=f"seed {plan.seeds[0]} has runs of"):
        check_record(plan, record, tmp_path)
    for content, message in (('{"format": 1, "runs": []}', "not a record of runs"), ("{", "not JSON")):
        (tmp_path / FILE).write_text(content)
        with pytest.raises(ValueError, match=message):
            read_record(tmp_path)


def test_a_repeated_run_that_answers_otherwise_is_named(plan_with, tmp_path):
    plan = plan_with()
    record = simulated(plan)
    write_record(record, tmp_path / FILE)
    again = read_record(tmp_path)
    assert not any(differing(record, again).values())
    again["runs"] = again["runs"][:2]
    again["runs"][1]["scores"]["color"][3] = 0.5
    assert differing(record, again) == {"none, seed 101": [], "layernorm, seed 101": ["scores"]}
    with pytest.raises(ValueError, match="no run in common"):
        differing(record, again | {"runs": []})


# --- simulated studies ------------------------------------------------------------------------------------------------


def test_students_distribution_equals_its_integral_and_its_table():
    for freedom in (1, 2, 3, 8, 15):
        x = np.linspace(0, 2.5, 20001)
        density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        constant = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        area = constant * float(np.sum((density[1:] + density[:-1]) / 2) * (x[1] - x[0]))
        assert student_cdf(2.5, freedom) == pytest.approx(0.5 + area, abs=1e-8)
        assert student_cdf(-2.5, freedom) == pytest.approx(0.5 - area, abs=1e-8)
    table = {1: 12.7062, 2: 4.30265, 7: 2.36462, 15: 2.13145, 30: 2.04227}
    assert {f: student_quantile(0.975, f) for f in table} == pytest.approx(table, rel=1e-5)


def studies(difference, deviation, seeds, count=3000):
    """Differences [count, arms, S] of two arms from one baseline, whose seeds they share."""
    rng = np.random.default_rng(5)
    baseline = rng.normal(0, deviation / math.sqrt(2), size=(count, 1, seeds))
    return difference + rng.normal(0, deviation / math.sqrt(2), size=(count, 2, seeds)) - baseline


def test_equal_arms_are_told_apart_in_at_most_one_study_of_twenty():
    plan = read_plan(PLAN)
    wrong = [
        any(not d.low <= 0 <= d.high for d in (compare_seeds(arm, plan.confidence) for arm in arms))
        for arms in studies(0, 3.0, len(plan.seeds))
    ]
    assert 0.03 < np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(wrong))


@pytest.mark.parametrize(("deviation", "difference"), [(2.0, 4.6), (3.0, 6.9), (4.0, 9.2)])
def test_the_third_studys_seeds_show_the_planned_difference_in_four_of_five_studies(deviation, difference):
    arms = studies(difference, deviation, seeds=5, count=2000)[:, 0]
    shown = np.mean([compare_seeds(values, confidence_of(3)).low > 0 for values in arms])
    assert shown == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / len(arms)))
    assert f"{difference:g}" in (ROOT / "docs/study-3-plan.md").read_text()


def test_the_second_studys_plan_is_refused_before_its_tuning_is_recorded(tmp_path):
    shutil.copy(DATA / "study-2-short.json", tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError, match="study-2-tuning-runs.json"):
        read_plan(tmp_path / "plan.json")
    read_plan(DATA / "study-2-tuning.json")


@pytest.mark.slow
def test_no_relevant_difference_is_rarely_said_of_a_relevant_one():
    plan = read_plan(PLAN)
    said = [
        WITHIN in verdict(compare_seeds(arms[0], plan.confidence), plan.margin)
        for arms in studies(plan.margin, 2.0, 12)
    ]
    assert np.mean(said) == pytest.approx(0.0125, abs=3 * math.sqrt(0.0125 * 0.9875 / len(said)))


def test_a_verdict_says_what_the_interval_decides():
    cases = {(1.0, 4.0): IMPROVED, (0.5, 2.0): f"{IMPROVED}, {WITHIN}", (-1.0, 2.0): WITHIN, (-4.0, 1.0): UNDECIDED}
    for (low, high), said in cases.items():
        difference = compare_seeds([low, high])
        assert verdict(type(difference)(0.0, low, high, 1.0, 1.0, ()), 3) == said


# --- runs and page ----------------------------------------------------------------------------------------------------


def simulated(plan, gains=None):
    """The record of a finished study: each run right with the same share, but for the arms of `gains`."""
    rng, count = np.random.default_rng(3), 40
    questions = {task: [f"{task}-{number}" for number in range(count)] for task in sorted({*plan.tasks, "text"})}
    record = {"format": 1, "configuration": {"pretrain.code.digest": "a"}, "questions": questions, "runs": []}
    for seed in plan.seeds:
        for arm in plan.arms:
            share = 0.6 + (gains or {}).get(arm, 0.0)
            scores = {task: (rng.random(count) < share).astype(float).tolist() for task in questions}
            logs = {task: (-rng.random(count) + share).tolist() for task in questions}
            entry = {"seed": seed, "arm": arm, "plan": plan.digest, "commit": "c0ffee", "started": "2026-01-01"}
            entry |= {"hours": 0.05, "machine": "a processor, 2 cores", "precision": "bf16"}
            entry |= {"weights": "w", "tower": "t", "language_model": "l"}
            record["runs"].append(entry | {"scores": scores, "log_probabilities": logs})
    return record


def test_comparisons_are_of_the_plans_tasks_and_only_the_primary_ones_decide(plan_with):
    plan = plan_with(seeds=[101, 102, 103, 104])
    record = simulated(plan, {"layernorm": 0.3})
    stats = Statistics(record, plan)
    overall = {arm: by_task[stats.overall] for arm, by_task in stats.results.items()}
    assert {arm: result["role"] for arm, result in overall.items()} == {
        "layernorm": "primary",
        "gwc_layernorm": "primary",
        "gwc_rmsnorm": "exploratory",
        "clip": "exploratory",
    }
    by_run = {(entry["arm"], entry["seed"]): entry["scores"] for entry in record["runs"]}
    expected = [
        100 * np.mean([np.mean(by_run["layernorm", s][t]) - np.mean(by_run["none", s][t]) for t in plan.tasks])
        for s in plan.seeds
    ]
    assert overall["layernorm"]["by_seed"] == pytest.approx(expected)
    assert overall["layernorm"]["verdict"] == IMPROVED and overall["layernorm"]["confidence"] == 0.975
    assert overall["clip"]["confidence"] == 0.95
    decided = [row for row in differences_table(stats) if row["verdict"]]
    assert [(row["arm"], row["benchmark"]) for row in decided] == [("layernorm", "mean"), ("gwc_layernorm", "mean")]
    for entry in record["runs"]:
        entry["scores"]["text"] = [0.0] * 40  # a task outside the outcome
    assert Statistics(record, plan).results["clip"]["mean"] == overall["clip"] | {"won": ANY, "lost": ANY}


def test_an_exploratory_study_decides_nothing(plan_with):
    plan = plan_with(primary=[], seeds=[1, 2, 3])
    stats = Statistics(simulated(plan), plan)
    results = [result for by_task in stats.results.values() for result in by_task.values()]
    assert {(r["role"], r["confidence"], r["verdict"]) for r in results} == {("exploratory", 0.95, "")}


def test_a_run_of_other_code_or_questions_or_another_start_in_its_precision_is_not_added(plan_with, monkeypatch):
    record = simulated(plan_with(seeds=[101, 102, 103])) | {"questions": {"color": ["1", "2"]}}
    entry = record["runs"].pop() | {"precision": "bf16"}
    run = SimpleNamespace(name="none, seed 104", seed=104, arm="none")

    def add(ids, configuration=record["configuration"], entry=entry):
        monkeypatch.setattr("llava.compare.record.shared_configuration", lambda *_: configuration)
        monkeypatch.setattr("llava.compare.record.entry_of", lambda *_: entry)
        samples = [Answered(name, 1.0, "a", "a") for name in ids]
        tasks = {"color": TaskResult("accuracy", 100.0, samples, 25.0, 1.0)}
        add_run(record, run, Results("c", "f", "", {}, {}, "", tasks))

    with pytest.raises(ValueError, match=r"digest: 'a' \(recorded\), 'b' \(now\)\nContinue at commit c0ffee"):
        add(["1", "2"], configuration={"pretrain.code.digest": "b"})
    with pytest.raises(ValueError, match="answered other questions"):
        add(["1", "3"])
    with pytest.raises(ValueError, match="language model of digest m, the recorded runs in bf16 from l"):
        add(["1", "2"], entry=entry | {"language_model": "m"})
    rates = {"pretrain.training.learning_rate": 1e-3}
    with pytest.raises(ValueError, match=r"104 was trained at other rates .* 101\n.*learning_rate: .*absent.*, 0.001"):
        add(["1", "2"], entry=entry | {"own": rates})
    add(["1", "2"], entry=entry | {"language_model": "m", "precision": "fp32"})
    add(["1", "2"])
    assert record["runs"][-1] == entry


@pytest.mark.slow
def test_seeds_of_both_precisions_are_recorded_and_other_settings_are_not_left_out(tiny, tmp_path, monkeypatch):
    """By real runs: what follows from the precision has many names."""
    monkeypatch.setattr("llava.compare.record.STAGES", ("pretrain",))

    def shared(bf16, **options):
        run = Run(tmp_path / f"{bf16} {options}", 101, "none")
        training.run(tiny, run.folder("pretrain"), 1, norm="none", bf16=bf16, max_steps=1, **options)
        results = Results("", "", "", {}, {"dtype": "bfloat16" if bf16 else "float32"}, "")
        return shared_configuration(run, results)

    configuration = shared(True)
    assert configuration == shared(False) and len(configuration) > 100
    other = shared(True, weight_decay=0.5)
    assert {name for name in other if other[name] != configuration[name]} == {"pretrain.training.weight_decay"}


# --- the committed studies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "runs"), [*STUDIES.items(), *SECOND.items()])
def test_a_plan_was_committed_before_its_runs(name, runs):
    for entry in read_record(DATA / f"{runs}.json")["runs"]:
        commit = git("show", "--no-patch", "--format=%cI", entry["commit"])
        if commit.returncode:
            pytest.skip(f"no commit {entry['commit'][:12]} here: a checkout without its history")
        places = (f"{entry['commit']}:{folder}/{name}.json" for folder in ("docs/data", "docs"))  # now, and at first
        then = next(shown for shown in (git("show", place) for place in places) if not shown.returncode)
        assert hashlib.sha256(then.stdout).hexdigest() == entry["plan"]
        assert hashlib.sha256((DATA / f"{name}.json").read_bytes()).hexdigest() == entry["plan"]
        assert datetime.fromisoformat(commit.stdout.decode().strip()) < datetime.fromisoformat(entry["started"])


def test_the_third_studys_rates_are_those_of_its_tunings_most_right_answers():
    tuning, plan = read_plan(DATA / "study-3-tuning.json"), read_plan(DATA / "study-3-plan.json")
    record = json.loads((DATA / "study-3-tuning-runs.json").read_text())
    assert record["plan"] == tuning.digest and record["points"] == tuning.points
    page = (ROOT / "docs/study-3-plan.md").read_text()
    for arm in tuning.arms:
        right = {result["point"]: result["right"] for result in record["results"] if result["arm"] == arm}
        chosen = max(range(4), key=lambda point: right[point])
        assert plan.settings[arm] == tuning.points[chosen]
        assert " | ".join([f"`{arm}`", *(f"{right[point]:.1f}" for point in range(4)), str(chosen)]) in page


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True)


@pytest.mark.parametrize("name", STUDIES)
def test_a_studys_results_follow_from_its_record_and_its_page_states_them(name):
    plan, record = read_plan(DATA / f"{name}.json"), read_record(DATA / f"{STUDIES[name]}.json")
    check_record(plan, record, DATA)
    assert plan.missing(record) == []
    stats, scores = Statistics(record, plan), {(run["arm"], run["seed"]): run["scores"] for run in record["runs"]}
    sections = (ROOT / "docs/study.md").read_text().split("\n## ")
    section = " ".join(next(text for text in sections if f"data/{STUDIES[name]}.json" in text).split())
    number = r"[+-]\d+(?:\.\d+)?"
    form = rf"`([\w-]+)`[^`]*? ({number}) points \(({number}) to ({number})\)"
    stated = {arm: numbers for arm, *numbers in re.findall(form, section)}
    for arm in plan.arms[1:]:
        result = stats.results[arm][stats.overall]
        assert result["won"] == sum(stats.results[arm][task]["won"] for task in plan.tasks)
        seeds = []
        for seed in plan.seeds:
            ours, theirs = scores[arm, seed], scores["none", seed]
            seeds.append(100 * np.mean([np.mean(ours[task]) - np.mean(theirs[task]) for task in plan.tasks]))
        quantile = student_quantile(0.5 + result["confidence"] / 2, len(seeds) - 1)
        width = quantile * np.std(seeds, ddof=1) / len(seeds) ** 0.5
        ends = [result[name] for name in ("delta", "low", "high")]
        assert ends == pytest.approx([np.mean(seeds), np.mean(seeds) - width, np.mean(seeds) + width])
        assert stated[arm] == [f"{value:+.1f}" for value in ends]


def test_the_second_studys_table_is_that_of_its_records():
    rows = dict(re.findall(r"\| `(\w+)`(?:, percent right)? \| (.*) \|", (ROOT / "docs/study.md").read_text()))
    for column, (name, runs) in enumerate(SECOND.items()):
        plan, record = read_plan(DATA / f"{name}.json"), read_record(DATA / f"{runs}.json")
        check_record(plan, record, DATA)
        stats, cells = Statistics(record, plan), {arm: row.split(" | ")[column] for arm, row in rows.items()}
        expected = {
            arm: "{delta:+.1f} ({low:+.1f} to {high:+.1f})".format(**r["mean"]) for arm, r in stats.results.items()
        }
        assert cells == {"none": f"{np.mean(stats.scores['none']['mean']):.1f}"} | expected


# --- by the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path):
    """A plan of two arms and three seeds."""
    content = {"preset": "demo", "arms": ARMS, "primary": ["layernorm"], "seeds": SEEDS, "margin": 3}
    content |= {"trials": [{"seed": 7}], "tasks": ["color", "count"]}
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
    with pytest.raises(ValueError, match="are missing; nothing is compared before the last one"):
        write_page(read_record(record), tmp_path, read_plan(plan))
    study.seen()

    kept = tmp_path / "kept.json"  # the machine is lost: what is recorded is not trained again
    shutil.copy(record, kept)
    shutil.rmtree(study.out)
    study.out.mkdir()
    record.write_text(re.sub(r'("finetune.code.digest":)"\w+"', r'\1"other"', kept.read_text()))
    other = study("--plan", plan)
    assert other.returncode == 2 and "code.digest" in other.stderr and not study.seen()
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


def test_what_the_plan_decides_is_refused_before_anything_is_made(plan, tmp_path, capsys, monkeypatch):
    words = ["run", "--plan", str(plan), "--output-dir", str(tmp_path / "out")]
    for flags in (["--preset", "demo"], ["--seeds", "1,2,3"], ["--tasks", "scenes"], ["--question-images", "x"]):
        assert main([*words, *flags]) == 2
        assert f"{flags[0]}: the plan" in capsys.readouterr().err and not (tmp_path / "out").exists()
    for name in ("MAX_STEPS", "LEARNING_RATE", "TASKS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            assert main(words) == 2
        assert f"{name}=3: the plan" in capsys.readouterr().err


# --- a tuning ---------------------------------------------------------------------------------------------------------


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
    content = {"preset": "demo", "arms": ARMS, "primary": [], "seeds": [TRIED], "margin": 3, "tasks": ["color"]}
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
    assert [result["right"] is None for result in record["results"]].count(True) == len(ARMS)

    # A second sitting, beside other questions: what is recorded is not trained again, and the choice is the same.
    (folder / "pictures/heldout.json").write_text(json.dumps([{"id": "other"}]))
    half = {name: part for name, part in record.items() if name != "choice"} | {"results": record["results"][:1]}
    (folder / "again").mkdir()
    (folder / "again/record.json").write_text(json.dumps(half))
    again = tuned(folder, "again")
    assert ("train 301 none pretrain" in calls()) and again["results"][0] == record["results"][0]

    def right(content):
        return {(result["arm"], result["point"]): result["right"] for result in content["results"]}

    assert right(again) == right(record) and again["choice"] == record["choice"]
    (folder / "pictures/validation.json").write_text(json.dumps({"none": 5e-4, "layernorm": 2e-3}))
    assert tuned(folder, "swapped")["choice"] == {"none": POINTS[1], "layernorm": POINTS[0]}

    shutil.copy(folder / "out/record.json", folder / "chosen.json")
    monkeypatch.setenv("RIGHT", json.dumps({"none": 0.4, "layernorm": 0.8}))
    final = {"seeds": [1, 2, 3], "primary": ["layernorm"], "pilot": "chosen.json"}
    with pytest.raises(ValueError, match=r"seeds \[301\] were seen"):
        read_plan(planned(folder, "seen", **final | {"seeds": [1, 2, TRIED]}, settings=record["choice"]))
    with pytest.raises(ValueError, match="the tuning chosen.json chose"):
        read_plan(planned(folder, "other", **final, settings={"none": POINTS[1]}))
    with pytest.raises(ValueError, match="pilot again/half.json: expected .* a tuning's record with its choice"):
        (folder / "again/half.json").write_text(json.dumps(half))
        read_plan(planned(folder, "early", **final | {"pilot": "again/half.json"}))
    plan = planned(folder, "final", **final, settings=record["choice"])
    assert main(["run", "--plan", str(plan), "--output-dir", str(folder / "final")]) == 0
    runs = json.loads((folder / "final/record.json").read_text())["runs"]
    rate = "finetune.training.mm_projector_lr"
    assert {(run["arm"], run["own"][rate]) for run in runs} == {("none", 0.002), ("layernorm", 0.0005)}
    page = (folder / "final/report.md").read_text()
    assert "improved" in page and "its own rates" in page and "one set of learning rates" not in page


def test_rates_decide_these_fields_of_a_real_run_and_no_others(tiny, tmp_path):
    runs = [Run(tmp_path, None, arm) for arm in ("none", "layernorm")]
    for run, rate in zip(runs, (1e-3, 2e-3), strict=True):
        rates = {"learning_rate": rate, "mm_projector_lr": rate / 2, "max_grad_norm": rate}
        training.run(tiny, run.folder("finetune"), 2, norm="none", **rates)
    assert set(differences(*(run.configuration("finetune") for run in runs))) == {*RATE_FIELDS}


def test_a_point_counts_by_its_mean_over_the_seeds_and_not_at_all_where_a_training_was_given_up():
    tried = [("none", 0, 50.0), ("none", 0, 40.0), ("none", 1, 90.0), ("none", 1, None), ("none", 2, 44.0)]
    results = [{"arm": arm, "point": point, "right": right} for arm, point, right in tried]
    assert best_points({"points": POINTS, "results": results}) == {"none": 0}
    results.append({"arm": "clip", "point": 0, "right": None})
    with pytest.raises(ValueError, match="no point trains clip"):
        best_points({"points": POINTS[:1], "results": results[-1:]})


@pytest.mark.slow
def test_a_tuning_that_trains_no_arm_keeps_every_result(folder, capsys):
    plan = planned(folder, points=POINTS[2:])
    assert main(["run", "--plan", str(plan), "--output-dir", str(folder / "out")]) == 2
    assert "no point trains none, layernorm" in capsys.readouterr().err
    results = json.loads((folder / "out/record.json").read_text())["results"]
    assert [(result["arm"], result["right"]) for result in results] == [("none", None), ("layernorm", None)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"none": {"finetune": {"GLOBAL_BATCH": 4}}}}, "expected, by stage, numbers for LEARNING_RATE"),
        ({"settings": {"none": {"finetune": {"LEARNING_RATE": ""}}}}, "expected, by stage, numbers for LEARNING_RATE"),
        ({"settings": {"none": POINTS[0]}, "points": POINTS}, "points beside settings"),
        ({"settings": {"clip": {}}}, "of the plan's arms"),
        (
            {"points": [{"pretrain": {"PROJECTOR_LR": 1e-4}}]},
            "pretrain trains the projector alone, at its LEARNING_RATE",
        ),
        ({"points": [{"finetuning": {}}]}, "expected, by stage"),
    ],
)
def test_settings_may_hold_rates_of_the_plans_arms_alone(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        read_plan(planned(folder, **{"seeds": [1, 2, 3]} | changes))


def test_a_tuning_needs_pictures_for_its_questions(folder):
    with pytest.raises(ValueError, match="a tuning needs pictures.num_validation"):
        read_plan(planned(folder, points=POINTS, pictures={}))
