"""Finds variables that a script does not read, though their names say that something it reads is meant.

`python -m llava.launch.variable_check SCRIPT` checks the environment for scripts/SCRIPT.sh: exit status 2 if a variable
is misspelt or named as other trainers name it. What a shell may export for other programs is named in a warning.
"""

import os
import re
import sys
from collections.abc import Mapping
from functools import cache

from llava.launch.settings import NAMES, Refusal, script_flags
from llava.train.sections import FLAGS
from llava.utils.names import nearest_name
from llava.utils.paths import ROOT

_EVERYWHERE = {"EXTRAS", "LLAVA_PYTHON", "PYTHON"}
# What the scripts read besides the variables of training.
OWN: dict[str, set[str]] = {
    "quickstart": {"ARMS", "OUTPUT_ROOT"},
    "compare": {"EVALUATE_FLAGS", "ANALYSIS", "DATA", "SAMPLES", "UPSTREAM_SETTINGS"},
    "reproduce": {"DATA", "EVALUATE_FLAGS", "SAMPLES"},
    "evaluate": {"TASKS"},
    "analyze": {"OUTPUT_DIR", "DATA", "SAMPLES", "COMMANDS"},
    "upstream_baseline": {
        "ARMS", "BF16", "FINETUNE_DATA", "FINETUNE_IMAGES", "GRADIENT_CHECKPOINTING", "MAX_STEPS", "MODEL_MAX_LENGTH",
        "MODEL_PATH", "OUTPUT_DIR", "PER_DEVICE_BATCH", "PREPARE_ONLY", "PRETRAIN_DATA", "PRETRAIN_IMAGES", "SEED",
        "TOLERANCE", "UPSTREAM_VENV", "VISION_TOWER",
    },
    "test": {"COVERAGE", "FAST", "FIX", "WORKERS"},
    "test_all": {"OUTPUT_DIR", "TRANSFORMERS_TESTS"},
    "lint": {"FIX"},
}  # fmt: skip
# What other trainers and their scripts call ours. No shell exports them for other reasons.
OTHER_NAMES = {
    "LR": "LEARNING_RATE", "BASE_LR": "LEARNING_RATE", "MAX_LR": "LEARNING_RATE", "LEARN_RATE": "LEARNING_RATE",
    "MM_LR": "PROJECTOR_LR", "VISION_LR": "VISION_TOWER_LR", "TOWER_LR": "VISION_TOWER_LR",
    "BATCH": "GLOBAL_BATCH", "BATCH_SIZE": "GLOBAL_BATCH", "BSZ": "GLOBAL_BATCH", "TRAIN_BATCH_SIZE": "GLOBAL_BATCH",
    "GLOBAL_BATCH_SIZE": "GLOBAL_BATCH", "TOTAL_BATCH_SIZE": "GLOBAL_BATCH", "MICRO_BATCH_SIZE": "PER_DEVICE_BATCH",
    "MICRO_BATCH": "PER_DEVICE_BATCH", "PER_DEVICE_BATCH_SIZE": "PER_DEVICE_BATCH",
    "PER_GPU_BATCH": "PER_DEVICE_BATCH", "PER_GPU_BATCH_SIZE": "PER_DEVICE_BATCH",
    "GRAD_ACCUM": "GLOBAL_BATCH", "GRADIENT_ACCUMULATION": "GLOBAL_BATCH", "ACCUMULATION_STEPS": "GLOBAL_BATCH",
    "STEPS": "MAX_STEPS", "NUM_STEPS": "MAX_STEPS", "TRAIN_STEPS": "MAX_STEPS", "MAX_ITERS": "MAX_STEPS",
    "ITERS": "MAX_STEPS", "NUM_EPOCHS": "EPOCHS", "N_EPOCHS": "EPOCHS", "MAX_EPOCHS": "EPOCHS",
    "RANDOM_SEED": "SEED", "TRAIN_SEED": "SEED", "WARMUP": "WARMUP_RATIO", "OPTIMIZER": "OPTIM",
    "MAX_LEN": "MODEL_MAX_LENGTH", "MAX_LENGTH": "MODEL_MAX_LENGTH", "MAX_SEQ_LEN": "MODEL_MAX_LENGTH",
    "MAX_SEQ_LENGTH": "MODEL_MAX_LENGTH", "SEQ_LEN": "MODEL_MAX_LENGTH", "MODEL_MAX_LEN": "MODEL_MAX_LENGTH",
    "NORM_TYPE": "NORM", "MM_NORM": "NORM", "PROJECTOR_NORM": "NORM", "ARMS": "NORM", "ARM": "NORM",
    "USE_LORA": "LORA", "LORA_RANK": "LORA_R", "LORA_DIM": "LORA_R",
    "LLM_VERSION": "MODEL_PATH", "BASE_MODEL": "MODEL_PATH", "LLM": "MODEL_PATH", "LLM_PATH": "MODEL_PATH",
    "VISION_MODEL_VERSION": "VISION_TOWER", "VISION_MODEL": "VISION_TOWER", "VISION_ENCODER": "VISION_TOWER",
    "CONV_VERSION": "PROMPT_VERSION", "CONV_MODE": "PROMPT_VERSION", "TEMPLATE": "PROMPT_VERSION",
    "ADAPTER": "PRETRAIN_ADAPTER", "PRETRAIN_MLP": "PRETRAIN_ADAPTER", "PROJECTOR_PATH": "PRETRAIN_ADAPTER",
    "TRAIN_DATA": "DATA_PATH", "DATA_FILE": "DATA_PATH", "DATA_JSON": "DATA_PATH", "EVAL_DATA": "EVAL_DATA_PATH",
    "IMAGE_DIR": "IMAGE_FOLDER", "IMAGE_PATH": "IMAGE_FOLDER", "IMAGE_ROOT": "IMAGE_FOLDER",
    "EVAL_IMAGES": "EVAL_IMAGE_FOLDER", "OUT_DIR": "OUTPUT_DIR", "OUTPUT_PATH": "OUTPUT_DIR",
    "OUTPUT_ROOT": "OUTPUT_DIR", "SAVE_DIR": "OUTPUT_DIR", "SAVE_EVERY": "SAVE_STEPS", "EXP_NAME": "RUN_NAME",
    "BASE_RUN_NAME": "RUN_NAME", "DS_CONFIG": "DEEPSPEED_CONFIG", "ATTENTION": "ATTN_IMPLEMENTATION",
    "NUM_GPUS_PER_NODE": "NUM_GPUS", "GPUS_PER_NODE": "NUM_GPUS", "ADDR": "MASTER_ADDR",
    "GRAD_CLIP": "--max_grad_norm", "MAX_GRAD_NORM": "--max_grad_norm", "LR_SCHEDULER": "--lr_scheduler_type",
    "WARMUP_STEPS": "--warmup_steps", "FP16": "--fp16", "WEIGHT_DECAY": "--weight_decay",
    "LOGGING_STEPS": "--logging_steps", "GRADIENT_ACCUMULATION_STEPS": "--gradient_accumulation_steps",
    "MM_PROJECTOR_NORM_EPS": "--mm_projector_norm_eps", "MM_PROJECTOR_NORM_MIN_GAIN": "--mm_projector_norm_min_gain",
}  # fmt: skip
# What a shell or a cluster may export for other programs: a warning, since no login shell may be refused.
GENERIC = {
    "DATA": "DATA_PATH", "DATASET": "DATA_PATH", "DATA_DIR": "DATA_PATH", "DATA_ROOT": "DATA_PATH",
    "IMAGES": "IMAGE_FOLDER", "MODEL": "MODEL_PATH", "MODEL_NAME": "MODEL_PATH", "MODEL_ID": "MODEL_PATH",
    "MODEL_DIR": "MODEL_PATH", "CHECKPOINT": "MODEL_PATH", "OUTPUT": "OUTPUT_DIR", "GPUS": "NUM_GPUS",
    "NGPUS": "NUM_GPUS", "N_GPUS": "NUM_GPUS", "NGPU": "NUM_GPUS", "NPROC_PER_NODE": "NUM_GPUS", "NODES": "NNODES",
    "NUM_NODES": "NNODES", "WORKERS": "NUM_WORKERS",
}  # fmt: skip
OF_RUNS = ("quickstart", "compare", "reproduce")
"""The scripts that train several runs."""
OF_ONE_STAGE = {
    "DRY_RUN": "only a single stage can be shown: bash scripts/pretrain.sh",
    "CHECK": "only a single stage can be checked: bash scripts/pretrain.sh",
}
"""Variables that several runs refuse: a stage that trains nothing would count as finished."""
_FOREIGN = {"CACHE_DIR", "NUM_CPUS", "PYTHON3", "RESET", "VERSION"}  # near a name or flag of ours, and other programs'


