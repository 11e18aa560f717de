"""The shell scripts as people call them: what a dry run shows, what is refused, signals, and that set-up works once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from paths import ROOT
from run_inputs import inputs_in
from shell import bash, only

from benchmarks.common import is_running
from llava.launch.plan import as_json, resolve

STAGES = ("pretrain", "finetune")
PRESETS = sorted(p.stem for p in (ROOT / "scripts/presets").glob("*.sh"))


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


# --- recipes ----------------------------------------------------------------------------------------------------------


FOR_ONE_CARD = ("nano", "0.5b", "1.5b", "3b-qwen")
LORA = {"lora_enable": "True", "lora_r": "128", "lora_alpha": "256", "learning_rate": "2e-4", "mm_projector_lr": "2e-5"}


LLAVA_1_5_AND_PAPER = {
    "num_train_epochs": "1",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": "0.03",
    "weight_decay": "0.0",
    "bf16": "True",
    "tf32": "True",
    "label_masking": "upstream",
}


@pytest.fixture
def resolved(tmp_path):
    """A function like `resolved_run`: the script's Python only writes down its call, which this process resolves."""
    python = tmp_path / "recorder"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || { env -0; printf \'%s\\0\' --- "$@"; }\n')
    python.chmod(0o755)

    def run(stage: str, *flags: str, **variables: object) -> dict:
        done = bash(f"scripts/{stage}.sh", *flags, PYTHON=python, **variables)
        settings, called, words = done.stdout.partition("---\0")
        assert called, done.stderr
        environment = dict(line.split("=", 1) for line in settings.split("\0") if line)
        _, _, entry, *words = words.removesuffix("\0").split("\0")
        return json.loads(as_json(resolve(environment, entry, words)))

    return run


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves_on_one_card_or_more_in_both_stages_and_by_lora(preset, count, resolved, tmp_path):
    """What the trainer then chooses for `auto` is tested in tests/train/test_accounting.py."""
    for stage, lora in (("pretrain", 0), ("finetune", 0), ("finetune", 1)):
        run = resolved(stage, NUM_GPUS=count, PRESET=preset, LORA=lora, HF_HOME=tmp_path, NORM="gwc_rmsnorm")
        flags, by_memory = run["flags"], preset in FOR_ONE_CARD
        assert run["devices"] == {"nodes": 1, "ranks": count, "on_gpu": True}
        chosen = [flags.get(name) == "auto" for name in ("deepspeed", "max_tokens_per_micro_batch")]
        assert chosen == [by_memory, by_memory]
        batch = {"pretrain": 16, "finetune": 8} if preset == "demo" else {"pretrain": 256, "finetune": 128}
        sizes = run["batch"]
        assert sizes["global"] == batch[stage] == count * sizes["per_device"] * sizes["accumulation"]
        models = [each for each in run["inputs"] if each["what"] in ("model", "vision tower", "deepspeed")]
        gated = [each["value"] for each in models if "gated" in each["hint"]]
        assert gated == ["meta-llama/Llama-3.2-3B-Instruct"] * (preset == "llama-3.2-3b")
        assert preset == "demo" or {each["state"] for each in models} <= {"hub", "found"}
        name = f"checkpoints/{preset}-gwc_rmsnorm"
        assert flags["output_dir"] == f"{name}-{stage}" + "-lora" * lora
        assert (flags["mm_projector_norm"], flags["seed"]) == ("gwc_rmsnorm", "42")
        adapter = f"{name}-pretrain/mm_projector.bin" if stage == "finetune" else None
        assert flags.get("pretrain_mm_mlp_adapter") == adapter
        assert flags.get("tune_mm_mlp_adapter") == ("True" if stage == "pretrain" else None)
        if stage == "finetune":
            tower = "" if lora or preset == "llava-1.5-7b" else "mm_vision_tower,"
            assert flags["mm_tunable_parts"] == f"{tower}mm_mlp_adapter,mm_language_model"
        if lora:
            assert {name: flags.get(name) for name in LORA} == LORA and "mm_vision_tower_lr" not in flags
        else:
            assert not {"lora_enable", "lora_r", "lora_alpha"} & flags.keys()
        assert not [word for word in run["command"] if run["command"].count(word) > 1 and word.startswith("--")]


