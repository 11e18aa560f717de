"""The commands of `python -m llava.analysis`, what each applies to, and what `--model [NAME=]PATH_OR_ID` means.

A command is the module of its name, with `add_arguments(parser)` and `run(args)`.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from llava.utils.paths import checkpoint_name

PACKAGE = "llava.analysis"
ANY, OURS, NORMED = "any", "is one of this tree's", "has a norm"
ALL = "all"


class Command(NamedTuple):
    """A command's summary, and what `all` runs it on.

    Attributes:
        models: `ANY` model, `OURS` (checkpoints of this tree), or `NORMED` (its projector ends in a norm).
        flags: which of `--data` and `--samples` are passed on to it.
    """

    summary: str
    models: str = ANY
    flags: tuple[str, ...] = ("data", "samples")


COMMANDS = {
    "interface-norms": Command("norms of vision features, visual tokens and text embeddings (Tables 1, 2, 3)"),
    "embedding-norms": Command("norms of text embeddings, read from the weight files (Tables 6, 7, 8)", flags=()),
    "layer-norms": Command("norms of visual and text tokens per layer (Figure 4)"),
    "update-rates": Command("how fast visual and text tokens turn per layer (Figures 2, 3, 4, 5)"),
    "norm-params": Command("gain and bias of the projector's norm, read from the weight files (Table 5)", NORMED, ()),
    # It measures one batch: the --samples of the other commands would be too many.
    "gradients": Command("gradients above and below the projector's norm (section 5.1)", OURS, ("data",)),
    "attention": Command("where a query looks, and how much attention visual tokens get (Appendix G)"),
    "theory": Command("how far the theory's assumptions and predictions hold in a model (sections 3 and B)"),
}
"""In the order of `all`."""
SUMMARIES = {name: command.summary for name, command in COMMANDS.items()}
SUMMARIES[ALL] = "all of these for the given checkpoints"


class NamedModel(NamedTuple):
    """A model on the command line: its name in tables and figures, and its folder or hub id."""

    name: str
    path: str


def named_model(text: str) -> NamedModel:
    """Parses `NAME=PATH_OR_ID`; without a name, a checkpoint is called by the last two parts of its path."""
    name, separator, path = text.partition("=")
    if not separator or Path(text).exists():
        name, path = checkpoint_name(text), text
    if not (name and path):
        raise argparse.ArgumentTypeError(f"expected [NAME=]PATH_OR_ID, found {text!r}")
    return NamedModel(name, path)


def required_models(models: list[NamedModel]) -> list[NamedModel]:
    """Returns `models`. Raises ValueError: there is none, or two models have one name."""
    if not models:
        raise ValueError("--model: give at least 1 checkpoint folder or hub id, found 0")
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--model: {', '.join(twice)} names two models; give --model aligned=PATH for each")
    return models
