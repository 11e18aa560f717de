"""Two CPU ranks under DeepSpeed, through the real entry point: they compute what one process computes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from anyres_data import ANYRES
from data_files import write_varied, write_without_targets
from decoder_families import NAMES, write_families
from safetensors.torch import load_file
from training import build, flags
from two_ranks import COMPARABLE, assert_same, launch, launch_in_turn, zero_1

from llava.model.lora import NON_LORA_FILE
from llava.model.multimodal_projector.norm import mean_text_embedding_norm
from llava.train import train as train_module
from llava.train.batches import assignment, sample_order
from llava.train.telemetry import LOG_FILE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    """Stage 2 with everything trained, global batch 8, in one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train_module.train(flags(tiny, folder, 2, per_device_train_batch_size=8, **COMPARABLE))
    return folder


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


def test_one_recomputed_layer_under_zero_3_equals_one_process(tiny, tmp_path, one_process):
    output = launch(flags(tiny, tmp_path / "two", 2, activation_checkpointing=1, **COMPARABLE), "zero3", tmp_path)
    assert "1 of 2 decoder layers" in output
    assert_same(tmp_path / "two", one_process)


@pytest.fixture(scope="module")
def varied(tiny, tmp_path_factory):
    """Data of varied lengths, and the run of one process with one micro-batch per step."""
    folder = tmp_path_factory.mktemp("varied")
    options = COMPARABLE | {"data_path": write_varied(tiny, folder / "data.json"), "per_device_train_batch_size": 8}
    train_module.train(flags(tiny, folder / "run", 2, **options))
    return options["data_path"], folder / "run"


def micro_batches(trainer) -> set[int]:
    """How many micro-batches two ranks take in the steps of eight samples that a single process has planned."""
    names = ("padding_free", "loss_reduction", "gradient_accumulation_steps", "max_tokens_per_micro_batch")
    args = SimpleNamespace(world_size=2, **{name: getattr(trainer.args, name) for name in names})
    dataset, size = trainer.train_dataset, 8
    order = list(sample_order(dataset, trainer.args))[: size * trainer.args.max_steps]
    assign = assignment(dataset, args)
    return {len(assign(order[start : start + size])[0]) for start in range(0, len(order), size)}


