"""The comparison's page: verdicts as computed, and everything escaped."""

import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from comparison_runs import write_run
from paths import ROOT

from llava.compare import paper
from llava.compare.__main__ import main
from llava.compare.figures import lengths
from llava.compare.plan import read_plan
from llava.compare.record import FILE, read_record
from llava.compare.report import markdown_text, write_lengths
from llava.compare.run import Comparison
from llava.compare.tables import Statistics, every_table, scores_table
from llava.eval.paired import compare_benchmarks, compare_seeds
from llava.eval.tasks import PAPER_COLUMNS, TASKS
from llava.utils.digests import revision
from llava.utils.presentation import import_pyplot, looks

HOSTILE = "<script>document.title='hacked'</script>\"'|`*[x](javascript:1)\n<img src=x onerror=document.title='hacked'>"


def compare(root, arms, seeds=(1, 2, 3), **more):
    Comparison("demo", list(arms), list(seeds), root, tasks=",".join(TASKS), **more).report(root)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A folder with the report on four arms: one clearly better, one worse, one hardly different from the baseline."""
    root = tmp_path_factory.mktemp("report")
    rights = {"none": 0.5, "layernorm": 0.5, "gwc_layernorm": 0.75, "layernorm@default": 0.2}
    tasks = {"scenes": 240, "pope": 300}
    runs = [
        write_run(root, seed, arm, right, answer=HOSTILE, tasks=tasks, model="/models/<b>Llama-3.2-3B</b>")
        for seed in (1, 2, 3)
        for arm, right in rights.items()
    ]
    (root / "analysis").mkdir()
    rows = [{"model": HOSTILE, "layer": i, "share": 1 / 7} for i in range(2)]
    now = revision(str(runs[0].folder("finetune")))
    for name, measured in (("layer-norms", now), ("norm-params", "of an earlier training")):
        content = {"rows": rows, "provenance": {"models": [{"name": "none", "revision": measured}]}}
        (root / f"analysis/{name}.json").write_text(json.dumps(content))
        (root / f"analysis/{name}.png").touch()
    compare(root, rights)
    return root, runs


def tables(root):
    """The tables of the record in a folder."""
    return every_table(Statistics(read_record(root)))


def test_tables_have_the_scores_of_the_samples(report):
    root, runs = report
    rows = {(row["arm"], row["benchmark"]): row for row in tables(root)["differences"]}
    scores = [run.results.tasks["scenes"].score for run in runs if run.arm == "gwc_layernorm"]
    base = [run.results.tasks["scenes"].score for run in runs if run.arm == "none"]
    row = rows["gwc_layernorm", "scenes"]
    changes = [ours - theirs for ours, theirs in zip(scores, base, strict=True)]
    expected = compare_seeds(changes)
    assert [row[f"seed {seed}"] for seed in (1, 2, 3)] == pytest.approx(changes, abs=0.01)
    assert [row[name] for name in ("delta", "low", "high")] == pytest.approx(
        [expected.delta, expected.low, expected.high], abs=0.01
    )
    verdicts = [rows[arm, "mean"]["verdict"] for arm in ("gwc_layernorm", "layernorm@default", "layernorm")]
    assert verdicts == ["improved", "worse", "undecided"]
    table = {row["benchmark"]: row for row in tables(root)["scores"]}
    assert table["scenes"]["gwc_layernorm"] == f"{sum(scores) / 3:.1f}" and table["scenes"]["chance"] == "25.0"
    assert table["POPE"]["layernorm, paper"] == paper.TABLE_4["Llama-3.2-3B"]["layernorm"]["pope"]
    assert not [name for name in table["mean"] if "paper" in name]
    assert "layernorm@default, paper" not in table["POPE"]


def write_answers(run, right, data="content abc"):
    """Answers to 80 questions of which the first `right` are right, with the record of what was asked."""
    run.answers.parent.mkdir()
    lines = [
        {"question_id": i, "text": "red" if i < right else "blue", "metadata": {"expected": "Red."}} for i in range(80)
    ]
    run.answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = f"{run.arm}, content {revision(str(run.folder('finetune')))}"
    asked = {"--model-path": model, "--data": data}
    run.answers.with_name("answers.jsonl.run.json").write_text(json.dumps({"asked": asked, "count": 80}))


@pytest.mark.slow
def test_the_caller_s_own_questions_are_scored_in_every_arm(tmp_path):
    runs = [write_run(tmp_path, 1, arm, 0.5) for arm in ("none", "layernorm")]
    for run, right in zip(runs, (40, 70), strict=True):
        write_answers(run, right)
    compare(tmp_path, ("none", "layernorm"), (1,), questions=Path("mine.jsonl"))
    rows = {(row["benchmark"], row["arm"]): row for row in tables(tmp_path)["differences"]}
    ours = rows["questions", "layernorm"]
    assert (ours["delta"], ours["won"], ours["lost"]) == (37.5, 30, 0) and "verdict" not in ours
    assert {row["benchmark"]: row["none"] for row in tables(tmp_path)["scores"]}["questions"] == "50.0 (39 to 61)"
    shutil.rmtree(runs[1].answers.parent)
    write_answers(runs[1], 70, data="content xyz")
    with pytest.raises(ValueError) as refused:
        compare(tmp_path, ("none", "layernorm"), (1,), questions=Path("mine.jsonl"))
    assert "--data: 'content abc' (none, seed 1), 'content xyz' (layernorm, seed 1)" in str(refused.value)


@pytest.mark.slow
def test_fewer_than_three_seeds_have_an_interval_of_questions_and_no_verdict(tmp_path):
    seeds = (1, 2)
    runs = [
        write_run(tmp_path, seed, arm, right) for seed in seeds for arm, right in (("none", 0.3), ("layernorm", 0.8))
    ]
    compare(tmp_path, ("none", "layernorm"), seeds)
    page, text = ((tmp_path / f"report.{kind}").read_text() for kind in ("html", "md"))
    for shown in (page, text):
        assert "2 seeds: the intervals cover the choice of questions only" in shown and "cannot be ranked" in shown
    assert '<td class="improved">' not in page and "improved" not in text and "undecided" not in text
    scores = np.array([[sample.score for sample in run.results.tasks["scenes"].samples] for run in runs])
    ((expected,), _) = compare_benchmarks([scores[1::2] - scores[::2]], [None])
    (row, _) = tables(tmp_path)["differences"]
    assert [row[name] for name in ("delta", "low", "high")] == pytest.approx(
        [expected.delta, expected.low, expected.high], abs=0.005
    )


@pytest.mark.slow
def test_the_page_is_written_from_the_record_alone(report, tmp_path):
    shutil.copy(report[0] / FILE, tmp_path)
    assert main(["report", str(tmp_path / FILE), "--output-dir", str(tmp_path / "again")]) == 0
    own, again = (folder / "report.md" for folder in (report[0], tmp_path / "again"))
    assert again.read_text() == own.read_text()


def test_page_needs_no_network_and_escapes_what_comes_from_data(report):
    page = (report[0] / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "https:" not in page.replace("https://www.w3.org", "") and "<script>document.title" not in page
    assert html.escape("<script>document.title=", quote=False) in page
    assert "<img src=x" not in page and "<b>Llama" not in page
    markdown = (report[0] / "report.md").read_text()
    assert not re.search(r"(?<!\\)<", markdown)
    assert markdown_text("a|b\n<i>*") == "a\\|b \\<i\\>\\*"


def test_the_page_has_what_was_measured_of_its_own_weights_alone(report):
    page = (report[0] / "report.html").read_text()
    assert "layer-norms" in page and "norm-params" not in page


def test_a_norm_has_one_colour_whatever_is_drawn_beside_it():
    arms = ["none", "layernorm", "gwc_layernorm", "pre_layernorm_mlp2x_gelu"]
    alone, among = looks(arms), looks(["org/model", "another", "layernorm@4x", *arms[::-1]])
    assert all(among[arm] == alone[arm] for arm in arms)
    colours = [look["color"] for look in among.values()]
    assert len(set(colours)) == len(colours)


def test_score_that_its_samples_do_not_give_is_refused(tmp_path):
    runs = [write_run(tmp_path, 1, arm, 0.5) for arm in ("none", "layernorm")]
    path = runs[1].folder("eval") / "results.json"
    content = json.loads(path.read_text())
    content["tasks"]["scenes"]["score"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="scenes, layernorm: score"):
        compare(tmp_path, ("none", "layernorm"), (1,))


def test_papers_last_column_is_the_mean_of_its_nine():
    means = {llm: [round(sum(row.values()) / 9, 2) for row in arms.values()] for llm, arms in paper.TABLE_4.items()}
    assert means == {"Llama-3.2-3B": [59.01, 62.04, 61.27], "Qwen2.5-7B": [68.49, 68.71, 69.41]}  # as printed
    assert all(list(row) == list(PAPER_COLUMNS.values()) for arms in paper.TABLE_4.values() for row in arms.values())
    assert paper.language_model_of("meta-llama/Llama-3.2-3B-Instruct") == "Llama-3.2-3B"


def test_a_figure_of_several_studies_has_their_results_over_their_steps_and_is_refused_without_every_plan(tmp_path):
    data = ROOT / "docs/data"
    names = [("study-exploratory-runs", "study-exploratory"), ("study-runs", "study-plan")]
    records, plans = ([str(data / f"{pair[part]}.json") for pair in names] for part in (0, 1))
    for given in (["--plan", plans[0]], [], ["--against", records[0]]):
        assert main(["report", *records, *given, "--output-dir", str(tmp_path)]) == 2
    assert main(["report", *records, "--plan", *plans, "--output-dir", str(tmp_path)]) == 0
    assert (tmp_path / "lengths.svg").read_bytes().startswith(b"<?xml")

    studies = [
        Statistics(read_record(data / f"{record}.json"), read_plan(data / f"{plan}.json")) for record, plan in names
    ]
    studies[0].record["runs"][0]["own"] = {"finetune.training.mm_projector_lr": 1.0}  # none alone
    order = (studies[1], *studies)
    lines = [line for line in lengths(order, import_pyplot()).axes[0].lines if line.get_marker() == "o"]
    shown = [(stats, arm) for arm in studies[1].arms[1:] for stats in order if arm in stats.arms]
    for line, (stats, arm) in zip(lines, shown, strict=True):
        ((x, y),) = line.get_xydata()
        assert x == pytest.approx(208, rel=0.1) and y == stats.results[arm]["mean"]["delta"]
        assert line.get_fillstyle() == ("full" if stats is studies[0] else "none")
    other = read_record(data / "study-runs.json") | {"questions": {"color": []}}
    with pytest.raises(ValueError, match="cannot stand beside"):
        write_lengths([studies[1].record, other], tmp_path, [studies[1].plan, None])


def test_a_mean_over_kinds_has_no_interval_of_a_share():
    scores, kinds = [1.0] * 9 + [0.0] * 2, ["a"] * 9 + ["b"] * 2
    facts = {"metric": "average", "chance": 25.0, "kinds": kinds, "targets": ["A"] * 11}
    record = {"configuration": {}, "questions": {"mmstar": list(range(11))}, "tasks": {"mmstar": facts}}
    runs = [
        {"seed": 42, "arm": arm, "scores": {"mmstar": scores}, "percent": {"mmstar": 50.0}} for arm in ("none", "clip")
    ]
    (row, _) = scores_table(Statistics(record | {"runs": runs}))
    assert row["none"] == row["clip"] == "50.0"
