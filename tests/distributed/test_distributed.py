"""Two CPU ranks under DeepSpeed, through the real entry point: they compute what one process computes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoder_families import NAMES, write_families
from paths import ROOT
from safetensors.torch import load_file
from training import flags

from llava.model.lora import NON_LORA_FILE
from llava.model.multimodal_projector.norm import mean_text_embedding_norm
from llava.train import train as train_module

TRAIN = ROOT / "llava/train/train_mem.py"
# Adam divides by the gradient's size; where that is pure rounding noise a larger epsilon keeps runs comparable.
COMPARABLE = {"adam_epsilon": 1e-4, "max_steps": 5, "mm_vision_tower_lr": 5e-4}

pytestmark = pytest.mark.slow


def launch(argv: list[str], deepspeed: dict | str, tmp_path: Path, timeout: int = 900, script: Path = TRAIN) -> str:
    """Trains on two ranks by `script`, which takes the flags; returns their output."""
    if isinstance(deepspeed, dict):
        config = tmp_path / "deepspeed.json"
        config.write_text(json.dumps(deepspeed))
    else:
        config = ROOT / "deepspeed_configs" / f"{deepspeed}.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += [str(script), *argv, "--deepspeed", str(config)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def zero_1() -> dict:
    config = json.loads((ROOT / "deepspeed_configs/zero2.json").read_text())
    config["zero_optimization"]["stage"] = 1
    return config


def assert_same(folder: Path, other: Path, atol: float = 1e-5) -> None:
    ours, theirs = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    """Stage 2 with everything trained, global batch 8, in one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train_module.train(flags(tiny, folder, 2, per_device_train_batch_size=8, **COMPARABLE))
    return folder


@pytest.mark.parametrize("config", [zero_1(), "zero2", "zero3", "zero3_offload"], ids=["zero1", "2", "3", "3_offload"])
def test_five_steps_equal_one_process(tiny, tmp_path, one_process, config):
    output = launch(flags(tiny, tmp_path / "two", 2, **COMPARABLE), config, tmp_path)
    assert ("gathers the weights of each of 4 layers at once" in output) == (config in ("zero3", "zero3_offload"))
    assert_same(tmp_path / "two", one_process)
    before, after = (
        {k: v for k, v in json.loads((f / "train_log.jsonl").read_text().splitlines()[0]).items() if "norm" in k}
        for f in (one_process, tmp_path / "two")
    )
    assert after == pytest.approx(before, rel=1e-4)


def test_ranks_agree_that_a_run_is_finished_and_that_another_is_refused(tiny, tmp_path):
    folder = tmp_path / "run"
    launch(flags(tiny, folder, 2, max_steps=1), zero_1(), tmp_path)
    before = {f: f.stat().st_mtime_ns for f in folder.rglob("*")}
    output = launch(flags(tiny, folder, 2, max_steps=1), zero_1(), tmp_path)
    assert output.count("this run is finished, after 1 steps; nothing is written") == 1
    assert {f: f.stat().st_mtime_ns for f in folder.rglob("*")} == before
    with pytest.raises(AssertionError) as refused:
        launch(flags(tiny, folder, 2, max_steps=1, learning_rate=0.5), zero_1(), tmp_path)
    for rank in (0, 1):
        assert f"rank {rank}: error: {folder} was written by a run with other settings" in str(refused.value)
    assert "learning_rate: there 0.001, now 0.5" in str(refused.value)
    assert {f: f.stat().st_mtime_ns for f in before if f != folder} == {f: t for f, t in before.items() if f != folder}


@pytest.mark.parametrize("use_reentrant", ["true", "false"])
def test_one_recomputed_layer_under_zero_3_equals_one_process(tiny, tmp_path, one_process, use_reentrant):
    options = {
        "activation_checkpointing": 1,
        "activation_checkpointing_kwargs": f'{{"use_reentrant": {use_reentrant}}}',
    }
    output = launch(flags(tiny, tmp_path / "two", 2, **options, **COMPARABLE), "zero3", tmp_path)
    assert "1 of 2 decoder layers" in output
    assert_same(tmp_path / "two", one_process)


