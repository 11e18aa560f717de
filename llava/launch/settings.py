"""What the user gives: the variables of the scripts, with their meanings and help, and the trainer's flags."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llava.utils.names import nearest_name
from llava.utils.paths import IS_CHECKOUT, ROOT

# Meaning of every variable that is not simply a flag of the trainer's. Defaults are the scripts', or stand here where
# the launcher finds them.
VARIABLES: dict[str, dict[str, str]] = {
    "what is trained": {
        "PRESET": "a file of scripts/presets: model, template and sizes that go with it",
        "DEMO_DATA": "with PRESET=demo: scenes or probes, prepared by python -m playground (default: scenes)",
        "LORA": "1: stage 2 by LoRA, LLaVA's recipe; the vision tower stays frozen (default: off)",
        "GLOBAL_BATCH": "samples of an optimizer step over all devices; accumulation follows",
        "PER_DEVICE_BATCH": "samples of a device's micro-batch, or auto: its whole share at once",
        "LENGTH_GROUP_WINDOW": "stage 2: batches whose samples are paired by length; auto: 1, on many devices 16",
        "RUN_NAME": "name in the logs (default: that of OUTPUT_DIR)",
        "REPORT_TO": "tensorboard, wandb, none, ...; auto: tensorboard, unless your own environment lacks it",
    },
    "devices and precision": {
        "NUM_GPUS": "GPUs per node; 0: train on the CPU (default: all visible)",
        "CPU_RANKS": "processes per node that share the cores where there is no GPU (default: 1)",
        "NNODES": "nodes (default: 1, or HOSTFILE's)",
        "HOSTFILE": "lines 'host slots=8', for several nodes by deepspeed",
        "NODE_RANK": "number of this node, from 0, for several nodes by torchrun (default: SLURM's)",
        "MASTER_ADDR": "address of the first node, the same on every node",
        "MASTER_PORT": "port where the ranks meet (default: one that differs between jobs, 29500 over several nodes)",
        "RDZV_ID": "name under which nodes meet again, with MAX_RESTARTS (default: the SLURM job, else RUN_NAME)",
        "LAUNCHER": "auto, python, deepspeed or torchrun (default: auto)",
        "MAX_RESTARTS": "how many times torchrun restarts all ranks after a failure (default: 0)",
        "DEEPSPEED_CONFIG": "a file of deepspeed_configs; auto: what fits first of ZeRO-2, ZeRO-3 and offload; empty: "
        "without DeepSpeed",
        "BF16": "compute in bf16 (default: True on GPUs and on CPUs with instructions for it)",
        "TF32": "fp32 products in TF32 (default: True on GPUs)",
        "GRADIENT_CHECKPOINTING": "LLaVA's name for ACTIVATION_CHECKPOINTING (default: not set)",
    },
    "the script itself": {
        "DRY_RUN": "1: show configuration, command and inputs; json: the same as JSON (default: off)",
        "LLAVA_PYTHON": "an interpreter of your own environment: nothing is installed (default: .venv)",
        "PYTHON": "interpreter that .venv is made from (default: python3)",
        "EXTRAS": "extras of pyproject.toml to install (default: train,playground,dev, and liger with CUDA's PyTorch)",
    },
}


@cache
def script_flags(stage: str) -> dict[str, str]:
    """The trainer's flag that each variable becomes, as the scripts write it."""
    texts = [(ROOT / f"scripts/{name}.sh").read_text() for name in (stage, "lib")]
    return {name: flag for text in texts for flag, name in re.findall(r'--(\w+) "\$\{?([A-Z]\w+)', text)}


NAMES = frozenset(name for group in VARIABLES.values() for name in group).union(script_flags("finetune"))
STAGES = {
    "pretrain": "Stage 1, feature alignment: trains the projector and its norm; the rest stays frozen.",
    "finetune": "Stage 2, full instruction tuning: trains language model, projector with its norm, and vision tower. "
    "LORA=1: by LoRA.",
}
# What the other scripts read. A name near one of these or of `NAMES` is misspelt, whatever script it is set for.
OTHERS = """ANALYSIS ARMS COMMANDS COVERAGE DATA EVALUATE_FLAGS FAMILIES FAST FINETUNE_DATA FINETUNE_IMAGES FIX
OUTPUT_ROOT PREPARE_ONLY PRETRAIN_DATA PRETRAIN_IMAGES SAMPLES TASKS TOLERANCE UPSTREAM_VENV WORKERS"""
_FOREIGN = """ARGS CACHE_DIR DATE FORM LAST LOCA MASTER_HOST MODULEPATH NODE_PATH NUM_CPUS PROJECT PYTHON3 RESET
ROLE_RANK SM_NUM_GPUS SPEED VERSION"""  # near ours, and other programs'
OF_ONE_STAGE = {
    "DRY_RUN": "only a single stage can be shown: bash scripts/pretrain.sh",
}
"""Variables that several runs refuse: a stage that trains nothing would count as finished."""
REPEATED = {"plugin"}
"""Flags of which every value counts."""


class Refusal(Exception):
    """A setting that cannot be used; the message names it, what was expected, what was found, and what to do."""


