"""The help of the training scripts: every variable with its meaning and the value that it has in this call."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from llava.launch.flags import parse_flags
from llava.launch.settings import NAMES, VARIABLES
from llava.utils.paths import IS_CHECKOUT, ROOT

USAGE = """{usage}

Flags after the script's name are the trainer's and win over all; `python -m llava.train.train --help` lists them.
Variables win over the preset, the preset over the recipe. Relative paths start at {root}.
"""


def help_text(environment: Mapping[str, str], words: Sequence[str]) -> str:
    """The help of the stage that STAGE names, with the values of its flags `words`; without STAGE, of all stages."""
    stage = environment.get("STAGE", "")
    called = f"bash scripts/{stage or '{pretrain,finetune}'}.sh" if IS_CHECKOUT else f"llava-recipe {stage}"
    usage = f"usage: [NAME=value ...] {called} [--flag value ...]"
    if stage:
        usage += "\n\n" + header(stage)
    flags = parse_flags([word for word in words[1:] if word not in ("-h", "--help")]).values()
    here = script_flags(stage)
    lines = [USAGE.format(usage=usage, root=Path.cwd())]
    for group, variables in VARIABLES.items():
        lines.append(f"{group}:")
        for name, meaning in variables.items():
            if stage and meaning.startswith("stage 2:") and stage != "finetune":
                continue
            value = flags.get(here.get(name, ""), "") or environment.get(name, "")
            if "(default" not in meaning and stage:
                meaning += f" [{value or 'empty'}]"
            lines.append(f"  {name:<26} {meaning}")
        lines.append("")
    return "\n".join(lines).rstrip()


def header(stage: str) -> str:
    """The comment at the top of the stage's script."""
    comments = re.match(r"#!.*\n((?:#.*\n)+)", (ROOT / f"scripts/{stage}.sh").read_text())
    return re.sub("^# ?", "", comments[1], flags=re.MULTILINE).rstrip() if comments else ""


@cache
def script_flags(stage: str) -> dict[str, str]:
    """The trainer's flag that each variable becomes, as the scripts write it."""
    texts = ((ROOT / f"scripts/{name}.sh").read_text() for name in ((stage, "lib") if stage else ()))
    pairs = (pair for text in texts for pair in re.findall(r'--(\w+) "\$\{?(\w+)', text))
    return {name: flag for flag, name in pairs if name in NAMES}
