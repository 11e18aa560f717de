"""A variable whose name is nearly one of ours ends the script; other programs' variables never do."""

import os
import re

import pytest
from paths import ROOT
from shell import bash

from llava.launch.settings import NAMES, OTHERS, Refusal, refuse_misspelt

# What login shells, containers, schedulers, launchers and build systems export.
_FOREIGN = """
    CC CFLAGS COLUMNS CONDA_PREFIX CUDA_HOME CUDA_VISIBLE_DEVICES CXX DEBUG DISPLAY EDITOR ENV HF_HOME HF_TOKEN HOME
    HOST HOSTNAME JOB_ID LANG LC_ALL LD_PRELOAD LINES LOCAL_RANK LOGNAME MAIL MANPATH MASTER_HOST MODULEPATH NCCL_DEBUG
    NODE_ENV NODE_NAME OLDPWD OMP_NUM_THREADS PAGER PATH PBS_NODEFILE PORT PS1 PWD PYTHONPATH RANK SHELL SHLVL
    SLURM_NNODES SLURM_GPUS_ON_NODE SPEED TERM TMPDIR TZ USER WANDB_PROJECT WORLD_SIZE FORM LOCA RESET NUM_CPUS VERSION
    CACHE_DIR JOB_NAME NHOSTS QUEUE http_proxy out name system PROJECT SCRATCH WORK STORE TASK_ID ARGS DATE LAST PREFIX
    SIZE BUILD TARGET ARCH SM_NUM_GPUS DATA_DIRECTORY LOG_LEVEL
"""
_OF_OTHER_PROGRAMS = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH", "TORCH_EXTENSIONS_DIR"}


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("NORMS", "NORM"),
        ("norm", "NORM"),
        ("LEARING_RATES", "LEARNING_RATE"),
        ("SED", "SEED"),
        ("EPOC", "EPOCHS"),
        ("BF", "BF16"),
        ("LORA_RANKS", "LORA_R"),
        ("FINETUNE_IMAGE", "FINETUNE_IMAGES"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_name_that_it_must_mean(wrong, meant):
    with pytest.raises(
        Refusal, match=f"^{wrong} is set, but no script reads it; did you mean {meant}. .*unset {wrong}$"
    ):
        refuse_misspelt({"PATH": "/bin", wrong: "1"})


def test_no_variable_of_a_login_shell_a_scheduler_or_a_launcher_is_named():
    refuse_misspelt(os.environ | dict.fromkeys(_FOREIGN.split(), "1"))


def test_every_variable_that_a_script_expands_is_known():
    for script in (ROOT / "scripts").glob("*.sh"):
        taken = set(re.findall(r"\$\{([A-Z][A-Z0-9_]+)[:=+-]", script.read_text()))
        refuse_misspelt(dict.fromkeys(taken, "1"))
        assert taken - _OF_OTHER_PROGRAMS <= NAMES.union(OTHERS.split()), script.name


def test_a_script_stops_with_status_2_before_it_prepares_anything():
    run = bash("scripts/quickstart.sh", LLAVA_PYTHON="false", NORMS="none")
    assert run.returncode == 2 and run.stdout == "", run.stdout
    assert run.stderr.startswith("error: NORMS is set, but no script reads it; did you mean NORM?"), run.stderr
