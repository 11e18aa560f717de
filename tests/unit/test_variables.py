"""A variable that a script does not read, though it must be meant for it, ends the script; other programs' never do."""

import os
import re

import pytest
from paths import ROOT
from shell import bash

from llava.launch.settings import NAMES, Refusal
from llava.launch.variable_check import GENERIC, OTHER_NAMES, OWN, check_variables, meant_by, read_by
from llava.model.multimodal_projector.norm import NORM_FIELDS
from llava.train.sections import FLAGS

SCRIPTS = ["pretrain", "finetune", *OWN]
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
    SIZE STRIP BUILD TARGET ARCH SM_NUM_GPUS AZUREML_RUN_ID NVIDIA_VISIBLE_DEVICES DATA_DIRECTORY LOG_LEVEL
"""
FOREIGN = frozenset(_FOREIGN.split())


@pytest.mark.parametrize(
    ("script", "wrong", "meant"),
    [
        ("pretrain", "NORMS", "NORM"),
        ("pretrain", "norm", "NORM"),
        ("pretrain", "NROM", "NORM"),
        ("pretrain", "SEED_", "SEED"),
        ("pretrain", "LR", "LEARNING_RATE"),
        ("finetune", "lr", "LEARNING_RATE"),
        ("finetune", "BATCH_SIZE", "GLOBAL_BATCH"),
        ("finetune", "PER_DEVICE_TRAIN_BATCH_SIZE", "PER_DEVICE_BATCH"),
        ("finetune", "MM_PROJECTOR_NORM", "NORM"),
        ("finetune", "WEIGHT_DECAY", "--weight_decay"),
        ("pretrain", "EPOCH", "EPOCHS"),
        ("pretrain", "MAX_STEP", "MAX_STEPS"),
        ("pretrain", "MAXSTEPS", "MAX_STEPS"),
        ("pretrain", "MAX_SETPS", "MAX_STEPS"),
        ("pretrain", "PRESTE", "PRESET"),
        ("pretrain", "NUM_GPU", "NUM_GPUS"),
        ("pretrain", "LEARNIGN_RATE", "LEARNING_RATE"),
        ("pretrain", "LEARING_RATES", "LEARNING_RATE"),
        ("pretrain", "GLOBAL_BACTH", "GLOBAL_BATCH"),
        ("slurm_script", "NORMS", "NORM"),  # sbatch runs a copy of this name
        ("quickstart", "norms", "NORM"),
        ("quickstart", "OUTPUT_ROOTS", "OUTPUT_ROOT"),
        ("quickstart", "LR", "LEARNING_RATE"),
        ("quickstart", "WEIGHT_DECAY", "bash scripts/pretrain.sh --weight_decay"),
        ("compare", "SEEDS", "--seeds"),
        ("compare", "BATCH_SIZE", "GLOBAL_BATCH"),
        ("evaluate", "LIMIT", "--limit"),
        ("analyze", "SAMPLE", "SAMPLES"),
        ("analyze", "OUTDIR", None),
        ("upstream_baseline", "MAX_STEP", "MAX_STEPS"),
    ],
)
def test_a_misspelt_variable_and_another_trainers_name_are_refused(script, wrong, meant):
    if meant is None:
        assert check_variables(script, {wrong: "1"}) == []
        return
    with pytest.raises(Refusal, match=f"^{wrong} is set, but {script}.sh does not read it; .*{meant}.*unset"):
        check_variables(script, {"PATH": "/bin", wrong: "1"})


@pytest.mark.parametrize("name", ["DRY_RUN", "CHECK"])
@pytest.mark.parametrize("script", ["quickstart", "compare"])
def test_scripts_of_several_runs_refuse_a_dry_run_before_python_loads(script, name):
    run = bash(f"scripts/{script}.sh", LLAVA_PYTHON="false", **{name: 1})
    assert run.returncode == 2 and run.stderr.startswith(f"error: {name}=1: only a single stage can be ")


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_variable_of_a_login_shell_a_scheduler_or_a_launcher_is_named(script):
    assert check_variables(script, dict.fromkeys(FOREIGN, "1")) == []
    with_own = {name: "1" for name in os.environ if name not in GENERIC}
    assert check_variables(script, with_own) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_variables_of_a_script_and_of_those_it_calls_are_never_named(script):
    known = NAMES.union(*OWN.values()) - OTHER_NAMES.keys()
    refused = {name: right for name in known if (right := meant_by(script, name)) and name not in GENERIC}
    assert refused.items() <= {("TASKS", "--tasks")}  # a variable of evaluate.sh, and a flag of compare.sh


def test_a_name_that_other_programs_export_is_only_a_warning():
    (line,) = check_variables("pretrain", {"DATA": "/scratch"})
    assert line.startswith("WARNING: DATA is set, but pretrain.sh does not read it; did you mean DATA_PATH?")
    assert check_variables("pretrain", {"DATA": "/scratch", "DATA_PATH": "mine.json"}) == []
    assert check_variables("analyze", {"DATA": "mine.json"}) == []


def test_every_other_name_leads_to_a_variable_or_a_flag():
    rights = {*OTHER_NAMES.values(), *GENERIC.values()}
    assert {right for right in rights if not right.startswith("--")} <= NAMES
    assert not NAMES & (OTHER_NAMES | GENERIC).keys() and not OTHER_NAMES.keys() & GENERIC.keys()
    assert not FOREIGN & (OTHER_NAMES | GENERIC).keys()


def test_a_variable_named_like_a_flag_of_this_tree_is_never_ignored():
    names = {name.upper() for name in FLAGS.keys() | set(NORM_FIELDS)} - NAMES
    assert {name for name in names if not meant_by("pretrain", name)} == {"VERSION", "CACHE_DIR"}  # other programs' too


@pytest.mark.parametrize("script", OWN)
def test_the_variables_that_a_script_expands_are_those_of_its_row(script):
    text = (ROOT / f"scripts/{script}.sh").read_text()
    taken = set(re.findall(r"\$\{([A-Z][A-Z0-9_]+)[:=+-]", text))
    local = set(re.findall(r"(?m)^(?:readonly )?([A-Z][A-Z0-9_]+)=", text))
    assert taken - local - {"BASH_SOURCE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} <= read_by(script)


@pytest.mark.parametrize("script", ["pretrain", "finetune", "quickstart", "compare", "evaluate", "analyze"])
def test_every_script_stops_with_status_2_before_it_prepares_anything(script):
    wrong = {"evaluate": "LIMIT", "analyze": "OUTPUT_DIRS"}.get(script, "NORMS")
    run = bash(f"scripts/{script}.sh", LLAVA_PYTHON="false", **{wrong: "none"})
    assert run.returncode == 2 and run.stdout == "", run.stdout
    assert run.stderr.startswith(f"error: {wrong} is set, but {script}.sh does not read it; did you mean "), run.stderr


def test_the_warning_of_a_dry_run_follows_its_table():
    run = bash("scripts/pretrain.sh", DRY_RUN=1, NUM_GPUS=1, MODEL="other", LLAVA_PYTHON="false")
    assert "\nWARNING: MODEL is set, but pretrain.sh does not read it; did you mean MODEL_PATH?" in run.stderr
    assert "configuration" in run.stdout and "other" not in run.stdout
