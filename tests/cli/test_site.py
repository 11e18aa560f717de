"""The site of the pages builds strictly, loads nothing from elsewhere, and its search finds the page that answers."""

import re
from http.server import SimpleHTTPRequestHandler

import pytest
from local_server import QuietHandler, listening

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
    "video": "faq",
    "several images": "faq",
    "Windows": "faq",
    "Colab": "faq",
    "what is none": "faq",
    "license": "faq",
    "Table 2": "analysis",
    "learning rate": "norm",
    "LoRA": "models",
    "续训": "first-hour.zh-CN",
}
"""Questions, and the page that answers each."""
LOWERED = {"api", "changelog", "source"}
HITS = "hits => hits.slice(0, 3).map(hit => hit.querySelector('a').pathname.split('/')[1])"


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loads = r'<(?:script|img|iframe|link(?! rel="canonical"))[^>]* (?:src|href)="(?:https?:)?//'
    for page in pages:
        assert not re.search(loads, page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\((?:\"|')?(?:https?:)?//", style.read_text()), style


def test_no_table_or_list_is_ended_early_by_the_parser(site):
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        left = re.search(r"(^|<(p|li|td)>)\s*(\|[ -]|[-*] |\d+\. ).*", text, re.MULTILINE)
        assert not left, (page, left)


@pytest.fixture(scope="module")
def address(site):
    class Files(QuietHandler, SimpleHTTPRequestHandler):
        def __init__(self, *request):
            super().__init__(*request, directory=site)

    with listening(Files) as address:
        yield address


@pytest.mark.parametrize("question", FIRST)
def test_the_first_hit_answers_what_is_typed(address, browser, question):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(address)
    box = page.locator("[data-md-component=search-query]")
    page.locator("label[for=__search]:visible").first.click()
    box.fill(question)
    box.press("End")  # the page searches when a key is released; no key writes a Chinese character
    page.locator(".md-search-result__item").first.wait_for(state="attached")
    hits = page.eval_on_selector_all(".md-search-result__item", HITS)
    assert hits[0] == FIRST[question] and not LOWERED & set(hits)
    page.close()