@pytest.mark.parametrize(
    ("preset", "model", "version"),
    [
        ("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "llava_llama_3"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "qwen_1_5"),
    ],
)
def test_recipe_presets_carry_the_papers_hyper_parameters(preset, model, version, resolved):
    stage1, stage2 = (resolved(stage, PRESET=preset, NUM_GPUS=8)["flags"] for stage in STAGES)
    shared = LLAVA_1_5_AND_PAPER | {"model_name_or_path": model, "image_aspect_ratio": "square", "max_steps": "-1"}
    shared["vision_tower"] = "google/siglip-so400m-patch14-384"
    for name, value in shared.items():
        assert (stage1[name], stage2[name]) == (value, value), name
    # The projector's gradients are not worth gathering the whole model for every micro-batch.
    assert stage1["deepspeed"] == "deepspeed_configs/zero2.json"
    stage_2_zero = {"llama-3.2-3b": "zero2", "qwen2.5-7b": "zero3"}[preset]  # 3B has room for whole weights
    assert stage2["deepspeed"] == f"deepspeed_configs/{stage_2_zero}.json"
    assert (stage1["version"], stage2["version"]) == ("plain", version)
    assert (stage1["per_device_train_batch_size"], stage2["per_device_train_batch_size"]) == ("2", "1")
    assert (stage1["learning_rate"], stage2["learning_rate"]) == ("1e-3", "1e-5")
    assert stage2["mm_vision_tower_lr"] == "2e-6"
    assert Path(stage1["data_path"]).name == "blip_laion_cc_sbu_558k.json"


LLAVA_1_5 = LLAVA_1_5_AND_PAPER | {
    "model_name_or_path": "lmsys/vicuna-7b-v1.5",
    "vision_tower": "openai/clip-vit-large-patch14-336",
    "mm_vision_select_layer": "-2",
    "mm_projector_type": "mlp2x_gelu",
    "mm_projector_norm": "none",
    "model_max_length": "2048",
}


def test_llava_1_5_has_the_numbers_of_llavas_scripts(resolved):
    """Those of haotian-liu/LLaVA c121f04, scripts/v1_5: pretrain.sh, finetune.sh and finetune_lora.sh, for 8 cards."""
    preset = {"PRESET": "llava-1.5-7b", "NORM": "none", "NUM_GPUS": 8}
    first, second = (resolved(stage, **preset) for stage in STAGES)
    lora = resolved("finetune", LORA=1, **preset)
    stage_1 = {"version": "plain", "learning_rate": "1e-3", "deepspeed": "deepspeed_configs/zero2.json"}
    stage_1 |= {"tune_mm_mlp_adapter": "True", "image_aspect_ratio": "square"}  # pretrain.sh does not pad
    stage_2 = {"version": "v1", "learning_rate": "2e-5", "deepspeed": "deepspeed_configs/zero3.json"}
    stage_2 |= {"image_aspect_ratio": "pad", "group_by_modality_length": "True", "length_group_window": "1"}
    stage_2 |= {"mm_tunable_parts": "mm_mlp_adapter,mm_language_model"}
    by_lora = {"learning_rate": "2e-4", "mm_projector_lr": "2e-5", "lora_r": "128", "lora_alpha": "256"}
    for run, own in ((first, stage_1), (second, stage_2), (lora, stage_2 | by_lora)):
        expected = LLAVA_1_5 | own
        assert {name: run["flags"].get(name) for name in expected} == expected
        assert "mm_vision_tower_lr" not in run["flags"]
    assert "mm_projector_lr" not in second["flags"] and "lora_enable" not in second["flags"]
    assert first["batch"] == {"per_device": 32, "accumulation": 1, "global": 256}
    assert second["batch"] == lora["batch"] == {"per_device": 16, "accumulation": 1, "global": 128}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("words", [[], ["--num_train_epochs", "3"], ["--num-train-epochs=3"]])
def test_what_is_asked_of_a_demo_is_not_lost_behind_its_own_length(resolved, stage, words):
    flags = resolved(stage, *words, PRESET="demo", SAVE_STEPS=20, **({} if words else {"EPOCHS": 3}))["flags"]
    assert (flags["num_train_epochs"], flags["max_steps"]) == ("3", "-1")
    assert (flags["save_strategy"], flags["save_steps"]) == ("steps", "20")


def test_folder_adapter_launcher_and_batch_follow_their_flags(resolved):
    flags = ["--mm-projector-norm", "rmsnorm", "--deepspeed=deepspeed_configs/zero2.json"]
    run = resolved("finetune", *flags, "--per_device_train_batch_size", "2", PRESET="demo", NUM_GPUS=2)
    assert run["flags"]["output_dir"] == "checkpoints/demo-rmsnorm-finetune"
    assert run["flags"]["run_name"] == "demo-rmsnorm-finetune"
    assert run["flags"]["pretrain_mm_mlp_adapter"] == "checkpoints/demo-rmsnorm-pretrain/mm_projector.bin"
    assert run["launcher"] == "deepspeed"
    assert run["batch"] == {"per_device": 2, "accumulation": 2, "global": 8}
    assert "image_folder" not in resolved("pretrain", PRESET="0.5b", NUM_GPUS=1, IMAGE_FOLDER="")["flags"]
    assert resolved("finetune", DEEPSPEED_CONFIG="auto", NUM_GPUS=8)["flags"]["deepspeed"] == "auto"
    without = resolved("finetune", "--deepspeed", "", "--output_dir", "a/b", NUM_GPUS=1)
    assert without["launcher"] == "python" and "deepspeed" not in without["flags"]
    assert (without["flags"]["output_dir"], without["flags"]["run_name"]) == ("a/b", "b")
    own = resolved("finetune", "--warmup_steps", "9", PRESET="demo", NUM_GPUS=0, WARMUP_RATIO="", LORA="off")["flags"]
    assert not {"warmup_ratio", "lora_enable", "deepspeed"} & own.keys()


# --- what a call shows and refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ([], {"PRESET": "nonsense"}, "PRESET=nonsense is not one of: "),
        ([], {"LORA_R": 64}, "LORA_R and LORA_ALPHA need LORA=1"),
        ([], {"DEMO_DATA": "photos", "PRESET": "demo"}, "DEMO_DATA=photos is not one of: scenes probes"),
        (["MAX_STEPS=3"], {}, "variables stand before the command"),
    ],
)
def test_what_the_shell_refuses_is_named(words, variables, said):
    run = bash("scripts/finetune.sh", *words, DRY_RUN=1, NUM_GPUS=8, **variables)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and said in run.stderr


