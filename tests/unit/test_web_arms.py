"""What the web page shows, without the page: checked uploads, growing answers, where the model looked, bars."""

import itertools
import json
import os
import re
import socket
import sys
import threading
import urllib.request

import numpy as np
import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, WARM, encoded, noise, turns
from PIL import Image

from llava.analysis.models import our_batch
from llava.analysis.probe import VISUAL
from llava.analysis.samples import PicturePrompt
from llava.asking import load_assistant
from llava.serve import arms, look, web
from llava.serve import page as web_page
from llava.serve.arms import (
    Arm,
    Talk,
    ask_all,
    bar_width,
    checked_picture,
    checked_question,
    growing_answer,
    without_open_question,
)
from llava.serve.uploads import REFUSAL, may_be_served, named_files, uploaded_file

ASK = QUESTIONS[0] + POPE_SUFFIX
RED = Image.new("RGB", (20, 16), COLOURS["red"])
GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def pair(trained):
    """Two arms."""
    return [Arm(norm, load_assistant(str(trained(norm)))) for norm in ("none", "gwc_layernorm")]


def asked(question=ASK):
    return [{"from": "human", "value": f"<image>\n{question}"}]


# --- what comes from the page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (None, "Please type a question"),
        (" \n", "Please type a question"),
        ("Is <image> red?", "please ask without <image>"),
        ("a" * 10_001, "has 10,001 characters; the limit is 10,000"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused_in_a_sentence(typed, message):
    with pytest.raises(ValueError, match=message):
        checked_question(typed)


def test_a_question_is_taken_without_the_space_around_it():
    assert checked_question("  Why?\n") == "Why?"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("note.png", b"hello", "note.png: not a picture in a format that Pillow reads."),
        ("cut.png", encoded(noise(size=(64, 64)))[:900], "cut.png: cannot be read"),
        ("eps.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "eps.jpg: not a picture"),
        ("large.png", encoded(noise(size=(64, 64))) + bytes(20_000), "bytes; the limit is 20,000."),
    ],
)
def test_an_upload_that_is_not_a_picture_is_refused_by_its_name_alone(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as raised:
        checked_picture(str(tmp_path / name), tmp_path, 20_000)
    assert message in str(raised.value) and str(tmp_path) not in str(raised.value)


@pytest.fixture
def uploads(tmp_path):
    """An upload folder with `a.png`, reached over a link, beside a folder with another picture."""
    for name in ("uploads/a.png", "uploads-of-others/own.png"):
        (tmp_path / name).parent.mkdir()
        RED.save(tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / "uploads")
    (tmp_path / "uploads/out.png").symlink_to(tmp_path / "uploads-of-others/own.png")
    os.mkfifo(tmp_path / "uploads/pipe.png")
    return tmp_path / "linked"


@pytest.mark.parametrize(
    "path",
    ["http://127.0.0.1/a.png", "HTTP://127.0.0.1/a.png", "//127.0.0.1/a.png", "file://{folder}/a.png", "", "a\0.png"]
    + ["/etc/hostname", "/nowhere.png", "a.png", "{folder}", "{folder}/none.png", "{folder}/pipe.png", "a" * 5000]
    + ["{folder}/../uploads-of-others/own.png", "{folder}/../../{name}", "{folder}/out.png", None, 0],
)
def test_only_a_file_below_the_upload_folder_is_opened(uploads, path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", None)
    path = path.format(folder=uploads, name=uploads.parent.name) if isinstance(path, str) else path
    with pytest.raises(ValueError) as refused:
        uploaded_file(path, uploads)
    assert str(refused.value) == REFUSAL
    if path:
        with pytest.raises(ValueError, match=re.escape(REFUSAL)):
            checked_picture(path, uploads, 1 << 20)


def test_an_uploaded_file_is_opened_over_a_link_to_the_folder(uploads):
    for folder, path in itertools.product((uploads, uploads.resolve()), (uploads, uploads.resolve())):
        assert uploaded_file(f"{path}/a.png", folder) == uploads.resolve() / "a.png"
        assert checked_picture(f"{path}/a.png", folder, 1 << 20).size == RED.size


def test_files_are_seen_wherever_in_an_event_they_are_named():
    picture = {"path": "a", "is_stream": True}
    data = [picture, "path", None, 3, {"value": {"path": "b", "more": [{"path": {"path": "c"}}]}}, {"path": None}]
    assert list(named_files(data)) == ["a", "b", {"path": "c"}, "c"]


def test_a_request_gets_no_file_but_an_uploaded_one(uploads):
    for start in ("/gradio_api/file=", "/gradio_api/file/"):
        assert may_be_served(f"{start}{uploads}/a.png", uploads)
        for other in ("http://127.0.0.1/a.png", "/etc/hostname", f"{uploads}/out.png", "", f"x\n{uploads}/a.png"):
            assert not may_be_served(start + other, uploads)
    assert may_be_served("/assets/index.js", uploads) and may_be_served("/gradio_api/queue/join", uploads)


def test_an_upload_of_too_many_pixels_is_refused(tmp_path, monkeypatch):
    RED.save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(ValueError, match=r"bomb\.png: cannot be read \(Image size"):
        checked_picture(str(tmp_path / "bomb.png"), tmp_path, 1 << 20)


def test_an_upload_is_seen_as_in_training(tmp_path):
    frames = [Image.new("P", (8, 6), colour) for colour in (1, 2)]
    frames[0].putpalette([0, 0, 0, 220, 30, 30, 1, 1, 1])
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    image = checked_picture(str(tmp_path / "two.gif"), tmp_path, 1 << 20)
    assert image.mode == "RGB" and image.size == (8, 6) and image.getpixel((0, 0)) == (220, 30, 30)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_grows_to_what_is_answered(pair):
    assistant = pair[1].assistant
    texts = list(growing_answer(assistant, asked("Say it!"), RED, **GREEDY | {"max_new_tokens": 24}))
    assert [texts[-1]] == assistant.answer([asked("Say it!")], [RED], **GREEDY | {"max_new_tokens": 24})
    assert all(long.strip().startswith(short.strip()) for short, long in zip(texts, texts[1:], strict=False))


@pytest.mark.slow
def test_an_answer_that_nobody_waits_for_is_ended(pair, monkeypatch):
    monkeypatch.setattr(arms._Streamer, "on_finalized_text", lambda self, text, stream_end=False: self.show("x", False))
    put, tokens, threads = arms._Streamer.put, [], threading.active_count()
    monkeypatch.setattr(arms._Streamer, "put", lambda self, value: tokens.append(value) or put(self, value))
    growing = growing_answer(pair[1].assistant, asked("Say it!"), RED, **GREEDY | {"max_new_tokens": 400})
    next(growing)
    growing.close()
    assert len(tokens) < 400 and threading.active_count() == threads


def test_what_is_refused_in_the_generating_thread_is_raised_here(pair):
    with pytest.raises(ValueError, match="more than the 512 of"):
        list(growing_answer(pair[1].assistant, asked("why? " * 200), RED, **GREEDY))


def test_both_arms_answer_one_after_the_other_and_remember(pair):
    seen = list(ask_all(pair, [Talk(), Talk()], RED, ASK, **GREEDY))
    question = {"role": "user", "content": ASK}
    assert [talk.messages() for talk in seen[0]] == [[question]] * 2
    second_begins = next(talks for talks in seen if len(talks[1].turns) > 1)
    assert second_begins[0].heatmap and second_begins[1].heatmap is None
    *steps, end = seen
    assert all(without_open_question(talks) == [Talk(), Talk()] for talks in steps)
    assert without_open_question(end) == end
    expected = "Yes" if "red" in WARM else "No"
    for talk in end:
        assert talk.messages() == [{"role": "user", "content": ASK}, {"role": "assistant", "content": expected}]
        assert talk.heatmap.size == (384, 307) and "times the norm of text tokens" in talk.norms
    again = list(ask_all(pair, end, RED, "Sure?", **GREEDY))[-1]
    for arm, talk in zip(pair, again, strict=True):
        history = [*asked(), {"from": "gpt", "value": expected}, {"from": "human", "value": "Sure?"}]
        assert talk.turns[:3] == history
        assert [talk.turns[3]["value"]] == arm.assistant.answer([history], [RED], **GREEDY)


def test_an_answer_without_words_is_shown_as_such():
    assert Talk(turns("<image>\nWhy?", "")).messages()[1]["content"] == "(no words)"


# --- where it looked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "Yes", "It is red"])
def test_the_heatmap_is_the_librarys_attention_of_the_answers_tokens(pair, answer):
    assistant, probe = pair[1].assistant, pair[1].probe
    seen = look.look_of(assistant, probe, asked(), RED, answer)
    answer_ids = assistant.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.cat([assistant.prompt_ids(asked()), torch.tensor(answer_ids, dtype=torch.long)])
    batch = our_batch(assistant.model, [ids], [RED], assistant.image_processor)
    config = assistant.model.config
    before, config._attn_implementation = config._attn_implementation, "eager"
    try:
        with torch.no_grad():
            weights = torch.stack(assistant.model(**batch.inputs, output_attentions=True, use_cache=False).attentions)
    finally:
        config._attn_implementation = before
    visual = probe.groups(batch)[0] == VISUAL
    length = batch.input_ids.shape[1]
    asking = range(length - len(answer_ids) - 1, length - 1) if answer_ids else [length - 1]
    expected = weights[:, 0].mean(dim=(0, 1))[list(asking)][:, visual].mean(dim=0)
    assert seen.heatmap.shape == (2, 2)
    assert seen.heatmap.ravel() == pytest.approx((expected / expected.sum()).numpy(), rel=1e-4)


def test_the_norms_are_those_of_what_enters_the_language_model(pair):
    assistant, model = pair[0].assistant, pair[0].assistant.model
    seen = look.look_of(assistant, pair[0].probe, asked(), RED, "Yes")
    with torch.no_grad():
        pixels = assistant.image_processor.preprocess(RED, return_tensors="pt")["pixel_values"]
        visual = model.encode_images(pixels).reshape(-1, model.config.hidden_size)
        answer_ids = assistant.tokenizer("Yes", add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        ids = torch.cat([assistant.prompt_ids(asked()), answer_ids])
        is_text = (ids >= 0) & ~torch.isin(ids, torch.tensor(sorted(pair[0].probe.special_ids.tolist())))
        text = model.get_input_embeddings()(ids[is_text])
    assert seen.visual_norm == pytest.approx(visual.norm(dim=-1).median().item(), rel=1e-4)
    assert seen.text_norm == pytest.approx(text.norm(dim=-1).median().item(), rel=1e-4)


def test_the_same_attention_runs_after_a_look_as_before(pair):
    model = pair[0].assistant.model
    before = model.config._attn_implementation
    look.look_of(pair[0].assistant, pair[0].probe, asked(), RED, "Yes")
    assert model.config._attn_implementation == before


def test_a_look_agrees_with_the_attention_command(pair):
    from llava.analysis import attention
    from llava.analysis.models import our_prompt

    assistant, probe = pair[1].assistant, pair[1].probe
    sample = PicturePrompt("red", RED, ASK)
    prompt = our_prompt(sample, assistant.tokenizer, assistant.template, assistant.model.config)
    probe._prepare = lambda samples: our_batch(assistant.model, [prompt], [RED], assistant.image_processor)
    expected = attention.look(probe, sample, "last")["map"]
    assert np.allclose(look.look_of(assistant, probe, asked(), RED, "").heatmap, expected, rtol=1e-6)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "drawn"),
    [((2000, 500), (768, 192)), ((500, 400), (500, 400)), ((64, 32), (384, 192)), ((3000, 1), (768, 1))],
)
def test_a_heatmap_is_drawn_as_large_as_it_is_shown(size, drawn):
    assert arms.shown_heatmap(Image.new("RGB", size), np.ones((2, 2))).size == drawn


def test_a_place_that_was_seen_more_is_brighter():
    shares = np.array([[0.1, 0.2], [0.3, 0.4]])
    drawn = arms.shown_heatmap(Image.new("RGB", (400, 400), "white"), shares)
    corners = [sum(drawn.getpixel(at)) for at in ((0, 0), (399, 0), (0, 399), (399, 399))]
    assert corners == sorted(corners) and len(set(corners)) == 4


def test_the_scale_has_the_maps_colours_and_ends_at_its_brightest_place():
    shares = np.array([[0.0, 0.1], [0.275, 0.625]])
    drawn = arms.shown_heatmap(Image.new("RGB", (400, 400), (128, 128, 128)), shares)
    text = arms.measured(look.Look(shares, 3.0, 3.0))
    colours = [tuple(map(int, rgb.split(", "))) for rgb in re.findall(r"rgb\(([^)]*)\)", text)]
    assert (colours[0], colours[-1]) == (drawn.getpixel((0, 0)), drawn.getpixel((399, 399)))
    assert "<span>0</span>" in text and "<b>62.5%</b>" in text
    assert 'class="scale"' not in arms.measured(look.Look(None, 3.0, 3.0, "why"))


def test_bars_stay_on_their_scale():
    widths = [bar_width(norm) for norm in (0.0, 0.05, 0.1, 1, 10, 673, 10_000, 1e9)]
    assert widths == sorted(widths) and widths[0] == 0 and widths[-1] == 100
    assert bar_width(1) == pytest.approx(20) and bar_width(float("nan")) == 0


def test_bars_say_the_numbers_and_their_ratio():
    text = arms.norm_bars(look.Look(None, 673.0, 2.89))
    assert "<b>673</b>" in text and "<b>2.89</b>" in text and "233 times the norm of text tokens" in text


def test_the_page_says_why_there_is_no_heatmap():
    why = "5 visual tokens do not fill 2 rows and columns"
    assert f"No heatmap: {why}." in arms.norm_bars(look.Look(None, 3.0, 3.0, why))
    assert "No heatmap" not in arms.norm_bars(look.Look(np.ones((2, 2)), 3.0, 3.0))


def test_the_heatmap_of_a_padded_picture_leaves_its_margins_out(pair):
    assistant, wide = pair[1].assistant, Image.new("RGB", (400, 100), "white")
    before, assistant.model.config.image_aspect_ratio = assistant.model.config.image_aspect_ratio, "pad"
    try:
        seen = look.look_of(assistant, pair[1].probe, asked(), wide, "Yes")
    finally:
        assistant.model.config.image_aspect_ratio = before
    assert seen.area == (0, -1.5, 1, 2.5) and seen.heatmap.shape == (2, 2)
    drawn = arms.shown_heatmap(wide, np.array([[0.9, 0.0], [0.0, 0.1]]), seen.area)
    assert drawn.getpixel((10, 40)) != drawn.getpixel((10, 60))  # the rows meet in the middle of the picture
    assert drawn.getpixel((10, 2)) == drawn.getpixel((10, 40))


# --- what the buttons do ----------------------------------------------------------------------------------------------


@pytest.fixture
def red(tmp_path):
    RED.save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


def test_asking_shows_the_answers_of_both_arms_and_keeps_them(pair, red, tmp_path):
    page = web_page.Page(pair, tmp_path, 1 << 20, same="same")
    steps = list(page.ask(red, ASK, page.start(), 0, 8))
    last = [[step[i] for step in steps if step[i] != "same"] for i in range(len(steps[0]))]
    talks, message, *shown = [values[-1] for values in last]
    assert message == "" and [talk.turns[1]["value"] for talk in talks] == ["Yes", "Yes"]
    assert without_open_question(talks) == talks
    assert shown == [value for talk in talks for value in (talk.messages(), talk.heatmap, talk.norms)]
    assert [len(last[i]) for i in (3, 6)] == [1, 1]  # each heatmap is sent once


@pytest.mark.parametrize(
    ("picture", "question", "message"),
    [
        (None, "Why?", "Please choose a picture first."),
        ("red", "", "Please type a question."),
        ("red", "why? " * 200, "more than the 512 of"),
        ("/nowhere.png", "Why?", REFUSAL),
    ],
)
def test_a_refused_question_is_reported_and_keeps_the_conversation(pair, red, tmp_path, picture, question, message):
    page = web_page.Page(pair, tmp_path, 1 << 20)
    before = [Talk(turns("<image>\nIs <b>?", "No"), RED, "norms")] * 2
    steps = list(page.ask(red if picture == "red" else picture, question, before, 0, 8))
    talks, sentence, *parts = [[step[i] for step in steps if step[i] is not None] for i in range(len(steps[0]))]
    assert talks[-1:] in ([], [before]) and message in sentence[-1] and 'role="alert"' in sentence[-1]
    assert [values[-1:] for values in parts] in ([[]] * 6, [[value] for value in page.shown(before)[2:]])


def test_a_bug_is_reported_on_the_page_and_shown_in_the_terminal(pair, red, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(web_page, "ask_all", lambda *_, **__: 1 / 0)
    page = web_page.Page(pair, tmp_path, 1 << 20, same="same")
    ((talks, message, *parts),) = page.ask(red, ASK, page.start(), 0, 8)
    assert "the terminal says why" in message and "ZeroDivisionError" in capsys.readouterr().err
    assert [talks, *parts] == ["same"] * 7


def test_a_name_with_markup_stays_text(pair, tmp_path):
    path = tmp_path / "<img src=x>.png"
    path.write_bytes(b"no")
    picture, _, message, *_ = web_page.Page(pair, tmp_path, 9).new_picture(str(path))
    assert picture is None and "&lt;img src=x&gt;.png: not a picture" in message and "<img" not in message


def test_another_picture_resets_and_a_stopped_question_is_dropped(pair, red, tmp_path):
    page = web_page.Page(pair, tmp_path, 1 << 20)
    kept = [Talk(turns("<image>\nWhy?", "So"), RED, "norms")] * 2
    first_has_answered = [Talk(turns("<image>\nWhy?", "So", "And?", "Beca"[:end]), before=kept[0]) for end in (4, 2)]
    stopped = page.stop(first_has_answered)
    assert "stopped" in stopped[1] and stopped == page.shown(kept, "The answer was stopped, the question is dropped.")
    page.same = "same"
    assert page.stop(kept)[:2] == [kept, "same"]
    assert page.forget_message(red) == ["", False] and page.forget_message(None) == ["same", False]
    assert page.new_picture(red)[:3] == ["same", page.start(), "same"]  # what was said since it was chosen holds
    assert page.new_picture(None)[:3] == ["same", page.start(), "same"]  # the reason for taking it away stays readable
    assert page.reset()[:2] == [page.start(), ""]


def test_examples_are_the_playgrounds_pictures_each_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert web_page.examples() == []
    folder = tmp_path / "playground/data/scenes"
    (folder / "images").mkdir(parents=True)
    for name in "abc":
        RED.save(folder / f"images/{name}.png")
    records = [{"image": f"{name}.png", "conversations": turns(f"<image>\n{name}?", "x")} for name in "aabdc"]
    (folder / "heldout.json").write_text(json.dumps(records))
    examples = [("playground/data/scenes/images/" + name + ".png", f"{name}?") for name in "abc"]
    assert [tuple(pair) for pair in web_page.examples()] == examples


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-path", "a", "--model-path", "b", "--model-path", "c"], "expected one or two checkpoints, found 3"),
        (["--model-path", "a", "--max-upload", "0"], "--max-upload 0: expected a positive number"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(capsys, flags, message):
    assert web.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert web.main(["--model-path", "/nowhere", "--port", str(port)]) == 2
    assert f"--host 127.0.0.1 --port {port}: cannot listen there" in capsys.readouterr().err
    assert web.main(["--model-path", "/nowhere", "--port", "99999"]) == 2
    assert "--port 99999: cannot listen there" in capsys.readouterr().err


def test_without_gradio_the_command_says_what_brings_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(web_page, "check_free", lambda host, port: None)
    assert web.main(["--model-path", "a"]) == 2
    assert "pip install 'llava[web]'" in capsys.readouterr().err


def test_two_checkpoints_of_one_name_are_told_apart(monkeypatch, trained):
    monkeypatch.setattr(web_page, "load_chat_assistant", lambda args: load_assistant(args.model_path))
    path = str(trained("none"))
    args = web.parser().parse_args(["--model-path", path, "--model-path", path])
    first, second = web_page.load_arms(args)
    assert first.name.startswith("1: ") and first.name[3:] == second.name[3:] and second.name[:3] == "2: "