def test_a_token_cap_under_deepspeed_equals_one_process(tiny, tmp_path, one_process):
    """DeepSpeed is told of the fewer micro-batches."""
    options = COMPARABLE | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    output = launch(flags(tiny, tmp_path / "two", 2, max_tokens_per_micro_batch=10**6, **options), "zero2", tmp_path)
    assert "--max_tokens_per_micro_batch 1000000: 1 micro-batches" in output
    assert_same(tmp_path / "two", one_process)


def test_rank_without_images_meets_the_others(tiny, tmp_path):
    """Rank 0 sees pictures only and rank 1 text only, in every micro-step."""
    records = json.loads((tiny / "data/finetune.json").read_text())
    images, texts = ([r for r in records if ("image" in r) is kind] for kind in (True, False))
    mixed = [r for i in range(0, 8, 2) for r in images[i : i + 2] + texts[i : i + 2]]
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    options = COMPARABLE | {"data_path": tmp_path / "mixed.json", "train_sampling_strategy": "sequential"}
    options |= {"max_steps": 4}
    launch(flags(tiny, tmp_path / "two", 2, per_device_train_batch_size=2, **options), "zero3", tmp_path)
    train_module.train(flags(tiny, tmp_path / "one", 2, per_device_train_batch_size=4, **options))
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(("model", "norm"), [("qwen", "gwc_layernorm"), ("qwen_tied", "scale")])
def test_zero3_measures_the_target_and_keeps_every_bit(tiny, tmp_path, model, norm):
    """With learning rate 0 the folder that ZeRO-3 saves must hold what it loaded, and load again."""
    options = {"model": model, "learning_rate": 0, "max_steps": 1, "norm": norm}
    launch(flags(tiny, tmp_path / "first", 2, **options), "zero3", tmp_path)
    saved = load_file(tmp_path / "first/model.safetensors")
    base, tower = load_file(tiny / model / "model.safetensors"), load_file(tiny / "siglip/model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in base.items())
    for name, tensor in saved.items():
        if "vision_tower" in name:
            assert torch.equal(tensor, tower[name.split("vision_model.")[1]])
    config = json.loads((tmp_path / "first/config.json").read_text())
    assert config["mm_projector_norm_target"] == pytest.approx(
        mean_text_embedding_norm(base["model.embed_tokens.weight"]), rel=1e-6
    )
    gain = saved["model.mm_projector.3.weight"]
    assert torch.equal(gain, torch.full_like(gain, config["mm_projector_norm_init_gain"]))
    assert len(gain) == (1 if norm == "scale" else 32)
    again = options | {"model_name_or_path": tmp_path / "first", "vision_tower": None}
    launch(flags(tiny, tmp_path / "second", 2, **again), "zero3", tmp_path)
    assert_same(tmp_path / "second", tmp_path / "first", atol=0)


@pytest.mark.parametrize(("stage", "config"), [(1, "zero2"), (1, "zero3"), (2, "zero2"), (2, "zero3")])
def test_either_stage_resumes_exactly_under_either_zero(tiny, tmp_path, stage, config):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    launch(flags(tiny, tmp_path / "whole", stage, **options), config, tmp_path)
    (tmp_path / "resumed").mkdir()
    (tmp_path / "whole/checkpoint-2").rename(tmp_path / "resumed/checkpoint-2")
    output = launch(flags(tiny, tmp_path / "resumed", stage, **options), config, tmp_path)
    assert "resuming from" in output
    assert_same(tmp_path / "resumed", tmp_path / "whole", atol=0)
    assert (tmp_path / "resumed/mm_projector.bin").exists() == (stage == 1)


@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_lora_equals_one_process_and_resumes_exactly(tiny, tmp_path, config):
    options = COMPARABLE | {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0, "save_strategy": "steps"}
    options |= {"save_steps": 2, "max_steps": 4}
    launch(flags(tiny, tmp_path / "two", 2, **options), config, tmp_path)
    train_module.train(flags(tiny, tmp_path / "one", 2, per_device_train_batch_size=8, **options))
    whole, one = lora_files(tmp_path / "two"), lora_files(tmp_path / "one")
    assert whole.keys() == one.keys() and any("vision_tower" in name for name in whole)
    for name in whole:
        torch.testing.assert_close(whole[name], one[name], rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    (tmp_path / "resumed").mkdir()
    (tmp_path / "two/checkpoint-2").rename(tmp_path / "resumed/checkpoint-2")
    assert "resuming from" in launch(flags(tiny, tmp_path / "resumed", 2, **options), config, tmp_path)
    resumed = lora_files(tmp_path / "resumed")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_lora_on_frozen_embeddings_equals_one_process_under_zero_3(tiny, tmp_path):
    """The first layer's input needs no gradient, by which DeepSpeed would know that the layer's own are complete."""
    options = COMPARABLE | {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0, "max_steps": 3}
    options |= {"mm_tunable_parts": "mm_language_model", "telemetry_steps": 0}  # whose probe wants gradients
    launch(flags(tiny, tmp_path / "two", 2, **options), "zero3", tmp_path)
    train_module.train(flags(tiny, tmp_path / "one", 2, per_device_train_batch_size=8, **options))
    two, one = lora_files(tmp_path / "two"), lora_files(tmp_path / "one")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


# The library takes bf16 under DeepSpeed for a GPU's. Before a step its gradients' types are printed.
BF16_ON_CPU_RANKS = """
import transformers.training_args
from deepspeed.runtime.engine import DeepSpeedEngine
from llava.train.train import main
transformers.training_args.is_torch_bf16_gpu_available = lambda: True
step = DeepSpeedEngine.step
def telling_step(engine, *args, **kwargs):
    gradients = [g for group in engine.optimizer.averaged_gradients.values() for g in group]
    weights = {p.dtype for p in engine.module.parameters()}
    print("weights", weights, "gradients", {g.dtype for g in gradients}, flush=True)
    return step(engine, *args, **kwargs)
DeepSpeedEngine.step = telling_step
main()
"""


@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_gradients_of_a_bf16_run_add_up_in_fp32(tiny, tmp_path, config):
    worker = tmp_path / "bf16.py"
    worker.write_text(BF16_ON_CPU_RANKS)
    options = {"bf16": True, "max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    output = launch(flags(tiny, tmp_path / "run", 2, **options), config, tmp_path, script=worker)
    assert "weights {torch.bfloat16} gradients {torch.float32}" in output


def lora_files(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a LoRA folder holds of the model."""
    assert not (folder / "model.safetensors").exists()
    return load_file(folder / "adapter_model.safetensors") | torch.load(folder / NON_LORA_FILE, weights_only=True)


# Trains one family after the other in one process group: starting takes longer than a tiny model's five steps.
EVERY_FAMILY = """
import sys
import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from llava.train.train import train
torch.distributed.destroy_process_group = lambda: None  # a second group would find the first one's store
for name in {names!r}:
    train([argument.replace("FAMILY", name) for argument in sys.argv[1:]])
    unset_hf_deepspeed_config()
"""


def test_five_steps_under_zero_3_on_two_ranks_equal_one_process(tiny, tmp_path):
    families = write_families(tiny)
    worker = tmp_path / "every_family.py"
    worker.write_text(EVERY_FAMILY.format(names=NAMES))
    options = {"model": "families/FAMILY", **COMPARABLE}
    launch(flags(families, tmp_path / "two/FAMILY", 2, **options), "zero3", tmp_path, script=worker)
    for name in NAMES:
        options = {"model": f"families/{name}", "per_device_train_batch_size": 8, **COMPARABLE}
        train_module.train(flags(families, tmp_path / "one" / name, 2, **options))
        assert_same(tmp_path / "two" / name, tmp_path / "one" / name)