# --- launch kinds -----------------------------------------------------------------------------------------------------


def test_gpus_are_counted_when_num_gpus_is_not_set(tool_path):
    path = tool_path("nvidia-smi", 'printf "GPU 0: a\\nGPU 1: b\\nGPU 2: c\\nGPU 3: d\\n"')
    shown = bash("scripts/pretrain.sh", path=path, DRY_RUN=1, LLAVA_PYTHON="false").stdout
    assert (
        "  devices              4 = 1 node x 4 GPUs\n" in shown and "\nmemory of a card: no estimate without" in shown
    )


# --- signals ----------------------------------------------------------------------------------------------------------

# In place of Python: a rank that does not listen, or ends by itself.
STAND_IN_TRAINER = """#!/usr/bin/env bash
if [ "$BEHAVIOUR" = fails ]; then
  mkdir -p "$ERRORS"
  echo "rank 0: connection closed by peer" >"$ERRORS/00000005-3-1-100-rank0.txt"
  echo "rank 1: the real error" >"$ERRORS/00000005-2-0-200-rank1.txt"
  exit 3
fi
exec "$REAL_PYTHON" -c '
import os, pathlib, signal, subprocess, sys, time
behaviour = os.environ["BEHAVIOUR"]
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
if behaviour.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, behaviour))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True,
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("ready", worker.pid, flush=True)
while True:
    time.sleep(0.1)
'
"""


