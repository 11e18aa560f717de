"""A study by a written plan: what is refused, its test's power and error rates in simulated data, and its page."""

import hashlib
import json
import math
import re
import shutil
import subprocess
from datetime import datetime

import numpy as np
import pytest
import training
from paths import ROOT

from llava.compare.confirmatory import hold_plan
from llava.compare.confirmatory_page import (
    UNDECIDED,
    WITHIN,
    compared,
    controls,
    means,
    reached,
    verdict,
    write_page,
)
from llava.compare.plan import POWER, shown_probability, smallest_shown, within_probability
from llava.compare.registered import generated, parsed, planned_deviation, read_registered, start_of, with_planning
from llava.compare.runs import Run
from llava.compare.study_page import END
from llava.compare.study_runs import missing_seeds, read_runs, runs_file, shared_configuration, with_runs, write_runs
from llava.eval.paired import IMPROVED, compare_seeds, resampled_interval
from llava.utils.intervals import student_cdf, student_quantile

PLAN = ROOT / "docs/study-plan.json"
PLANS = ("study-plan", "study-exploratory")
TASKS = ("binding", "color", "count", "position", "shape")
TRIAL = {
    "seed": 7,
    "tasks": {task: {"right": 80, "questions": 96, "chance": 25.0} for task in TASKS}
    | {"text": {"right": 20, "questions": 96, "chance": 16.7}},
    "samples": [0, 280, 560, 840, 1120],
    "loss": [2.0, 1.0, 0.8, 0.5, 0.4],
}


@pytest.fixture
def plan_with(tmp_path):
    """A function that gives the committed plan, changed and in a folder of its own."""
    shutil.copy(ROOT / "docs/study.json", tmp_path)

    def read(**changes):
        file = tmp_path / "study-plan.json"
        content = json.loads(PLAN.read_text()) | {"trials": [TRIAL], "tasks": list(TASKS)} | changes
        content = {name: value for name, value in content.items() if value is not None}
        file.write_text(json.dumps(content))
        return read_registered(file)

    return read


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [101, 43]}, r"seeds \[43\] were seen before the plan was made \(pilot \[42, 43, 44\]"),
        ({"seeds": [101, 7]}, r"seeds \[7\] were seen .*trials \[7\]"),
        ({"seeds": [101, 101]}, "none twice"),
        ({"primary": ["scale"]}, r"primary \['scale'\]: expected arms of"),
        (
            {"arms": ["none", "gwc_scale"], "primary": ["gwc_scale"]},
            r"primary \['gwc_scale'\]: the pilot .* did not train",
        ),
        ({"arms": ["layernorm", "none"]}, "baseline"),
        (
            {"tasks": ["color", "text"]},
            r"tasks \['color', 'text'\]: expected those that the trials answer above chance",
        ),
        ({"trials": []}, r"no trials; python -m llava.compare plan .* --trial SEED makes one"),
        ({"steps": {"pretrain": 3}}, "steps"),
        ({"margin": 0}, "margin 0: expected a positive number"),
        ({"margin": None}, "expected .*margin.*; found"),
    ],
)
def test_plans_that_contradict_themselves_or_name_seen_seeds_are_refused(plan_with, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_with(**changes)


def test_a_plan_that_changed_after_the_first_run_is_refused(plan_with, tmp_path):
    plan = plan_with()
    hold_plan(plan, tmp_path)
    hold_plan(plan, tmp_path)
    write_runs(plan, simulated(plan))
    assert missing_seeds(plan, read_runs(plan)) == []
    other = plan_with(margin=plan.margin + 1)
    for check in (lambda: read_runs(other), lambda: hold_plan(other, tmp_path)):
        with pytest.raises(ValueError, match="may not change after its first run") as refused:
            check()
        assert plan.digest[:12] in str(refused.value) and other.digest[:12] in str(refused.value)


def test_half_a_seed_and_damaged_records_are_refused(plan_with, tmp_path):
    plan = plan_with()
    assert read_runs(plan)["runs"] == []
    record = simulated(plan)
    del record["runs"][1]
    write_runs(plan, record)
    with pytest.raises(ValueError, match=f"seed {plan.seeds[0]} has runs of"):
        read_runs(plan)
    runs_file(plan).write_text("{}")
    with pytest.raises(ValueError, match="not the runs of a study"):
        read_runs(plan)


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
    plan = parsed(PLAN)
    wrong = [
        any(not low <= 0 <= high for low, high in map(bounds(plan), arms))
        for arms in studies(0, planned_deviation(plan), len(plan.seeds))
    ]
    assert 0.03 < np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(wrong))