def is_on(value: str) -> bool:
    """Whether the value of a switch like DRY_RUN turns it on."""
    return value.lower() not in ("", "0", "no", "n", "false", "f", "off")


def whole_number(name: str, value: str, smallest: int) -> int:
    """`value` as a whole number; raises Refusal that names it `name` where it is none, or below `smallest`."""
    plain = value.isascii() and value.isdecimal() and (value == "0" or not value.startswith("0")) and len(value) < 10
    if not plain or int(value) < smallest:
        raise Refusal(f"{name}={value} is not a whole number of at least {smallest}")
    return int(value)


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """`value`; raises Refusal that names it `name` and lists what is `allowed` where it is not one of them."""
    if value not in allowed:
        raise Refusal(f"{name}={value} is not one of: {' '.join(allowed)}")
    return value


def refuse_misspelt(environment: Mapping[str, str]) -> None:
    """Raises Refusal for a variable that no script reads and whose name is nearly that of one, such as NORMS."""
    known = NAMES.union(OTHERS.split())
    for name in sorted(environment.keys() - known):
        if name.upper() not in _FOREIGN.split() and (meant := nearest_name(name, known - {"PYTHON"})):
            raise Refusal(f"{name} is set, but no script reads it; did you mean {meant}? Give that, or unset {name}")


NOTES = (
    "Flags after the script's name are the trainer's and win over all; `python -m llava.train.train --help` has their\n"
    "meanings. Variables win over the preset, the preset over the recipe. Relative paths start at {root}."
)


def help_text(environment: Mapping[str, str], flags: Mapping[str, str]) -> str:
    """The help of the stage that STAGE names, with the values of its `flags`; without STAGE, of all stages."""
    stage = environment.get("STAGE", "")
    called = f"bash scripts/{stage or '{pretrain,finetune}'}.sh" if IS_CHECKOUT else f"llava-recipe {stage}"
    lines = [f"usage: [NAME=value ...] {called} [--flag value ...]", "", STAGES.get(stage, "")]
    lines += [NOTES.format(root=Path.cwd()), ""]
    names = script_flags(stage or "finetune")
    for group, variables in VARIABLES.items():
        lines.append(f"{group}:")
        for name, meaning in variables.items():
            if stage == "pretrain" and meaning.startswith("stage 2:"):
                continue
            value = flags.get(names.get(name, ""), "") or environment.get(name, "")
            shown = "" if "(default" in meaning or not stage else f" [{value or 'empty'}]"
            lines.append(f"  {name:<26} {meaning}{shown}")
        lines.append("")
    lines.append("flags of the trainer as variables:")
    values = {name: f" [{flags.get(flag) or 'empty'}]" if stage else "" for name, flag in names.items()}
    lines += [f"  {name:<26} --{names[name]}{value}" for name, value in values.items()]
    return "\n".join(lines)


# --- the trainer's flags: each name once, the last one given wins ---


@dataclass(frozen=True)
class Flags:
    """The flags by name, in their order, each as the words that give it: `("--seed", "42")` or `("--seed=42",)`."""

    given: dict[str, tuple[str, ...]]

    def value(self, name: str) -> str:
        """The flag's value; `True` without one, as the trainer's parser takes a switch; empty for one not given."""
        flag, *rest = self.given.get(name, ("",))
        return flag and (flag.partition("=")[2] or " ".join(rest) or "True")

    def values(self) -> dict[str, str]:
        """The value of each flag by name."""
        return {name: self.value(name) for name in self.given}

    def before(self, **values: str) -> "Flags":
        """These flags with `values` in front, each of which counts only where no flag of its name is given."""
        new = {name: (f"--{name}", value) for name, value in values.items() if name not in self.given}
        return Flags(new | self.given)

    def with_value(self, name: str, value: str) -> "Flags":
        """The same flags with another value for one of them, in its place."""
        return Flags(self.given | {name: (f"--{name}", value)}) if name in self.given else self.before(**{name: value})

    def words(self) -> list[str]:
        """The flags as the words of a command line."""
        return [word for words in self.given.values() for word in words]


def parse_flags(words: Sequence[str]) -> Flags:
    """The flags in `words`; an empty value leaves the flag out. Raises Refusal for a word that belongs to no flag."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        flag, _, value = word.partition("=")
        if word.startswith("--") and flag != "--":
            name = flag.removeprefix("--").replace("-", "_")
            if name in REPEATED:
                given.setdefault(name, [f"--{name}"]).append(value)
            else:
                given.pop(name, None)  # so that it stands where it was given last
                given[name] = [word]
        elif name:
            given[name].append(word)
        else:
            raise Refusal(f"{word}: expected a flag of the trainer, as in --seed 1")
    for name in REPEATED & given.keys():
        given[name] = list(filter(None, given[name]))
    empty = {
        name for name, (flag, *rest) in given.items() if rest == [""] or (not rest and flag.find("=") == len(flag) - 1)
    }
    empty |= {name for name in REPEATED & given.keys() if len(given[name]) == 1}
    return Flags({name: tuple(words) for name, words in given.items() if name not in empty})


if __name__ == "__main__":
    try:
        refuse_misspelt(os.environ)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(2)
