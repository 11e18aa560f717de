"""The recipes of examples/, each for two steps in its trainer's own environment, which scripts/test_all.sh makes.

Each trainer has this tree's wheel, installed without requirements, and nothing else of this tree.
"""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import saved_models
import torch
from paths import ROOT
from PIL import Image
from saved_models import SAVED

PEERS = Path(os.environ.get("PEERS_VENV", ROOT / ".venv-peers")).resolve()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEERS.is_dir(), reason=f"no {PEERS}; bash scripts/test_all.sh peers makes it"),
]
QUESTION, ANSWER = "What is it?", "a red square on a white ground"


def python_of(tool: str) -> str:
    python = PEERS / tool / "bin/python"
    if not python.exists():
        pytest.skip(f"no {python}; bash scripts/test_all.sh peers makes it")
    return str(python)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the installed wheel, which is in front of a trainer's own packages."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder, wheel], check=True)
    return folder


def write_inputs(family: str, folder: Path, method: str = "sft", tag: str = "") -> None:
    """A model, a picture and a file of records in the format that all three trainers read."""
    saved_models.write(SAVED[family], folder / "model")
    noise = torch.rand(20, 40, 3, generator=torch.Generator().manual_seed(0)) * 255
    Image.fromarray(noise.byte().numpy()).save(folder / "picture.png")
    question = [{"role": "user", "content": tag + QUESTION}]
    texts = {"answer": ANSWER, "chosen": ANSWER, "rejected": "no"}
    turns = {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}
    record = {
        "sft": {"messages": question + turns["answer"]},
        "dpo": {"prompt": question, "chosen": turns["chosen"], "rejected": turns["rejected"]},
        "grpo": {"prompt": question, "answer": ANSWER},
    }[method]
    line = json.dumps(record | {"images": [str(folder / "picture.png")]})
    (folder / "records.jsonl").write_text(f"{line}\n" * 8)


@pytest.fixture
def run(installed):
    """Runs a recipe and returns what `train_elsewhere.py` says of it."""
    return partial(run_recipe, installed)


def run_recipe(site: Path, tool: str, family: str, folder: Path, argv: list, output: Path, **variables: str) -> dict:
    saved = SAVED[family]
    text = f"user: {saved.mark}{QUESTION}\nassistant:"
    job = {"argv": [str(word) for word in argv], "model": str(folder / "model"), "picture": str(folder / "picture.png")}
    job |= {"text": text, "output": str(output), "nested": family == "gemma3"}
    (folder / "job.json").write_text(json.dumps(job))
    env = os.environ | {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "USE_HF": "1"}
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(folder / "cache")} | variables
    command = [python_of(tool), ROOT / "tests/helpers/train_elsewhere.py", folder / "job.json"]
    result = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    told = json.loads((folder / "result.json").read_text())
    assert Path(told["llava"]).is_relative_to(site)
    return told


def assert_trained(result: dict) -> None:
    assert result["steps"] == 2
    assert result["gain changed"] > 1e-3
    assert result["states equal"]
    assert result["answers"][0] == result["answers"][1]


COMMON = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--use_cpu", "True"]
COMMON += ["--logging_steps", "1", "--report_to", "none"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "internvl"])
def test_trl_trains_the_norm_saves_it_and_the_loaded_model_answers_equally(run, family, tmp_path):
    write_inputs(family, tmp_path)
    argv = [ROOT / "examples/train_trl.py", "--model", tmp_path / "model", "--records", tmp_path / "records.jsonl"]
    assert_trained(run("trl", family, tmp_path, [*argv, *COMMON, "--output_dir", tmp_path / "out"], tmp_path / "out"))


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_trls_other_trainers_that_take_pictures_train_the_norm(run, method, tmp_path):
    write_inputs("qwen2_5_vl", tmp_path, method)
    argv = [ROOT / "examples/train_trl.py", "--method", method, "--model", tmp_path / "model"]
    argv += ["--records", tmp_path / "records.jsonl", "--output_dir", tmp_path / "out", *COMMON]
    argv += ["--num_generations", "2", "--max_completion_length", "8"] if method == "grpo" else []
    result = run("trl", "qwen2_5_vl", tmp_path, argv, tmp_path / "out")
    assert_trained(result)
    if method == "dpo":  # the reference model has the norm too
        assert result["loss"][0] == pytest.approx(math.log(2), rel=1e-6)


def test_ms_swifts_plug_in_trains_the_norm(run, tmp_path):
    write_inputs("llava", tmp_path, tag="<image>")
    argv = ["swift.cli.sft", "--external_plugins", ROOT / "examples/ms_swift_plugin.py"]
    argv += ["--model", tmp_path / "model", "--model_type", "llava1_5_hf", "--dataset", tmp_path / "records.jsonl"]
    argv += ["--tuner_type", "full", "--freeze_aligner", "false", "--split_dataset_ratio", "0"]
    argv += ["--torch_dtype", "float32", "--output_dir", tmp_path / "out"]
    argv += ["--add_version", "false", "--device_map", "cpu", *COMMON]
    assert_trained(run("ms-swift", "llava", tmp_path, argv, tmp_path / "out/checkpoint-2"))


def test_llamafactorys_start_script_trains_the_norm(run, tmp_path):
    write_inputs("llava", tmp_path, tag="<image>")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    data = {"file_name": "records.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"tiny": data}))
    settings = {"stage": "sft", "do_train": True, "finetuning_type": "full", "freeze_multi_modal_projector": False}
    settings |= {"model_name_or_path": str(tmp_path / "model"), "template": "llava", "dataset": "tiny", "max_steps": 2}
    settings |= {"dataset_dir": str(tmp_path), "output_dir": str(tmp_path / "out"), "use_cpu": True}
    settings |= {"report_to": "none", "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    settings |= {"logging_steps": 1, "cutoff_len": 512}
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    argv = [ROOT / "examples/train_llamafactory.py", tmp_path / "settings.yaml"]
    assert_trained(run("llamafactory", "llava", tmp_path, argv, tmp_path / "out"))