def test_the_planned_difference_is_shown_with_the_planned_power():
    plan = parsed(PLAN)
    facts = (planned_deviation(plan), len(plan.seeds), plan.confidence)
    difference = smallest_shown(*facts)
    assert shown_probability(difference, *facts) == pytest.approx(POWER, abs=1e-4)
    shown = [bounds(plan)(arms[0])[0] > 0 for arms in studies(difference, *facts[:2])]
    assert np.mean(shown) == pytest.approx(POWER, abs=3 * math.sqrt(POWER * (1 - POWER) / len(shown)))


@pytest.mark.slow
def test_no_relevant_difference_is_said_as_often_as_planned_and_rarely_wrongly():
    plan, deviation, seeds = parsed(PLAN), 2.0, 12
    for truth in (0.0, plan.margin):
        said = [
            WITHIN in verdict(compare_seeds(arms[0], plan.confidence), plan.margin)
            for arms in studies(truth, deviation, seeds)
        ]
        expected = within_probability(plan.margin, deviation, seeds, plan.confidence) if truth == 0 else 0.0125
        assert np.mean(said) == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / len(said)))


def bounds(plan):
    def of(values):
        difference = compare_seeds(values, plan.confidence)
        return difference.low, difference.high

    return of


@pytest.mark.slow
def test_an_interval_over_seeds_and_questions_holds_the_truth():
    rng, inside = np.random.default_rng(8), []
    for _ in range(200):
        seeds, questions = rng.normal(0, 1, size=(12, 1)), [rng.normal(0, 4, size=(1, 48)) for _ in range(2)]
        d = [0.5 + seeds + own + rng.normal(0, 2, size=(12, 48)) for own in questions]
        low, high = resampled_interval(d, resamples=1000)
        inside.append(low <= 0.5 <= high)
        narrow = compare_seeds(np.mean([task.mean(axis=1) for task in d], axis=0))
    assert 0.9 < np.mean(inside) < 0.99
    assert high - low > narrow.high - narrow.low  # its questions are those asked


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
            training = {"samples": [0, 560, 1120], "loss": losses, "accuracy": [0.2, 0.5, 0.8]}
            entry = {"seed": seed, "arm": arm, "plan": plan.digest, "commit": "c0ffee", "started": "2026-01-01"}
            entry |= {"hours": 0.05, "machine": "a processor, 2 cores", "precision": "bf16"}
            entry |= {"weights": "w", "tower": "t", "language_model": "l"}
            entry |= {"controls": {"blank": dict.fromkeys(questions, 25.0 + seed % 2)}}
            record["runs"].append(entry | {"scores": scores, "log_probabilities": logs, "training": training})
    return record


@pytest.mark.slow
def test_comparisons_are_of_the_plans_tasks_and_only_the_primary_ones_decide(plan_with):
    plan = plan_with(seeds=[101, 102, 103, 104])
    record = simulated(plan, {"layernorm": 0.3})
    rows = compared(plan, record)
    assert [(row["arm"], row["role"]) for row in rows[:3]] == [
        ("layernorm", "primary"),
        ("gwc_layernorm", "primary"),
        ("gwc_rmsnorm", "exploratory"),
    ]
    by_run = {(entry["arm"], entry["seed"]): entry["scores"] for entry in record["runs"]}
    expected = [
        100 * np.mean([np.mean(by_run["layernorm", s][t]) - np.mean(by_run["none", s][t]) for t in plan.tasks])
        for s in plan.seeds
    ]
    assert rows[0]["by_seed"] == pytest.approx(expected) and rows[0]["verdict"] == IMPROVED
    assert {row["confidence"] for row in rows} == {0.975, 0.95}
    assert all(row["verdict"] == "" for row in rows[2:])
    for entry in record["runs"]:
        entry["scores"]["text"] = [0.0] * 40  # a task outside the outcome
    assert compared(plan, record) == rows


