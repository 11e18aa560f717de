"""LoRA: upstream's recorded runs, the files, loading and merging them, resuming, and what is refused."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from paths import GOLDEN
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from training import ALL_PARTS, LM_AND_PROJECTOR, LORA, build, finish, fit, flags, load, logits
from transformers import AutoModelForCausalLM, TrainerCallback

from llava.constants import IMAGE_TOKEN_INDEX
from llava.model import builder, merge_lora
from llava.model.builder import load_pretrained_model
from llava.model.lora import NON_LORA_FILE, apply_lora, recorded_base
from llava.train import build as build_module
from llava.train import train as train_module
from llava.train.build import quantized_loading
from llava.train.llava_trainer import LLaVATrainer
from llava.train.optim import ADAPTER, LANGUAGE_MODEL

PREFIX = "base_model.model."


def closed_form(folder: Path, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Base weights with `alpha / r * B A` added in float64, straight from the folder's files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file) if file.exists() else torch.load(folder / "adapter_model.bin", weights_only=True)
    merged = dict(base)
    for name in [n for n in tensors if n.endswith("lora_A.weight")]:
        a, b = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
        key = name.removeprefix(PREFIX).replace("lora_A.weight", "weight")
        merged[key] = (base[key].double() + config["lora_alpha"] / config["r"] * (b @ a)).float()
    return merged


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """(folder, model) of a finished LoRA run with gwc_layernorm and checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    options = LORA | {"learning_rate": 1e-2, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    return folder, fit(flags(tiny, folder, 2, **options))


# --- upstream's runs --------------------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    """Learning rates after every step."""

    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr())


class RecordedTrainer(LLaVATrainer):
    """Takes upstream's sample order and keeps the loss of every micro-batch."""

    order: list[int]
    losses: list[float]

    def sample_order(self):
        return self.order

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


