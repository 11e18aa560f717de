"""The web page in headless Chromium, at the width of a phone, with two tiny checkpoints.

Needs Gradio (`llava[web]`), Playwright (`pip install playwright`; it drives the Chromium that is there) and a Chromium.
"""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from data_files import POPE_SUFFIX, QUESTIONS, encoded, noise
from local_server import QuietHandler, listening
from paths import ROOT

from llava.serve.page import EXAMPLE, REFUSAL

pytest.importorskip("gradio", reason="the web page needs Gradio: pip install 'llava[web]'")
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


def test_an_example_fills_picture_and_question(page):
    page.get_by_role("button", name="Example").click()
    page.get_by_role("button", name="Remove Image").wait_for(timeout=PATIENCE)
    assert box(page).input_value() == EXAMPLE
    page.get_by_role("button", name="Ask").click()
    page.wait_for_function(MAPS_ARE_THERE, timeout=PATIENCE)
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


@pytest.fixture
def inner():
    """The address of a server that only this machine reaches, and the requests that it got."""
    requests, picture = [], encoded(noise(size=(8, 8)))

    class Handler(QuietHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(picture)

    with listening(Handler) as place:
        yield place, requests


def post(url: str, content: object) -> tuple[int, str]:
    """Status and text of what the server says to a JSON body."""
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def joined(address: str, event: int, data: list[object], session: str) -> str:
    """The stream of an event's messages, as the page itself gets it."""
    status, text = post(f"{address}gradio_api/queue/join", {"data": data, "fn_index": event, "session_hash": session})
    assert status == 200, text
    with urllib.request.urlopen(f"{address}gradio_api/queue/data?session_hash={session}", timeout=60) as stream:
        return "".join(line.decode() for line in stream)


def upload(address: str, content: bytes) -> str:
    """Where the server has put an uploaded picture."""
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="up.png"\r\n\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(f"{address}gradio_api/upload", head + content + b"\r\n--x--\r\n", kind)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)[0]


def events(address: str) -> list[tuple[int, str, list[str]]]:
    """Number, name and kinds of inputs of every event of the page that runs code here."""
    with urllib.request.urlopen(f"{address}config", timeout=60) as response:
        config = json.load(response)
    kinds = {component["id"]: component["type"] for component in config["components"]}
    return [
        (event["id"], event["api_name"], [kinds[number] for number in event["inputs"]])
        for event in config["dependencies"]
        if event["backend_fn"]
    ]


def told(stream: str) -> list[str]:
    """The sentences that an event's messages show: Gradio's errors, and warnings."""
    return re.findall(r'"(?:error|log)": ?"([^"]*)"', stream)


FILE = {"meta": {"_type": "gradio.FileData"}}
FORMS = [{"is_stream": stream, **kind} for stream in (True, False) for kind in ({}, FILE)]
REFUSALS = (REFUSAL, "Please choose a picture first.")


def is_refused(stream: str) -> bool:
    """Whether an event ended in a refusal, of ours or of Gradio, and nothing was asked."""
    refused = any(told(stream)[-1:] and told(stream)[-1].endswith(sentence) for sentence in REFUSALS)
    return "assistant" not in stream and (refused or bool(re.search(r'"success": ?false', stream)))


def test_no_event_opens_or_fetches_what_was_not_uploaded(address, inner, tmp_path):
    server, requests = inner
    (tmp_path / "own.png").write_bytes(encoded(noise(size=(8, 8))))
    uploaded = Path(upload(address, encoded(noise(size=(8, 8)))))
    beside = os.path.relpath(tmp_path / "own.png", uploaded.parent)
    paths = [f"{server}/a.png", f"file://{tmp_path}/own.png", str(tmp_path / "own.png"), f"{uploaded.parent}/{beside}"]
    paths += [server.replace("http", "HTTP") + "/b.png", "/etc/hostname", "/nowhere.png", str(uploaded.parent)]
    paths += PUBLIC
    count = itertools.count()
    for event, _, kinds in events(address):
        for place, path, form in itertools.product(range(len(kinds)), paths, FORMS):
            if kinds[place] in ("image", "textbox"):
                data = ["why?" if kind == "textbox" else None for kind in kinds]
                data[place] = {"path": path, **form}
                stream = joined(address, event, data, f"session{next(count)}")
                assert is_refused(stream), (event, kinds, data, stream)
                if path in PUBLIC and "meta" in form and not form["is_stream"]:
                    assert told(stream)[-1].endswith(REFUSAL)  # before a connection was tried
    assert next(count) == 2 * len(paths) * len(FORMS) and requests == []


PUBLIC = ["http://8.8.8.8/a.png", "https://huggingface.co/a.png"]  # Gradio itself would open them