def test_samples_to_a_loss_are_paired_and_runs_that_miss_it_are_counted(plan_with):
    plan = plan_with(seeds=[101, 102, 103], trials=[TRIAL | {"loss": [2.0, 1.0, 0.6, 0.1, 0.1]}])
    assert plan.losses == [1.0, 0.1]
    rows = reached(plan, simulated(plan, {"clip": 0.2}))
    by_arm = {(row["loss"], row["arm"]): row for row in rows}
    assert by_arm[1.0, "clip"]["high"] < 0 and by_arm[1.0, "clip"]["not reached by"] == 0
    assert by_arm[0.1, "clip"]["not reached by"] == 3 and "difference" not in by_arm[0.1, "clip"]


@pytest.mark.slow
def test_nothing_is_compared_before_the_last_seed(plan_with, tmp_path):
    plan = plan_with(seeds=[101, 102])
    record = simulated(plan)
    part = record | {"runs": record["runs"][: len(plan.arms)]}
    write_page(plan, part)
    page = tmp_path / "study-runs.md"
    assert "1 of 2 seeds are missing" in page.read_text() and "Comparisons" not in page.read_text()
    assert "| 101 | none | 2026-01-01 | 0.05 | a processor, 2 cores | bf16 | c0ffee | t |" in page.read_text()
    write_page(plan, record)
    assert "## Comparisons with none" in page.read_text() and "missing" not in page.read_text()
    assert "97.5 % intervals of the primary arms; below: 95 %. Circles: seeds. Grey: the margin, 3" in page.read_text()
    arm, *by_task, outcome = re.search(r"## Percent right\n\n.*\n.*\n\| (.*) \|", page.read_text())[1].split(" | ")
    assert arm == "none" and float(outcome) == pytest.approx(np.mean([*map(float, by_task[:-1])]), abs=0.1)
    assert (tmp_path / "figures/study-runs.svg").is_file()


@pytest.mark.slow
def test_an_exploratory_study_decides_nothing_and_has_files_of_its_own(plan_with, tmp_path):
    file = tmp_path / "more.json"
    plan_with()
    file.write_text(
        json.dumps(json.loads((tmp_path / "study-plan.json").read_text()) | {"primary": [], "seeds": [1, 2]})
    )
    plan = read_registered(file)
    record = simulated(plan)
    assert {(row["role"], row["confidence"], row["verdict"]) for row in compared(plan, record)} == {
        ("exploratory", 0.95, "")
    }
    write_runs(plan, record)
    write_page(plan, record)
    page = (tmp_path / "more-runs.md").read_text()
    assert (tmp_path / "more-runs.json").is_file() and "figures/more-runs.svg" in page
    assert (tmp_path / "figures/more-runs.svg").is_file() and not (tmp_path / "study-runs.json").exists()
    assert "| gwc\\_layernorm | 60.0 | 25.5 |" in re.sub(r"\| \d\d\.\d \| 25", "| 60.0 | 25", page)
    assert "None is primary." in generated(plan) and "What the seeds can show" not in generated(plan)


def test_a_run_of_other_code_is_not_added(plan_with, monkeypatch):
    plan = plan_with(seeds=[101, 102])
    record = simulated(plan)
    monkeypatch.setattr("llava.compare.study_runs.shared_configuration", lambda run: {"pretrain.code.digest": "b"})
    monkeypatch.setattr("llava.compare.study_runs.answers_of", lambda run, control: type("R", (), {"tasks": {}}))
    run = type("Run", (), {"name": "none, seed 102"})
    with pytest.raises(
        ValueError, match=r"pretrain.code.digest: 'a' \(recorded\), 'b' \(now\)\nContinue at commit c0ffee"
    ):
        with_runs(plan, record, [run])


