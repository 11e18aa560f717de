"""The shell scripts: what a dry run resolves, what is refused, and that set-up does its work once; installs nothing."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHELL_FILES = sorted(p for p in (ROOT / "scripts").rglob("*") if p.suffix in {".sh", ".sbatch"})
PRESETS = sorted(p.stem for p in (ROOT / "scripts/presets").glob("*.sh"))
NORMS = ["none", "layernorm", "gwc_layernorm", "rmsnorm", "gwc_rmsnorm"]


def bash(*command: str, cwd: Path = ROOT, path: str = os.environ["PATH"], **env: object) -> subprocess.CompletedProcess:
    """Run a script with only the given variables, so that the caller's environment cannot change the outcome."""
    variables = {"PATH": path, "HOME": os.environ.get("HOME", "/"), **{k: str(v) for k, v in env.items()}}
    return subprocess.run(["bash", *command], cwd=cwd, env=variables, capture_output=True, text=True, timeout=60)


class DryRun:
    """A dry run's three sections: `configuration` by row name, `command` as words, `inputs` as lines."""

    def __init__(self, stage: str, *args: str, script: str = "", **env: object):
        run = bash(script or f"scripts/{stage}.sh", *args, DRY_RUN=1, **env)
        assert run.returncode == 0, run.stderr
        configuration, rest = run.stdout.removeprefix("configuration\n").split("command\n", 1)
        command, self.inputs = rest.split("\ninputs\n", 1)
        self.configuration = {line[2:22].strip(): line[23:] for line in configuration.splitlines()}
        self.command = shlex.split(command.replace("\\\n", " "))

    def flag(self, name: str) -> str | None:
        return self.command[self.command.index(name) + 1] if name in self.command else None

    @property
    def launcher(self) -> str:
        """The command up to the trainer's entry."""
        return " ".join(self.command[: self.command.index("llava/train/train_mem.py")])


