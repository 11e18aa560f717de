"""The pages of a study: what they have of its record, and which part of docs/study-pilot.md is generated."""

import json
import re

import numpy as np
import pytest
from paths import ROOT

from llava.compare.commands import main
from llava.compare.figures import figures
from llava.compare.study import ARMS
from llava.compare.study_page import (
    by_hand,
    limits,
    measurements,
    power,
    tables,
    write_markdown,
    write_page,
)
from llava.compare.study_record import doses, measured, read_record

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
    docs = ROOT / "docs/study-pilot.md"
    pictures = figures(study)
    page, numbers, *drawn = write_markdown(study, tmp_path / docs.name, tmp_path / "figures", pictures, by_hand(docs))
    assert page.read_text() == docs.read_text()
    assert numbers.read_text() == (ROOT / "docs/study-pilot-numbers.md").read_text()
    assert all((ROOT / "docs/figures" / path.name).is_file() for path in drawn)
    assert all(str(study["seeds"][0]) in picture.caption for picture in pictures.values())


@pytest.mark.parametrize("page", ["study-pilot.md", "study-pilot-numbers.md"])
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


def test_every_number_of_the_hand_written_text_is_the_studys(study):
    text = " ".join(by_hand(ROOT / "docs/study-pilot.md")[0].split())
    results = [r for group in ("results", "contrasts") for by_task in study[group].values() for r in by_task.values()]
    intervals = {tuple(round(result[name], 1) for name in ("delta", "low", "high")) for result in results}
    signed, interval = r"([+-]?\d+\.\d)", r"(?:points)?[,:]? ?\(?([+-]?\d+\.\d) to ([+-]?\d+\.\d)"
    stated = re.findall(rf"(?<![\d.]){signed} ?{interval}", text)
    assert len(stated) == 14 and {tuple(map(float, numbers)) for numbers in stated} <= intervals
    text = re.sub(rf"(?<![\d.]){signed} ?{interval}", "", text)

    measured = study["measured"]["finetune"]
    turns = {row["model"]: row["update mean"] for row in measured["update-rates"] if row["tokens"] == "visual"}
    text_turns = [row["update mean"] for row in measured["update-rates"] if row["tokens"] == "text after"]
    kl = {
        name: {row["model"]: row["KL (nats)"] for row in measured["interventions"] if row["intervention"] == name}
        for name in ("text norm", "blank picture")
    }
    near = [turns[arm] for arm in NAMES if turns[arm] > 0.5]
    between = [turns[arm] for arm in NAMES if 0.2 < turns[arm] < 0.5]
    breaking = [kl["text norm"][arm] for arm in ("scale", "layernorm@default", "gwc_layernorm@16x")]
    harmless = max(value for arm, value in kl["text norm"].items() if value < 0.1)
    without = [study["controls"]["untouched"][a]["score"] - study["controls"]["blank"][a]["score"] for a in NAMES]
    spread = {arm: np.var(by_task["mean"]["by_seed"], ddof=1) for arm, by_task in study["results"].items()}
    wild = spread.pop("gwc_layernorm@0.25x")
    claims = [
        f"difference of {round(max(study['resolved'].values())):d} points with 80 %",
        f"by {turns['none']:.2f} without a norm layer, by {turns['layernorm']:.2f} with `layernorm` and by "
        f"{turns['gwc_layernorm']:.2f} with `gwc_layernorm`, and a text token by 0.94 to 1.00",
        "reach {:.0f} or {:.0f} % right".format(
            *(100 * a for a in sorted({r["accuracy"] for r in study["training"]["reached"]}))
        ),
        f"arms lose {min(without):.1f} to {max(without):.1f} points",
        f"{turns['none']:.2f} for `none`; {min(between):.2f} to {max(between):.2f} for",
        f"{min(near):.2f} to {max(near):.2f} for arms",
        f"{min(text_turns):.2f} to {max(text_turns):.2f} for text after",
        f"of `none` by {kl['text norm']['none']:.3f} nats, of `scale-fixed` by {kl['text norm']['scale-fixed']:.3f}",
        f"by {min(breaking):.3f} to {max(breaking):.3f}, and of all others by at most {harmless:.3f}",
        f"by {min(kl['blank picture'].values()):.2f} to {max(kl['blank picture'].values()):.2f}.",
        f"standard deviations of {wild**0.5:.1f} and {np.mean(list(spread.values())) ** 0.5:.1f} points",
    ]
    assert [claim for claim in claims if claim not in text] == []
    for claim in claims:
        text = text.replace(claim, "")
    text = re.sub(r"`[^`]*`|\(arXiv [\d.]*\)|bkal01|May 2026|[Ss]tage \d|[\d.]+x\b", "", text)
    assert re.findall(r"\d+(?:\.\d+)?", text) == []