@pytest.mark.slow
def test_seeds_of_both_precisions_are_recorded_and_other_settings_are_not_left_out(tiny, tmp_path, monkeypatch):
    """By real runs: what follows from the precision has many names."""
    monkeypatch.setattr("llava.compare.study_runs.STAGES", ("pretrain",))
    monkeypatch.setattr("llava.compare.study_runs.answers_of", lambda run, control: run)

    def shared(bf16, **options):
        run = Run(tmp_path / f"{bf16} {options}", 101, "none")
        training.run(tiny, run.folder("pretrain"), 1, norm="none", bf16=bf16, max_steps=1, **options)
        dtype = {"settings.dtype": "bfloat16" if bf16 else "float32"}
        monkeypatch.setattr("llava.compare.study_runs.evaluation_settings", lambda run: dtype)
        return shared_configuration(run)

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
    plan = plan_with(seeds=[101, 102])
    record = simulated(plan) | {"questions": {}}
    entry = record["runs"].pop() | entry
    run, answers = type("Run", (), {"name": "clip, seed 102"}), type("Results", (), {"tasks": {}})
    for name, value in (("shared_configuration", record["configuration"]), ("entry_of", entry)):
        monkeypatch.setattr(f"llava.compare.study_runs.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("llava.compare.study_runs.answers_of", lambda run, control: answers)
    if message is None:
        assert with_runs(plan, record, [run])["runs"][-1] == entry
    else:
        with pytest.raises(ValueError, match=message):
            with_runs(plan, record, [run])


# --- the page of the plan ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_a_plans_page_has_what_the_plan_and_the_pilot_say(plan):
    page = ROOT / "docs" / f"{plan}.md"
    registered = read_registered(page.with_suffix(".json"))
    assert page.read_text() == with_planning(page, registered), (
        f"run: python -m llava.compare plan docs/{plan}.json --docs"
    )


@pytest.mark.parametrize("plan", PLANS)
def test_every_number_of_a_plans_text_is_in_its_generated_part(plan):
    page = ROOT / "docs" / f"{plan}.md"
    text = page.read_text()
    made = text[text.index(start_of(page)) : text.index(END)]
    by_hand = text.replace(made, "")
    written = re.sub(r"\(https?:[^)]*\)|`[^`]*`|```.*?```|[Ss]tage \d", "", by_hand, flags=re.DOTALL)
    known = set(re.findall(r"\d+(?:\.\d+)?", made))
    unknown = [number for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w])", written) if number not in known]
    assert unknown == [] and len(known) > 20


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_was_committed_before_its_runs(plan):
    file = ROOT / "docs" / f"{plan}.json"
    record = read_runs(read_registered(file))
    for entry in record["runs"]:
        commit = git("show", "--no-patch", "--format=%cI", entry["commit"])
        if commit.returncode:
            pytest.skip(f"no commit {entry['commit'][:12]} here: a checkout without its history")
        then = git("show", f"{entry['commit']}:{file.relative_to(ROOT)}")
        assert hashlib.sha256(then.stdout).hexdigest() == entry["plan"]
        assert datetime.fromisoformat(commit.stdout.decode().strip()) < datetime.fromisoformat(entry["started"])


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True)


def finished(name):
    """A committed study: its plan, its record, and its comparisons."""
    plan = read_registered(ROOT / "docs" / f"{name}.json")
    record = read_runs(plan)
    assert missing_seeds(plan, record) == []
    return plan, record, compared(plan, record)