@pytest.fixture
def tool_path(tmp_path):
    """A function that puts a stand-in program in front of PATH and returns that PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def add(name: str, body: str) -> str:
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    return add


@pytest.mark.parametrize("script", SHELL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_script_is_valid_bash(script):
    check = bash("-n", str(script))
    assert check.returncode == 0, check.stderr


# --- batch arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "num_gpus", "nnodes", "accumulation", "global_batch"),
    [
        ("pretrain", 1, 1, 128, 256),
        ("pretrain", 8, 1, 16, 256),
        ("pretrain", 8, 4, 4, 256),
        ("pretrain", 8, 8, 2, 256),  # the paper: 64 GPUs, 2 x 2
        ("finetune", 1, 1, 128, 128),
        ("finetune", 4, 2, 16, 128),
        ("finetune", 8, 4, 4, 128),  # the paper: 32 GPUs, 1 x 4
    ],
)
def test_global_batch_of_the_recipe_is_kept_for_any_number_of_gpus(stage, num_gpus, nnodes, accumulation, global_batch):
    run = DryRun(stage, NUM_GPUS=num_gpus, NNODES=nnodes)
    per_device = int(run.flag("--per_device_train_batch_size"))
    assert run.flag("--gradient_accumulation_steps") == str(accumulation)
    assert per_device * accumulation * num_gpus * nnodes == global_batch
    assert run.configuration["global batch"].startswith(f"{global_batch} = ")
    assert run.configuration["devices"].startswith(f"{num_gpus * nnodes} = ")


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_device_count_that_does_not_divide_the_batch_is_refused_with_the_choices(stage):
    run = bash(f"scripts/{stage}.sh", DRY_RUN=1, NUM_GPUS=7)
    assert run.returncode == 2
    for name in ("GLOBAL_BATCH", "PER_DEVICE_BATCH", "NNODES", "NUM_GPUS"):
        assert name in run.stderr
    assert "1 2 4 8 16 32 64 128" in run.stderr


def test_per_device_batch_choices_are_those_that_divide_the_devices_share():
    run = bash("scripts/pretrain.sh", DRY_RUN=1, NUM_GPUS=8, PER_DEVICE_BATCH=3)
    assert run.returncode == 2
    assert "PER_DEVICE_BATCH    1 2 4 8 16 32\n" in run.stderr


@pytest.mark.parametrize("name", ["NUM_GPUS", "NNODES", "PER_DEVICE_BATCH", "GLOBAL_BATCH", "CPU_RANKS"])
@pytest.mark.parametrize("value", ["two", "-1", "08", "1.5"])
def test_count_that_is_no_whole_number_is_refused_by_name(name, value):
    run = bash("scripts/pretrain.sh", DRY_RUN=1, **{"NUM_GPUS": 8, name: value})
    assert run.returncode == 2
    assert f"{name}={value}" in run.stderr


# --- presets and arms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_and_arm_resolves_in_both_stages(stage, norm, preset):
    run = DryRun(stage, PRESET=preset, NORM=norm, NUM_GPUS=8)
    assert run.flag("--mm_projector_norm") == norm
    assert run.flag("--output_dir") == f"checkpoints/{preset}-{norm}-{stage}"
    assert run.flag("--seed") == "42"
    if stage == "finetune":
        assert run.flag("--pretrain_mm_mlp_adapter") == f"checkpoints/{preset}-{norm}-pretrain/mm_projector.bin"
        assert run.flag("--mm_tunable_parts") == "mm_vision_tower,mm_mlp_adapter,mm_language_model"
        assert "--tune_mm_mlp_adapter" not in run.command
    else:
        assert run.flag("--tune_mm_mlp_adapter") == "True"
        assert "--pretrain_mm_mlp_adapter" not in run.command
    assert not [word for word in run.command if run.command.count(word) > 1 and word.startswith("--")]


@pytest.mark.parametrize(
    ("preset", "model", "version"),
    [
        ("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "llava_llama_3"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "qwen_1_5"),
    ],
)
def test_recipe_presets_carry_the_papers_hyper_parameters(preset, model, version):
    stage1, stage2 = (DryRun(stage, PRESET=preset, NUM_GPUS=8) for stage in ("pretrain", "finetune"))
    shared = {
        "--model_name_or_path": model,
        "--vision_tower": "google/siglip-so400m-patch14-384",
        "--image_aspect_ratio": "square",
        "--lr_scheduler_type": "cosine",
        "--warmup_ratio": "0.03",
        "--weight_decay": "0.0",
        "--num_train_epochs": "1",
        "--max_steps": "-1",
        "--label_masking": "upstream",
        "--bf16": "True",
        "--tf32": "True",
        "--deepspeed": "deepspeed_configs/zero3.json",
    }
    for name, value in shared.items():
        assert (stage1.flag(name), stage2.flag(name)) == (value, value), name
    assert (stage1.flag("--version"), stage2.flag("--version")) == ("plain", version)
    assert (stage1.flag("--per_device_train_batch_size"), stage2.flag("--per_device_train_batch_size")) == ("2", "1")
    assert (stage1.flag("--learning_rate"), stage2.flag("--learning_rate")) == ("1e-3", "1e-5")
    assert stage2.flag("--mm_vision_tower_lr") == "2e-6"
    assert Path(stage1.flag("--data_path")).name == "blip_laion_cc_sbu_558k.json"


@pytest.mark.parametrize("preset", PRESETS)
def test_lora_has_llavas_recipe_for_every_preset(preset):
    run = DryRun("finetune", LORA=1, PRESET=preset, NUM_GPUS=8)
    expected = {"--lora_enable": "True", "--lora_r": "128", "--lora_alpha": "256", "--learning_rate": "2e-4"}
    expected |= {"--mm_projector_lr": "2e-5", "--mm_tunable_parts": "mm_mlp_adapter,mm_language_model"}
    assert {name: run.flag(name) for name in expected} == expected
    assert run.flag("--mm_vision_tower_lr") is None
    assert run.flag("--output_dir") == f"checkpoints/{preset}-gwc_layernorm-finetune-lora"
    assert run.configuration["LoRA rank"] == "128"
    assert DryRun("finetune", LORA=1, LORA_R=8, LEARNING_RATE="1e-4", NUM_GPUS=8).flag("--lora_r") == "8"
    plain = DryRun("finetune", LORA=0, PRESET=preset, NUM_GPUS=8)
    assert "--lora_enable" not in plain.command and "LoRA rank" not in plain.configuration


def test_demo_preset_is_one_plain_process_on_a_cpu():
    stage1, stage2 = (DryRun(stage, PRESET="demo", NUM_GPUS=0) for stage in ("pretrain", "finetune"))
    for run in (stage1, stage2):
        assert run.launcher.endswith(".venv/bin/python")
        assert run.flag("--per_device_train_batch_size") == "8"
        assert run.flag("--deepspeed") is None
        assert run.flag("--tf32") == "False"
        assert run.flag("--version") == "chatml"
    assert (stage1.flag("--max_steps"), stage2.flag("--max_steps")) == ("80", "80")
    assert [stage2.flag(f"--{name}") for name in ("learning_rate", "mm_projector_lr", "mm_vision_tower_lr")] == [
        "1e-4",
        "1e-3",
        "1e-4",
    ]


def test_environment_wins_over_preset_and_extra_flags_come_last():
    run = DryRun("pretrain", "--max_grad_norm", "0.5", "--learning_rate=5e-4", PRESET="demo", NUM_GPUS=0, MAX_STEPS=7)
    assert run.flag("--max_steps") == "7"
    assert run.command[-3:] == ["--max_grad_norm", "0.5", "--learning_rate=5e-4"]
    assert run.configuration["learning rate"] == "5e-4"
    assert run.configuration["length"] == "7 steps"


def test_norm_init_is_passed_on_only_when_set():
    assert DryRun("pretrain", NUM_GPUS=8).flag("--mm_projector_norm_init") is None
    assert DryRun("pretrain", NUM_GPUS=8, NORM_INIT="default").flag("--mm_projector_norm_init") == "default"


@pytest.mark.parametrize(
    ("variable", "allowed"),
    [("PRESET", PRESETS), ("NORM", NORMS), ("LAUNCHER", ["auto", "python", "deepspeed", "torchrun"])],
)
def test_unknown_name_is_refused_with_the_allowed_ones(variable, allowed):
    run = bash("scripts/pretrain.sh", DRY_RUN=1, NUM_GPUS=8, **{variable: "nonsense"})
    assert run.returncode == 2
    assert f"{variable}=nonsense" in run.stderr
    assert all(name in run.stderr for name in allowed)


@pytest.mark.parametrize("extra", [["--output_dir", "x"], ["--per_device_train_batch_size=4"], ["--deepspeed", "y"]])
def test_flag_that_the_script_computes_with_is_refused_as_an_extra_flag(extra):
    run = bash("scripts/pretrain.sh", *extra, DRY_RUN=1, NUM_GPUS=8)
    assert run.returncode == 2
    assert extra[0].split("=")[0] in run.stderr


# --- launch kinds -----------------------------------------------------------------------------------------------------


def test_one_node_runs_under_deepspeed():
    launcher = DryRun("pretrain", NUM_GPUS=8, MASTER_PORT=29600).launcher
    assert launcher == ".venv/bin/python -m deepspeed.launcher.runner --num_gpus 8 --master_port 29600"


def test_one_gpu_without_deepspeed_is_one_process_that_sees_one_gpu():
    run = DryRun("pretrain", NUM_GPUS=1, DEEPSPEED_CONFIG="", CUDA_VISIBLE_DEVICES="3,5")
    assert run.launcher == "env CUDA_VISIBLE_DEVICES=3 .venv/bin/python"


def test_cuda_visible_devices_is_kept_by_torchrun_since_deepspeed_would_ignore_it():
    run = DryRun("pretrain", CUDA_VISIBLE_DEVICES="2,3")
    assert run.launcher == ".venv/bin/python -m torch.distributed.run --standalone --nproc_per_node 2"
    refused = bash("scripts/pretrain.sh", DRY_RUN=1, CUDA_VISIBLE_DEVICES="2,3", LAUNCHER="deepspeed")
    assert refused.returncode == 2
    assert "CUDA_VISIBLE_DEVICES=2,3" in refused.stderr


def test_hostfile_gives_nodes_and_gpus(tmp_path):
    hostfile = tmp_path / "host file"
    hostfile.write_text("# comment slots=99\nnode-1 slots=8\nnode-2 slots=8\n")
    run = DryRun("finetune", HOSTFILE=hostfile)
    assert run.configuration["devices"] == "16 = 2 nodes x 8 GPUs"
    launcher = run.launcher.removeprefix(".venv/bin/python -m deepspeed.launcher.runner ")
    assert launcher == f"--hostfile {hostfile} --num_nodes 2 --num_gpus 8"


def test_hostfile_with_unequal_slots_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("node-1 slots=8\nnode-2 slots=4\n")
    run = bash("scripts/finetune.sh", DRY_RUN=1, HOSTFILE=tmp_path / "hosts")
    assert run.returncode == 2
    assert "NUM_GPUS" in run.stderr


def test_torchrun_rendezvous_over_nodes():
    rendezvous = {"MASTER_ADDR": "node-1", "MASTER_PORT": 29611, "NODE_RANK": 2}
    run = DryRun("finetune", NUM_GPUS=8, NNODES=4, **rendezvous)
    assert run.launcher == (
        ".venv/bin/python -m torch.distributed.run --nnodes 4 --nproc_per_node 8 --node_rank 2"
        " --master_addr node-1 --master_port 29611"
    )
    assert "MISSING  MASTER_ADDR" not in run.inputs


def test_rendezvous_without_address_is_listed_as_missing():
    run = DryRun("finetune", NUM_GPUS=8, NNODES=4)
    assert "MISSING  MASTER_ADDR" in run.inputs
    assert "MISSING  NODE_RANK" in run.inputs


def test_cpu_ranks_run_under_deepspeed_and_share_the_cores(tool_path):
    path = tool_path("nproc", "echo 8")
    env = {"PRESET": "demo", "NUM_GPUS": 0, "CPU_RANKS": 2, "MASTER_PORT": 29612, "path": path}
    run = DryRun("pretrain", DEEPSPEED_CONFIG="deepspeed_configs/zero3.json", **env)
    assert run.launcher == (
        "env CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=4"
        " .venv/bin/python -m deepspeed.launcher.runner --num_accelerators 2 --master_port 29612"
    )
    assert run.flag("--per_device_train_batch_size") == "4"
    refused = bash("scripts/pretrain.sh", DRY_RUN=1, **env)  # without DeepSpeed each rank would train alone
    assert refused.returncode == 2
    assert "DEEPSPEED_CONFIG" in refused.stderr


def test_gpus_are_counted_when_num_gpus_is_not_set(tool_path):
    path = tool_path("nvidia-smi", 'printf "GPU 0: a\\nGPU 1: b\\nGPU 2: c\\nGPU 3: d\\n"')
    assert DryRun("pretrain", path=path).configuration["devices"] == "4 = 1 node x 4 GPUs"
    hidden = DryRun("pretrain", path=path, CUDA_VISIBLE_DEVICES="")
    assert hidden.configuration["devices"] == "1 = 1 node x 1 CPU rank"


def test_own_environment_is_used_and_told_where_the_package_lies(tool_path):
    path = tool_path("mypython", "exit 0")
    run = DryRun("pretrain", PRESET="demo", NUM_GPUS=0, LLAVA_PYTHON="mypython", path=path)
    assert run.launcher.split()[-1] == path.split(":")[0] + "/mypython"
    assert f"PYTHONPATH={ROOT}" in run.launcher


@pytest.mark.parametrize(("stage", "nodes", "global_batch"), [("pretrain", 8, 256), ("finetune", 4, 128)])
def test_slurm_job_starts_one_torchrun_per_node(stage, nodes, global_batch, tool_path, tmp_path):
    tool_path("scontrol", "printf 'node-7\\nnode-8\\n'")
    path = tool_path("srun", f'printf "%s\\n" "$@" >"{tmp_path}/srun"; shift 3; DRY_RUN=1 SLURM_NODEID=1 exec "$@"')
    slurm = {
        "SLURM_SUBMIT_DIR": ROOT,
        "SLURM_JOB_ID": 123456,
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": 8,
        "SLURM_CPUS_PER_TASK": 32,
        "LLAVA_PYTHON": "bash",
    }
    copy = tmp_path / "slurm_script"  # SLURM runs a copy from its own folder
    shutil.copy(ROOT / f"scripts/slurm/{stage}.sbatch", copy)
    run = bash(str(copy), "--max_grad_norm", "0.5", cwd=tmp_path, path=path, **slurm)
    assert run.returncode == 0, run.stderr
    command = run.stdout.replace("\\\n", " ")
    assert f"-m torch.distributed.run --nnodes {nodes} --nproc_per_node 8 --node_rank 1" in command
    assert "--master_addr node-7 --master_port 23456" in command
    assert f"  global batch         {global_batch} = " in run.stdout
    assert "--cpus-per-task=32" in (tmp_path / "srun").read_text()
    assert (tmp_path / "srun").read_text().endswith(f"scripts/{stage}.sh\n--max_grad_norm\n0.5\n")
    assert "MISSING  NODE_RANK" not in run.stdout

    header = (ROOT / f"scripts/slurm/{stage}.sbatch").read_text()
    assert f"#SBATCH --nodes={nodes}\n" in header
    assert "#SBATCH --ntasks-per-node=1\n" in header


@pytest.mark.parametrize(("code", "requeued"), [(85, True), (1, False)])
def test_slurm_job_is_requeued_when_a_signal_ended_it_after_a_save(code, requeued, tool_path, tmp_path):
    record = f'case $1 in show) echo node-7 ;; *) echo "$@" >"{tmp_path}/scontrol" ;; esac'
    tool_path("scontrol", record)
    path = tool_path("srun", f"exit {code}")
    slurm = {"SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 123456, "SLURM_JOB_NODELIST": "node-7"}
    slurm |= {"SLURM_JOB_NUM_NODES": 1, "SLURM_GPUS_ON_NODE": 8, "LLAVA_PYTHON": "bash"}
    run = bash("scripts/slurm/pretrain.sbatch", path=path, **slurm)
    assert run.returncode == code
    record = tmp_path / "scontrol"
    assert record.exists() == requeued
    assert not requeued or record.read_text() == "requeue 123456\n"
    for stage in ("pretrain", "finetune"):
        header = (ROOT / f"scripts/slurm/{stage}.sbatch").read_text()
        assert "#SBATCH --signal=USR1@" in header and "#SBATCH --requeue\n" in header


def test_restarts_over_nodes_meet_again_without_node_numbers():
    run = DryRun("pretrain", NUM_GPUS=8, NNODES=2, MAX_RESTARTS=3, MASTER_ADDR="node-1", MASTER_PORT=1234, RDZV_ID="a")
    assert "--max_restarts 3 --rdzv_backend c10d --rdzv_id a --rdzv_endpoint node-1:1234" in run.launcher
    assert "--node_rank" not in run.launcher and "NODE_RANK" not in run.inputs
    assert "is_host" not in run.launcher
    for rank, host in ((0, 1), (1, 0)):
        assert f"--rdzv_conf is_host={host}" in DryRun("pretrain", NNODES=2, MAX_RESTARTS=3, NODE_RANK=rank).launcher


def test_restarts_choose_torchrun_with_a_store_of_each_start_and_refuse_other_launchers():
    run = DryRun("pretrain", NUM_GPUS=8, MAX_RESTARTS=1)
    assert run.launcher.startswith("env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ") and "--max_restarts 1" in run.launcher
    refused = bash("scripts/pretrain.sh", DRY_RUN=1, NUM_GPUS=8, MAX_RESTARTS=1, LAUNCHER="deepspeed")
    assert refused.returncode == 2
    assert "MAX_RESTARTS=1 needs LAUNCHER=torchrun" in refused.stderr


STAND_IN_TRAINER = """#!/usr/bin/env bash
# In place of Python: a rank that saves on SIGUSR1, as the trainer does, or fails with reports of two ranks.
if [ "$BEHAVIOUR" = fails ]; then
  mkdir -p "$ERRORS"
  echo "rank 0: connection closed by peer" >"$ERRORS/00000005-3-1-100-rank0.txt"
  echo "rank 1: the real error" >"$ERRORS/00000005-2-0-200-rank1.txt"
  exit 3