@pytest.fixture
def start(tmp_path):
    """A function that starts stage 1 with a stand-in for Python, which behaves as it is told."""
    python = tmp_path / "python"
    python.write_text(STAND_IN_TRAINER)
    python.chmod(0o755)
    inputs = inputs_in(tmp_path)
    output = tmp_path / "out"
    env = {"PRESET": "demo", "NUM_GPUS": 0, "LLAVA_PYTHON": python, "OUTPUT_DIR": output, "ERRORS": output / "errors"}
    env |= inputs | {"REAL_PYTHON": sys.executable}

    def run(behaviour: str) -> subprocess.Popen:
        # Where tests run in the background Ctrl-C may be ignored, which children inherit.
        options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "start_new_session": True}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        return subprocess.Popen(["bash", "scripts/pretrain.sh"], env=only(**env, BEHAVIOUR=behaviour), **options)

    return run


def when_ready(process: subprocess.Popen) -> int:
    """Waits for the rank's first step; the process id of what it started."""
    for line in process.stdout:
        if line.startswith("ready"):
            return int(line.split()[1])
    raise AssertionError(process.stderr.read())


def test_a_second_ctrl_c_ends_everything_at_once(start):
    process = start("stubborn")
    worker = when_ready(process)
    os.killpg(process.pid, signal.SIGINT)
    assert "the ranks save" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert "ended at once" in stderr and "was killed" not in stderr
    for _ in range(50):
        if not is_running(worker):
            return
        time.sleep(0.1)
    raise AssertionError("what the rank had started lives on")


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        ("SIGKILL", 137, "ended without a message: .* it was killed, by hand or because memory ran out"),
        ("fails", 3, r"errors:\nrank 1: the real error\n(.*\n)*.*rank1.txt\n$"),
    ],
)
def test_a_killed_rank_is_reported_and_the_error_of_the_first_that_failed_is_last(start, behaviour, code, said):
    process = start(behaviour)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code and re.search(said, stderr), stderr


# --- a real run -------------------------------------------------------------------------------------------------------


def test_real_run_starts_what_it_shows_and_records_it(tmp_path, tool_path):
    path = tool_path("mypython", f'printf "%s\\n" "$@" >"{tmp_path}/started"')
    env = {"PRESET": "demo", "NUM_GPUS": 0, "LLAVA_PYTHON": "mypython", "OUTPUT_DIR": tmp_path / "out put"}
    env |= inputs_in(tmp_path) | {"DATA_PATH": tmp_path / "it's $HOME.json"}
    env["DATA_PATH"].touch()
    shown = json.loads(bash("scripts/pretrain.sh", path=path, DRY_RUN="json", **env).stdout)["command"]
    assert not (tmp_path / "started").exists() and not (tmp_path / "out put").exists()
    run = bash("scripts/pretrain.sh", path=path, **env)
    assert run.returncode == 0, run.stderr
    arguments = shown[shown.index("llava/train/train_mem.py") :]
    assert (tmp_path / "started").read_text().splitlines() == arguments
    (tmp_path / "started").unlink()
    assert bash(str(tmp_path / "out put" / "command.sh"), cwd=tmp_path).returncode == 0
    assert (tmp_path / "started").read_text().splitlines() == arguments