def test_every_result_of_the_studys_page_is_recorded():
    plan, record, rows = finished("study-plan")
    more, more_record, more_rows = finished("study-exploratory")
    page = re.sub(r"## One set of rates.*?(?=## )", "", (ROOT / "docs/study.md").read_text(), flags=re.DOTALL)
    text = " ".join(page.split())
    units = {"accuracy, points": ("points", 1), "log-probability, nats": ("nats", 3)}
    results = {}
    for row in [*rows, *more_rows]:
        unit, digits = units[row["outcome"]]
        results[row["arm"], unit] = tuple(f"{row[name]:+.{digits}f}" for name in ("delta", "low", "high"))
    for row in reached(plan, record):
        if row["loss"] == plan.losses[0] and row["arm"] != plan.arms[0]:
            results[row["arm"], "samples"] = tuple(f"{row[name]:+.0f}" for name in ("difference", "low", "high"))
    number = r"[+-]\d+(?:\.\d+)?"
    form = rf"`([\w-]+)`([^`]*?) ({number}) (points|nats|samples) \(({number}) to ({number})\)"
    stated = {(arm, unit): (delta, low, high) for arm, _, delta, unit, low, high in re.findall(form, text)}
    assert stated == {key: results[key] for key in stated} and len(re.findall(form, text)) == len(stated)
    arms = [*plan.arms[1:], *more.arms[1:]]
    assert {(arm, unit) for arm in arms for unit in ("points", "nats")} <= stated.keys()
    for row in rows[: len(plan.primary)]:
        assert f"**`{row['arm']}` is {row['verdict']}**" in text
    for precision in ("fp32", "bf16"):
        seeds = {entry["seed"] for entry in record["runs"] if entry["precision"] == precision}
        for row in rows:
            assert np.mean([d for seed, d in zip(plan.seeds, row["by_seed"], strict=True) if seed in seeds]) < 0

    rest = re.sub(rf"{form}|`[^`]*`|\]\([^)]*\)|[Ss]tage \d|commit \w+|fp32|bf16", "", text)
    pages = ("study-runs", "study-plan", "study-exploratory-runs")
    known = {word for name in pages for word in words_of(ROOT / f"docs/{name}.md")}
    assert set(re.findall(r"\d+(?:\.\d+)?", rest)) <= known
    for row in controls(plan, record):
        assert all(24 <= float(row[name]) <= 26 for name in ("blank", "text-only"))
    right = {row["arm"]: row for row in means(plan, record, "scores", 100.0)}
    assert all(float(row["color"]) > 94 for row in right.values())
    shares = [right[arm]["position"] for arm in ("none", "layernorm", "gwc_layernorm")]
    places = "`none` answers {} % of those about a position, `layernorm` {} % and `gwc_layernorm` {} %"
    assert places.format(*shares) in text
    right |= {row["arm"]: row for row in means(more, more_record, "scores", 100.0)}
    fixed, before, base = (right[arm]["position"] for arm in ("rmsnorm-fixed", "pre_layernorm_mlp2x_gelu", "none"))
    assert f"answers {before} % of the questions about a position" in text
    assert f"most on positions: {fixed} % against {base} %" in text
    mix = {row["arm"]: row for row in controls(more, more_record)}["vocab_mix_mlp2x_gelu"]
    assert f"{mix['picture']} % right with the picture and {mix['blank']} % with a blank one" in text


def test_the_studys_page_has_the_trial_of_rates_as_recorded():
    trial = json.loads((ROOT / "docs/data/rates-trial.json").read_text())
    section = (ROOT / "docs/study.md").read_text().split("## One set of rates")[1].split("\n## ")[0]
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


def words_of(page):
    return re.findall(r"[^\s|]+", page.read_text().replace("%", " ").replace(",", " "))


@pytest.mark.parametrize("plan", PLANS)
def test_the_committed_page_of_runs_is_that_of_the_record(plan, tmp_path):
    runs = runs_file(read_registered(ROOT / "docs" / f"{plan}.json"))
    for name in (f"{plan}.json", runs.name, "study.json"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    copy = read_registered(tmp_path / f"{plan}.json")
    write_page(copy, read_runs(copy))
    page = runs.with_suffix(".md").name
    assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()
    assert (ROOT / "docs/figures" / runs.name).with_suffix(".svg").is_file()
