"""What the web page shows, without the page: uploads, growing answers, where the model looked."""

import os
import re
import threading
import urllib.request

import numpy as np
import pytest
import torch
from data_files import COLOURS, POPE_SUFFIX, QUESTIONS
from PIL import Image

from llava.analysis.models import our_batch
from llava.analysis.probe import VISUAL, Probe
from llava.asking import load_assistant
from llava.constants import IMAGE_TOKEN_INDEX
from llava.families import Family, find_parts
from llava.serve import look, web
from llava.serve.conversation import growing_answer, with_question
from llava.serve.page import REFUSAL, uploaded_picture

ASK = QUESTIONS[0] + POPE_SUFFIX
RED = Image.new("RGB", (20, 16), COLOURS["red"])


@pytest.fixture(scope="module")
def assistant(trained):
    return load_assistant(str(trained("gwc_layernorm")))


def asked(question=ASK):
    return with_question([], question)


def flags(*words):
    return web.parser().parse_args(["--model-path", "x", "--max-new-tokens", "8", *words])


# --- what comes from the page -----------------------------------------------------------------------------------------


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


PATHS = [
    "http://127.0.0.1/a.png",
    "HTTP://127.0.0.1/a.png",
    "//127.0.0.1/a.png",
    "file://{folder}/a.png",
    "",
    "a\0.png",
]
PATHS += ["/etc/hostname", "/nowhere.png", "a.png", "{folder}", "{folder}/none.png", "{folder}/pipe.png", "a" * 5000]
PATHS += ["{folder}/../uploads-of-others/own.png", "{folder}/../../{name}", "{folder}/out.png"]


@pytest.mark.parametrize("path", [*PATHS, None, 0, 5, b"/etc/hostname"])
def test_only_a_file_below_the_upload_folder_is_opened(uploads, path, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", None)
    path = path.format(folder=uploads, name=uploads.parent.name) if isinstance(path, str) else path
    with pytest.raises(ValueError, match=re.escape(REFUSAL) if path else "choose a picture first"):
        uploaded_picture(path, uploads)
    for folder in (uploads, uploads.resolve()):
        assert uploaded_picture(f"{uploads}/a.png", folder).size == RED.size


@pytest.mark.parametrize("content", [b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_an_upload_that_is_not_a_picture_is_refused_by_its_name_alone(tmp_path, content):
    (tmp_path / "note.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"^note\.png: not a picture in a format that Pillow reads"):
        uploaded_picture(str(tmp_path / "note.png"), tmp_path)


def test_a_picture_of_too_many_pixels_is_refused(tmp_path, monkeypatch):
    Image.new("RGB", (15, 15)).save(tmp_path / "bomb.png")  # of which Pillow warns
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


def test_a_real_answer_grows_to_its_end_or_stops_at_its_first_token(assistant):
    stop, question = threading.Event(), asked("Say it!")
    options = {"do_sample": False}
    texts = list(growing_answer(assistant, question, RED, stop, flags("--max-new-tokens", "24")))
    assert [texts[-1]] == assistant.answer([question], [RED], max_new_tokens=24, **options)
    assert all(long.startswith(short.strip()) for short, long in zip(texts, texts[1:], strict=False))
    stop.set()
    (text,) = assistant.answer([question], [RED], max_new_tokens=1, **options)
    assert list(growing_answer(assistant, question, RED, stop, flags("--max-new-tokens", "400")))[-1] == text


# --- where it looked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "It is red"])
def test_the_heatmap_is_the_librarys_attention_of_the_answers_tokens(assistant, answer):
    config = assistant.model.config
    before = config._attn_implementation
    seen = look.look_of(assistant, asked(), RED, answer)["map"]
    assert config._attn_implementation == before
    answer_ids = assistant.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.cat([assistant.prompt_ids(asked()), torch.tensor(answer_ids, dtype=torch.long)])
    batch = our_batch(assistant.model, [ids], [RED], assistant.image_processor)
    config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            weights = torch.stack(assistant.model(**batch.inputs, output_attentions=True, use_cache=False).attentions)
    finally:
        config._attn_implementation = before
    probe = Probe("x", assistant.model, find_parts(assistant.model, Family(), IMAGE_TOKEN_INDEX))
    visual = probe.groups(batch)[0] == VISUAL
    length = batch.input_ids.shape[1]
    asking = range(length - len(answer_ids) - 1, length - 1) if answer_ids else [length - 1]
    expected = weights[:, 0].mean(dim=(0, 1))[list(asking)][:, visual].mean(dim=0)
    assert seen.shape == (2, 2)
    assert seen.ravel() == pytest.approx((expected / expected.sum()).numpy(), rel=1e-4)


def test_a_place_that_was_seen_more_is_brighter():
    heat = {"map": np.array([[0.1, 0.2], [0.3, 0.4]]), "picture": np.full((40, 40), 255, np.uint8)}
    drawn = look.heat_map(heat, 0.4)
    corners = [sum(drawn.getpixel(at)) for at in ((0, 0), (511, 0), (0, 511), (511, 511))]
    assert corners == sorted(corners) and len(set(corners)) == 4
    assert sum(look.heat_map(heat, 0.8).getpixel((511, 511))) < corners[-1]  # beside an arm that sees one place more
    assert look.heat_map(heat | {"map": np.empty((0, 0))}, 1.0) is None