fi
exec "$REAL_PYTHON" -c '
import os, pathlib, signal, time
folder = pathlib.Path(os.environ["LLAVA_RUN_DIR"])
signal.signal(signal.SIGUSR1, lambda *_: (folder / "requeue").touch() or os._exit(0))
(folder / "0.pid").write_text(str(os.getpid()))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(20)
'
"""


@pytest.fixture
def stand_in_run(tmp_path):
    """A function that runs stage 1 with a stand-in for Python, which behaves as it is told."""
    python = tmp_path / "python"
    python.write_text(STAND_IN_TRAINER)
    python.chmod(0o755)
    inputs = dict.fromkeys(("MODEL_PATH", "VISION_TOWER", "DATA_PATH", "IMAGE_FOLDER"), tmp_path)
    output = tmp_path / "out"
    env = {"PRESET": "demo", "NUM_GPUS": 0, "LLAVA_PYTHON": python, "OUTPUT_DIR": output, "ERRORS": output / "errors"}
    env["REAL_PYTHON"] = sys.executable
    return lambda behaviour: bash("scripts/pretrain.sh", BEHAVIOUR=behaviour, **env, **inputs)


def test_a_signal_to_the_script_reaches_the_ranks_and_asks_for_another_start(stand_in_run):
    run = stand_in_run("saves")
    assert run.returncode == 85, run.stderr
    assert "signal received: the ranks save after the current step and stop" in run.stderr


def test_the_error_of_the_rank_that_failed_first_is_shown_last(stand_in_run):
    run = stand_in_run("fails")
    assert run.returncode == 3
    assert run.stderr.endswith("rank 1: the real error\n")


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_paths_with_spaces_survive_as_one_word():
    data, images, output = "/some where/data $HOME.json", "/some where/it's images", "check points/a b"
    run = DryRun("pretrain", NUM_GPUS=8, DATA_PATH=data, IMAGE_FOLDER=images, OUTPUT_DIR=output)
    assert (run.flag("--data_path"), run.flag("--image_folder"), run.flag("--output_dir")) == (data, images, output)
    assert run.flag("--run_name") == "a b"


def test_hub_names_are_told_from_local_paths_and_missing_files_say_what_to_do(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    run = DryRun("finetune", NUM_GPUS=8, DATA_PATH=tmp_path / "data.json", VISION_TOWER="./no/such/tower")
    assert "hub      model          meta-llama/Llama-3.2-3B-Instruct" in run.inputs
    assert "MISSING  vision tower   ./no/such/tower" in run.inputs
    assert f"found    data           {tmp_path}/data.json" in run.inputs
    assert "found    deepspeed      deepspeed_configs/zero3.json" in run.inputs
    adapter = run.inputs[run.inputs.index("MISSING  adapter") :].splitlines()[1]
    assert "scripts/pretrain.sh" in adapter and "PRETRAIN_ADAPTER" in adapter


def test_folder_of_this_repository_is_never_taken_for_a_hub_name():
    assert (
        "MISSING  model          llava/no-such-folder"
        in DryRun("pretrain", NUM_GPUS=8, MODEL_PATH="llava/no-such-folder").inputs
    )


def test_real_run_refuses_missing_inputs_with_the_same_list_and_makes_nothing(tmp_path):
    output = tmp_path / "out"
    run = bash("scripts/pretrain.sh", NUM_GPUS=8, DATA_PATH="/no/such/file.json", OUTPUT_DIR=output)
    assert run.returncode == 2
    assert "MISSING  data           /no/such/file.json" in run.stdout
    assert "MISSING" in run.stderr
    assert not output.exists()


def test_real_run_starts_what_it_shows_and_records_it(tmp_path, tool_path):
    path = tool_path("mypython", f'printf "%s\\n" "$@" >"{tmp_path}/started"')
    env = {"PRESET": "demo", "NUM_GPUS": 0, "LLAVA_PYTHON": "mypython", "OUTPUT_DIR": tmp_path / "out put"}
    for name in ("MODEL_PATH", "VISION_TOWER", "DATA_PATH", "IMAGE_FOLDER"):
        env[name] = tmp_path
    shown = DryRun("pretrain", path=path, **env).command
    assert not (tmp_path / "started").exists() and not (tmp_path / "out put").exists()
    run = bash("scripts/pretrain.sh", path=path, **env)
    assert run.returncode == 0, run.stderr
    arguments = shown[shown.index("llava/train/train_mem.py") :]
    assert (tmp_path / "started").read_text().splitlines() == arguments
    (tmp_path / "started").unlink()
    assert bash(str(tmp_path / "out put" / "command.sh"), cwd=tmp_path).returncode == 0
    assert (tmp_path / "started").read_text().splitlines() == arguments


# --- DeepSpeed configurations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage"), [("zero2", 2), ("zero3", 3), ("zero3_offload", 3), ("zero3_hpz", 3), ("zeropp", 3)]
)
def test_deepspeed_config_leaves_to_the_trainer_what_the_trainer_knows(name, stage):
    config = json.loads((ROOT / f"deepspeed_configs/{name}.json").read_text())
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ):
        assert config[key] == "auto", key
    assert config["bf16"]["enabled"] == config["fp16"]["enabled"] == "auto"
    zero = config["zero_optimization"]
    assert zero["stage"] == stage
    assert zero["reduce_bucket_size"] == "auto"
    if stage == 3:
        assert zero["stage3_gather_16bit_weights_on_model_save"] is True
        assert zero["stage3_prefetch_bucket_size"] == zero["stage3_param_persistence_threshold"] == "auto"
    devices = [zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")]
    assert devices == (["cpu", "cpu"] if name.endswith("offload") else [None, None])


# --- set-up -----------------------------------------------------------------------------------------------------------

STAND_IN_PYTHON = """#!/bin/sh
# As much of an interpreter as setup.sh uses; `-m pip install` only writes down its arguments.
case "$*" in
  *version_info[*) echo "${STAND_IN_VERSION:-3.11.7}" ;;
  *"sys.exit("*) case "${STAND_IN_VERSION:-3.11.7}" in 3.9.*) exit 1 ;; esac ;;
  "-m venv --clear .venv")
    echo venv >>"$CALLS"
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "version = 3.11.7" >.venv/pyvenv.cfg ;;
  "-m pip install"*)
    sleep "${STAND_IN_SLEEP:-0}"; echo "$*" >>"$CALLS"; echo pip was here; exit "${STAND_IN_STATUS:-0}" ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """A function that runs setup.sh in a small tree with a stand-in interpreter; `.calls()` lists what it installed."""
    tree = tmp_path / "a tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/help.sh"):
        shutil.copy(ROOT / name, tree / name)
    python = tmp_path / "python3"
    python.write_text(STAND_IN_PYTHON)
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def run(**env: object) -> subprocess.CompletedProcess:
        path = f"{tmp_path}:{os.environ['PATH']}"
        return bash("scripts/setup.sh", cwd=tree, path=path, CALLS=calls, **env)

    run.tree = tree
    run.calls = lambda: calls.read_text().splitlines() if calls.exists() else []
    return run


