"""The variables that the training scripts read from the environment: meanings, checks of their values, and the help."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from llava.utils.paths import IS_CHECKOUT, ROOT

# Meaning of every variable, in groups. Defaults are the scripts', or stand here where the launcher finds them.
VARIABLES: dict[str, dict[str, str]] = {
    "what is trained": {
        "PRESET": "a file of scripts/presets: model, template and sizes that go with it",
        "DEMO_DATA": "with PRESET=demo: scenes, stamps or probes, prepared by python -m playground (default: scenes)",
        "PLUGINS": "Python files with your own parts, joined by commas or spaces (default: none)",
        "PROJECTOR": "type of the projector, as --mm_projector_type has it (default: mlp2x_gelu)",
        "NORM": "the arm: norm layer after the projector",
        "NORM_INIT": "initial L2 norm of visual tokens: text_norm, default or a number (default: the trainer's)",
        "NORM_LEARNABLE": "False keeps that norm's gain as it starts (default: True)",
        "MODEL_PATH": "language model: folder or hub name",
        "VISION_TOWER": "vision encoder: folder or hub name",
        "PROMPT_VERSION": "conversation template",
        "PRETRAIN_ADAPTER": "stage 2: mm_projector.bin of stage 1; empty where MODEL_PATH brings its projector",
        "TUNABLE_PARTS": "stage 2: what is trained, joined by commas",
        "LORA": "1: stage 2 by LoRA, LLaVA's recipe; the vision tower stays frozen (default: off)",
        "LORA_MODULES": "what gets adapters, with LORA=1: decoder, tower, or both with a comma (default: decoder)",
        "LORA_R": "rank of the adapters, with LORA=1",
        "LORA_ALPHA": "LoRA's alpha, the adapters' scale times their rank, with LORA=1",
    },
    "data": {
        "DATA_PATH": "records: files, folders, patterns, hf:OWNER/NAME[SPLIT], joined by commas; or a mixture, .yaml",
        "IMAGE_FOLDER": "folder or zip file of the pictures; empty where the rows hold them",
        "IMAGE_ASPECT_RATIO": "square, pad, anyres or anyres_max_N (default: square)",
        "IMAGE_GRID_PINPOINTS": "with anyres: grids in crops, '(1x1),...,(3x3)', or pixels, '[[384,768],[768,384]]'",
        "MM_PATCH_MERGE_TYPE": "order of the crops' tokens: flat, spatial, spatial_unpad (default: flat)",
        "EVAL_DATA_PATH": "held-out records, whose loss is measured during training (default: none)",
        "EVAL_IMAGE_FOLDER": "folder or zip file of their pictures (default: IMAGE_FOLDER)",
        "EVAL_TASKS": "benchmarks evaluated during training, NAME or NAME:N, such as mmstar:500,pope (default: none)",
        "EVAL_TASKS_DIR": "folder of their data sets, <org>/<name> (default: the hub and its cache)",
        "EVAL_STEPS": "steps between two evaluations, with EVAL_DATA_PATH or EVAL_TASKS (default: 500)",
        "EVAL_GENERATE": "held-out questions asked at every evaluation (default: 0)",
        "EVAL_ON_START": "True: before the first step too",
        "LABEL_MASKING": "which tokens are supervised: assistant or upstream",
        "MODEL_MAX_LENGTH": "maximum sample length in tokens, visual tokens included; longer samples are cut",
        "GROUP_BY_MODALITY_LENGTH": "stage 2: batches of one modality and similar length",
        "LENGTH_GROUP_WINDOW": "stage 2: batches whose samples are paired by length; auto: 1, on many devices 16",
        "NUM_WORKERS": "processes that prepare samples, per rank",
    },
    "optimisation": {
        "GLOBAL_BATCH": "samples of an optimizer step over all devices; accumulation follows",
        "PER_DEVICE_BATCH": "samples of a device's micro-batch, or auto: its whole share at once",
        "MAX_TOKENS_PER_MICRO_BATCH": "maximum tokens per micro-batch; a step takes the fewest (empty: by samples); "
        "auto: what fits, with DEEPSPEED_CONFIG=auto",
        "EPOCHS": "passes over the data, where MAX_STEPS is -1",
        "MAX_STEPS": "optimizer steps; -1: by EPOCHS",
        "LEARNING_RATE": "learning rate of parts without their own",
        "PROJECTOR_LR": "stage 2: learning rate of projector and norm; empty: LEARNING_RATE",
        "VISION_TOWER_LR": "stage 2: learning rate of the vision tower; empty: LEARNING_RATE",
        "WARMUP_RATIO": "fraction of the steps over which learning rates rise (default: 0.03)",
        "OPTIM": "optimizer, as the Hugging Face Trainer names it (default: the trainer's)",
        "SEED": "seed of the data order and of the initial projector",
    },
    "devices and precision": {
        "NUM_GPUS": "GPUs per node; 0: train on the CPU (default: all visible)",
        "CPU_RANKS": "processes per node that share the cores where there is no GPU (default: 1)",
        "NNODES": "nodes (default: 1, or HOSTFILE's)",
        "HOSTFILE": "lines 'host slots=8', for several nodes by deepspeed",
        "NODE_RANK": "number of this node, from 0, for several nodes by torchrun (default: SLURM's)",
        "MASTER_ADDR": "address of the first node, the same on every node",
        "MASTER_PORT": "port where the ranks meet (default: a free one, 29500 over several nodes)",
        "RDZV_ID": "name of the job where nodes find each other again, with MAX_RESTARTS (default: RUN_NAME)",
        "LAUNCHER": "auto, python, deepspeed or torchrun (default: auto)",
        "MAX_RESTARTS": "how many times torchrun restarts all ranks after a failure (default: 0)",
        "DEEPSPEED_CONFIG": "a file of deepspeed_configs; auto: what fits first of ZeRO-2, ZeRO-3 and offload; empty: "
        "without DeepSpeed",
        "BF16": "compute in bf16 (default: True on GPUs and on CPUs with instructions for it)",
        "TF32": "fp32 products in TF32 (default: True on GPUs)",
        "ATTN_IMPLEMENTATION": "attention of the language model (default: the fastest installed)",
        "LIGER": "the language model on Liger's fused kernels: auto (where they run), True or False",
        "ACTIVATION_CHECKPOINTING": "recompute activations: auto, True, False or a number of layers",
        "GRADIENT_CHECKPOINTING": "LLaVA's name for ACTIVATION_CHECKPOINTING (default: not set)",
    },
    "output": {
        "OUTPUT_DIR": "where everything goes; an interrupted run resumes from its newest checkpoint there",
        "RUN_NAME": "name in the logs (default: that of OUTPUT_DIR)",
        "REPORT_TO": "tensorboard, wandb, none, ...; auto: tensorboard, unless your own environment lacks it",
        "SAVE_STRATEGY": "when checkpoints are written: steps, epoch or no",
        "SAVE_STEPS": "steps between two checkpoints",
        "SAVE_TOTAL_LIMIT": "how many checkpoints are kept",
    },
    "the script itself": {
        "DRY_RUN": "1: show configuration, command and inputs; json: the same as JSON (default: off)",
        "CHECK": "1: only check the nodes, their links and paths (default: off)",
        "LLAVA_PYTHON": "an interpreter of your own environment: nothing is installed (default: .venv)",
        "PYTHON": "interpreter that .venv is made from (default: python3)",
        "EXTRAS": "extras of pyproject.toml to install (default: train,playground,dev, and liger with CUDA's PyTorch)",
    },
}
NAMES = frozenset(name for group in VARIABLES.values() for name in group)


class Refusal(Exception):
    """A setting that cannot be used; the message names it, what was expected, what was found, and what to do."""


def is_on(value: str) -> bool:
    """Whether the value of a switch like DRY_RUN turns it on."""
    return value not in ("", "0", "no", "false", "False")


def whole_number(name: str, value: str, smallest: int) -> int:
    """`value` as a whole number of at least `smallest`.

    Raises:
        Refusal: it is not a whole number, or too small; the message calls it `name`.
    """
    plain = value.isascii() and value.isdecimal() and (value == "0" or not value.startswith("0")) and len(value) < 10
    if not plain or int(value) < smallest:
        raise Refusal(f"{name}={value} is not a whole number of at least {smallest}")
    return int(value)


def one_of(name: str, value: str, allowed: Iterable[str]) -> str:
    """`value`, which must be one of `allowed`.

    Raises:
        Refusal: it is not; the message calls it `name` and lists what is allowed.
    """
    allowed = list(allowed)
    if value not in allowed:
        raise Refusal(f"{name}={value} is not one of: {' '.join(allowed)}")
    return value


NOTES = (
    "Flags after the script's name are the trainer's and win over all; `python -m llava.train.train --help` lists\n"
    "them. Variables win over the preset, the preset over the recipe. Relative paths start at {root}."
)


def help_text(environment: Mapping[str, str], flags: Mapping[str, str]) -> str:
    """The help of the stage that STAGE names, with the values of its `flags`; without STAGE, of all stages."""
    stage = environment.get("STAGE", "")
    called = f"bash scripts/{stage or '{pretrain,finetune}'}.sh" if IS_CHECKOUT else f"llava-recipe {stage}"
    usage = f"usage: [NAME=value ...] {called} [--flag value ...]"
    if stage:
        usage += "\n\n" + header(stage)
    here = script_flags(stage)
    lines = [usage, "", NOTES.format(root=Path.cwd()), ""]
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