@pytest.fixture(scope="module", params=["s2_lora", "n2_lora"])
def upstream(request, tmp_path_factory):
    """(upstream's record, our trainer after the same run, parameters before it, learning rates, folder)."""
    name, root = request.param, tmp_path_factory.mktemp("upstream")
    golden = json.loads((GOLDEN / f"train/{name}.json").read_text())
    init = {
        k.removeprefix(f"{name}/"): v for k, v in load_file(GOLDEN / "train/lora_init.safetensors").items() if name in k
    }
    init = {k.removeprefix(PREFIX): v for k, v in init.items()}
    torch.save({k: v for k, v in init.items() if "mm_projector" in k}, root / "mm_projector.bin")
    argv = [re.sub(r"^(tiny|data)/", f"{GOLDEN / 'train/inputs'}/", arg) for arg in golden["args"]]
    argv[argv.index("--output_dir") + 1] = str(root / "run")
    argv[argv.index("--pretrain_mm_mlp_adapter") + 1] = str(root / "mm_projector.bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "LLaVATrainer", RecordedTrainer)
        model, trainer = build([*argv, "--label_masking", "upstream", "--disable_tqdm", "True"])
    assert {k for k in init if "lora_A" in k} == {k for k, _ in model.named_parameters() if "lora_A" in k}
    model.load_state_dict(init, strict=False)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.order, trainer.losses = golden["sample_order"], []
    finish(trainer)
    return golden, trainer, before, recorder.rates, root / "run"


@pytest.mark.slow
def test_upstreams_losses_are_followed(upstream):
    golden, trainer, *_ = upstream
    assert trainer.losses == pytest.approx(golden["losses"], abs=1e-4)


@pytest.mark.slow
def test_optimizer_groups_and_learning_rates_are_upstreams(upstream):
    golden, trainer, _, rates, _ = upstream
    names = {id(p): PREFIX + n for n, p in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    ours = {(g["initial_lr"], g["weight_decay"], names[id(p)]) for g in groups for p in g["params"]}
    first_rates = golden["lrs_after_step"][0]  # of the warm-up's only step: the full rate
    assert ours == {
        (rate, group["weight_decay"], name)
        for group, rate in zip(golden["param_groups"], first_rates, strict=True)
        for name in group["params"]
        if "post_layernorm" not in name  # upstream's optimizer holds it and never gives it a gradient
    }
    parts = [group["name"] for group in groups]
    for part, upstreams_group in ((LANGUAGE_MODEL, 0), (ADAPTER, -1)):
        assert [r[parts.index(part)] for r in rates] == pytest.approx(
            [r[upstreams_group] for r in golden["lrs_after_step"]]
        )


def test_parameters_move_as_far_as_upstreams(upstream):
    golden, trainer, before, *_ = upstream
    after = dict(trainer.model.named_parameters())
    for name, (moved, size) in golden["param_deltas"].items():
        name = name.removeprefix(PREFIX)
        assert float(after[name].norm()) == pytest.approx(size, rel=1e-3), name
        # A shift of all keys changes nothing: what Adam does to their bias is rounding noise.
        if not name.endswith("k_proj.bias"):
            assert float((after[name] - before[name]).norm()) == pytest.approx(moved, rel=0.02), name


def test_files_and_keys_are_upstreams(upstream):
    golden, *_, run = upstream
    files = golden["files"]
    # README.md is PEFT's empty model card; .bin or .safetensors is a matter of PEFT's version.
    assert {path.name for path in run.iterdir()} >= files.keys() - {"README.md", "adapter_model.bin"}
    adapters = {k: list(v.shape) for k, v in load_file(run / "adapter_model.safetensors").items()}
    assert adapters == next(v["tensors"] for k, v in files.items() if k.startswith("adapter_model."))
    others = {k: list(v.shape) for k, v in torch.load(run / NON_LORA_FILE, weights_only=True).items()}
    assert others == files[NON_LORA_FILE]["tensors"]
    config, theirs = json.loads((run / "adapter_config.json").read_text()), files["adapter_config.json"]["json"]
    for field in ("r", "lora_alpha", "lora_dropout", "bias", "task_type", "peft_type", "fan_in_fan_out"):
        assert config[field] == theirs[field], field
    assert set(config["target_modules"]) == set(theirs["target_modules"])


# --- what is trained and written --------------------------------------------------------------------------------------


def test_folder_holds_adapters_projector_and_norm_and_nothing_of_the_base(trained):
    folder, model = trained
    names = {path.name for path in folder.iterdir()}
    wanted = {"adapter_config.json", "adapter_model.safetensors", NON_LORA_FILE, "config.json", "trainer_state.json"}
    assert wanted | {"tokenizer.json", "preprocessor_config.json"} <= names
    assert "model.safetensors" not in names
    adapters = load_file(folder / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 7 and all(".lora_" in name for name in adapters)
    assert all(name.startswith(f"{PREFIX}model.layers.") for name in adapters)
    others = torch.load(folder / NON_LORA_FILE, weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    assert sorted(others) == sorted(
        f"{PREFIX}model.mm_projector.{i}.{n}" for i in (0, 2, 3) for n in ("weight", "bias")
    )
    assert (others[f"{PREFIX}model.mm_projector.3.weight"] - config["mm_projector_norm_init_gain"]).abs().max() > 1e-4
    assert not any("lora" in n for n, _ in model.get_vision_tower().named_parameters())


def test_base_and_tower_stay_as_they_were(tiny, trained):
    state = trained[1].state_dict()
    for name, tensor in load_file(tiny / "llama/model.safetensors").items():
        own = name if name in state else name.replace(".weight", ".base_layer.weight")
        assert torch.equal(state[own], tensor), name
    for name, tensor in load_file(tiny / "siglip/model.safetensors").items():
        own = f"model.vision_tower.vision_tower.vision_model.{name}"
        assert own not in state or torch.equal(state[own], tensor)


def test_tuned_tower_and_fixed_norm_are_saved_whole(tiny, tmp_path):
    options = LORA | {"mm_tunable_parts": ALL_PARTS, "mm_projector_norm_learnable": False, "max_steps": 1}
    model = fit(flags(tiny, tmp_path / "run", 2, **options))
    others = torch.load(tmp_path / "run" / NON_LORA_FILE, weights_only=True)
    state = model.state_dict()
    wanted = {PREFIX + n for n in state if "vision_tower" in n or "mm_projector" in n}
    assert others.keys() == wanted and any("mm_projector.3" in n for n in wanted)
    torch.testing.assert_close(logits(load(tmp_path / "run", tiny / "llama")), logits(model), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_activation_checkpointing_changes_nothing_after_a_frozen_projector(tiny, tmp_path):
    options = LORA | {"mm_tunable_parts": "mm_language_model", "lora_dropout": 0.0}
    plain = fit(flags(tiny, tmp_path / "plain", 2, **options)).state_dict()
    options |= {"gradient_checkpointing": True}
    checkpointed = fit(flags(tiny, tmp_path / "ckpt", 2, **options)).state_dict()
    assert any(tensor.any() for name, tensor in plain.items() if "lora_B" in name)
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_resumed_run_equals_the_uninterrupted_one(tiny, tmp_path, bf16):
    options = LORA | {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "bf16": bf16}
    options |= {"mm_tunable_parts": ALL_PARTS, "lora_dropout": 0.3, "model": "qwen"}
    whole = fit(flags(tiny, tmp_path / "whole", 2, **options)).state_dict()
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "resumed/checkpoint-4")
    train_module.train(flags(tiny, tmp_path / "resumed", 2, **options))
    for file, read in (("adapter_model.safetensors", load_file), (NON_LORA_FILE, torch.load)):
        first, second = read(tmp_path / "whole" / file), read(tmp_path / "resumed" / file)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    q_proj = "model.layers.0.self_attn.q_proj"
    assert whole[f"{q_proj}.lora_A.default.weight"].dtype == torch.float32
    assert whole[f"{q_proj}.base_layer.weight"].dtype == (torch.bfloat16 if bf16 else torch.float32)


# --- loading and merging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 4])
def test_merged_weights_are_base_plus_adapters(tiny, trained, step):
    folder = trained[0] / f"checkpoint-{step}" if step else trained[0]
    state = load(folder, tiny / "llama").state_dict()
    expected = closed_form(folder, load_file(tiny / "llama/model.safetensors"))
    others = torch.load(folder / NON_LORA_FILE, weights_only=True)
    expected |= {name.removeprefix(PREFIX): tensor for name, tensor in others.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert not any("lora" in name for name in state)


def test_loaded_model_computes_what_the_trained_one_did(tiny, trained):
    folder, model = trained
    wanted = logits(model)
    with_base = load(folder, tiny / "llama")
    torch.testing.assert_close(logits(with_base), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(load(folder, None)), wanted, rtol=0, atol=1e-5)  # the base is recorded
    ids = torch.tensor([[5, IMAGE_TOKEN_INDEX, 7]])
    assert (
        with_base.generate(input_ids=ids, images=torch.rand(1, 3, 16, 16), max_new_tokens=3, do_sample=False).shape[1]
        <= 3
    )


@pytest.mark.filterwarnings("error::UserWarning")  # PEFT warns of adapters it misses, in the tower for instance
def test_stock_peft_reads_the_folder(tiny, trained):
    folder, model = trained
    base = model_class_with_tower(tiny)
    adapted = PeftModel.from_pretrained(base, str(folder))
    others = torch.load(folder / NON_LORA_FILE, weights_only=True)
    adapted.load_state_dict(others, strict=False)
    assert {n for n, _ in adapted.named_parameters() if "lora_" in n} == {
        PREFIX + n for n, _ in model.named_parameters() if "lora_" in n
    }
    torch.testing.assert_close(logits(adapted), logits(model), rtol=0, atol=1e-6)


def model_class_with_tower(tiny):
    """An untrained LLaVA on `llama` with the tiny tower and gwc_layernorm."""
    argv = flags(tiny, "unused", 2, mm_tunable_parts=LM_AND_PROJECTOR)
    return train_module.build_model(*train_module.parse_arguments(argv)).eval()


def test_merged_checkpoint_stands_alone_and_computes_the_same(tiny, trained, tmp_path):
    folder, model = trained
    argv = [
        "--model-path",
        str(folder),
        "--model-base",
        str(tiny / "llama"),
        "--save-model-path",
        str(tmp_path / "out"),
    ]
    merge_lora.main(argv)
    merged = shutil.move(tmp_path / "out", tmp_path / "moved")
    config = json.loads((merged / "config.json").read_text())
    config["mm_vision_tower"] = "/nowhere"
    (merged / "config.json").write_text(json.dumps(config))
    tokenizer, loaded, image_processor, _ = load_pretrained_model(str(merged), None, "llava", device="cpu")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    assert tokenizer("a")["input_ids"] and image_processor.size["height"] == 16
    assert not (merged / "adapter_config.json").exists()
    assert not hasattr(loaded, "peft_config")


@pytest.fixture
def half(tiny, tmp_path):
    """`llama` in bfloat16, with its tokenizer."""
    folder = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(tiny / "llama", dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / "llama" / name, folder)
    return folder


def test_merging_onto_a_bf16_base_keeps_adapter_precision_and_logits(trained, half, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    merge_lora.merge_lora(str(trained[0]), str(half), str(tmp_path / "out"))
    saved = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    expected = closed_form(trained[0], load_file(half / "model.safetensors"))["model.layers.0.mlp.up_proj.weight"]
    torch.testing.assert_close(saved["model.layers.0.mlp.up_proj.weight"], expected, rtol=0, atol=1e-6)
    assert any("was not checked" in message for message in caplog.messages)  # the run left no resume.json
    assert caplog.messages[-1] == f"merged checkpoint written to {tmp_path}/out in torch.float32"
    merged = logits(load(tmp_path / "out", None))
    monkeypatch.setattr(builder, "apply_lora", lambda model, folder, merge: apply_lora(model, folder, merge=False))
    unmerged = load(trained[0], half)
    assert unmerged.peft_config
    torch.testing.assert_close(merged, logits(unmerged), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("adapters", "dtype"), [("float32", "bfloat16"), ("float16", None), ("bfloat16", "float32")])
def test_merged_weights_are_rounded_once_to_the_requested_precision(tiny, trained, tmp_path, caplog, adapters, dtype):
    caplog.set_level("INFO")
    folder = shutil.copytree(trained[0], tmp_path / "lora")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({n: t.to(getattr(torch, adapters)) for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    argv = ["--model-path", str(folder), "--save-model-path", str(tmp_path / "out")]
    assert merge_lora.main(argv + (["--dtype", dtype] if dtype else [])) == 0
    written = dtype or adapters
    saved = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, written)}
    name = "model.layers.0.mlp.up_proj.weight"
    expected = closed_form(folder, load_file(tiny / "llama/model.safetensors"))[name].to(getattr(torch, written))
    assert (saved[name] != expected).float().mean() < 0.01  # except sums that two roundings could both take
    assert f"in torch.{written}" in caplog.messages[-1]
    assert ("rounding to it changes logits" in caplog.messages[-1]) == (written != "float32")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == written


def test_folder_trained_by_relative_paths_is_loaded_from_anywhere(tiny, trained, tmp_path, monkeypatch):
    """Base and tower are recorded by absolute paths, which stock PEFT follows too."""
    monkeypatch.chdir(tiny)
    fit(flags(Path(), tmp_path / "run", 2, **LORA))
    monkeypatch.chdir("/")
    config = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny / "llama")
    assert json.loads((tmp_path / "run/config.json").read_text())["mm_vision_tower"] == str(tiny / "siglip")
    load(tmp_path / "run", None)
    assert AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "run")).peft_config["default"].r == LORA["lora_r"]


@pytest.mark.parametrize(
    ("base", "found"), [("/old/machine/llama", "/old/machine/llama, which"), (None, "None, which")]
)
def test_recorded_base_that_is_not_there_is_named(trained, tmp_path, capsys, base, found):
    folder = shutil.copytree(trained[0], tmp_path / "lora")
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert merge_lora.main(["--model-path", str(folder), "--save-model-path", str(tmp_path / "out")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"adapter_config.json: base_model_name_or_path is {found}" in error and "--model-base" in error


def test_a_folder_without_an_adapters_config_has_no_base(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}/adapter_config.json: base_model_name_or_path is None, which"):
        recorded_base(str(tmp_path))


def test_lora_on_a_llava_checkpoint_takes_its_tower_from_there(tiny, trained, tmp_path):
    merge_lora.merge_lora(str(trained[0]), str(tiny / "llama"), str(tmp_path / "base"))
    base = tmp_path / "base"
    tensors = load_file(base / "model.safetensors")
    for name in tensors:
        if "vision_tower" in name:
            tensors[name] = tensors[name] * 1.5  # a tower that differs from the one in the config
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    options = LORA | {"model_name_or_path": base, "vision_tower": None, "learning_rate": 1e-2}
    model = fit(flags(tiny, tmp_path / "run", 2, **options))
    assert not any("vision_tower" in name for name in torch.load(tmp_path / "run" / NON_LORA_FILE, weights_only=True))
    torch.testing.assert_close(logits(load(tmp_path / "run", base)), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("file", ["adapter_model.bin", "adapter_model.safetensors"])
def test_published_layout_of_llava_loras_loads(tiny, tmp_path, file):
    """As liuhaotian/llava-v1.5-7b-lora: `llava` config, a tower by name, an adapter config of an early PEFT."""
    generator = torch.Generator().manual_seed(3)
    base = load_file(tiny / "llama/model.safetensors")
    linear = [name for name in base if re.fullmatch(r"model\.layers\..*proj\.weight", name)]
    adapters = {}
    for name in linear:
        rows, columns = base[name].shape
        stem = PREFIX + name.removesuffix("weight")
        adapters[f"{stem}lora_A.weight"] = torch.randn(4, columns, generator=generator)
        adapters[f"{stem}lora_B.weight"] = torch.randn(rows, 4, generator=generator) / 10
    sizes = {"0.weight": (32, 24), "0.bias": (32,), "2.weight": (32, 32), "2.bias": (32,)}
    projector = {f"{PREFIX}model.mm_projector.{k}": torch.randn(v, generator=generator) for k, v in sizes.items()}
    folder = tmp_path / "llava-v1.5-7b-lora"
    folder.mkdir()
    torch.save(adapters, folder / file) if file.endswith("bin") else save_file(adapters, folder / file)
    torch.save({name: tensor.half() for name, tensor in projector.items()}, folder / NON_LORA_FILE)
    targets = ["o_proj", "up_proj", "q_proj", "down_proj", "v_proj", "gate_proj", "k_proj"]
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.5", "bias": "none", "fan_in_fan_out": False}
    config |= {"inference_mode": True, "init_lora_weights": True, "layers_pattern": None, "layers_to_transform": None}
    config |= {"lora_alpha": 8, "lora_dropout": 0.05, "modules_to_save": None, "peft_type": "LORA", "r": 4}
    config |= {"revision": None, "target_modules": targets, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    llava = json.loads((tiny / "llama/config.json").read_text())
    llava |= {"model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": str(tiny / "clip")}
    llava |= {
        "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": 24,
        "mm_vision_select_layer": -2,
        "use_mm_proj": True,
    }
    llava |= {"mm_vision_select_feature": "patch", "image_aspect_ratio": "pad", "tokenizer_padding_side": "right"}
    (folder / "config.json").write_text(json.dumps(llava))

    model = load(folder, tiny / "llama")
    state = model.state_dict()
    for name, tensor in closed_form(folder, base).items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5, msg=name)
    for name, tensor in projector.items():
        assert torch.equal(state[name.removeprefix(PREFIX)], tensor.half().float())
    for name, tensor in load_file(tiny / "clip/model.safetensors").items():
        assert torch.equal(state[f"model.vision_tower.vision_tower.vision_model.{name}"], tensor), name
    assert model.config.image_aspect_ratio == "pad"


def test_every_file_of_training_and_merging_follows_the_umask(tiny, tmp_path):
    shutil.copytree(tiny / "data", tmp_path / "data", ignore=shutil.ignore_patterns(".llava_cache"))
    data = {"data_path": tmp_path / "data/finetune.json", "image_folder": tmp_path / "data/images"}
    before = os.umask(0o027)
    try:
        argv = flags(tiny, tmp_path / "run", 2, **(LORA | data | {"save_strategy": "steps", "save_steps": 1}))
        train_module.train(argv)
        merge_lora.merge_lora(str(tmp_path / "run"), None, str(tmp_path / "merged"))
    finally:
        os.umask(before)
    made = [tmp_path / "run", tmp_path / "merged", tmp_path / "data/.llava_cache"]
    modes = {f: f.stat().st_mode & 0o777 for folder in made for f in folder.rglob("*") if f.is_file()}
    assert {f.name for f in modes} >= {"model.safetensors", "adapter_model.safetensors", NON_LORA_FILE, "optimizer.pt"}
    assert not {str(f): oct(mode) for f, mode in modes.items() if mode != 0o640}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mm_tunable_parts": None, "tune_mm_mlp_adapter": True}, "--lora_enable.*--tune_mm_mlp_adapter"),
        ({"mm_tunable_parts": None, "freeze_backbone": True}, "--lora_enable.*--freeze_backbone"),
        ({"mm_tunable_parts": "mm_mlp_adapter"}, "--lora_enable.*name mm_language_model in --mm_tunable_parts"),
        ({"lora_enable": None}, "--lora_r, --lora_alpha: only with --lora_enable True"),
        ({"lora_weight_path": "x"}, "--lora_weight_path.*llava.model.merge_lora"),
    ],
)
def test_bad_flags_are_named(tiny, tmp_path, overrides, message, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: True)
    with pytest.raises(ValueError, match=message):
        train_module.train(flags(tiny, tmp_path, 2, **(LORA | overrides)))


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"target_modules": "model.layers.0.mlp.up_proj"}])
def test_adapters_of_a_tower_and_doras_are_refused_by_name(tiny, trained, tmp_path, changes):
    folder = shutil.copytree(trained[0], tmp_path / "lora")
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="adapters of the vision tower, or DoRA's; only commit 382b45f can load them"):
        load(folder, tiny / "llama")


