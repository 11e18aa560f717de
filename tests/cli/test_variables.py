"""A variable whose name is nearly one of ours ends the script; other programs' variables never do."""

import os
import re

import pytest
from paths import ROOT
from shell import bash

from llava.launch.settings import NAMES, OTHERS, Refusal, refuse_misspelt

# What login shells, containers, schedulers, launchers and build systems export.
_FOREIGN = """
    AWS_REGION CC CFLAGS COLUMNS CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_SHLVL CUDA_HOME CUDA_VISIBLE_DEVICES CXX
    DBUS_SESSION_BUS_ADDRESS DEBUG DISPLAY EDITOR ENV GOMP_SPINCOUNT GROUP_RANK HF_HOME HF_HUB_OFFLINE HF_TOKEN
    HISTSIZE HOME HOST HOSTNAME INPUT_DIR JOB_ID KMP_BLOCKTIME LANG LC_ALL LD_LIBRARY_PATH LD_PRELOAD LINES
    LOCAL_RANK LOGNAME LOCAL_WORLD_SIZE LS_COLORS MAIL MAKEFLAGS MANPATH MASTER_HOST MKL_NUM_THREADS MODULEPATH
    NCCL_DEBUG NODE_ENV NODE_NAME NODE_PATH NCCL_SOCKET_IFNAME OLDPWD OMP_NUM_THREADS PAGER PATH PBS_JOBID
    PBS_NODEFILE PE_HOSTFILE PORT PS1 PWD PYTHONPATH PYTHONHASHSEED PYTHONUNBUFFERED RANK ROLE_RANK SHELL SHLVL
    SLURM_JOB_ID SLURM_NNODES SLURM_NODEID SLURM_NTASKS SLURM_GPUS_ON_NODE SLURM_JOB_NODELIST SPEED
    SSH_AUTH_SOCK SSH_TTY TERM TMPDIR TOKENIZERS_PARALLELISM TORCH_HOME TORCHELASTIC_RUN_ID TZ USER USERNAME
    VIRTUAL_ENV WANDB_API_KEY WANDB_PROJECT WANDB_NAME WORLD_SIZE XDG_RUNTIME_DIR FORM LOCA RESET NUM_CPUS NCPUS
    VERSION CACHE_DIR PYTHON3 python3 RUNNER_NAME RUNNER_OS JOB_NAME NHOSTS NSLOTS QUEUE RESTARTED LSB_HOSTS
    LSB_DJOB_HOSTFILE OMPI_MCA_btl PET_NNODES PET_NODE_RANK http_proxy no_proxy debian_chroot out outputs name
    system shell builder buildInputs phases pythonLocation Python_ROOT_DIR KUBERNETES_PORT
    KUBERNETES_SERVICE_HOST MASTER_SERVICE_HOST EPOCHSECONDS SOURCE_DATE_EPOCH PROJECT SCRATCH WORK STORE
    TASK_ID ACCELERATE_MIXED_PRECISION ACCELERATE_GRADIENT_ACCUMULATION_STEPS DS_ACCELERATOR PIP_NO_CACHE_DIR
    ARGS DATE LAST PREFIX
    SIZE STRIP BUILD TARGET ARCH SM_NUM_GPUS AZUREML_RUN_ID NVIDIA_VISIBLE_DEVICES DATA_DIRECTORY LOG_LEVEL
"""
FOREIGN = frozenset(_FOREIGN.split())


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("NORMS", "NORM"),
        ("norm", "NORM"),
        ("NROM", "NORM"),
        ("SEED_", "SEED"),
        ("EPOCH", "EPOCHS"),
        ("MAXSTEPS", "MAX_STEPS"),
        ("MAX_SETPS", "MAX_STEPS"),
        ("PRESTE", "PRESET"),
        ("NUM_GPU", "NUM_GPUS"),
        ("LEARNIGN_RATE", "LEARNING_RATE"),
        ("LEARING_RATES", "LEARNING_RATE"),
        ("GLOBAL_BACTH", "GLOBAL_BATCH"),
        ("OUTPUT_ROOTS", "OUTPUT_ROOT"),
        ("EVALUATE_FLAG", "EVALUATE_FLAGS"),
        ("SED", "SEED"),
        ("SEEED", "SEED"),
        ("NORN", "NORM"),
        ("EPOC", "EPOCHS"),
        ("BF", "BF16"),
        ("LORA_RANKS", "LORA_R"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_name_that_it_must_mean(wrong, meant):
    with pytest.raises(
        Refusal, match=f"^{wrong} is set, but no script reads it; did you mean {meant}. .*unset {wrong}$"
    ):
        refuse_misspelt({"PATH": "/bin", wrong: "1"})


def test_no_variable_of_a_login_shell_a_scheduler_or_a_launcher_is_named():
    refuse_misspelt(dict.fromkeys(FOREIGN, "1"))
    refuse_misspelt(os.environ)


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.stem)
def test_no_variable_that_a_script_expands_is_refused(script):
    taken = set(re.findall(r"\$\{([A-Z][A-Z0-9_]+)[:=+-]", script.read_text()))
    refuse_misspelt(dict.fromkeys(taken, "1"))
    if script.stem in ("pretrain", "finetune", "lib"):
        assert taken - {"BASH_SOURCE", "TORCH_EXTENSIONS_DIR", "PYTHONPATH"} <= NAMES.union(OTHERS.split())


@pytest.mark.parametrize("script", ["pretrain", "finetune", "quickstart", "compare", "evaluate", "analyze"])
def test_every_script_stops_with_status_2_before_it_prepares_anything(script):
    run = bash(f"scripts/{script}.sh", LLAVA_PYTHON="false", NORMS="none")
    assert run.returncode == 2 and run.stdout == "", run.stdout
    assert run.stderr.startswith("error: NORMS is set, but no script reads it; did you mean NORM?"), run.stderr
