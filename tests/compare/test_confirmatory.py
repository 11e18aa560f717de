"""A study by a written plan: what is refused, its test's error rates in simulated data, its record, and its page."""

import hashlib
import json
import math
import re
import shutil
import subprocess
from datetime import datetime
from unittest.mock import ANY

import numpy as np
import pytest
import training
from paths import ROOT

from llava.compare.plan import check_record, hold, read_plan
from llava.compare.record import FILE, add_run, differing, read_record, shared_configuration, write_record
from llava.compare.report import write_page
from llava.compare.runs import Run
from llava.compare.tables import (
    UNDECIDED,
    WITHIN,
    Statistics,
    controls_table,
    differences_table,
    first_reached,
    reached_table,
    verdict,
)
from llava.eval.paired import IMPROVED, compare_seeds, confidence_of
from llava.eval.results import Answered, Results, TaskResult
from llava.utils.intervals import student_cdf, student_quantile

DATA = ROOT / "docs/data"
PLAN, STUDY = DATA / "study-plan.json", ROOT / "docs/study.md"
STUDIES = {"study-plan": "study-runs", "study-exploratory": "study-exploratory-runs"}
TASKS = ("binding", "color", "count", "position", "shape")
TRIAL = {"seed": 7, "samples": [0, 280, 560, 840, 1120], "loss": [2.0, 1.0, 0.8, 0.5, 0.4]}


@pytest.fixture
def plan_with(tmp_path):
    """A function that gives the committed plan, changed and in a folder of its own."""
    shutil.copy(DATA / "study.json", tmp_path)

    def read(**changes):
        file = tmp_path / "study-plan.json"
        content = json.loads(PLAN.read_text()) | {"trials": [TRIAL], "tasks": list(TASKS)} | changes
        content = {name: value for name, value in content.items() if value is not None}
        file.write_text(json.dumps(content))
        return read_plan(file)

    return read


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [101, 102, 43]}, r"seeds \[43\] were seen before the plan was made \(pilot \[42, 43, 44\]"),
        ({"seeds": [101, 102, 7]}, r"seeds \[7\] were seen .*trials \[7\]"),
        ({"seeds": [101, 102, 101, 103]}, "none twice"),
        ({"seeds": [101, 102]}, "at least 3"),
        ({"primary": ["scale"]}, r"primary \['scale'\]: expected arms of"),
        ({"arms": ["layernorm", "none"]}, "baseline"),
        ({"steps": {"pretrain": 3}}, "steps"),
        ({"margin": 0}, "margin 0: expected a positive number"),
        ({"margin": None}, "not a plan: .*'margin'"),
    ],
)
def test_plans_that_contradict_themselves_or_name_seen_seeds_are_refused(plan_with, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_with(**changes)


def test_a_plan_needs_neither_trials_nor_a_pilot(plan_with):
    plan = plan_with(trials=None, pilot=None)
    assert plan.losses == [] and plan.seeds[0] == 101


def test_a_plan_that_changed_after_the_first_run_is_refused(plan_with, tmp_path):
    plan = plan_with()
    hold(plan, tmp_path)
    hold(plan, tmp_path)
    record = simulated(plan)
    check_record(plan, record, tmp_path)
    assert plan.missing(record) == []
    other = plan_with(margin=plan.margin + 1)
    for check in (lambda: check_record(other, record, tmp_path), lambda: hold(other, tmp_path)):
        with pytest.raises(ValueError, match="may not change after its first run") as refused:
            check()
        assert plan.digest[:12] in str(refused.value) and other.digest[:12] in str(refused.value)


def test_half_a_seed_and_damaged_records_are_refused(plan_with, tmp_path):
    plan = plan_with()
    record = simulated(plan)
    del record["runs"][1]
    with pytest.raises(ValueError, match=f"seed {plan.seeds[0]} has runs of"):
        check_record(plan, record, tmp_path)
    for content, message in (("{}", "not a record of runs"), ("{", "not JSON"), (None, "no such file")):
        (tmp_path / FILE).unlink(missing_ok=True)
        if content:
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
    again["runs"][1]["training"]["loss"][0] += 1
    assert differing(record, again) == {
        "none, seed 101": [],
        "layernorm, seed 101": ["scores", "training"],
    }
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
        any(not low <= 0 <= high for low, high in map(bounds(plan), arms)) for arms in studies(0, 3.0, len(plan.seeds))
    ]
    assert 0.03 < np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(wrong))