@pytest.mark.parametrize("config", [None, "zero2", "zero3"])
def test_a_varying_number_of_micro_batches_equals_one_process_with_one(tiny, tmp_path, varied, config):
    """Gradients are exchanged and applied with a step's last micro-batch, however many it has."""
    options = COMPARABLE | {"data_path": varied[0], "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    options["max_tokens_per_micro_batch"] = 450
    launch(flags(tiny, tmp_path / "two", 2, **options), config, tmp_path)
    assert micro_batches(build(flags(tiny, tmp_path / "one", 2, **options))[1]) == {2, 3}
    assert_same(tmp_path / "two", varied[1])


@pytest.mark.parametrize("configs", [[None], ["zero2", "zero3"]], ids=["ddp", "zero"])
def test_a_step_in_which_no_rank_has_a_target_has_loss_and_gradient_zero(tiny, tmp_path, configs):
    data = write_without_targets(tiny, tmp_path / "data.json", {2, 3})  # both ranks' sample of the second step
    options = {"data_path": data, "per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
    options |= {"max_steps": 3, "model_max_length": 400}
    runs = [(flags(tiny, tmp_path / str(config), 2, **options), config) for config in configs]
    output = launch(*runs[0], tmp_path) if configs == [None] else launch_in_turn(runs, tmp_path)
    assert output.count("no target is left in step 2") == 2 * len(configs)  # each rank says so
    assert "record 2" in output and "record 3" in output
    for config in configs:
        lines = [line for line in map(json.loads, (tmp_path / str(config) / LOG_FILE).open()) if "loss" in line]
        assert [line["loss"] == line["grad_norm"] == 0 for line in lines] == [False, True, False]


@pytest.mark.parametrize("images_as", [{}, ANYRES], ids=["whole", "crops"])
def test_rank_without_images_meets_the_others_also_in_evaluation(tiny, tmp_path, images_as):
    """Rank 0 sees only pictures and rank 1 only text, in every micro-step; held-out samples do not divide evenly."""
    records = json.loads((tiny / "data/finetune.json").read_text())
    images, texts = ([r for r in records if ("image" in r) is kind] for kind in (True, False))
    mixed = [r for i in range(0, 8, 2) for r in images[i : i + 2] + texts[i : i + 2]]
    (tmp_path / "mixed.json").write_text(json.dumps(mixed))
    options = COMPARABLE | {"data_path": tmp_path / "mixed.json", "train_sampling_strategy": "sequential"}
    (tmp_path / "held.json").write_text(json.dumps(images[:3] + texts[:2]))
    options |= {"max_steps": 4, "eval_data_path": tmp_path / "held.json", "eval_strategy": "steps", "eval_steps": 1}
    options |= {"eval_on_start": True, "per_device_eval_batch_size": 1}
    options |= images_as
    launch(flags(tiny, tmp_path / "two", 2, per_device_train_batch_size=2, **options), "zero3", tmp_path)
    train_module.train(flags(tiny, tmp_path / "one", 2, per_device_train_batch_size=4, **options))
    assert_same(tmp_path / "two", tmp_path / "one")
    two, one = evaluations(tmp_path / "two"), evaluations(tmp_path / "one")
    assert len(one) == 5 and two[0] == pytest.approx(one[0], rel=1e-6)  # the weights are the same
    assert two == [pytest.approx(line, rel=1e-4) for line in one]


def evaluations(folder: Path, key: str = "eval/loss") -> list[dict[str, float]]:
    """What a run's log says of its evaluations, the lines with `key`."""
    lines = map(json.loads, (folder / "train_log.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "eval/seconds"} for line in lines if key in line]


@pytest.mark.parametrize(("model", "norm"), [("qwen", "gwc_layernorm"), ("qwen_tied", "clip")])
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
    assert len(gain) == (1 if norm == "clip" else 32)
    again = options | {"model_name_or_path": tmp_path / "first", "vision_tower": None}
    launch(flags(tiny, tmp_path / "second", 2, **again), "zero3", tmp_path)
    assert_same(tmp_path / "second", tmp_path / "first", atol=0)


@pytest.mark.parametrize(("stage", "config"), [(1, "zero2"), (1, "zero3"), (2, "zero2"), (2, "zero3")])
def test_either_stage_resumes_exactly_under_either_zero(tiny, tmp_path, stage, config):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    launch(flags(tiny, tmp_path / "whole", stage, **options), config, tmp_path)
    (tmp_path / "resumed").mkdir()
    (tmp_path / "whole/checkpoint-1").rename(tmp_path / "resumed/checkpoint-1")
    output = launch(flags(tiny, tmp_path / "resumed", stage, **options), config, tmp_path)
    assert "resuming from" in output
    assert_same(tmp_path / "resumed", tmp_path / "whole", atol=0)
    assert (tmp_path / "resumed/mm_projector.bin").exists() == (stage == 1)


def test_a_run_of_two_ranks_goes_on_with_one(tiny, tmp_path):
    options = COMPARABLE | {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    launch(flags(tiny, tmp_path / "whole", 2, **options), "zero3", tmp_path)
    (tmp_path / "resumed").mkdir()
    (tmp_path / "whole/checkpoint-1").rename(tmp_path / "resumed/checkpoint-1")
    argv = flags(tiny, tmp_path / "resumed", 2, **options | {"per_device_train_batch_size": 8})
    with pytest.raises(AssertionError, match="checkpoint-1 was written by 2 ranks, and now there are 1; "):
        launch(argv, "zero3", tmp_path, count=1)
    states = tmp_path / "resumed/checkpoint-1/global_step1"
    words = ["--inject_missing_state", "--input_folder", str(states), "--output_folder", f"{states}_universal"]
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words], check=True)
    output = launch(argv, "zero3", tmp_path, count=1)
    assert "changed within the run: world_size: checkpoint 2, now 1" in output
    assert_same(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_lora_equals_one_process_and_resumes_exactly(tiny, tmp_path, config):
    options = COMPARABLE | {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0, "save_strategy": "steps"}
    options |= {"save_steps": 1, "max_steps": 2}
    launch(flags(tiny, tmp_path / "two", 2, **options), config, tmp_path)
    train_module.train(flags(tiny, tmp_path / "one", 2, per_device_train_batch_size=8, **options))
    whole, one = lora_files(tmp_path / "two"), lora_files(tmp_path / "one")
    assert whole.keys() == one.keys() and any("vision_tower" in name for name in whole)
    for name in whole:
        torch.testing.assert_close(whole[name], one[name], rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    (tmp_path / "resumed").mkdir()
    (tmp_path / "two/checkpoint-1").rename(tmp_path / "resumed/checkpoint-1")
    assert "resuming from" in launch(flags(tiny, tmp_path / "resumed", 2, **options), config, tmp_path)
    resumed = lora_files(tmp_path / "resumed")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_lora_on_frozen_embeddings_equals_one_process_under_zero_3(tiny, tmp_path):
    """The first layer's input needs no gradient, from which DeepSpeed would know that the layer's own are complete."""
    options = COMPARABLE | {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0, "max_steps": 3}
    options |= {"mm_tunable_parts": "mm_language_model", "telemetry_steps": 0}  # telemetry's probe wants gradients
    launch(flags(tiny, tmp_path / "two", 2, **options), "zero3", tmp_path)
    train_module.train(flags(tiny, tmp_path / "one", 2, per_device_train_batch_size=8, **options))
    two, one = lora_files(tmp_path / "two"), lora_files(tmp_path / "one")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


# Prints the types of a step's gradients before they are applied.
BF16_ON_CPU_RANKS = """
from deepspeed.runtime.engine import DeepSpeedEngine
from llava.train.train import main
step = DeepSpeedEngine.step
def telling_step(engine, *args, **kwargs):
    gradients = [g for group in engine.optimizer.averaged_gradients.values() for g in group]
    weights = {p.dtype for p in engine.module.parameters()}
    # In one write: both ranks have the same file, and an unbuffered print writes each of its words alone.
    print(f"weights {weights} gradients { {g.dtype for g in gradients} }\\n", end="", flush=True)
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


def test_three_steps_under_zero_3_on_two_ranks_equal_one_process(tiny, tmp_path):
    families = write_families(tiny)
    models = {name: {"model": f"families/{name}", **COMPARABLE} for name in NAMES}
    runs = [flags(families, tmp_path / "two" / name, 2, **options) for name, options in models.items()]
    launch_in_turn([(run, "zero3") for run in runs], tmp_path)
    for name, options in models.items():
        train_module.train(flags(families, tmp_path / "one" / name, 2, per_device_train_batch_size=8, **options))
        assert_same(tmp_path / "two" / name, tmp_path / "one" / name)
