"""What the benchmarks share, and their page."""

import csv
import json
import math

import pytest

from benchmarks import common, page, scale, vs_peers, vs_upstream
from benchmarks.peers import recording

# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "ours"), [([7.01, 6.0], [7.0, 6.0]), ([math.nan], [2.0]), ([2.0], [math.nan])])
def test_a_tool_whose_first_loss_differs_or_is_no_number_has_no_speed(theirs, ours):
    vs_peers.check_first_loss([7.00001, 6.1], [7.0, 6.0], 1e-4)
    with pytest.raises(common.Failed, match="losses of the first step differ"):
        vs_peers.check_first_loss(theirs, ours, 1e-4)


@pytest.mark.parametrize("other", [10.92321, 10.92134, 10.91711])
def test_other_samples_are_not_the_same_work(other):  # of captions, for a random model of the demo's shapes
    assert vs_upstream.loss_difference([other], [10.93331]) > max(common.TOLERANCE.values())


def test_a_steps_loss_is_the_mean_over_its_targets_in_every_trainer():
    by_targets = [(3.0 * 2 / 8, 2, True), (1.0 * 6 / 8, 6, True)]  # means of 3 and 1 over 2 and 6 targets
    by_micro_batches = [(3.0 / 2, 2, False), (1.0 / 2, 6, False)]
    assert recording.step_loss(by_targets) == recording.step_loss(by_micro_batches) == 1.5


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_on_scale_has_the_rows_that_the_command_prints(monkeypatch):
    with (common.ROOT / "docs/data/scale.csv").open() as file:
        written = list(csv.reader(file))[1:]
    some = (7, 15)  # every file of DeepSpeed is chosen in these, and a recomputing run
    monkeypatch.setattr(scale, "RECIPES", [scale.RECIPES[number] for number in some])
    assert list(scale.rows()) == [written[number] for number in some]
    page = (common.ROOT / "docs/scale.md").read_text()
    shown = [[row[i] for i in (0, 1, 2, 4, 7)] for row in written if row[1] != "1"]  # 24 and 80 GB, eight of 80
    assert all("| " + " | ".join(row) + " |\n" in page for row in shown)


def test_the_pages_tables_are_those_of_the_results():
    text = page.PAGE.read_text()
    assert text == page.with_tables(text)
    assert round(page.GPU_ROWS[0].value(common.RESULTS), 3) == 0.516 and "| 0.491 | **missed** |" in text
    for path in common.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert result["name"] == path.stem and result["environment"]["commit"]


def test_a_part_that_was_cut_off_has_no_figure(tmp_path):
    row = page.Row("error", "<= 0.1", "zero", "error", "command", least=2)
    for errors, line in (((0.05, 0.2), "0.2 | **missed** |"), ((0.05,), "not measured | open |")):
        (tmp_path / "zero.json").write_text(json.dumps({"rows": [{"error": error} for error in errors]}))
        assert line in row.line(tmp_path)