def test_a_run_that_the_trainer_refuses_leaves_no_folder(tmp_path, tool_path):
    env = {
        "PRESET": "demo",
        "NUM_GPUS": 0,
        "LLAVA_PYTHON": "mypython",
        "OUTPUT_DIR": tmp_path / "out",
        "NORM": "lyernorm",
    }
    run = bash("scripts/pretrain.sh", path=tool_path("mypython", "exit 2"), **env, **inputs_in(tmp_path))
    assert run.returncode == 2 and not (tmp_path / "out").exists(), run.stderr


@pytest.mark.parametrize(("name", "stage"), [("zero2", 2), ("zero3", 3), ("zero3_offload", 3), ("zero3_hpz", 3)])
def test_deepspeed_config_leaves_to_the_trainer_what_the_trainer_knows(name, stage):
    config = json.loads((ROOT / f"deepspeed_configs/{name}.json").read_text())
    zero, sizes = config["zero_optimization"], ("train_batch_size", "train_micro_batch_size_per_gpu")
    left = {config[name] for name in (*sizes, "gradient_accumulation_steps", "gradient_clipping")}
    assert left | {config["bf16"]["enabled"], config["fp16"]["enabled"], zero["reduce_bucket_size"]} == {"auto"}
    assert config["data_types"]["grad_accum_dtype"] == "fp32"  # a step adds up many micro-batches
    assert config["timers"]["throughput"]["enabled"] is False  # it waits for the GPU in every micro-batch
    assert zero["stage"] == stage and zero.get("stage3_gather_16bit_weights_on_model_save", stage == 2)
    devices = [zero.get(part, {}).get("device") for part in ("offload_optimizer", "offload_param")]
    assert devices == (["cpu", "cpu"] if name.endswith("offload") else [None, None])


# --- set-up -----------------------------------------------------------------------------------------------------------

STAND_IN_PYTHON = """#!/bin/sh
# As much of an interpreter as setup.sh uses; `-m pip install` only writes down its arguments.
case "$*" in
  *version_info[*) echo 3.11.7 ;;
  "-m venv --clear .venv")
    echo venv >>"$CALLS"
    rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "version = 3.11.7" >.venv/pyvenv.cfg ;;
  "-m pip install"*)
    sleep "${STAND_IN_SLEEP:-0}"; echo "$*" >>"$CALLS"; echo pip was here ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """A function that runs setup.sh in a small tree with a stand-in interpreter; `.calls()` lists what it installed."""
    tree = tmp_path / "a tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, tree / name)
    python = tmp_path / "python3"
    python.write_text(STAND_IN_PYTHON)
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def run(**env: object) -> subprocess.CompletedProcess:
        path = f"{tmp_path}:{os.environ['PATH']}"
        # PYTHON is empty, as if unset: while coverage is measured, only() names the tests' own interpreter.
        return bash("scripts/setup.sh", cwd=tree, path=path, PYTHON="", CALLS=calls, **env)

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
    # Every file of every package compiled, or an environment for the build, would take longer than the rest.
    assert "--no-compile" in torch and "--no-compile" in package and "--no-build-isolation" in package
    assert "setuptools" in torch
    assert "up to date" in setup().stdout
    assert len(setup.calls()) == 3


def test_setup_extras_add_up_and_unknown_ones_are_refused(setup):
    setup(EXTRAS="dev")
    setup(EXTRAS="eval")
    package, harnesses = setup.calls()[-2:]
    assert package.endswith("-e .[dev,eval]")
    assert harnesses.endswith("--no-deps lmms-eval lm-eval") and "-c constraints.txt" in harnesses
    assert "up to date" in setup(EXTRAS="dev").stdout
    assert setup(EXTRAS="flash4").returncode == 0
    refused = setup(EXTRAS="dev,nonsense")
    assert refused.returncode != 0
    assert "nonsense" in refused.stderr and "playground" in refused.stderr


def test_setup_calls_at_the_same_time_install_once(setup):
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: setup(STAND_IN_SLEEP=0.3), range(3)))
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(setup.calls()) == 3
