"""`python -m playground compare`: the table, the results and the page of arms that are there."""

import html
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from llava import asking
from llava.compare import answers
from llava.compare import quickstart_page as page
from llava.utils.intervals import share_interval
from playground.__main__ import main

ARMS = ("none", "gwc_layernorm")
HOSTILE = "<img src=x onerror=document.title='hacked'>"
QUESTIONS, RIGHT = 24, {"none": 9, "gwc_layernorm": 18}


def write_arm(folder, name):
    """Writes both stages' folders as training leaves them, as far as the page reads them."""
    for stage in ("pretrain", "finetune"):
        (folder / name / stage).mkdir(parents=True)
        (folder / name / f"{stage}.log").write_text("done")
        (folder / name / stage / "config.json").write_text(json.dumps({"arm": name}))
        steps = [{"step": i, "loss": 3 / i, "norm/llm_input": 30.0, "norm/text_embeddings": 3.0} for i in (1, 2, 3)]
        (folder / name / stage / "train_log.jsonl").write_text("\n".join(map(json.dumps, [*steps, {"runtime": 1}])))
    return ["--arm", name, str(folder / name / "pretrain"), str(folder / name / "finetune")]


@pytest.fixture
def arms(tmp_path, monkeypatch):
    """A function that runs the command on two arms whose answers are made up; `.asked` names those that were asked."""
    data, out = tmp_path / "photos", tmp_path / "out"
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
    words = [word for name in ARMS for word in write_arm(out, name)]

    def answers_under(control, checkpoint, records, images, batch_size):
        name = Path(checkpoint).parent.name
        run.asked.append(name)
        return [("Right." if i >= QUESTIONS - RIGHT[name] else HOSTILE, -1.0) for i in range(len(records))]

    monkeypatch.setattr(asking, "load_assistant", lambda checkpoint, **_: checkpoint)
    monkeypatch.setattr(answers, "answers_under", answers_under)

    def run(*flags):
        run.asked.clear()
        return main(["compare", *words, "--data", str(data), "--output-dir", str(out), "--pictures", "0", *flags])

    run.asked, run.out, run.data = [], out, data
    return run


def test_scores_have_their_intervals_and_arms_their_paired_difference(arms, capsys):
    assert arms() == 0
    results = json.loads((arms.out / "results.json").read_text())
    summary = results["arms"]["none"]
    assert summary["accuracy_percent"]["all questions"] == pytest.approx(100 * 9 / 24)
    low, high = share_interval(9, 24)
    assert summary["accuracy_interval"]["all questions"] == pytest.approx([100 * low, 100 * high])
    assert results["chance_percent"] == {"color": 25.0, "shape": 25.0, "all questions": 25.0}
    difference = results["differences"]["gwc_layernorm"]["all questions"]
    assert (difference["won"], difference["lost"], difference["points"]) == (9, 0, pytest.approx(37.5))
    assert difference["interval"][0] < 37.5 < difference["interval"][1]
    table = (arms.out / "table.md").read_text()
    assert f"37.5 ({100 * low:.0f} to {100 * high:.0f})" in table and table in capsys.readouterr().out


@pytest.mark.slow
def test_answers_are_reused_until_what_decides_them_changes(arms, capsys, monkeypatch):
    assert arms() == 0 and arms.asked == list(ARMS)
    assert arms() == 0 and arms.asked == []
    (arms.out / "none/finetune/config.json").write_text("{}")
    assert arms() == 0 and arms.asked == ["none"]
    (arms.data / "heldout.json").write_text((arms.data / "heldout.json").read_text() + "\n")
    assert arms() == 0 and arms.asked == list(ARMS)
    capsys.readouterr()
    Image.new("RGB", (400, 300), "grey").save(arms.data / "images/3.png")
    assert arms() == 0 and arms.asked == list(ARMS)
    assert capsys.readouterr().out.count("made with different questions or pictures; answering again") == 2
    monkeypatch.setattr(answers, "code_digest", lambda sources: "another")
    assert arms() == 0 and arms.asked == list(ARMS)


