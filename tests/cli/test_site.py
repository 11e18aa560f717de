"""The site of the pages builds strictly, and loads nothing from elsewhere."""

import re

import pytest

pytestmark = pytest.mark.slow


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