def test_setup_installs_torch_first_and_once(setup):
    first = setup()
    assert first.returncode == 0, first.stderr
    venv, torch, package = setup.calls()
    assert venv == "venv"
    assert torch.endswith(" torch") and "-c constraints.txt" in torch
    assert package.endswith("-e .[dev,playground,train]") and "-c constraints.txt" in package
    assert "up to date" in setup().stdout
    assert len(setup.calls()) == 3


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_setup_runs_again_when_the_requirements_change_and_keeps_the_environment(setup, name):
    setup()
    (setup.tree / name).write_text((setup.tree / name).read_text() + "\n# changed\n")
    setup()
    assert len(setup.calls()) == 5 and setup.calls().count("venv") == 1


def test_setup_extras_add_up_and_unknown_ones_are_refused(setup):
    setup(EXTRAS="dev")
    setup(EXTRAS="eval")
    package, harnesses = setup.calls()[-2:]
    assert package.endswith("-e .[dev,eval]")
    assert harnesses.endswith("--no-deps lmms-eval lm-eval") and "-c constraints.txt" in harnesses
    assert "up to date" in setup(EXTRAS="dev").stdout
    refused = setup(EXTRAS="dev,nonsense")
    assert refused.returncode != 0
    assert "nonsense" in refused.stderr and "playground" in refused.stderr


def test_setup_that_failed_shows_pips_words_and_starts_again(setup):
    failed = setup(STAND_IN_STATUS=1)
    assert failed.returncode != 0
    assert "pip was here" in failed.stderr
    assert setup().returncode == 0
    assert "up to date" in setup().stdout


def test_setup_calls_at_the_same_time_install_once(setup):
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: setup(STAND_IN_SLEEP=0.3), range(3)))
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(setup.calls()) == 3


def test_setup_refuses_an_old_python_and_names_the_variable(setup):
    run = setup(STAND_IN_VERSION="3.9.18")
    assert run.returncode != 0
    assert "PYTHON" in run.stderr and "3.9.18" in run.stderr and "3.10" in run.stderr
    assert setup.calls() == []


def test_setup_leaves_the_callers_own_environment_alone(setup):
    run = setup(LLAVA_PYTHON="/opt/python")
    assert run.returncode == 0
    assert setup.calls() == [] and not (setup.tree / ".venv").exists()
