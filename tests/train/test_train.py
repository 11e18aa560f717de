"""Both stages through the real entry point: what is trained, written, refused and resumed."""

import json
import shutil

import pytest
import torch
from data_files import write_varied
from safetensors.torch import load_file
from training import flags, logged, losses, run, same, stopped

from llava.model.builder import load_pretrained_model
from llava.model.multimodal_projector.norm import mean_text_embedding_norm
from llava.train import train as train_module
from llava.train.arguments import ModelArguments
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, VISION_TOWER, tunable_parts


def build(tiny, tmp_path, stage, **overrides):
    """The model before the first step."""
    parsed = train_module.parse_arguments(flags(tiny, tmp_path / "unused", stage, **overrides))
    return train_module.build_model(*parsed)


@pytest.fixture(scope="module")
def stage_1(tiny, tmp_path_factory):
    """A finished stage-1 folder with gwc_layernorm."""
    folder = tmp_path_factory.mktemp("stage1") / "run"
    train_module.train(flags(tiny, folder, 1, max_steps=6, save_strategy="steps", save_steps=3))
    return folder


def test_stage_1_trains_projector_and_norm_only(tiny, stage_1):
    weights = load_file(stage_1 / "model.safetensors")
    language_model, tower = (
        load_file(tiny / "llama" / "model.safetensors"),
        load_file(tiny / "siglip/model.safetensors"),
    )
    for name, tensor in language_model.items():
        assert torch.equal(weights[name], tensor)
    for name, tensor in weights.items():
        if "vision_tower" in name:
            assert torch.equal(tensor, tower[name.split("vision_model.")[1]])
    config = json.loads((stage_1 / "config.json").read_text())
    gain = weights["model.mm_projector.3.weight"]
    assert (gain - config["mm_projector_norm_init_gain"]).abs().max() > 1e-4
    adapter = torch.load(stage_1 / "mm_projector.bin", weights_only=True)
    assert sorted(adapter) == sorted(k for k in weights if "mm_projector" in k)
    assert all(torch.equal(adapter[k], weights[k]) for k in adapter)


def test_target_is_measured_and_recorded(tiny, stage_1):
    config = json.loads((stage_1 / "config.json").read_text())
    embedding = load_file(tiny / "llama/model.safetensors")["model.embed_tokens.weight"]
    target = mean_text_embedding_norm(embedding)
    assert config["mm_projector_norm_target"] == pytest.approx(target, rel=1e-6)
    assert config["mm_projector_norm_init_gain"] == pytest.approx(target / embedding.shape[1] ** 0.5, rel=1e-6)
    assert logged(stage_1)[0]["norm/llm_input"] == pytest.approx(target, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "norm"),
    [
        ("llama", "none"),
        ("qwen_tied", "gwc_rmsnorm"),
        ("llama", "clip"),
    ],
)
def test_both_stages_and_inference_from_the_folder_alone(tiny, tmp_path, model, norm):
    run(tiny, tmp_path / "s1", 1, model=model, norm=norm)
    weights, _ = run(
        tiny, tmp_path / "s2", 2, model=model, norm=norm, pretrain_mm_mlp_adapter=tmp_path / "s1/mm_projector.bin"
    )
    moved = shutil.move(tmp_path / "s2", tmp_path / "moved")
    tokenizer, loaded, image_processor, context_len = load_pretrained_model(str(moved), None, "llava")
    assert loaded.get_vision_tower().num_tokens == 4 and image_processor.size["height"] == 16 and context_len == 512
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert ("model.mm_projector.3.weight" in state) == (norm != "none")


