"""Figures: a colour has one meaning in all of them, lines can be told apart, and a sentence says what is seen."""

import base64
import re

import matplotlib
import pytest
from paths import ROOT

from llava.compare import figures
from llava.compare.study import ARMS
from llava.compare.study_record import read_record
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.utils import presentation
from llava.utils.presentation import NORM_COLOURS, TEXT_COLOUR, VISUAL_COLOUR, import_pyplot, looks

TOKENS = {VISUAL_COLOUR, TEXT_COLOUR, presentation.TEXT_BEFORE_COLOUR, presentation.SPECIAL_COLOUR}
NAMES = ARMS.split(",")


@pytest.fixture(scope="module")
def study():
    """The committed study."""
    return read_record(ROOT / "docs/study.json")


@pytest.fixture(scope="module")
def drawn(study):
    """The study's pictures, and its figures while they are open, by name."""
    pyplot = import_pyplot()
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", kept.append)
        pictures = figures.figures(study)
    yield pictures, dict(zip(pictures, kept, strict=True))
    for figure in kept:
        pyplot.close(figure)


def colours_in(svg):
    return {colour.upper() for colour in re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", svg)}


def content(uri):
    return base64.b64decode(uri.partition(",")[2]).decode()


def test_every_norm_and_every_kind_of_token_has_a_colour_of_its_own():
    assert set(NORM_COLOURS) == set(NORM_TYPES)
    colours = [*NORM_COLOURS.values(), *TOKENS, presentation.NEUTRAL]
    assert len(set(colours)) == len(colours)


def test_an_arm_looks_the_same_whatever_else_is_drawn():
    together = looks(NAMES)
    assert all(looks([arm]) == {arm: together[arm]} for arm in NAMES)
    assert len({look["color"] for look in together.values()}) == len(NAMES)
    assert list(looks(["none/finetune", "layernorm_default"]).values()) == [
        together["none"],
        together["layernorm@default"],
    ]


def test_other_models_and_unlisted_variants_take_what_no_arm_has():
    names = [*NAMES, "gwc_layernorm@2x", "gwc_layernorm@3x-fixed", "baseline", "org/model", "none2"]
    taken = {tuple(look.items()) for look in looks(names).values()}
    assert len(taken) == len(names) and looks(names)["none"] == looks(["none"])["none"]
    assert looks(["none", "mine"])["mine"]["color"] != NORM_COLOURS["none"]
    assert len(looks(map(str, range(100)))) == 100


@pytest.mark.slow
def test_an_arm_has_one_colour_in_the_study_the_report_and_the_quickstart(drawn, study):
    pages = {name: picture.svg.decode() for name, picture in drawn[0].items()}
    logs = [{"step": step, "norm/llm_input": 30.0, "loss": 1.0} for step in (1, 2)]
    curves = figures.training_curves([("none", [logs, logs]), ("gwc_layernorm", [logs, logs])])
    pages |= {curve["title"]: content(curve["uri"]) for curve in curves}
    results = {arm: study["results"][arm] for arm in ("layernorm", "gwc_layernorm")}
    pages["report"] = content(figures.intervals(results, ["none", *results]))
    assert len(pages) == 10
    for name, svg in pages.items():
        assert NORM_COLOURS["gwc_layernorm"] in colours_in(svg), name
        assert not TOKENS & colours_in(svg), name


@pytest.mark.slow
def test_accuracy_has_a_panel_for_each_arm_with_the_baseline(drawn, study):
    panels = [axes for axes in drawn[1]["training"].axes if axes.get_visible()]
    baseline, *others = study["arms"]
    assert [axes.get_title() for axes in panels] == others
    for axes, arm in zip(panels, others, strict=True):
        assert [line.get_label() for line in axes.lines] == ["chance", baseline, arm]


@pytest.mark.slow
def test_a_legend_shows_a_whole_dash_beside_its_mark(drawn):
    pattern = {"--": "dashed", "-.": "dashdot", ":": "dotted"}
    checked = set()
    for name, figure in drawn[1].items():
        for line in (line for legend in figure.legends for line in legend.get_lines()):
            if line.get_linestyle() in pattern:
                dashes = matplotlib.rcParams[f"lines.{pattern[line.get_linestyle()]}_pattern"]
                mark = line.get_markersize() if line.get_marker() != "None" else 0
                shown = max(line.get_xdata()) - min(line.get_xdata()) - mark
                assert shown >= sum(dashes) * line.get_linewidth(), (name, line.get_label())
                checked.add(name)
    assert checked == {"rescaling", "norms", "gradients"}


def test_what_the_analysis_draws_is_described_alike_on_all_pages():
    page = (ROOT / "docs/analysis.md").read_text()
    shown = [f"![{alt}](figures/analysis/{name}.png)" for name, (_, alt) in figures.DRAWN.items()]
    assert [picture for picture in shown if picture not in page] == []


@pytest.mark.parametrize("path", ["docs/site.css", "llava/compare/templates/style.css.jinja"])
def test_figures_stand_on_a_white_card_in_dark_mode_too(path):
    rules = (ROOT / path).read_text().partition("@media print")[0]
    assert re.search(r"^[^{\n]*\bimg[^{\n]*\{[^}]*background: #fff;[^}]*padding", rules, re.MULTILINE)
