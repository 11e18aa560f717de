"""What the web page shows, without the page: uploads, growing answers, where the model looked."""

import itertools
import os
import re
import threading
import urllib.request

import numpy as np
import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS, encoded, noise
from PIL import Image

from llava.analysis import attention
from llava.analysis.models import our_batch, our_prompt
from llava.analysis.probe import VISUAL, Probe
from llava.analysis.samples import PicturePrompt
from llava.asking import load_assistant
from llava.constants import IMAGE_TOKEN_INDEX
from llava.families import Family, find_parts
from llava.serve import look, web
from llava.serve.conversation import growing_answer, with_question
from llava.serve.page import REFUSAL, uploaded_picture

ASK = QUESTIONS[0] + POPE_SUFFIX
RED = Image.new("RGB", (20, 16), COLOURS["red"])


@pytest.fixture(scope="module")
def pair(trained):
    """Two checkpoints."""
    return [load_assistant(str(trained(norm))) for norm in ("none", "gwc_layernorm")]


def asked(question=ASK):
    return with_question([], question)


def probe_of(assistant):
    return Probe("x", assistant.model, find_parts(assistant.model, Family(), IMAGE_TOKEN_INDEX))


def flags(*words):
    return web.parser().parse_args(["--model-path", "x", "--max-new-tokens", "8", *words])


