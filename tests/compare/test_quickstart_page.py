"""The quickstart's page: the table, the record and the page of arms that are there."""

import argparse
import html
import json
import re
from pathlib import Path

import pytest
from comparison_runs import write_run
from PIL import Image

from llava import asking
from llava.compare import answers
from llava.compare.quickstart import Quickstart
from llava.compare.record import read_record
from llava.compare.tables import Statistics
from llava.utils.intervals import share_interval

ARMS = ("none", "gwc_layernorm")
HOSTILE = "<img src=x onerror=document.title='hacked'>"
QUESTIONS, RIGHT = 24, {"none": 9, "gwc_layernorm": 18}


@pytest.fixture
def arms(tmp_path, monkeypatch):
    """A function that answers by made-up models and writes the page; `.asked` names the arms that were asked."""
    data, out = tmp_path / "playground/data/photos", tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    (data / "images").mkdir(parents=True)
    records = []
    for i in range(QUESTIONS):
        Image.new("RGB", (400, 300), (10 * i, 0, 0)).save(data / f"images/{i}.png")
        turns = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "right"}]
        kind = ("color", "shape")[i % 2]
        records.append(
            {"id": f"q{i}", "image": f"{i}.png", "kind": kind, "choices": list("abcd"), "conversations": turns}
        )
    (data / "heldout.json").write_text(json.dumps(records))
    for arm in ARMS:
        run = write_run(out, None, arm, 0.5)
        run.folder("pretrain").with_suffix(".log").write_text("done")

    def answers_under(control, checkpoint, records, images, batch_size):
        name = Path(checkpoint).parent.name
        run.asked.append(name)
        return [("Right." if i >= QUESTIONS - RIGHT[name] else HOSTILE, -1.0) for i in range(len(records))]

    monkeypatch.setattr(asking, "load_assistant", lambda checkpoint, **_: checkpoint)
    monkeypatch.setattr(answers, "answers_under", answers_under)
    monkeypatch.setattr(Quickstart, "measurements", lambda *_: {})

    def run():
        run.asked.clear()
        for arm in ARMS:
            words = {"checkpoint": out / arm / "finetune", "data": data, "output_dir": out / "answers" / arm}
            more = {"batch_size": 80, "controls": ["untouched"], "questions": 0}
            answers.run(argparse.Namespace(**words, **more))
        Quickstart("demo", list(ARMS), [], out, "photos").page()

    run.asked, run.out, run.data = [], out, data
    return run


def test_scores_have_their_intervals_and_arms_their_paired_difference(arms, capsys):
    arms()
    stats = Statistics(read_record(arms.out))
    assert stats.scores["none"]["all questions"] == [pytest.approx(100 * 9 / 24)]
    difference = stats.results["gwc_layernorm"]["all questions"]
    assert (difference["won"], difference["lost"], difference["delta"]) == (9, 0, pytest.approx(37.5))
    assert difference["low"] < 37.5 < difference["high"] and difference["verdict"] == ""
    low, high = share_interval(9, 24)
    printed = capsys.readouterr().out
    assert re.search(rf"all questions +37\.5 \({100 * low:.0f} to {100 * high:.0f}\) .* 25\.0", printed)


@pytest.mark.slow
def test_answers_are_reused_until_what_decides_them_changes(arms, monkeypatch):
    arms()
    assert arms.asked == list(ARMS)
    arms()
    assert arms.asked == []
    config = arms.out / "none/finetune/config.json"
    config.write_text(config.read_text() + "\n")
    arms()
    assert arms.asked == ["none"]
    (arms.data / "heldout.json").write_text((arms.data / "heldout.json").read_text() + "\n")
    arms()
    assert arms.asked == list(ARMS)
    Image.new("RGB", (400, 300), "grey").save(arms.data / "images/3.png")
    arms()
    assert arms.asked == list(ARMS)
    monkeypatch.setattr("llava.utils.versions.code_digest", lambda sources: "another")
    arms()
    assert arms.asked == list(ARMS)


def test_page_stands_alone_and_escapes_answers(arms):
    arms()
    page = (arms.out / "index.html").read_text()
    assert not re.findall(r"""src=["'](?!data:)""", page) and "<img src=x" not in page
    assert html.escape("<img src=x", quote=False) in page
    alts = re.findall(r'<img [^>]*alt="([^"]*)"', page)
    assert "Which?" in alts and all(re.fullmatch(r"[A-Z].*[.?]", alt) for alt in alts)
    assert "the arms cannot be ranked" in page and "+37.50 points" in page


def test_an_answer_may_be_one_token_longer_than_the_longest_expected(tokenizer):
    """Cut at the expected length, "a great blue heron on a lake" would be taken for "a great blue heron"."""
    records = [{"conversations": [{}, {"value": text}]} for text in ("red", "a great blue heron")]
    assert answers.longest_answer(records, tokenizer) == len("a great blue heron") + 1  # a token per byte
    assert answers.longest_answer(records[:1], tokenizer) == answers.SHORTEST