@pytest.mark.parametrize(("deviation", "difference"), [(2.0, 4.6), (3.0, 6.9), (4.0, 9.2)])
def test_the_second_studys_seeds_show_the_planned_difference_in_four_of_five_studies(deviation, difference):
    plan = json.loads((DATA / "study-2-plan.json").read_text())
    confidence = confidence_of(len(plan["primary"]))
    arms = studies(difference, deviation, len(plan["seeds"]), count=2000)[:, 0]
    shown = np.mean([compare_seeds(values, confidence).low > 0 for values in arms])
    assert shown == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / len(arms)))
    assert f"{difference:g}" in (ROOT / "docs/study-2-plan.md").read_text()


def test_the_second_studys_plan_is_refused_before_its_tuning_is_recorded(tmp_path):
    content = json.loads((DATA / "study-2-plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(content))
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


def bounds(plan):
    def of(values):
        difference = compare_seeds(values, plan.confidence)
        return difference.low, difference.high

    return of


def test_each_comparison_has_its_own_variance():
    calm, wild = compare_seeds([1.0, 1.1, 0.9]), compare_seeds([10.0, -9.0, 2.0])
    assert calm.low > 0 and calm.deviation == pytest.approx(0.1) and wild.low < 0 < wild.high
    assert calm.p < 0.05 < wild.p
    with pytest.raises(ValueError, match="at least two seeds, found 1"):
        compare_seeds([1.0])


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
            losses = [2.0, 1.2 - (gains or {}).get(arm, 0.0) + 0.01 * rng.random(), 0.3]
            training = {"samples": [0, 560, 1120], "loss": losses}
            entry = {"seed": seed, "arm": arm, "plan": plan.digest, "commit": "c0ffee", "started": "2026-01-01"}
            entry |= {"hours": 0.05, "machine": "a processor, 2 cores", "precision": "bf16"}
            entry |= {"weights": "w", "tower": "t", "language_model": "l"}
            entry |= {"controls": {"blank": dict.fromkeys(questions, 25.0 + seed % 2)}}
            record["runs"].append(entry | {"scores": scores, "log_probabilities": logs, "training": training})
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


def test_samples_to_a_loss_are_paired_and_runs_that_miss_it_are_counted(plan_with):
    plan = plan_with(seeds=[101, 102, 103], trials=[TRIAL | {"loss": [2.0, 1.0, 0.6, 0.1, 0.1]}])
    assert plan.losses == [1.0, 0.1]
    rows = reached_table(Statistics(simulated(plan, {"clip": 0.2}), plan))
    by_arm = {(row["loss"], row["arm"]): row for row in rows}
    assert by_arm[1.0, "clip"]["high"] < 0 and by_arm[1.0, "clip"]["not reached by"] == 0
    assert by_arm[0.1, "clip"]["not reached by"] == 3 and "difference" not in by_arm[0.1, "clip"]


@pytest.mark.parametrize(
    ("loss", "samples"), [(2.5, 0.0), (2.0, 0.0), (1.5, 100.0), (1.0, 200.0), (0.75, 300.0), (0.4, math.inf)]
)
def test_a_loss_is_reached_on_the_straight_line_between_two_evaluations(loss, samples):
    assert first_reached(loss, {"samples": [0, 200, 400], "loss": [2.0, 1.0, 0.5]}) == pytest.approx(samples)


@pytest.mark.slow
def test_nothing_is_compared_before_the_last_seed(plan_with, tmp_path):
    plan = plan_with(seeds=[101, 102, 103])
    record = simulated(plan)
    part = record | {"runs": record["runs"][: len(plan.arms)]}
    write_page(part, tmp_path, plan)
    page = (tmp_path / "report.md").read_text()
    assert "2 of 3 seeds are missing" in page and "## Runs" in page
    assert "## Differences" not in page and "## Scores" not in page and not list(tmp_path.glob("*.svg"))
    assert "minus none" not in (tmp_path / "report.html").read_text()
    write_page(record, tmp_path, plan)
    page = (tmp_path / "report.md").read_text()
    assert "## Differences" in page and "missing" not in page and "97.5 % interval" in page
    assert (tmp_path / "report-differences.svg").is_file()


def test_an_exploratory_study_decides_nothing(plan_with):
    plan = plan_with(primary=[], seeds=[1, 2, 3])
    stats = Statistics(simulated(plan), plan)
    results = [result for by_task in stats.results.values() for result in by_task.values()]
    assert {(r["role"], r["confidence"], r["verdict"]) for r in results} == {("exploratory", 0.95, "")}


class Answering:
    """A run of which nothing is read but its name."""

    name, seed, arm = "none, seed 104", 104, "none"


def answered(ids):
    samples = [Answered(name, 1.0, "a", "a") for name in ids]
    return Results("c", "f", "", {}, {}, "", {"color": TaskResult("accuracy", 100.0, samples, 25.0, 1.0)})


def test_a_run_of_other_code_or_questions_is_not_added(plan_with, monkeypatch):
    record = simulated(plan_with(seeds=[101, 102, 103])) | {"questions": {"color": ["1", "2"]}}
    monkeypatch.setattr("llava.compare.record.shared_configuration", lambda *_: {"pretrain.code.digest": "b"})
    with pytest.raises(ValueError, match=r"digest: 'a' \(recorded\), 'b' \(now\)\nContinue at commit c0ffee"):
        add_run(record, Answering(), answered(["1", "2"]))
    monkeypatch.setattr("llava.compare.record.shared_configuration", lambda *_: record["configuration"])
    with pytest.raises(ValueError, match="answered other questions"):
        add_run(record, Answering(), answered(["1", "3"]))


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
    other = shared(True, learning_rate=2e-3)
    assert {name for name in other if other[name] != configuration[name]} == {"pretrain.training.learning_rate"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"precision": "bf16", "language_model": "l"}, None),
        ({"precision": "fp32", "language_model": "m"}, None),
        ({"precision": "bf16", "language_model": "m"}, "language model of digest m, the recorded runs in bf16 from l"),
    ],
)
def test_runs_of_one_precision_start_from_one_language_model(plan_with, monkeypatch, entry, message):
    record = simulated(plan_with(seeds=[101, 102, 103])) | {"questions": {"color": ["1"]}}
    entry = record["runs"].pop() | entry
    for name, value in (("shared_configuration", record["configuration"]), ("entry_of", entry)):
        monkeypatch.setattr(f"llava.compare.record.{name}", lambda *_, value=value: value)
    if message is None:
        add_run(record, Answering(), answered(["1"]))
        assert record["runs"][-1] == entry
    else:
        with pytest.raises(ValueError, match=message):
            add_run(record, Answering(), answered(["1"]))


