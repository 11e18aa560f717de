"""What `--model [NAME=]PATH_OR_ID` means."""

import argparse
from typing import NamedTuple

from llava.utils.paths import checkpoint_name


class NamedModel(NamedTuple):
    """A model on the command line: its name in tables and figures, and its folder or hub id."""

    name: str
    path: str


def named_model(text: str) -> NamedModel:
    """Parses `NAME=PATH_OR_ID`; without a name, a checkpoint is called by the last two parts of its path."""
    name, separator, path = text.partition("=")
    if not separator:
        name, path = checkpoint_name(text), text
    if not (name and path):
        raise argparse.ArgumentTypeError(f"expected [NAME=]PATH_OR_ID, found {text!r}")
    return NamedModel(name, path)


def required_models(models: list[NamedModel], at_least: int = 1) -> list[NamedModel]:
    """Returns `models` if there are at least `at_least`, and no two of one name.

    Raises:
        ValueError: there are fewer, or two models have one name.
    """
    if len(models) < at_least:
        raise ValueError(f"--model: give at least {at_least} checkpoint folder or hub id, found {len(models)}")
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"--model: {', '.join(twice)} names two models; give each its own name, as in --model aligned=PATH"
        )
    return models
