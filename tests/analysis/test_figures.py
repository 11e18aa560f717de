"""Figures: a colour has one meaning in all of them, lines can be told apart, and a sentence says what is seen."""

from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.utils import presentation
from llava.utils.presentation import NORM_COLOURS, TEXT_COLOUR, VISUAL_COLOUR, looks

TOKENS = {VISUAL_COLOUR, TEXT_COLOUR, presentation.TEXT_BEFORE_COLOUR, presentation.SPECIAL_COLOUR}
NAMES = [
    *("none", "scale", "scale-fixed", "clip", "rmsnorm", "layernorm", "layernorm@default", "gwc_layernorm"),
    *("gwc_rmsnorm", "gwc_layernorm@0.25x", "gwc_layernorm@4x", "gwc_layernorm@16x"),
]


def test_every_norm_and_every_kind_of_token_has_a_colour_of_its_own():
    assert set(NORM_COLOURS) == {*NORM_TYPES, "scale", "gwc_scale"}
    colours = [*NORM_COLOURS.values(), *TOKENS, presentation.NEUTRAL]
    assert len(set(colours)) == len(colours)


def test_a_norm_looks_the_same_whatever_else_is_drawn_and_every_arm_has_a_colour():
    together = looks(NAMES)
    assert all(looks([arm]) == {arm: together[arm]} for arm in NAMES if arm in NORM_COLOURS)
    assert len({look["color"] for look in together.values()}) == len(NAMES)
    assert list(looks(["none/finetune"]).values()) == [together["none"]]
