"""LoRA: upstream's recorded runs, the files, loading and merging them, resuming, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from paths import GOLDEN
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training import ALL_PARTS, LM_AND_PROJECTOR, LORA, build, finish, fit, flags, load, logits, same, stopped
from transformers import AutoModelForCausalLM
from vision_language_models import our_checkpoint

from llava.model import merge_lora
from llava.model.builder import load_pretrained_model
from llava.model.lora import NON_LORA_FILE
from llava.train import build as build_module
from llava.train import train as train_module
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


class RecordedTrainer(LLaVATrainer):
    """Keeps loss and learning rates of every step."""

    def training_step(self, *args, **kwargs):
        self.rates.append(self.lr_scheduler.get_last_lr())
        self.losses.append(float(loss := super().training_step(*args, **kwargs)))
        return loss


@pytest.fixture(scope="module", params=["s2_lora", "n2_lora"])
def upstream(request, tmp_path_factory):
    """(upstream's record, our trainer after the same run, parameters before it, folder)."""
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
    trainer.losses, trainer.rates = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llava.train.llava_trainer.sample_order", lambda *_: golden["sample_order"])
        finish(trainer)
    return golden, trainer, before, root / "run"


@pytest.mark.slow
@pytest.mark.numeric
def test_losses_optimizer_groups_and_learning_rates_are_upstreams(upstream):
    golden, trainer, *_ = upstream
    assert trainer.losses == pytest.approx(golden["losses"], abs=1e-4)
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
        recorded = [rates[upstreams_group] for rates in golden["lrs_after_step"][:-1]]
        assert [rates[parts.index(part)] for rates in trainer.rates[1:]] == pytest.approx(recorded)


@pytest.mark.slow
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
def test_resumed_run_equals_the_uninterrupted_one(tiny, tmp_path):
    options = LORA | {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "bf16": True}
    options |= {"mm_tunable_parts": ALL_PARTS, "lora_dropout": 0.3, "model": "qwen"}
    whole = fit(flags(tiny, tmp_path / "whole", 2, **options)).state_dict()
    stopped(tmp_path / "whole", 4, tmp_path / "resumed")
    train_module.train(flags(tiny, tmp_path / "resumed", 2, **options))
    for file, read in (("adapter_model.safetensors", load_file), (NON_LORA_FILE, torch.load)):
        assert same(read(tmp_path / "whole" / file), read(tmp_path / "resumed" / file))
    q_proj = "model.layers.0.self_attn.q_proj"
    assert whole[f"{q_proj}.lora_A.default.weight"].dtype == torch.float32
    assert whole[f"{q_proj}.base_layer.weight"].dtype == torch.bfloat16


# --- loading and merging ----------------------------------------------------------------------------------------------


def test_loaded_model_computes_what_the_trained_one_did(tiny, trained):
    folder, model = trained
    wanted = logits(model)
    torch.testing.assert_close(logits(load(folder, tiny / "llama")), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(load(folder, None)), wanted, rtol=0, atol=1e-5)  # the base is recorded


@pytest.mark.filterwarnings("error::UserWarning")  # PEFT warns of adapters it misses, in the tower for instance
def test_stock_peft_reads_the_folder(tiny, trained):
    folder, model = trained
    argv = flags(tiny, "unused", 2, mm_tunable_parts=LM_AND_PROJECTOR)
    base = train_module.build_model(*train_module.parse_arguments(argv)).eval()
    adapted = PeftModel.from_pretrained(base, str(folder))
    others = torch.load(folder / NON_LORA_FILE, weights_only=True)
    adapted.load_state_dict(others, strict=False)
    assert {n for n, _ in adapted.named_parameters() if "lora_" in n} == {
        PREFIX + n for n, _ in model.named_parameters() if "lora_" in n
    }
    torch.testing.assert_close(logits(adapted), logits(model), rtol=0, atol=1e-6)


def test_a_changed_field_reaches_the_base_too(tiny, trained):
    changes = {"max_position_embeddings": 99, "image_aspect_ratio": "pad"}
    options = {"device": "cpu", "overwrite_config": changes}
    *_, model, _, context = load_pretrained_model(str(trained[0]), str(tiny / "llama"), "x", **options)
    assert context == 99 and changes.items() <= model.config.to_dict().items()


def test_merged_checkpoint_stands_alone_and_computes_the_same(tiny, trained, tmp_path, monkeypatch):
    """Moved, and by its name on the hub."""
    folder, model = trained
    merge_lora.merge_lora(str(folder), str(tiny / "llama"), str(tmp_path / "out"))
    repository = tmp_path / "hub/models--me--merged"
    for name in ("snapshots", "refs"):
        (repository / name).mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    merged = shutil.move(tmp_path / "out", repository / "snapshots" / ("a" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = json.loads((merged / "config.json").read_text())
    config["mm_vision_tower"] = "/nowhere"
    (merged / "config.json").write_text(json.dumps(config))
    for path in (str(merged), "me/merged"):
        tokenizer, loaded, image_processor, _ = load_pretrained_model(path, None, "llava", device="cpu")
        torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
        assert tokenizer("a")["input_ids"] and image_processor.size["height"] == 16
    assert not (merged / "adapter_config.json").exists() and not hasattr(loaded, "peft_config")


@pytest.fixture(scope="module")
def half(tiny, tmp_path_factory):
    """`llama` in bfloat16, with its tokenizer."""
    folder = shutil.copytree(tiny / "llama", tmp_path_factory.mktemp("half") / "llama")
    AutoModelForCausalLM.from_pretrained(tiny / "llama", dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("adapters", "dtype"), [("float32", "bfloat16"), ("float16", None), ("float32", None)])
def test_merged_weights_are_rounded_once_to_the_requested_or_the_adapters_precision(
    half, trained, tmp_path, caplog, adapters, dtype
):
    """Also where the base has a lower one."""
    caplog.set_level("INFO")
    folder = shutil.copytree(trained[0], tmp_path / "lora")
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({n: t.to(getattr(torch, adapters)) for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "resume.json").write_text('{"settings": {"language_model_files": "another"}}')
    argv = ["--model-path", str(folder), "--model-base", str(half), "--save-model-path", str(tmp_path / "out")]
    assert merge_lora.main(argv + (["--dtype", dtype] if dtype else [])) == 0
    assert "was trained on a base with other files (another)" in caplog.text
    written = getattr(torch, dtype or adapters)
    saved = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {written}
    name = "model.layers.0.mlp.up_proj.weight"
    expected = closed_form(folder, load_file(half / "model.safetensors"))[name]
    if written is torch.float32:
        torch.testing.assert_close(saved[name], expected, rtol=0, atol=1e-6)
    else:
        assert (saved[name] != expected.to(written)).float().mean() < 0.01  # sums that two roundings could both take
        assert f"in {written}; rounding to it changes logits" in caplog.messages[-1]
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(written).removeprefix("torch.")


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


def test_published_layout_of_llava_loras_loads(tiny, trained, tmp_path):
    """As liuhaotian/llava-v1.5-7b-lora: `llava` config, a tower by name, an adapter config of an early PEFT, .bin."""
    folder = shutil.copytree(trained[0], tmp_path / "llava-v1.5-7b-lora")
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    projector = torch.load(folder / NON_LORA_FILE, weights_only=True)
    torch.save({name: tensor.half() for name, tensor in projector.items()}, folder / NON_LORA_FILE)
    golden = json.loads((GOLDEN / "train/s2_lora.json").read_text())["files"]["adapter_config.json"]["json"]
    config = golden | {"base_model_name_or_path": "lmsys/vicuna-7b-v1.5", "lora_alpha": 8, "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    llava = json.loads((folder / "config.json").read_text()) | {"model_type": "llava", "use_mm_proj": True}
    del llava["mm_vision_config"]
    (folder / "config.json").write_text(json.dumps(llava))

    state = load(folder, tiny / "llama").state_dict()
    for name, tensor in closed_form(folder, load_file(tiny / "llama/model.safetensors")).items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5, msg=name)
    for name, tensor in projector.items():
        assert torch.equal(state[name.removeprefix(PREFIX)], tensor.half().float())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("adapter_config.json", {"use_dora": True}, "or DoRA's; only commit 382b45f can load them"),
        ("adapter_config.json", {"target_modules": "model.layers.0.mlp.up_proj"}, "adapters of the vision tower"),
        ("adapter_config.json", {"base_model_name_or_path": "/old/llama"}, "path is /old/llama.* as --model-base"),
        ("config.json", {"mm_vision_tower": "/old/siglip"}, "/old/siglip cannot be loaded.*mm_vision_tower in the"),
    ],
)
def test_a_folder_that_cannot_be_merged_is_refused_by_name(trained, tmp_path, capsys, file, changes, message):
    folder = shutil.copytree(trained[0], tmp_path / "lora")
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    assert merge_lora.main(["--model-path", str(folder), "--save-model-path", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_base_of_other_depth_is_refused(tiny, tmp_path, trained):
    base = shutil.copytree(tiny / "llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 1}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"14 have no layer \(first: model.layers.1.*0 layers have none"):
        load(trained[0], base)


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


def test_merge_never_writes_over_anything(trained, capsys):
    assert merge_lora.main(["--model-path", str(trained[0]), "--save-model-path", str(trained[0])]) == 2
    assert f"error: --save-model-path {trained[0]}: exists" in capsys.readouterr().err


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
    loading = {"device": "cpu", "torch_dtype": "bfloat16", "load_4bit": bits == 4, "load_8bit": bits == 8}
    _, loaded, _, _ = load_pretrained_model(str(tmp_path / "run"), str(tiny / "llama"), "x", **loading)
    _, complete, _, _ = load_pretrained_model(our_checkpoint(tiny, tmp_path / "whole"), None, "x", **loading)
    quantised = {n for n, p in complete.named_parameters() if p.dtype in (torch.uint8, torch.int8)}
    assert quantised and all(name.startswith("model.layers.") for name in quantised)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = logits(loaded), logits(model)
        model.disable_adapters()
        without = logits(model)
    assert (found - wanted).abs().max() < 0.1 * (without - wanted).abs().max()  # bf16 arithmetic