def check_variables(script: str, environment: Mapping[str, str]) -> list[str]:
    """Lines about variables that `script` does not read, and that may be meant for other programs.

    Raises:
        Refusal: the script has another name for what a variable can only mean, or a variable is for a single stage.
    """
    for name, reason in OF_ONE_STAGE.items():
        if script in OF_RUNS and environment.get(name):
            raise Refusal(f"{name}={environment[name]}: {reason}; leave the variable out")
    meant = {name: right for name in environment if (right := meant_by(script, name))}
    lines = {
        name: f"{name} is set, but {script}.sh does not read it; did you mean {right}? Give that, or unset {name}"
        for name, right in meant.items()
    }
    if refused := [line for name, line in lines.items() if name.upper() not in GENERIC]:
        raise Refusal("\n       ".join(refused))
    return [f"WARNING: {line}" for name, line in lines.items() if meant[name] not in environment]


def meant_by(script: str, name: str) -> str:
    """What `script` reads instead of the variable `name`; empty where the variable is read, or is another program's."""
    reads, plain = read_by(script), name.upper()
    if name in reads:
        return ""
    if name not in NAMES and (flag := f"--{plain.lower().replace('_', '-')}") in header_flags(script):
        return flag
    right = OTHER_NAMES.get(plain) or GENERIC.get(plain) or trainer_names().get(plain, "")
    if right.startswith("--") and trains(script):
        return f"bash scripts/pretrain.sh {right}" if script in OWN else right
    if right in reads:
        return right
    if plain in _FOREIGN or name in NAMES.union(*OWN.values()):  # the latter are of a script that calls this one
        return ""
    return nearest_name(plain, reads - {"PYTHON"}) or ""


