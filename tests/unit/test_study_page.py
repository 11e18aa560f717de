"""The study's page says what the intervals allow and nothing else, for as many arms as there are."""

import json

import numpy as np
import pytest
from paths import ROOT

from llava.eval.results import CONTROLS
from llava.experiment.commands import main
from llava.experiment.figures import figures
from llava.experiment.plan import MEAN
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
from llava.experiment.study_record import CONTRASTS, doses, measured, read_record

NAMES = ARMS.split(",")


def difference(delta, half=4.0):
    low, high = delta - half, delta + half
    verdict = "improved" if low > 0 else "worse" if high < 0 else "unchanged"
    return {"delta": delta, "low": low, "high": high, "by_seed": [delta - 1, delta + 1], "verdict": verdict} | {
        "won": 9,
        "lost": 3,
        "p": 0.1,
    }


@pytest.fixture
def study():
    """A made-up study: layernorm better, clip worse, gwc_layernorm@16x worse than gwc_layernorm, the rest alike."""
    deltas = {"layernorm": 6.0, "clip": -7.0}
    tasks = {"color": {"questions": 72, "chance": 12.5}, "count": {"questions": 72, "chance": 25.0}}

    def both(delta):
        return {"color": difference(delta, 9.0), "count": difference(delta, 9.0), MEAN: difference(delta)}

    pairs = {f"{a} minus {b}": both(5.0 if "16x" in b else 0.5) for a, b in CONTRASTS}
    scores = {arm: {task: [60 + deltas.get(arm, 0)] * 3 for task in [*tasks, MEAN]} for arm in NAMES}
    seen = [0, 100, 200]
    reached = [{"accuracy": 0.5, "arm": arm, "samples": 100, "low": 90, "high": 120} for arm in NAMES]
    reached[NAMES.index("rmsnorm")] |= {"samples": 50, "low": 40, "high": 60}
    reached[NAMES.index("clip")] |= {"samples": None, "low": 150, "high": None}
    controls = {c: {a: {"score": 60.0, "low": 55.0, "high": 65.0} for a in NAMES} for c in CONTROLS}
    controls["blank"] = {a: {"score": 25.0, "low": 20.0, "high": 30.0} for a in NAMES[:-1]} | {
        NAMES[-1]: {"score": 58.0, "low": 50.0, "high": 62.0}
    }
    rows = [
        {"model": arm, "intervention": name, "KL (nats)": 0.5, "cos of keys": 0.9, "cos of values": None}
        for arm in NAMES
        for name in ("untouched", "alpha 0.01", "alpha 10", "text norm", "blank picture")
    ]
    rates = [
        {"model": "none", "tokens": tokens, "cosine mean": 0.9, "update mean": rate}
        for tokens, rate in (("visual", 0.04), ("text after", 0.9))
    ]
    gradients = [{"model": a, "gradient at": "x", "none": 1.0, "layernorm": 0.1, "gwc_layernorm": 1.0} for a in NAMES]
    return {
        "format": 2,
        "created": "2026-11-22",
        "commit": "c0ffee",
        "trained_at": "c0ffee",
        "plan": {"preset": "demo", "hours": 2.0, "questions": 0, "smallest": {"color": 9.0, "count": 9.5, MEAN: 4.5}}
        | {"seeds": [42, 43, 44]},
        "model": {"model_name_or_path": "/models/<b>small</b>", "vision_tower": "tower"},
        "devices": "1 x cpu",
        "arms": NAMES,
        "seeds": [42, 43, 44],
        "tasks": tasks,
        "samples": {"pretrain": 1000, "finetune": 200},
        "scores": scores,
        "results": {arm: both(deltas.get(arm, 1.0)) for arm in NAMES[1:]},
        "contrasts": pairs,
        "resolved": dict.fromkeys(NAMES[1:], 5.0),
        "dose": doses(NAMES),
        "training": {"samples": seen, "questions": 96, "chance": 0.2, "reached": reached}
        | {"curves": {arm: np.linspace(0.2, 0.8, 9).reshape(3, 3).tolist() for arm in NAMES}},
        "controls": controls,
        "logged": {arm: {"visual norm": [3.0, None, 300.0], "text norm": [3.0, 3.0, 3.0]} for arm in NAMES},
        "measured": {
            "start": {"update-rates": rates},
            "finetune": {"update-rates": rates, "interventions": rows, "gradients": gradients},
        },
        "hours": 3.0,
    }


def test_controls_without_intervals_are_shown_and_called_so(study):
    assert "95 %, over other questions and other seeds" in " ".join(limits(study))
    for by_arm in study["controls"].values():
        for arm in by_arm:
            by_arm[arm] = {"score": by_arm[arm]["score"]}
    assert tables(study)["With the picture taken away"][0]["blank"] == "25.0"
    assert "picture taken away there are no intervals" in " ".join(limits(study))


def test_every_family_of_intervals_is_said_to_spend_5_percent(study):
    assert "each family spends its own 5 %" in " ".join(limits(study))


def test_power_and_limits_say_what_the_study_could_not_show(study):
    assert "4.5 points" in power(study)[0] and "color 9.0" in power(study)[0] and "5.0 to 5.0" in power(study)[1]
    study["plan"]["smallest"]["count"] = 125.0
    assert "count none" in power(study)[0]
    assert not any("trial" in text for text in limits(study))
    study["plan"]["questions"] = 48
    assert "Only 48 questions" in limits(study)[0]
    study["plan"] |= {"questions": 0, "seeds": [42, 43, 44, 45]}
    assert limits(study)[0] == "1 seed of 4 not trained yet: this is how it stands so far."


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
    (tmp_path / "study.json").write_text(json.dumps(study))
    assert main(["page", str(tmp_path)]) == 0
    html = (tmp_path / "study.html").read_text()
    assert "<b>small" not in html and "http" not in html.replace("http-equiv", "") and "improved" in html
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


def test_the_generated_part_of_the_page_in_docs_is_what_its_numbers_give(tmp_path):
    study, docs = read_record(ROOT / "docs/study.json"), ROOT / "docs/study.md"
    pictures = figures(study)
    page, numbers, *drawn = write_markdown(study, tmp_path / "study.md", tmp_path / "figures", pictures, by_hand(docs))
    assert page.read_text() == docs.read_text()
    assert numbers.read_text() == (ROOT / "docs/study-numbers.md").read_text()
    assert all((ROOT / "docs/figures" / path.name).is_file() for path in drawn)
    assert all(str(study["seeds"][0]) in picture.caption for picture in pictures.values())


def test_what_a_page_has_by_hand_stays(study, tmp_path):
    page = tmp_path / "study.md"
    write_markdown(study, page, tmp_path / "figures", {})
    page.write_text(page.read_text().replace("# Study", "Mine.\n\n# Study") + "Mine too.\n")
    write_markdown(study | {"hours": 9.0}, page, tmp_path / "figures", {}, by_hand(page))
    text = page.read_text()
    assert text.startswith("Mine.\n") and text.endswith("Mine too.\n") and "; 9 hours of training" in text
    page.write_text("Mine alone.\n")
    with pytest.raises(ValueError, match="each once"):
        by_hand(page)