def test_page_stands_alone_escapes_answers_and_leads_to_every_log(arms):
    assert arms() == 0
    page = (arms.out / "index.html").read_text()
    assert not re.findall(r"""src=["'](?!data:)""", page) and "<img src=x" not in page
    assert html.escape("<img src=x", quote=False) in page
    links = re.findall(r'href="([^"]*)"', page)
    assert len(links) == 10 and all((arms.out / link).exists() for link in links)
    alts = re.findall(r'<img [^>]*alt="([^"]*)"', page)
    assert alts[:3] == ["Which?"] * 3 and all(re.fullmatch(r"[A-Z].*[.?]", alt) for alt in alts)
    assert "guessing gives 25 %" in page and "It cannot rank the arms" in page and "+37.5 points" in page


def test_page_fits_a_phone_and_logs_nothing_to_the_console(arms, browse, tmp_path):
    assert arms() == 0
    _, console = browse(arms.out / "index.html")
    assert not console
    probe = "<script>document.title = [innerWidth, document.documentElement.scrollWidth].join();</script></body>"
    page = re.sub(r"<meta http-equiv=.*?>", "", (arms.out / "index.html").read_text())
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe))
    dom, _ = browse(tmp_path / "probe.html", width=390)
    window, content = map(int, re.search("<title>(.*?)</title>", dom)[1].split(","))
    assert content <= window <= 390


def test_on_paper_commands_wrap_and_pictures_fit_with_their_headings(arms, browse, tmp_path):
    assert arms() == 0
    page = re.sub(r"<meta http-equiv=.*?>", "", (arms.out / "index.html").read_text())
    probe = """<script>
      Array.from(document.styleSheets[0].cssRules).forEach(function (rule) {
        if (rule.media && rule.media.mediaText === "print") rule.media.mediaText = "all"; });
      function all(what) { return Array.from(document.querySelectorAll(what)); }
      document.title = [
        all("pre").filter(function (e) { return e.scrollWidth > e.clientWidth; }).length,
        all("h2, h2 + p").filter(function (e) { return getComputedStyle(e).breakAfter !== "avoid"; }).length,
        all("img").filter(function (e) { return e.height > 760; }).length];</script></body>"""
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe))
    dom, _ = browse(tmp_path / "probe.html", width=680)
    assert re.search("<title>(.*?)</title>", dom)[1] == "0,0,0"


def test_an_answer_may_be_one_token_longer_than_the_longest_expected(tokenizer):
    """Cut at the expected length, "a great blue heron on a lake" would be taken for "a great blue heron"."""
    records = [{"conversations": [{}, {"value": text}]} for text in ("red", "a great blue heron")]
    assert answers.longest_answer(records, tokenizer) == len("a great blue heron") + 1  # a token per byte
    assert answers.longest_answer(records[:1], tokenizer) == answers.SHORTEST


def test_the_page_shows_different_pictures(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    turns = [{"value": "<image>\nWhich?"}, {"value": "this"}]
    records = [{"image": f"{n}.png", "kind": kind, "conversations": turns} for n in "ab" for kind in ("is", "has")]
    shown = page.examples(records, {"none": list("1234")}, tmp_path)
    assert [(row["image"], row["replies"]) for row in shown] == [("a.png", ["none: 1"]), ("b.png", ["none: 4"])]


@pytest.mark.parametrize("missing", ["train_log.jsonl", "config.json"])
def test_a_folder_without_a_finished_training_is_refused_in_one_line(arms, missing, capsys):
    (arms.out / "none/finetune" / missing).unlink()
    assert arms() == 1
    error = capsys.readouterr().err
    assert "none/finetune" in error and "--arm expects" in error and len(error.splitlines()) == 1


def test_data_without_questions_says_how_to_make_them(arms, capsys):
    (arms.data / "heldout.json").unlink()
    assert arms() == 1
    assert "python -m playground photos" in capsys.readouterr().err
