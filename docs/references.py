"""Writes the references of docs/ from the code: `python docs/references.py`, after a flag, variable or script changed.

Everything below the marker of a page is replaced.
"""

import argparse
import html
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
MARKER = "<!-- what follows is written by: python docs/references.py -->\n"


def flags() -> str:
    """This tree's own flags of the trainer in a table for each dataclass, from the parser that reads them."""
    from llava.train.arguments import DataArguments, FlagParser, ModelArguments, TrainingArguments

    actions = {action.dest: action for action in reversed(FlagParser()._actions)}  # --x, not --no_x
    lines = []
    for owner in (ModelArguments, DataArguments, TrainingArguments):
        title = owner.__name__.removesuffix("Arguments")
        lines += ["", f"## {title}", "", "| flag | values | default | meaning |", "|---|---|---|---|"]
        own = [cls for cls in owner.__mro__ if cls.__module__.startswith("llava.")]
        for action in [actions[name] for cls in own for name in cls.__annotations__]:
            kind = {int: "N", float: "X", str: "TEXT"}.get(
                action.type, "True|False" if action.const is True else "VALUE"
            )
            values = ", ".join(map(str, action.choices)) if action.choices else kind
            default = "" if action.default in (None, "", [], argparse.SUPPRESS) else f"`{action.default}`"
            meaning = cell(action.help.replace("%%", "%"))
            lines.append(f"| {name_cell(action.option_strings[0])} | {cell(values)} | {default} | {meaning} |")
    return "\n".join(lines)


def variables() -> str:
    """The variables of the training scripts in tables."""
    from llava.launch.settings import VARIABLES, script_flags

    lines = []
    for group, meanings in VARIABLES.items():
        lines += ["", f"## {group[0].upper()}{group[1:]}", "", "| variable | meaning |", "|---|---|"]
        lines += [f"| {name_cell(name)} | {cell(meaning)} |" for name, meaning in meanings.items()]
    lines += ["", "## Flags as variables", "", "| variable | [flag](flags.md) |", "|---|---|"]
    of_both = script_flags("pretrain")
    for name, flag in script_flags("finetune").items():
        lines.append(f"| {name_cell(name)} | `--{flag}`{'' if name in of_both else ', in stage 2 alone'} |")
    return "\n".join(lines)


def name_cell(name: str) -> str:
    """A flag or variable for a table's cell, not broken over lines."""
    return f'<code class="flag">{name}</code>'


def cell(text: str) -> str:
    """Text for a table's cell: one line, with special characters escaped."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")


PAGES: dict[str, Callable[[], str]] = {"flags.md": flags, "variables.md": variables}


def page(name: str) -> str:
    """A page of docs/ as it should be: its own text up to the marker, then the reference."""
    own, marker, _ = (DOCS / name).read_text().partition(MARKER)
    assert marker, f"docs/{name} has no line {MARKER}"
    return own + MARKER + PAGES[name]() + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for name in PAGES:
        (DOCS / name).write_text(page(name))