def test_intermediate_stage_1_folder_loads_on_its_language_model(tiny, stage_1):
    folder = stage_1 / "checkpoint-3"
    assert not (folder / "model.safetensors").exists()
    _, model, image_processor, _ = load_pretrained_model(str(folder), str(tiny / "llama"), "llava")
    adapter = torch.load(folder / "mm_projector.bin", weights_only=True)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in adapter.items())
    language_model, tower = load_file(tiny / "llama/model.safetensors"), load_file(tiny / "siglip/model.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in language_model.items())
    fc1 = "encoder.layers.0.mlp.fc1.weight"
    assert torch.equal(state[f"model.vision_tower.vision_tower.vision_model.{fc1}"], tower[fc1])
    assert not model.training and image_processor is not None


def test_stage_2_takes_the_norm_bit_for_bit_and_trains_every_part(tiny, tmp_path, stage_1):
    trained = torch.load(stage_1 / "mm_projector.bin", weights_only=True)
    model = build(tiny, tmp_path, 2, pretrain_mm_mlp_adapter=stage_1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert all(torch.equal(before[k], v) for k, v in trained.items())
    after, _ = run(tiny, tmp_path / "s2", 2, pretrain_mm_mlp_adapter=stage_1)
    for part in ("mm_projector.3.weight", "layers.0.mlp", "lm_head", "embed_tokens", "encoder.layers.1.mlp.fc1.weight"):
        assert any(part in name and not torch.equal(after[name], before[name]) for name in after), part


@pytest.mark.parametrize(
    ("overrides", "both_sides"),
    [
        ({"norm": "none"}, r"3\.weight: adapter \(32,\), flags have none"),
        ({"norm": "layernorm"}, "adapter 'gwc_layernorm'.*flags 'layernorm'"),
        ({"mm_projector_norm_eps": 1e-6}, "norm_eps: adapter 1e-05.*flags 1e-06"),
    ],
)
def test_adapter_that_contradicts_the_flags_is_refused(tiny, tmp_path, stage_1, overrides, both_sides):
    with pytest.raises(ValueError, match=f"(?s)--pretrain_mm_mlp_adapter.*{both_sides}"):
        build(tiny, tmp_path, 2, pretrain_mm_mlp_adapter=stage_1, **overrides)


def test_checkpoint_with_projector_refuses_other_norm_flags(tiny, tmp_path, stage_1):
    with pytest.raises(ValueError, match="mm_projector_norm: checkpoint 'gwc_layernorm', flags 'none'"):
        build(tiny, tmp_path, 2, model_name_or_path=stage_1, norm="none")
    model = build(tiny, tmp_path, 2, model_name_or_path=stage_1, vision_tower=None)
    saved = load_file(stage_1 / "model.safetensors")
    assert all(torch.equal(model.state_dict()[k], v) for k, v in saved.items())


@pytest.mark.parametrize("tower", ["siglip", "other"])
def test_a_checkpoint_keeps_its_tower_and_image_processor_whatever_tower_the_flags_name(
    tiny, tmp_path, stage_1, caplog, tower
):
    base = shutil.copytree(stage_1, tmp_path / "base", ignore=shutil.ignore_patterns("checkpoint-*"))
    processor = json.loads((base / "preprocessor_config.json").read_text()) | {"image_mean": [0.1, 0.2, 0.3]}
    (base / "preprocessor_config.json").write_text(json.dumps(processor))
    run(tiny, tmp_path / "run", 2, model=base, tower=tower, max_steps=1)
    assert json.loads((tmp_path / "run/preprocessor_config.json").read_text())["image_mean"] == [0.1, 0.2, 0.3]
    settings = json.loads((tmp_path / "run/resume.json").read_text())["settings"]
    assert settings["vision_tower_files"] is None  # they are among the checkpoint's
    assert ("other is not read" in caplog.text) == (tower == "other")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, True)])
