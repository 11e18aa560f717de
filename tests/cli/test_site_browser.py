"""The site of the pages in headless Chromium: what its search finds, on a phone, and on paper.

Needs MkDocs (`llava[docs]`), Playwright and a Chromium. SCREENSHOTS=FOLDER keeps pictures of the pages.
"""

import functools
import os
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from paths import ROOT

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
LOWERED = {"api", "changelog", "source"}
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


def keep_screenshot(page, name: str) -> None:
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"site-{name}.png", full_page=True)


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


def test_on_a_phone_name_and_diagram_are_readable_and_comments_wrap(page, address):
    page.goto(address)
    keep_screenshot(page, "phone")
    wide = "elements => elements.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent.trim())"
    assert page.eval_on_selector_all(".md-header__title .md-ellipsis, article pre code:has(.c1)", wide) == []
    drawing = (ROOT / "docs/figures/where_the_norm_sits.svg").read_text()
    shown = page.locator("img[src$='.svg']").bounding_box()["width"]
    scale = shown / int(re.search(r'viewBox="0 0 (\d+) ', drawing)[1])
    assert min(map(int, re.findall(r'font-size="(\d+)"', drawing))) * scale > 9


@pytest.mark.parametrize("name", ["", "first-hour/", "performance/", "study/", "tests/"])
def test_on_paper_nothing_is_cut_and_headings_stay_with_their_text(page, address, name):
    page.set_viewport_size({"width": 680, "height": 1000})  # an A4 sheet within its margins
    page.goto(address + name)
    page.emulate_media(media="print")
    keep_screenshot(page, f"paper-{name.strip('/') or 'home'}")
    cut = "elements => elements.filter(e => e.scrollWidth > e.parentElement.clientWidth).length"
    assert page.eval_on_selector_all("article :is(code, table, img)", cut) == 0
    assert page.eval_on_selector_all("article img", "images => images.filter(i => i.height > 900).length") == 0
    after = "headings => headings.filter(h => getComputedStyle(h).breakAfter != 'avoid').length"
    assert page.eval_on_selector_all("article :is(h1, h2, h3)", after) == 0
    assert page.locator(".md-code__nav:visible").count() == 0