# --- the committed studies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_a_plan_was_committed_before_its_runs(name):
    for entry in read_record(DATA / f"{STUDIES[name]}.json")["runs"]:
        commit = git("show", "--no-patch", "--format=%cI", entry["commit"])
        if commit.returncode:
            pytest.skip(f"no commit {entry['commit'][:12]} here: a checkout without its history")
        then = git("show", f"{entry['commit']}:docs/{name}.json")  # where plans were
        assert hashlib.sha256(then.stdout).hexdigest() == entry["plan"]
        assert hashlib.sha256((DATA / f"{name}.json").read_bytes()).hexdigest() == entry["plan"]
        assert datetime.fromisoformat(commit.stdout.decode().strip()) < datetime.fromisoformat(entry["started"])


def test_the_plans_page_has_the_plans_numbers():
    plan = read_plan(PLAN)
    section = (ROOT / "docs/study-plan.md").read_text().split("## The plan in numbers")[1]
    for values in (plan.seeds, plan.tasks, [f"`{arm}`" for arm in plan.arms]):
        assert f": {', '.join(map(str, values))}." in section
    assert f"{plan.steps['pretrain']} in pretrain and {plan.steps['finetune']} in finetune" in section
    assert f"interval: {100 * plan.confidence:g} %" in section and f"Margin: {plan.margin:g} points" in section
    assert " and ".join(map(str, plan.losses)) in section and len(plan.primary) == 2


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True)


def finished(name):
    """A committed study: its plan, its record, and its statistics."""
    plan, record = read_plan(DATA / f"{name}.json"), read_record(DATA / f"{STUDIES[name]}.json")
    check_record(plan, record, DATA)
    assert plan.missing(record) == []
    return plan, record, Statistics(record, plan)