def test_resumed_run_equals_the_uninterrupted_one(tiny, tmp_path, stage, bf16):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "bf16": bf16}
    if stage == 2:  # where steps have 4 to 6 micro-batches
        options |= {"group_by_modality_length": True, "data_path": write_varied(tiny, tmp_path / "data.json")}
        options |= {"gradient_accumulation_steps": 2, "max_tokens_per_micro_batch": 450}
    whole, _ = run(tiny, tmp_path / "whole", stage, **options)
    stopped(tmp_path / "whole", 4, tmp_path / "resumed")
    (tmp_path / "resumed/checkpoint-6").mkdir()  # a crash while saving leaves an incomplete folder
    resumed, _ = run(tiny, tmp_path / "resumed", stage, **options)
    assert same(whole, resumed)
    continued, original = (logged(tmp_path / name, "step") for name in ("resumed", "whole"))
    assert [(x["step"], x.get("loss")) for x in continued] == [(x["step"], x.get("loss")) for x in original]


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 8), (4, 2)])
def test_accumulation_equals_one_large_batch(tiny, tmp_path, batch, accumulation):
    options = {"max_steps": 3, "adam_epsilon": 1e-4, "max_grad_norm": 1e9}
    large, _ = run(tiny, tmp_path / "large", 2, per_device_train_batch_size=8, **options)
    small, _ = run(
        tiny,
        tmp_path / "small",
        2,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **options,
    )
    for name in large:
        torch.testing.assert_close(small[name], large[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_loss_is_the_mean_over_targets_or_over_micro_batches(tiny, tmp_path):
    def trained(name: str, **overrides) -> list[float]:
        options = {"learning_rate": 0, "train_sampling_strategy": "sequential", "padding_free": False} | overrides
        train_module.train(flags(tiny, tmp_path / name, 2, **options))
        return losses(tmp_path / name)

    alone = trained("alone", max_steps=2)  # each micro-batch as a step of its own
    both = {"max_steps": 1, "gradient_accumulation_steps": 2}
    over_micro_batches = trained("micro", loss_reduction="micro_batch_mean", **both)
    packed = trained("packed", loss_reduction="micro_batch_mean", **both | {"padding_free": True})
    assert packed == pytest.approx(over_micro_batches, abs=1e-6)
    over_targets = trained("token", **both)
    assert over_micro_batches == [pytest.approx(sum(alone) / 2, abs=1e-5)]
    assert abs(over_targets[0] - over_micro_batches[0]) > 2e-5 and min(alone) < over_targets[0] < max(alone)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stage"), [("True", 1), (1, 2)])
def test_activation_checkpointing_changes_nothing(tiny, tmp_path, layers, stage):
    plain, _ = run(tiny, tmp_path / "plain", stage, activation_checkpointing=False)
    checkpointed, _ = run(tiny, tmp_path / "ckpt", stage, activation_checkpointing=layers)
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("flag", "trained"), [("mm_vision_tower_lr", ADAPTER), ("mm_projector_lr", LANGUAGE_MODEL)])
def test_a_rate_of_a_part_that_is_not_trained_is_named(tiny, tmp_path, caplog, flag, trained):
    build(tiny, tmp_path, 2, mm_tunable_parts=trained, **{flag: 2e-6})
    assert [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()] == [
        f"--{flag} has no effect: {VISION_TOWER if 'tower' in flag else ADAPTER} is not trained; leave it out"
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data_path": "/nowhere.json"}, "--data_path /nowhere.json: no such file"),
        (
            {"data_path": "/nowhere.json", "version": "qwen_3", "label_masking": "upstream"},
            "pass --label_masking assistant",
        ),
        ({"vision_tower": None}, "--vision_tower is missing"),
        ({"mm_tunable_parts": "mm_mlp_adapter"}, "leave out --tune_mm_mlp_adapter"),
        ({"activation_checkpointing": 9}, "--activation_checkpointing 9: the language model has 2 layers"),
        (
            {"dataloader_drop_last": True, "per_device_train_batch_size": 25},
            "--dataloader_drop_last True leaves no step: a step has 25 samples, the data has 24",
        ),
        ({"norm": "none", "mm_projector_norm_init": 0.5}, "_norm_init has no effect with --mm_projector_norm none"),
        ({"max_tokens_per_micro_batch": 9, "padding_free": False}, "_micro_batch needs --padding_free True"),
        (
            {"train_sampling_strategy": "sequential", "group_by_modality_length": True},
            "sequential does not go with --group_by_modality_length True",
        ),
        ({"model_max_length": 0}, "--model_max_length: expected a positive number, found 0"),
        ({"norm": "none", "mm_projector_type": "identity"}, "identity: vision width 24 differs from the LLM's 32"),
        ({"optim": "schedule_free_adamw"}, "--optim schedule_free_adamw: its averaged weights"),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.5}, "constant has no warm-up; take constant_with_warmup"),
    ],
)
def test_bad_flags_are_named(tiny, tmp_path, overrides, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_module.train(flags(tiny, tmp_path, 1, **overrides))


@pytest.mark.parametrize("change", [{"mm_vision_select_layer": -1}, {"mm_vision_select_feature": "cls_patch"}])
def test_an_adapter_trained_on_other_features_of_the_tower_is_refused(tiny, tmp_path, change):
    train_module.train(flags(tiny, tmp_path / "one", 1, tower="clip", max_steps=1, **change))
    adapter = str(tmp_path / "one/mm_projector.bin")
    with pytest.raises(ValueError, match=f"{[*change][0]}: adapter .*its config.json.*, flags"):
        train_module.train(flags(tiny, tmp_path / "two", 2, tower="clip", pretrain_mm_mlp_adapter=adapter))


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("", {ADAPTER, LANGUAGE_MODEL}),
        ("freeze_backbone", {ADAPTER}),
        ("tune_mm_mlp_adapter", {ADAPTER}),
        ("freeze_mm_mlp_adapter", {LANGUAGE_MODEL}),
        ("unfreeze_mm_vision_tower", {ADAPTER, LANGUAGE_MODEL, VISION_TOWER}),
        ("freeze_backbone freeze_mm_mlp_adapter", "the flags leave nothing to train"),
        ("tune_mm_mlp_adapter freeze_mm_mlp_adapter", "contradict each other"),
    ],
)
def test_llavas_own_flags_say_what_is_trained(given, parts):
    model_args = ModelArguments(model_name_or_path="m", vision_tower="v", **dict.fromkeys(given.split(), True))
    if isinstance(parts, set):
        assert tunable_parts(model_args) == parts
    else:
        with pytest.raises(ValueError, match=parts):
            tunable_parts(model_args)


def test_checkpoint_without_the_optimizers_state_is_not_continued(tiny, tmp_path):
    """With `--save_only_model` the library would go on with a fresh optimizer."""
    options = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    train_module.train(flags(tiny, tmp_path, 2, **options))
    (tmp_path / "complete.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-2 holds no optimizer state.*remove the folder"):
        train_module.train(flags(tiny, tmp_path, 2, **options))