# --- what comes from the page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("note.png", b"hello", "note.png: not a picture in a format that Pillow reads"),
        ("cut.png", encoded(noise(size=(64, 64)))[:900], "cut.png: cannot be read"),
        ("eps.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "eps.jpg: not a picture"),
    ],
)
def test_an_upload_that_is_not_a_picture_is_refused_by_its_name_alone(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as raised:
        uploaded_picture(str(tmp_path / name), tmp_path)
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
    + [
        "{folder}/../uploads-of-others/own.png",
        "{folder}/../../{name}",
        "{folder}/out.png",
        None,
        0,
        5,
        b"/etc/hostname",
    ],
)
def test_only_a_file_below_the_upload_folder_is_opened(uploads, path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", None)
    path = path.format(folder=uploads, name=uploads.parent.name) if isinstance(path, str) else path
    with pytest.raises(ValueError, match=re.escape(REFUSAL) if path else "choose a picture first"):
        uploaded_picture(path, uploads)


def test_an_uploaded_file_is_opened_over_a_link_to_the_folder(uploads):
    for folder, path in itertools.product((uploads, uploads.resolve()), (uploads, uploads.resolve())):
        assert uploaded_picture(f"{path}/a.png", folder).size == RED.size


def test_an_upload_of_too_many_pixels_is_refused(tmp_path, monkeypatch):
    RED.save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(ValueError, match=r"bomb\.png: cannot be read \(Image size"):
        uploaded_picture(str(tmp_path / "bomb.png"), tmp_path)


def test_an_upload_is_seen_as_in_training(tmp_path):
    frames = [Image.new("P", (8, 6), colour) for colour in (1, 2)]
    frames[0].putpalette([0, 0, 0, 220, 30, 30, 1, 1, 1])
    frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
    image = uploaded_picture(str(tmp_path / "two.gif"), tmp_path)
    assert image.mode == "RGB" and image.size == (8, 6) and image.getpixel((0, 0)) == (220, 30, 30)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_answer_grows_to_what_is_answered(pair):
    texts = list(growing_answer(pair[1], asked("Say it!"), RED, threading.Event(), flags("--max-new-tokens", "24")))
    assert [texts[-1]] == pair[1].answer([asked("Say it!")], [RED], do_sample=False, max_new_tokens=24)
    assert all(long.startswith(short.strip()) for short, long in zip(texts, texts[1:], strict=False))


class Endless:
    """A model that answers until it is stopped."""

    tokenizer, end, tokens = None, "###", 0

    def answer(self, conversations, pictures, streamer, stopping_criteria, **options):
        (is_stopped,) = stopping_criteria
        while not is_stopped(None, None):
            self.tokens += 1
            streamer.on_finalized_text("x")
        return ["all"]


@pytest.mark.parametrize("by_event", [True, False])
def test_an_answer_that_nobody_waits_for_is_ended(by_event):
    stop, threads = threading.Event(), threading.active_count()
    growing = growing_answer(Endless(), asked(), RED, stop, flags())
    next(growing)
    if by_event:
        stop.set()
        assert list(growing)[-1] == "all"
    growing.close()
    assert stop.is_set() and threading.active_count() == threads


@pytest.mark.slow
def test_a_stopped_event_ends_a_real_answer_at_its_first_token(pair):
    stop = threading.Event()
    stop.set()
    question = asked("Say it!")
    (text,) = pair[1].answer([question], [RED], do_sample=False, max_new_tokens=1)
    assert list(growing_answer(pair[1], question, RED, stop, flags("--max-new-tokens", "400")))[-1] == text


def test_what_is_refused_in_the_generating_thread_is_raised_here(pair):
    with pytest.raises(ValueError, match="more than the 512 of"):
        list(growing_answer(pair[1], asked("why? " * 200), RED, threading.Event(), flags()))


# --- where it looked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "Yes", "It is red"])
def test_the_heatmap_is_the_librarys_attention_of_the_answers_tokens(pair, answer):
    assistant = pair[1]
    seen = look.look_of(assistant, asked(), RED, answer)["map"]
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
    visual = probe_of(assistant).groups(batch)[0] == VISUAL
    length = batch.input_ids.shape[1]
    asking = range(length - len(answer_ids) - 1, length - 1) if answer_ids else [length - 1]
    expected = weights[:, 0].mean(dim=(0, 1))[list(asking)][:, visual].mean(dim=0)
    assert seen.shape == (2, 2)
    assert seen.ravel() == pytest.approx((expected / expected.sum()).numpy(), rel=1e-4)


def test_the_same_attention_runs_after_a_look_as_before(pair):
    model = pair[0].model
    before = model.config._attn_implementation
    look.look_of(pair[0], asked(), RED, "Yes")
    assert model.config._attn_implementation == before


def test_a_look_agrees_with_the_attention_command(pair):
    assistant, sample = pair[1], PicturePrompt("red", RED, ASK)
    probe = probe_of(assistant)
    prompt = our_prompt(sample, assistant)
    probe.prepare = lambda sample: our_batch(assistant.model, [prompt], [RED], assistant.image_processor)
    expected = attention.look_of(probe, sample, "last")["map"]
    assert np.allclose(look.look_of(assistant, asked(), RED, "")["map"], expected, rtol=1e-6)


# --- what is drawn ----------------------------------------------------------------------------------------------------


WHOLE = np.array([0, 0, 1, 1])


def drawn(picture, heat, area=WHOLE):
    return look.heat_map(picture, {"map": np.array(heat), "area": area})


def test_a_place_that_was_seen_more_is_brighter_and_without_places_there_is_no_map():
    heat = drawn(Image.new("RGB", (400, 400), "white"), [[0.1, 0.2], [0.3, 0.4]])
    corners = [sum(heat.getpixel(at)) for at in ((0, 0), (511, 0), (0, 511), (511, 511))]
    assert corners == sorted(corners) and len(set(corners)) == 4
    assert drawn(RED, []) is None


def test_the_heat_map_of_a_padded_picture_leaves_its_margins_out(pair, monkeypatch):
    wide = Image.new("RGB", (400, 100), "white")
    monkeypatch.setattr(pair[1].model.config, "image_aspect_ratio", "pad")
    seen = look.look_of(pair[1], asked(), wide, "Yes")
    assert seen["area"].tolist() == [0, -1.5, 1, 2.5] and seen["map"].shape == (2, 2)
    heat = drawn(wide, [[0.9, 0.0], [0.0, 0.1]], seen["area"])
    assert heat.size == (512, 128) and heat.getpixel((10, 50)) != heat.getpixel((10, 80))  # the rows meet in the middle
    assert heat.getpixel((10, 2)) == heat.getpixel((10, 50))
