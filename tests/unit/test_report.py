"""The comparison's page: verdicts as computed, everything escaped, and how a browser shows it."""

import csv
import html
import json
import re
import shutil

import pytest
from comparison_runs import write_run

from llava.compare import paper
from llava.compare.commands import main
from llava.compare.report import markdown_text
from llava.compare.report_tables import Statistics
from llava.eval.results import PAPER_COLUMNS
from llava.utils.digests import revision

HOSTILE = "<script>document.title='hacked'</script>\"'|`*[x](javascript:1)\n<img src=x onerror=document.title='hacked'>"


def compare(root, arms, seeds="1,2"):
    assert main(["report", "--output-dir", str(root), "--arms", ",".join(arms), "--seeds", seeds]) == 0


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A folder with the report on four arms: one clearly better, one worse, one hardly different from the baseline."""
    root = tmp_path_factory.mktemp("report")
    rights = {"none": 0.5, "layernorm": 0.5, "gwc_layernorm": 0.75, "layernorm_default": 0.2}
    tasks = {"scenes": 240, "pope": 300}
    runs = [
        write_run(root, seed, arm, right, answer=HOSTILE, tasks=tasks, model="/models/<b>Llama-3.2-3B</b>")
        for seed in (1, 2)
        for arm, right in rights.items()
    ]
    (root / "analysis").mkdir()
    rows = [{"model": HOSTILE, "layer": i, "norm": 10.0 - i, "share": 1 / 7} for i in range(11)]
    (root / "analysis/layer-norms.json").write_text(json.dumps({"rows": rows}))
    (root / "analysis/layer-norms.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>')
    (root / "analysis/update-rates-layers.json").write_text(json.dumps({"rows": rows * 10}))
    (root / "upstream").mkdir()
    stage = {"ours": [1.0, 2.0], "upstream": [1.0, 2.0], "largest_loss_difference": 1.25e-6}
    (root / "upstream/comparison.json").write_text(json.dumps({"arms": {"none": {"pretrain": stage}}}))
    compare(root, rights)
    return root, runs


def read_csv(root, name):
    with open(root / f"report-{name}.csv", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_tables_have_the_scores_of_the_samples(report):
    root, runs = report
    rows = {(row["arm"], row["benchmark"]): row for row in read_csv(root, "results")}
    scores = [run.results.tasks["scenes"].score for run in runs if run.arm == "gwc_layernorm"]
    base = [run.results.tasks["scenes"].score for run in runs if run.arm == "none"]
    row = rows["gwc_layernorm", "scenes"]
    assert float(row["score"]) == pytest.approx(sum(scores) / 2, abs=0.01)
    assert float(row["delta"]) == pytest.approx((sum(scores) - sum(base)) / 2, abs=0.01)
    assert [float(row["seed 1"]), float(row["seed 2"])] == pytest.approx(scores, abs=0.01)
    verdicts = {
        arm: rows[arm, "mean"]["verdict"] for arm in ("none", "gwc_layernorm", "layernorm_default", "layernorm")
    }
    assert list(verdicts.values()) == ["baseline", "improved", "worse", "unchanged"]
    assert rows["layernorm", "POPE"]["paper delta"] == "0.74"
    assert rows["layernorm", "mean"]["paper"] == ""  # the paper's is over nine benchmarks
    assert rows["layernorm_default", "POPE"]["paper"] == ""


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


def test_the_caller_s_own_questions_are_scored_in_every_arm(tmp_path, capsys):
    runs = [write_run(tmp_path, 1, arm, 0.5) for arm in ("none", "layernorm")]
    for run, right in zip(runs, (40, 70), strict=True):
        write_answers(run, right)
    words = ["report", "--output-dir", str(tmp_path), "--arms", "none,layernorm", "--seeds", "1,"]
    assert main([*words, "--questions"]) == 0
    rows = {(row["benchmark"], row["arm"]): row for row in read_csv(tmp_path, "results")}
    ours = rows["questions", "layernorm"]
    assert (ours["score"], ours["delta"], ours["won"], ours["lost"]) == ("87.5", "37.5", "30", "0")
    assert ours["verdict"] == "improved" and rows["questions", "none"]["score"] == "50.0"
    shutil.rmtree(runs[1].answers.parent)
    write_answers(runs[1], 70, data="content xyz")
    assert main([*words, "--questions"]) == 2
    assert "--data: 'content abc' (none, seed 1), 'content xyz' (layernorm, seed 1)" in capsys.readouterr().err


def test_only_intervals_without_zero_are_bold(report):
    text = (report[0] / "report.md").read_text()
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ") and " to " in line}
    assert "**" not in lines["layernorm"]
    assert lines["gwc\\_layernorm"].count("**+") == 3 and lines["layernorm\\_default"].count("**-") == 3
    page = (report[0] / "report.html").read_text()
    assert page.count('<strong class="improved">') == 3 and page.count('<strong class="worse">') == 3


def test_with_several_seeds_the_page_says_that_p_does_not_decide(report):
    text = (report[0] / "report.md").read_text()
    assert "2 seeds: how much training runs vary" in text and "p leaves aside how training runs vary" in text


def test_cost_counts_each_step_once(report):
    row = read_csv(report[0], "cost")[0]
    assert float(row["device hours"]) == pytest.approx(5 * 8 / 4 / 3600, abs=5e-4)
    assert (row["tokens"], row["peak memory, GiB"], row["optimizer steps"]) == ("4000", "2.0", "5")


def test_page_needs_no_network_and_escapes_what_comes_from_data(report):
    page = (report[0] / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "https:" not in page.replace("https://www.w3.org", "") and "<script>document.title" not in page
    assert html.escape("<script>document.title=", quote=False) in page
    assert "<img src=x" not in page and "<b>Llama" not in page
    markdown = (report[0] / "report.md").read_text()
    assert not re.search(r"(?<!\\)<", markdown)
    assert markdown_text("a|b\n<i>*") == "a\\|b \\<i\\>\\*"


def test_measured_numbers_are_read_in_four_digits(report):
    page = (report[0] / "report.html").read_text()
    assert page.count('<td class="n">0.1429</td>') == 121 and str(1 / 7)[:6] not in page


def test_a_pictures_text_is_a_sentence(report):
    alts = re.findall(r'<img [^>]*alt="([^"]*)"', (report[0] / "report.html").read_text())
    assert len(alts) > 2 and [alt for alt in alts if not re.fullmatch(r"[A-Z]\S* .{15,}\.", html.unescape(alt))] == []


def test_a_difference_that_rounds_to_nothing_has_no_sign():
    assert [markdown_text(round(value, 1)) for value in (-4.6e-16, -0.06, 0.0)] == ["0.0", "-0.1", "0.0"]
    assert [markdown_text(value) for value in (None, True, 3)] == ["", "True", "3"]


def test_score_that_its_samples_do_not_give_is_refused(tmp_path, capsys):
    runs = [write_run(tmp_path, 1, arm, 0.5) for arm in ("none", "layernorm")]
    path = runs[1].folder("eval") / "results.json"
    content = json.loads(path.read_text())
    content["tasks"]["scenes"]["score"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="scenes, layernorm: score"):
        Statistics(runs)


def test_one_seed_names_what_its_interval_excludes(tmp_path):
    for arm in ("none", "layernorm"):
        write_run(tmp_path, 1, arm, 0.5)
    compare(tmp_path, ("none", "layernorm"), "1,")
    page = (tmp_path / "report.html").read_text()
    assert "One seed" in page and "p leaves aside" not in page
    assert {row["paper"] for row in read_csv(tmp_path, "results")} == {""}


def test_papers_last_column_is_the_mean_of_its_nine():
    for llm, arms in paper.TABLE_4.items():
        for arm, scores in arms.items():
            assert list(scores) == list(PAPER_COLUMNS.values())
            assert sum(scores.values()) / 9 == pytest.approx(paper.MEANS[llm][arm], abs=0.006)
    assert paper.language_model_of("meta-llama/Llama-3.2-3B-Instruct") == "Llama-3.2-3B"


# --- in a browser -----------------------------------------------------------------------------------------------------


def test_page_renders_without_a_message_and_sorts_its_tables(report, browse, tmp_path):
    dom, console = browse(report[0] / "report.html")
    assert not console
    assert "<title>hacked" not in dom and "Inside the models" in dom

    # What a reader would do, without the policy that keeps any other script from running.
    page = re.sub(r"<meta http-equiv=.*?>", "", (report[0] / "report.html").read_text())
    probe = """<script>window.onload = function () {
      var table = Array.from(document.querySelectorAll("details"))
        .find(function (d) { return d.textContent.startsWith("layer-norms"); }).querySelector("table"), seen = [];
      function cell(r, i) { return r.cells[i].textContent; }
      function column(i) { return Array.from(table.tBodies[0].rows, function (r) { return cell(r, i); }).join(); }
      [2, 2, 1].forEach(function (i) { table.querySelectorAll("th button")[i].click(); seen.push(column(1)); });
      var broken = Array.from(document.images).filter(function (i) { return !i.naturalWidth; }).length;
      window.dispatchEvent(new Event("beforeprint"));
      var closed = Array.from(document.querySelectorAll("details:not([open]) > summary")).map(e => e.textContent);
      document.title = JSON.stringify([seen, broken, closed, document.title === "hacked"]);
    };</script></body>"""
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe))
    dom, console = browse(tmp_path / "probe.html")
    assert not console
    seen, broken, closed, hacked = json.loads(html.unescape(re.search("<title>(.*?)</title>", dom)[1]))
    rising, falling = ",".join(map(str, range(11))), ",".join(map(str, range(10, -1, -1)))
    assert seen == [falling, rising, rising]  # norms fall as layers rise; the third click sorts numbers, not text
    assert (broken, closed, hacked) == (0, ["update-rates-layers (110)"], False)


def test_page_fits_a_phone_and_paper(report, browse, tmp_path):
    page = re.sub(r"<meta http-equiv=.*?>", "", (report[0] / "report.html").read_text())
    probe = """<script>window.dispatchEvent(new Event("beforeprint"));
      document.title = [innerWidth, document.documentElement.scrollWidth].join();</script></body>"""
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe))
    dom, _ = browse(tmp_path / "probe.html", width=390)
    window, content = map(int, re.search("<title>(.*?)</title>", dom)[1].split(","))
    assert content <= window <= 390
    browse(report[0] / "report.html", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
