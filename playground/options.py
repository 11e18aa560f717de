"""Settings dataclasses as command-line options: one documented field is one flag."""

import argparse
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

SettingsT = TypeVar("SettingsT")

PICTURES = ("scenes", "stamps", "probes")
"""The sets of pictures, each a module of this package; the first is the default."""


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a dataclass field that `add_options` turns into a flag of the default's type."""
    return field(default=default, metadata={"help": help, "choices": choices})


def add_options(parser: argparse.ArgumentParser, settings_class: type) -> None:
    """Add one `--field-name` flag per field of `settings_class`."""
    for item in fields(settings_class):
        if item.default is MISSING:
            raise TypeError(f"{settings_class.__name__}.{item.name}: a settings field needs a default (use option())")
        parser.add_argument(
            "--" + item.name.replace("_", "-"),
            type=type(item.default),
            default=item.default,
            choices=item.metadata.get("choices"),
            help=item.metadata["help"],
        )


def settings_from(args: argparse.Namespace, settings_class: type[SettingsT]) -> SettingsT:
    """Return the settings that the parsed flags describe."""
    return settings_class(**{item.name: getattr(args, item.name) for item in fields(settings_class)})
