"""Figures: a colour has one meaning in all of them, lines can be told apart, and a sentence says what is seen."""

import base64
import re

import pytest
from paths import ROOT

from llava.compare import figures
from llava.compare.plan import read_plan
from llava.compare.record import read_record
from llava.compare.tables import Statistics
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.utils import presentation
from llava.utils.presentation import NORM_COLOURS, TEXT_COLOUR, VISUAL_COLOUR, looks

TOKENS = {VISUAL_COLOUR, TEXT_COLOUR, presentation.TEXT_BEFORE_COLOUR, presentation.SPECIAL_COLOUR}
NAMES = [
    *("none", "scale", "scale-fixed", "clip", "rmsnorm", "layernorm", "layernorm@default", "gwc_layernorm"),
    *("gwc_rmsnorm", "gwc_layernorm@0.25x", "gwc_layernorm@4x", "gwc_layernorm@16x"),
]
DATA = ROOT / "docs/data"


def colours_in(svg):
    return {colour.upper() for colour in re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", svg)}


def content(uri):
    return base64.b64decode(uri.partition(",")[2]).decode()


def test_every_norm_and_every_kind_of_token_has_a_colour_of_its_own():
    assert set(NORM_COLOURS) == {*NORM_TYPES, "scale", "gwc_scale"}
    colours = [*NORM_COLOURS.values(), *TOKENS, presentation.NEUTRAL]
    assert len(set(colours)) == len(colours)


def test_a_norm_looks_the_same_whatever_else_is_drawn_and_every_arm_has_a_colour():
    together = looks(NAMES)
    assert all(looks([arm]) == {arm: together[arm]} for arm in NAMES if arm in NORM_COLOURS)
    assert len({look["color"] for look in together.values()}) == len(NAMES)
    assert list(looks(["none/finetune"]).values()) == [together["none"]]


def test_other_models_and_more_variants_take_what_no_arm_has():
    names = [*NAMES, "gwc_layernorm@2x", "gwc_layernorm@3x-fixed", "baseline", "org/model", "none2"]
    taken = {tuple(look.items()) for look in looks(names).values()}
    assert len(taken) == len(names) and looks(names)["none"] == looks(["none"])["none"]
    assert looks(["none", "mine"])["mine"]["color"] != NORM_COLOURS["none"]
    assert len(looks(map(str, range(100)))) == 100


@pytest.mark.slow
def test_an_arm_has_one_colour_in_all_figures():
    record = read_record(DATA / "study-runs.json")
    drawn = {
        "differences": figures.svg(
            figures.differences, Statistics(record, read_plan(DATA / "study-plan.json"))
        ).decode()
    }
    drawn["by task"] = figures.svg(figures.differences, Statistics(record)).decode()
    curves = {"norm/llm_input": [[1, 30.0], [2, 30.0]], "loss": [[1, 1.0], [2, 1.0]]}
    stages = {stage: {"steps": 2, "curves": curves} for stage in ("pretrain", "finetune")}
    runs = [{"arm": arm, "stages": stages} for arm in ("none", "gwc_layernorm")]
    drawn |= {curve["title"]: content(curve["uri"]) for curve in figures.training_curves({"runs": runs})}
    assert len(drawn) == 4
    for name, svg in drawn.items():
        assert NORM_COLOURS["gwc_layernorm"] in colours_in(svg), name
        assert not TOKENS & colours_in(svg), name


@pytest.mark.parametrize("path", ["docs/site.css", "llava/compare/templates/style.css.jinja"])
def test_figures_stand_on_a_white_card_in_dark_mode_too(path):
    rules = (ROOT / path).read_text().partition("@media print")[0]
    assert re.search(r"^[^{\n]*\bimg[^{\n]*\{[^}]*background: #fff;[^}]*padding", rules, re.MULTILINE)
