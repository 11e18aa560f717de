"""The site of the pages in headless Chromium: what its search finds.

Needs MkDocs (`llava[docs]`), Playwright and a Chromium.
"""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install playwright")
pytestmark = pytest.mark.slow

FIRST = {
    "--mm_projector_norm": "flags",
    "CUDA out of memory": "troubleshooting",
    "resume training": "clusters",
    "ModuleNotFoundError: No module named 'llava'": "troubleshooting",
    "No space left on device": "troubleshooting",
    "loss is nan": "troubleshooting",
    "run hangs": "troubleshooting",
    "multiple nodes": "clusters",
    "my own data": "data",
    "vllm": "serve",
}
"""Questions, and the page that answers each."""
LOWERED = {"api", "changelog", "source", "study-numbers"}
HITS = "hits => hits.slice(0, 3).map(hit => hit.querySelector('a').pathname.split('/')[1])"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    yield page
    page.close()


def first_hits(page) -> list[str]:
    """The pages of the first three results, after a search."""
    page.locator(".md-search-result__item").first.wait_for(state="attached")
    return page.eval_on_selector_all(".md-search-result__item", HITS)


@pytest.mark.parametrize("question", FIRST)
def test_the_first_hit_answers_what_is_typed(page, address, question):
    page.goto(address)
    box = page.locator("[data-md-component=search-query]")
    page.locator("label[for=__search]:visible").first.click()
    box.fill(question[:-1])
    box.press(question[-1])
    hits = first_hits(page)
    assert hits[0] == FIRST[question] and not LOWERED & set(hits)


def test_a_flag_in_the_address_is_searched_for_too(page, address):
    page.goto(f"{address}?q=--mm_projector_norm")
    assert first_hits(page)[0] == "flags"