def stated_results(stats):
    """Every overall result as a page states it, by arm and unit."""
    results = {}
    for arm, by_task in stats.results.items():
        overall, nats = by_task[stats.overall], stats.nats[arm]
        results[arm, "points"] = tuple(f"{overall[name]:+.1f}" for name in ("delta", "low", "high"))
        results[arm, "nats"] = tuple(f"{value:+.3f}" for value in (nats.delta, nats.low, nats.high))
    for row in reached_table(stats):
        if row["loss"] == stats.plan.losses[0] and "difference" in row:
            results[row["arm"], "samples"] = tuple(f"{row[name]:+.0f}" for name in ("difference", "low", "high"))
    return results


def test_every_result_of_the_studys_page_is_recorded():
    plan, record, stats = finished("study-plan")
    more, _, more_stats = finished("study-exploratory")
    page = re.sub(r"## (One set of rates|The pilot).*?(?=## |$)", "", STUDY.read_text(), flags=re.DOTALL)
    text = " ".join(page.split())
    results = stated_results(more_stats) | stated_results(stats)
    number = r"[+-]\d+(?:\.\d+)?"
    form = rf"`([\w-]+)`([^`]*?) ({number}) (points|nats|samples) \(({number}) to ({number})\)"
    stated = {(arm, unit): (delta, low, high) for arm, _, delta, unit, low, high in re.findall(form, text)}
    assert stated == {key: results[key] for key in stated} and len(re.findall(form, text)) == len(stated)
    arms = [*plan.arms[1:], *more.arms[1:]]
    assert {(arm, unit) for arm in arms for unit in ("points", "nats")} <= stated.keys()
    for arm in plan.primary:
        assert f"**`{arm}` is {stats.results[arm][stats.overall]['verdict']}**" in text
    for precision in ("fp32", "bf16"):
        seeds = {entry["seed"] for entry in record["runs"] if entry["precision"] == precision}
        for by_task in stats.results.values():
            by_seed = zip(plan.seeds, by_task[stats.overall]["by_seed"], strict=True)
            assert np.mean([d for seed, d in by_seed if seed in seeds]) < 0

    for row in controls_table(stats):
        assert all(24 <= float(row[name]) <= 26 for name in ("blank", "text-only"))
    assert all(np.mean(own["color"]) > 94 for own in stats.scores.values())

    def on_places(stats, arm):
        return f"{np.mean(stats.scores[arm]['position']):.1f}"

    shares = [on_places(stats, arm) for arm in ("none", "layernorm", "gwc_layernorm")]
    places = "`none` answers {} % of those about a position, `layernorm` {} % and `gwc_layernorm` {} %"
    assert places.format(*shares) in text
    fixed, before, base = (on_places(more_stats, a) for a in ("rmsnorm-fixed", "pre_layernorm_mlp2x_gelu", "none"))
    assert f"answers {before} % of the questions about a position" in text
    assert f"most on positions: {fixed} % against {base} %" in text
    mix = {row["arm"]: row for row in controls_table(more_stats)}["vocab_mix_mlp2x_gelu"]
    assert f"{mix['picture']} % right with the picture and {mix['blank']} % with a blank one" in text


def test_the_pilots_paragraph_has_its_recorded_results():
    pilot = json.loads((DATA / "study.json").read_text())["results"]
    section = " ".join(STUDY.read_text().split("## The pilot")[1].split("## ")[0].split())
    form = r"`([\w@.]+)` ([+-][\d.]+) points \(([+-][\d.]+) to ([+-][\d.]+)\)"
    stated = re.findall(form, section)
    assert len(stated) >= 3
    for arm, *numbers in stated:
        assert numbers == [f"{pilot[arm]['mean'][name]:+.1f}" for name in ("delta", "low", "high")]


def test_the_studys_page_has_the_trial_of_rates_as_recorded():
    trial = json.loads((DATA / "rates-trial.json").read_text())
    section = STUDY.read_text().split("## One set of rates")[1].split("\n## ")[0]
    names = ("stage_1_rate", "projector_rate", "mean", "position")
    recorded = [(row["arm"], *(row[name] for name in names)) for row in trial["rows"] if row["steps"] == [68, 70]]
    stated = [
        (arm, *map(float, numbers))
        for arm, *numbers in (
            line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \w+ \| \d", line)
        )
    ]
    assert len(stated) == 9 and set(stated) <= set(recorded)
    assert trial["commit"] in section and f"seed {trial['seed']}, {trial['precision']}" in section