def trains(script: str) -> bool:
    """Whether a script reads the variables of training; any name without a row of `OWN` stands for those that do."""
    return script not in OWN or script in OF_RUNS


@cache
def read_by(script: str) -> frozenset[str]:
    """The variables that a script reads; what a comparison decides itself, llava.compare.stage refuses by name."""
    return frozenset(_EVERYWHERE | OWN.get(script, set()) | (NAMES if trains(script) else set()))


@cache
def header_flags(script: str) -> frozenset[str]:
    """The flags that the comment at a script's head names; none of pretrain.sh and finetune.sh."""
    if script not in OWN:
        return frozenset()
    head = re.match(r"(?:#.*\n)+", (ROOT / f"scripts/{script}.sh").read_text())
    return frozenset(re.findall(r"--[a-z][a-z-]*", head[0] if head else ""))


@cache
def trainer_names() -> dict[str, str]:
    """The trainer's flags in capitals, each with its variable, or with the flag itself where it has none."""
    of_flag = {flag: name for name, flag in script_flags("finetune").items()}
    flags = {flag.upper(): of_flag.get(flag, f"--{flag}") for flag in FLAGS.keys() | of_flag.keys()}
    return {name: right for name, right in flags.items() if name not in _FOREIGN}


def main() -> int:
    """Checks the environment for the script that the command line names; returns the exit status."""
    try:
        for line in check_variables(sys.argv[1], os.environ):
            print(f"\n{line}\n", file=sys.stderr)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
