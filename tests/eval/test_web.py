"""The web page in headless Chromium, at the width of a phone, with two tiny checkpoints.

Needs Gradio (`llava[web]`), Playwright (`pip install playwright`; it drives the Chromium that is there) and a Chromium.
"""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from types import SimpleNamespace

import pytest
from data_files import POPE_SUFFIX, QUESTIONS
from paths import ROOT

from llava.serve.page import REFUSAL, build_page, refuse_addresses

gradio = pytest.importorskip("gradio", reason="the web page needs Gradio: pip install 'llava[web]'")
pytest.importorskip("playwright", reason="needs Playwright: pip install playwright")

# The command with a second arm that answers a question with "slowly" until it is stopped.
SLOW = """
import sys, time
from llava.serve import page, web
answers = page.growing_answer
def growing_answer(assistant, turns, picture, stop, args):
    if "gwc" in assistant.name and "slowly" in turns[-1]["value"]:
        while not stop.is_set():
            yield "Ye"
            time.sleep(0.1)
    yield from answers(assistant, turns, picture, stop, args)
page.growing_answer = growing_answer
sys.exit(web.main())
"""
WIDTH, PATIENCE = 390, 60_000  # pixels, milliseconds
STOPPED = "The answer was stopped, the question is dropped."
MAPS_ARE_THERE = """() => [...document.querySelectorAll('img[alt^=Where]')]
  .filter(i => i.complete && i.naturalWidth == 512).length == 2"""


@pytest.fixture(scope="module")
def address(trained, tmp_path_factory):
    """Where the page of two arms is served."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command = [sys.executable, "-c", SLOW, "--port", str(free.getsockname()[1])]
    command += [word for norm in ("none", "gwc_layernorm") for word in ("--model-path", str(trained(norm)))]
    log = tmp_path_factory.mktemp("web") / "log.txt"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, cwd=ROOT)
    line = server.stdout.readline()
    assert "http://127.0.0.1:" in line, log.read_text()
    yield line.split()[-1] + "/"
    server.send_signal(2)
    assert server.wait(30) == 0
    errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", log.read_text(), re.MULTILINE)
    assert all("InvalidPathError" in error for error in errors)  # Gradio prints its refusals


@pytest.fixture
def page(browser, address):
    """The opened page. At the end, its requests and the console are checked."""
    page, asked, logged = browser.new_page(viewport={"width": WIDTH, "height": 900}), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: logged.append((message.type, message.text)))
    page.on("pageerror", lambda error: logged.append(("error", str(error))))
    page.goto(address)
    page.get_by_role("button", name="Ask").wait_for(timeout=PATIENCE)
    yield page
    elsewhere = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not elsewhere, "the page asked other servers"
    assert not [text for kind, text in logged if kind == "error"]
    page.close()


def choose(page, file) -> None:
    page.locator("input[type=file]").first.set_input_files(str(file))


def box(page):
    return page.get_by_role("textbox", name="Question")


def ask(page, question: str) -> None:
    box(page).fill(question)
    page.get_by_role("button", name="Ask").click()


def ask_and_wait(page, picture) -> None:
    """Asks a first question about a picture and waits for all that the page shows of it."""
    choose(page, picture)
    page.get_by_role("button", name="Remove Image").wait_for(timeout=PATIENCE)
    ask(page, QUESTIONS[0] + POPE_SUFFIX)
    page.wait_for_function(MAPS_ARE_THERE, timeout=PATIENCE)


def on_the_page(page) -> list[list[str]]:
    """What the arms have said and been asked, and their maps."""
    said = [arm.locator(".message").all_inner_texts() for arm in page.get_by_role("log").all()]
    return [*said, page.locator("img[alt^=Where]").evaluate_all("all => all.map(image => image.src)")]


def test_both_arms_answer_about_an_uploaded_picture(page, tiny):
    ask_and_wait(page, tiny / "data/images/red.png")
    answers = [text.strip() for text in page.locator(".message.bot").all_inner_texts()]
    assert len(answers) == 2 and all(answer.startswith("Yes") for answer in answers)
    labels = page.locator("label", has_text="Where").all_inner_texts()
    assert len(labels) == 2 and all(re.search(r"up to \d+\.\d% in one place", text) for text in labels), labels
    page.wait_for_function("!document.querySelector('textarea').value", timeout=PATIENCE)
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH


def test_stop_at_any_moment_drops_the_question_for_both_and_clear_forgets_all(page, tiny):
    ask_and_wait(page, tiny / "data/images/red.png")
    before = on_the_page(page)
    assert [len(said) for said in before] == [len(before[0]), len(before[0]), 2]
    for milliseconds in (50, 150, 400, 1000):
        ask(page, "slowly?")
        page.wait_for_timeout(milliseconds)
        page.get_by_role("button", name="Stop").click()
        page.get_by_test_id("toast-text").get_by_text(STOPPED).wait_for(timeout=PATIENCE)
        shown = f"document.querySelectorAll('.message').length == {2 * len(before[0])}"
        page.wait_for_function(shown, timeout=PATIENCE)
        assert on_the_page(page) == before and page.locator(".error").count() == 0, milliseconds
        page.get_by_test_id("toast-close").first.click()
        page.get_by_test_id("toast-text").wait_for(state="detached", timeout=PATIENCE)
    ask(page, "slowly?")
    page.get_by_text("Ye", exact=True).wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="Clear").first.click()
    page.wait_for_function("document.querySelectorAll('.message, img[alt^=Where]').length == 0", timeout=PATIENCE)
    ask(page, "Sure?")
    page.wait_for_function(MAPS_ARE_THERE, timeout=PATIENCE)
    first, second, _ = on_the_page(page)
    assert {text for text in (*first, *second) if "?" in text} == {"Sure?"}


# --- what is sent past the page ---------------------------------------------------------------------------------------


def test_a_picture_that_was_not_uploaded_is_neither_fetched_nor_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    refuse_addresses(gradio)
    blocks = build_page(gradio, [SimpleNamespace(name="never asked")], str(tmp_path), None)
    _, own, _ = blocks.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    for path in ("http://8.8.8.8/a.png", "https://huggingface.co/a.png", "/etc/hostname", str(ROOT / "README.md")):
        data = [{"path": path, "meta": {"_type": "gradio.FileData"}}, "why?", None]
        body = json.dumps({"data": data, "fn_index": 0, "session_hash": path}).encode()
        join = urllib.request.Request(f"{own}gradio_api/queue/join", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(join, timeout=60).close()
        session = urllib.parse.quote(path, safe="")
        with urllib.request.urlopen(f"{own}gradio_api/queue/data?session_hash={session}", timeout=60) as stream:
            told = stream.read().decode()
        assert "process_completed" in told and "why?" not in told
        assert not path.startswith("http") or REFUSAL in told  # which Gradio itself would fetch
    blocks.close()
