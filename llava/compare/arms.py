"""The names of a comparison's arms: a norm of `NORM_TYPES`, with its initial norm after an @ unless that is the
text norm, as in `layernorm@4x` or `layernorm@default`, and `-fixed` at the end if it is not trained, as in
`rmsnorm-fixed`; or another projector without a norm, as in `pre_layernorm_mlp2x_gelu`."""

from collections.abc import Callable
from typing import NamedTuple

from llava.utils.plugins import load_named

BASELINE = "none"
PROJECTOR = "mlp2x_gelu"
"""The projector of all arms that do not name one: the scripts' default."""
FIXED = "-fixed"
FIRST_SEED = 42  # the paper's


class Arm(NamedTuple):
    """The flags that tell one arm from another.

    Attributes:
        norm: `--mm_projector_norm`.
        init: `--mm_projector_norm_init`; empty for the baseline, which has none.
        learnable: `--mm_projector_norm_learnable`.
        projector: `--mm_projector_type`.
    """

    norm: str
    init: str
    learnable: bool = True
    projector: str = PROJECTOR

    @property
    def settings(self) -> dict[str, str]:
        """Variables of scripts/pretrain.sh and finetune.sh."""
        projector = "" if self.projector == PROJECTOR else self.projector
        learnable = "" if self.learnable else "False"
        return {"PROJECTOR": projector, "NORM": self.norm, "NORM_INIT": self.init, "NORM_LEARNABLE": learnable}


def parse_arm(name: str) -> Arm:
    """The arm called `name`.

    Raises:
        ValueError: an unknown norm or projector, a malformed initial norm, or a baseline that has either suffix.
    """
    # These take seconds.
    from llava.model.multimodal_projector.builder import PROJECTOR_TYPES, find_projector
    from llava.model.multimodal_projector.norm import NORM_TYPES, ProjectorNormArguments, parse_init

    load_named()  # a plug-in's norm or projector is an arm too
    norm, at, init = name.removesuffix(FIXED).partition("@")
    learnable = not name.endswith(FIXED)
    if norm not in NORM_TYPES:
        try:
            find_projector(name)
        except ValueError:
            known = ", ".join([*NORM_TYPES, *PROJECTOR_TYPES])
            removed = "docs/study.md names the commit that has removed ones"
            raise ValueError(f"--arms {name}: {norm!r} is not one of: {known}; {removed}") from None
        if name == PROJECTOR:
            raise ValueError(f"--arms {name}: the projector of {BASELINE} and of every norm; leave it out")
        return Arm(BASELINE, "", projector=name)
    if norm == BASELINE:
        if at or not learnable:
            raise ValueError(f"--arms {name}: the baseline has no norm to initialize or to fix")
        return Arm(norm, "")
    if at:
        parse_init(init)
    return Arm(norm, init if at else ProjectorNormArguments.mm_projector_norm_init, learnable)


def parse_arms(text: str, parse: Callable[[str], object] = parse_arm) -> list[str]:
    """The names of arms, joined by commas: the baseline first, at least one more, none twice.

    Raises:
        ValueError: another list; or see `parse_arm`.
    """
    names = text.split(",")
    arms = set(map(parse, names))
    if names[0] != BASELINE or len(names) < 2:
        raise ValueError(f"--arms {text}: expected {BASELINE}, the baseline, first, and at least one more")
    if len(arms) < len(names):
        raise ValueError(f"--arms {text} names an arm twice")
    return names


def parse_seeds(text: str) -> list[int]:
    """Seeds from a count (42, 43, ...; the paper's first) or a list, as in `1,2` or `7,`.

    Raises:
        ValueError: neither, or a seed twice.
    """
    parts = text.removesuffix(",").split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"--seeds {text}: expected a count, as in 2, or a list, as in 1,2 or 7,")
    seeds = [int(part) for part in parts]
    if "," not in text:
        seeds = list(range(FIRST_SEED, FIRST_SEED + seeds[0]))
    if len(set(seeds)) < max(1, len(seeds)):
        raise ValueError(f"--seeds {text} names no seed, or a seed twice")
    return seeds
