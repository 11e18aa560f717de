"""The site of the pages builds strictly, loads nothing from elsewhere, and its references are the code's."""

import re
from dataclasses import fields

import pytest

from llava.launch.settings import NAMES
from llava.train.arguments import DataArguments, ModelArguments

pytestmark = pytest.mark.slow


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loads = r'<(?:script|img|iframe|link(?! rel="canonical"))[^>]* (?:src|href)="(?:https?:)?//'
    for page in pages:
        assert not re.search(loads, page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\((?:\"|')?(?:https?:)?//", style.read_text()), style


def test_references_have_every_flag_and_variable(site):
    shown = {f"--{field.name}" for owner in (ModelArguments, DataArguments) for field in fields(owner)}
    flags, variables = ((site / name / "index.html").read_text() for name in ("flags", "variables"))
    assert shown and all(f">{flag}</code>" in flags for flag in shown)
    assert all(f">{name}</code>" in variables for name in NAMES)


def test_pages_from_outside_the_folder_and_linked_files_are_there(site):
    for name in (
        "index.html",
        "contributing/index.html",
        "zh-CN/index.html",
        "tests/index.html",
        "source/llava/conversation.py/index.html",
    ):
        assert (site / name).is_file(), name
    home = (site / "index.html").read_text()
    assert 'href="recipe/"' in home and 'href="zh-CN/"' in home and 'src="figures/where_the_norm_sits.svg"' in home
