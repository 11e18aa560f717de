"""The pages of a study: what they have of its record, and which part of docs/study.md is generated."""

import json
import re

import pytest
from paths import ROOT

from llava.experiment.commands import main
from llava.experiment.figures import figures
from llava.experiment.study import ARMS
from llava.experiment.study_page import (
    by_hand,
    limits,
    measurements,
    power,
    tables,
    write_markdown,
    write_page,
)
from llava.experiment.study_record import doses, measured, read_record

NAMES = ARMS.split(",")


@pytest.fixture
def study():
    """The committed study."""
    return read_record(ROOT / "docs/study.json")


def test_controls_are_shown_with_intervals_where_the_record_has_them(study):
    assert tables(study)["With the picture taken away"][0]["blank"] == "26.6"
    assert "picture taken away there are no intervals" in " ".join(limits(study))
    for by_arm in study["controls"].values():
        for score in by_arm.values():
            score |= {"low": 20.04, "high": 30.0}
    assert tables(study)["With the picture taken away"][0]["blank"] == "26.6 (20.0 to 30.0)"
    assert "95 %, over other questions and other seeds" in " ".join(limits(study))


def test_a_trial_run_and_missing_seeds_are_named_first(study):
    study["plan"]["smallest"]["count"] = 125.0
    assert "count none" in power(study)[0]
    assert not any("trial" in text for text in limits(study))
    study["plan"]["questions"] = 48
    assert "Only 48 questions" in limits(study)[0]
    study["plan"] |= {"questions": 0, "seeds": [42, 43, 44, 45]}
    assert limits(study)[0] == "1 seed of 4 not trained yet: the result is preliminary."


def test_the_record_keeps_tables_of_arms_and_columns_of_long_ones(tmp_path):
    tables = {
        "sinks": {"model": "none", "share": 0.123456, "position": 12345},
        "update-rates": {"model": "none", "tokens": "text", "cosine mean": 0.9, "update mean": 1.0, "count": 7},
        "update-rates-layers": {"model": "none", "layer": 0, "cosine": 0.9},
        "theory": {"statement": "a lemma, whatever the models"},
    }
    for name, row in tables.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [row]}))
    (tmp_path / "norm-params.json").write_text(json.dumps({"rows": [{"model": "a", "step": 1}, {"model": "paper"}]}))
    assert measured(tmp_path) == {
        "norm-params": [{"model": "a", "step": 1}, {"model": "paper"}],
        "sinks": [{"model": "none", "share": 0.1235, "position": 12345}],
        "update-rates": [{"model": "none", "tokens": "text", "cosine mean": 0.9, "update mean": 1.0}],
    }


def test_a_measurement_has_one_table_with_an_arms_rows_together(study):
    before, after = (
        [{"model": arm, "tokens": t, "cosine mean": c, "update mean": 0.1} for arm in ("none", "clip") for t in "ab"]
        for c in (0.5, 0.98765)
    )
    study["measured"] = {"finetune": {"update-rates": after}, "start": {"update-rates": before}}
    shown = measurements(study)
    assert list(shown) == ["update-rates, cosine mean", "update-rates, update mean"]
    assert shown["update-rates, cosine mean"] == [
        {"model": arm, "when": when, "a": value, "b": value}
        for arm in ("none", "clip")
        for when, value in (("before training", 0.5), ("after stage 2", 0.988))
    ]


@pytest.mark.slow
def test_both_pages_and_every_figure_hold_every_arm_and_escape_names(study, tmp_path):
    study["model"]["vision_tower"] = "/models/<b>small</b>"
    (tmp_path / "study.json").write_text(json.dumps(study))
    assert main(["page", str(tmp_path)]) == 0
    html = (tmp_path / "study.html").read_text()
    assert "<b>small" not in html and "http" not in html.replace("http-equiv", "") and "improved" in html
    alts = re.findall(r'<img [^>]*alt="([^"]*)"', html)
    assert len(alts) == 7 and all(re.fullmatch(r"[A-Z]\S* .{15,}\.", alt) for alt in alts)
    figures = sorted(path.stem for path in (tmp_path / "figures").glob("*.svg"))
    names = ("controls", "dose", "gradients", "intervals", "norms", "rescaling", "training")
    assert figures == [f"study-{name}" for name in names]
    for name in ("controls", "intervals", "rescaling", "training"):
        drawn = (tmp_path / f"figures/study-{name}.svg").read_text()
        assert all(f">{arm}<" in drawn for arm in NAMES[1:])
    before = (tmp_path / "study.md").read_text()
    write_page(study, tmp_path)
    assert (tmp_path / "study.md").read_text() == before


def test_doses_are_the_multiples_of_the_text_norm_in_their_order():
    assert list(doses(NAMES).values()) == [0.25, 1.0, 4.0, 16.0]
    assert doses(["none", "gwc_layernorm@3.5", "gwc_layernorm@2x-fixed", "gwc_layernorm@default"]) == {}


def test_the_pages_in_docs_are_generated_from_the_committed_study(study, tmp_path):
    docs = ROOT / "docs/study.md"
    pictures = figures(study)
    page, numbers, *drawn = write_markdown(study, tmp_path / "study.md", tmp_path / "figures", pictures, by_hand(docs))
    assert page.read_text() == docs.read_text()
    assert numbers.read_text() == (ROOT / "docs/study-numbers.md").read_text()
    assert all((ROOT / "docs/figures" / path.name).is_file() for path in drawn)
    assert all(str(study["seeds"][0]) in picture.caption for picture in pictures.values())


@pytest.mark.parametrize("page", ["study.md", "study-numbers.md"])
def test_columns_of_numbers_are_aligned_right_and_words_left(page):
    checked = 0
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        for name, rule, *cells in zip(*lines, strict=True):
            numbers = [bool(re.match(r"-?\d", cell)) for cell in cells if cell and cell != "not reached"]
            if all(numbers) or not any(numbers):
                assert rule == ("---:" if numbers and all(numbers) else "---"), name
                checked += 1
    assert checked > 10


def test_the_hand_written_parts_of_a_page_stay(study, tmp_path):
    page = tmp_path / "study.md"
    write_markdown(study, page, tmp_path / "figures", {})
    page.write_text(page.read_text().replace("# Study", "Mine.\n\n# Study") + "Mine too.\n")
    write_markdown(study | {"hours": 9.0}, page, tmp_path / "figures", {}, by_hand(page))
    text = page.read_text()
    assert text.startswith("Mine.\n") and text.endswith("Mine too.\n") and "; 9 hours of training" in text
    page.write_text("Mine alone.\n")
    with pytest.raises(ValueError, match="each once"):
        by_hand(page)
