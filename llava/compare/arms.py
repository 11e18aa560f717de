"""The names of a comparison's arms: a norm of `NORM_TYPES`, with its initial norm after an @ unless that is the
text norm, as in `layernorm@4x` or `layernorm@default`, and `-fixed` at the end if it is not trained, as in
`rmsnorm-fixed`; or another projector without a norm, as in `pre_layernorm_mlp2x_gelu`."""

from typing import NamedTuple

from llava.utils.plugins import load_named

BASELINE = "none"
PROJECTOR = "mlp2x_gelu"
"""The projector of all arms that do not name one: the scripts' default."""
SEEDS = "number of seeds (42, 43, ...), or a list, as in 1,2 or 7,"
"""What `parse_seeds` reads, for the help of `--seeds`."""
FIXED = "-fixed"


REMOVED_NORMS, REMOVED_PROJECTOR = ("scale", "gwc_scale"), "vocab_mix_mlp2x_gelu"
"""Exploratory arms of committed records, which only the commit that docs/study.md names can train."""


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


def parse_arm(name: str, recorded: bool = False) -> Arm:
    """The arm called `name`, of a committed record also one that was removed.

    Raises:
        ValueError: an unknown norm or projector, a malformed initial norm, or a baseline that has either suffix.
    """
    # These take seconds.
    from llava.model.multimodal_projector.builder import PROJECTOR_TYPES, find_projector
    from llava.model.multimodal_projector.norm import NORM_TYPES, ProjectorNormArguments, parse_init

    load_named()  # a plug-in's norm or projector is an arm too
    norm, at, init = name.removesuffix(FIXED).partition("@")
    learnable = not name.endswith(FIXED)
    if norm not in NORM_TYPES and not (recorded and norm in REMOVED_NORMS):
        try:
            if not (recorded and name == REMOVED_PROJECTOR):
                find_projector(name)
        except ValueError:
            known = ", ".join([*NORM_TYPES, *PROJECTOR_TYPES])
            raise ValueError(
                f"--arms {name}: {norm!r} is not one of: {known}; docs/study.md names the commit that has removed ones"
            ) from None
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


def parse_arms(text: str, recorded: bool = False) -> list[str]:
    """The names of arms, joined by commas: the baseline first, at least one more, none twice; see `parse_arm`.

    Raises:
        ValueError: another list; or see `parse_arm`.
    """
    names = text.split(",")
    arms = [parse_arm(name, recorded) for name in names]
    if names[0] != BASELINE or len(names) < 2:
        raise ValueError(f"--arms {text}: expected {BASELINE}, the baseline, first, and at least one more")
    if len(set(arms)) < len(arms):
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
        if not seeds[0]:
            raise ValueError("--seeds 0: expected a count of at least 1")
        seeds = list(range(_FIRST_SEED, _FIRST_SEED + seeds[0]))
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text} names a seed twice")
    return seeds


_FIRST_SEED = 42