def test_lora_folder_is_refused_as_a_model_to_train(tiny, tmp_path, trained):
    with pytest.raises(ValueError, match="is a LoRA folder.*llava.model.merge_lora"):
        train_module.train(flags(tiny, tmp_path, 2, model_name_or_path=trained[0]))


def test_base_of_other_depth_is_refused(tiny, tmp_path, trained):
    config = json.loads((tiny / "llama/config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tiny / "llama").iterdir():
        if path.name != "config.json":
            shutil.copy(path, tmp_path)
    with pytest.raises(ValueError, match=r"14 have no layer \(first: model.layers.1.*0 layers have none"):
        load(trained[0], tmp_path)


def test_folder_without_the_projector_is_refused(tiny, tmp_path, trained):
    folder = shutil.copytree(trained[0], tmp_path / "copy")
    others = torch.load(folder / NON_LORA_FILE, weights_only=True)
    others.pop(f"{PREFIX}model.mm_projector.3.bias")
    torch.save(others, folder / NON_LORA_FILE)
    with pytest.raises(ValueError, match=f"{NON_LORA_FILE} lacks model.mm_projector.3.bias"):
        load(folder, tiny / "llama")
    (folder / NON_LORA_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {NON_LORA_FILE}"):
        load(folder, tiny / "llama")


def test_merge_needs_a_lora_folder(tiny, tmp_path):
    with pytest.raises(ValueError, match="--model-path.*no adapter_config.json"):
        merge_lora.merge_lora(str(tiny / "llama"), None, str(tmp_path / "out"))


def test_recorded_tower_that_is_not_there_is_named(trained, tmp_path, capsys):
    folder = shutil.copytree(trained[0], tmp_path / "lora")
    config = json.loads((folder / "config.json").read_text()) | {"mm_vision_tower": "/old/machine/siglip"}
    (folder / "config.json").write_text(json.dumps(config))
    assert merge_lora.main(["--model-path", str(folder), "--save-model-path", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "vision tower /old/machine/siglip cannot be loaded" in error and "mm_vision_tower in the config" in error


@pytest.mark.parametrize("place", ["base", "lora", "file"])
def test_merge_never_writes_over_anything(tiny, trained, tmp_path, capsys, place):
    (tmp_path / "note").write_text("mine")
    target = {"base": tiny / "llama", "lora": trained[0], "file": tmp_path / "note"}[place]
    assert merge_lora.main(["--model-path", str(trained[0]), "--save-model-path", str(target)]) == 2
    assert f"error: --save-model-path {target}: exists" in capsys.readouterr().err


# --- quantised base ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_base_trains_and_loads(tiny, tmp_path, bits):
    """QLoRA on a CPU: only the decoder's linear layers are quantised, and loading gives what was trained."""
    pytest.importorskip("bitsandbytes")
    options = LORA | {"bits": bits, "bf16": True, "learning_rate": 1e-2, "max_steps": 3}
    model = fit(flags(tiny, tmp_path / "run", 2, **options))
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    quantised = {n for n, dtype in dtypes.items() if dtype in (torch.uint8, torch.int8)}
    assert quantised == {n for n in dtypes if n.endswith("proj.base_layer.weight")}
    assert dtypes["lm_head.weight"] == dtypes["model.embed_tokens.weight"] == torch.bfloat16
    assert dtypes["model.mm_projector.0.weight"] == torch.float32
    assert any(p.any() for n, p in model.named_parameters() if "lora_B" in n)
    load_bits = {"load_4bit": bits == 4, "load_8bit": bits == 8}
    _, loaded, _, _ = load_pretrained_model(
        str(tmp_path / "run"), str(tiny / "llama"), "x", device="cpu", torch_dtype="bfloat16", **load_bits
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = logits(loaded), logits(model)
        model.disable_adapters()
        without = logits(model)
    assert (found - wanted).abs().max() < 0.1 * (without - wanted).abs().max()  # bf16 arithmetic


def test_quantised_base_needs_bitsandbytes(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ImportError, match="--bits.*pip install bitsandbytes"):
        train_module.train(flags(tiny, tmp_path, 2, **LORA, bits=4))


def test_quantised_base_is_loaded_as_qlora_loads_it(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: True)
    options = quantized_loading(4, torch.float16, torch.device("cpu"))
    config = options["quantization_config"]
    assert config.load_in_4bit and config.bnb_4bit_compute_dtype == torch.float16
    assert (config.bnb_4bit_use_double_quant, config.bnb_4bit_quant_type) == (True, "nf4")
    assert set(config.llm_int8_skip_modules) == {"mm_projector", "vision_tower", "lm_head"}
    assert options["device_map"] == {"": torch.device("cpu")}
    assert quantized_loading(16, torch.float16, torch.device("cpu")) == {}


def test_quantised_base_is_refused_under_zero_3(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr("llava.train.checks.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="--bits 8: ZeRO-3 cannot partition.*zero2.json"):
        train_module.train(flags(tiny, tmp_path, 2, **LORA, bits=8))
