"""Operations and memory: what is counted equals hand counts, PyTorch's own counter, and what autograd really keeps."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from activations import Kept, kept_by_one_layer
from batches import IMG, collated
from counted_operations import assert_counted_operations_equal_pytorchs_counter, no_rotary_product
from tiny_models import STAGE_1, STAGE_2, make, trained
from training import LM_AND_PROJECTOR, LORA, flags, training_arguments
from transformers.training_args import OptimizerNames

from llava.model.attention import SEGMENTS
from llava.model.lora import add_lora
from llava.train import memory
from llava.train.arguments import parse_flags
from llava.train.build import build_model
from llava.train.memory import MemoryEstimate, estimate_memory, layers_to_recompute, rows_of_cards
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, set_trainable
from llava.train.zero import check_zero, fit_zero, gathered_units

V = 4  # visual tokens per image: 16 px in patches of 8


@no_rotary_product
@pytest.mark.parametrize(
    ("tower", "case"), [("siglip", "stage 1"), ("clip", "stage 2"), ("siglip", "decoder only"), ("clip", "lora")]
)
def test_counted_operations_equal_pytorchs_counter(tiny, tower, case):
    parts = {"stage 1": STAGE_1, "decoder only": {LANGUAGE_MODEL}, "lora": {ADAPTER, LANGUAGE_MODEL}}
    model = make(tiny, tower=tower).train()
    if case == "lora":
        add_lora(model, r=4, alpha=8, dropout=0.0, dtype=torch.float32)
    set_trainable(model, frozenset(parts.get(case, STAGE_2)))
    assert_counted_operations_equal_pytorchs_counter(model, collated([[5, IMG, *range(6, 40), IMG, 41]]))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("parts", [STAGE_1, STAGE_2])
def test_a_layers_activations_are_what_autograd_keeps(tiny, tmp_path, parts, autocast):
    model, tokens = trained(tiny, parts), 64
    model.config._attn_implementation = SEGMENTS
    estimate = estimate_memory(model, training_arguments(tmp_path, bf16=autocast), tokens)
    assert estimate.layer == pytest.approx(kept_by_one_layer(model, tokens, autocast), rel=0.1)


def test_lora_and_tower_activations_are_what_autograd_keeps(tiny, tmp_path):
    model, tokens = make(tiny).train(), 64
    add_lora(model, r=4, alpha=8, dropout=0.1, dtype=torch.float32)
    set_trainable(model, STAGE_2)
    model.config._attn_implementation = SEGMENTS
    estimate = estimate_memory(model, training_arguments(tmp_path), tokens)
    assert estimate.layer == pytest.approx(kept_by_one_layer(model, tokens, False), rel=0.1)
    tower = model.get_vision_tower()
    images = tokens // V
    hidden = torch.randn(images, V, tower.hidden_size, requires_grad=True)
    with Kept(model) as kept:
        tower.layers[0](hidden, attention_mask=None)
    assert estimate.tower_layer == pytest.approx(kept.bytes(), rel=0.15)


def test_the_frozen_tower_keeps_nothing(tiny, monkeypatch):
    model = trained(tiny, STAGE_1)
    monkeypatch.setattr(model.get_model(), "mm_projector", torch.nn.Identity())
    with Kept(model) as kept:
        model.encode_images(torch.randn(3, 3, 16, 16))
    assert not kept.storages


def zero_arguments(stage: int, ranks: int, offload: str = "none", **overrides) -> SimpleNamespace:
    config = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": offload}}}
    config |= overrides.pop("config", {})
    fields = {"deepspeed": "zero.json", "hf_deepspeed_config": SimpleNamespace(config=config), "world_size": ranks}
    fields |= {"optim": "adamw_torch", "bf16": True, "fp16": False, "use_liger_kernel": False}
    return SimpleNamespace(device=torch.device("cuda"), **(fields | overrides))


def test_states_are_divided_as_zero_divides_them(tiny):
    model = trained(tiny, STAGE_2).bfloat16()
    elements = sum(p.numel() for p in model.parameters())
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def states(*args, **kwargs):
        estimate = estimate_memory(model, zero_arguments(*args, **kwargs), 64)
        return estimate.parameters, estimate.gradients, estimate.optimizer

    assert states(2, 4) == (2 * elements, 2 * learnt // 4, 12 * (learnt // 4))
    assert states(3, 4) == (2 * elements + 2 * elements // 4, 2 * learnt // 4, 12 * (learnt // 4))
    assert states(3, 1) == (2 * elements, 2 * learnt, 12 * learnt)  # a rank that is alone gathers nothing
    assert states(2, 4, offload="cpu") == (2 * elements, 0, 0)
    assert states(1, 4, optim=OptimizerNames("adamw_bnb_8bit")) == (2 * elements, 2 * learnt, 6 * (learnt // 4))


def test_without_deepspeed_16_bit_weights_have_masters_and_fp32_copies(tiny, tmp_path):
    for dtype, stored, beside in ((torch.bfloat16, 2, 4 + 8), (torch.float32, 4 + 2, 8)):
        model = trained(tiny, STAGE_2).to(dtype)
        elements = sum(p.numel() for p in model.parameters())
        learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
        frozen = (elements - learnt) * dtype.itemsize
        estimate = estimate_memory(model, training_arguments(tmp_path, bf16=True), 64)
        assert estimate.parameters == frozen + stored * learnt
        assert (estimate.gradients, estimate.optimizer) == (4 * learnt, beside * learnt)


def test_gradients_added_up_in_fp32_and_deepspeeds_buckets_are_counted(tiny):
    model = trained(tiny, STAGE_2).bfloat16()
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def gradients(stage, **config):
        return estimate_memory(model, zero_arguments(stage, 4, config=config), 64).gradients

    for stage in (2, 3):
        assert gradients(stage, data_types={"grad_accum_dtype": "fp32"}) == 4 * learnt // 4
        for size in (1000, 1e3):  # files write numbers as 5e8, too
            zero = {"stage": stage, "reduce_bucket_size": size}
            assert gradients(stage, zero_optimization=zero) == 2 * learnt // 4 + 2 * 1000 * 2


def test_a_bucket_holds_a_layer_and_every_layer_is_gathered_at_once(tiny):
    model = trained(tiny, STAGE_2)
    layer = sum(p.numel() for p in model.get_model().layers[0].parameters())
    auto = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")
    for stage, marked in ((2, 0), (3, 4)):
        arguments = zero_arguments(stage, 4, config={"zero_optimization": {"stage": stage, **auto}})
        fit_zero(model, arguments)
        zero = arguments.hf_deepspeed_config.config["zero_optimization"]
        assert "overlap_comm" not in zero and zero["reduce_bucket_size"] == layer
        assert zero["stage3_prefetch_bucket_size"] == (layer if stage == 3 else "auto")
        assert sum(getattr(module, "_z3_leaf", False) for module in model.modules()) == marked
    alone = zero_arguments(
        3, 1, config={"zero_optimization": {"stage": 3, "reduce_bucket_size": 5, "overlap_comm": True}}
    )
    fit_zero(model, alone)
    zero = alone.hf_deepspeed_config.config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 5 and not zero["overlap_comm"]


@pytest.mark.parametrize(
    ("sections", "option", "fault"),
    [
        ({}, {"leaf_module": {"classes": ["Layer"]}}, "leaf_module: this trainer does not take it"),
        ({}, {"stage3_gather_16bit_weights_on_model_save": False}, "stage3_gather_16bit_weights_on_model_save must be"),
        ({"optimizer": {}, "scheduler": {}}, {}, "optimizer, scheduler: flags decide this"),
    ],
)
def test_what_gives_wrong_numbers_or_no_weights_under_zero_is_refused_by_name(sections, option, fault):
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    check_zero(zero_arguments(3, 2, config={"zero_optimization": zero}))
    with pytest.raises(ValueError, match=f"--deepspeed zero.json: {fault}"):
        check_zero(zero_arguments(3, 2, config=sections | {"zero_optimization": zero | option}))


def test_a_layer_without_input_gradient_is_gathered_module_by_module(tiny):
    """DeepSpeed would reduce its gradients before they are computed."""
    stage_1, stage_2 = trained(tiny, STAGE_1), trained(tiny, STAGE_2)
    for model in (stage_1, stage_2):
        assert [*gathered_units(model)] == [*model.get_model().layers, *model.get_vision_tower().layers]
    lora = make(tiny).train()
    add_lora(lora, r=4, alpha=8, dropout=0.0, dtype=torch.float32)
    set_trainable(lora, {ADAPTER, LANGUAGE_MODEL})
    assert [*gathered_units(lora)] == [*lora.get_model().layers[1:], *lora.get_vision_tower().layers]


def estimate_of(**fields) -> MemoryEstimate:
    zeros = dict.fromkeys((f.name for f in dataclasses.fields(MemoryEstimate)), 0)
    return MemoryEstimate(**(zeros | {"parameters": 100, "num_layers": 4, "layer": 50, "layer_input": 10} | fields))


@pytest.mark.parametrize(
    ("requested", "budget", "expected"),
    [
        (False, 0, 0),
        (True, 10**6, 4),
        (3, 0, 3),
        ("auto", 100 + 50 + 200 + 2 * 30, 0),  # parameters, working space, four layers, tower
        ("auto", 409, 1),
        ("auto", 409 - 40, 2),
        ("auto", 100, 4),  # the tower's layers too
    ],
)
def test_auto_recomputes_as_few_layers_as_needed(requested, budget, expected):
    estimate = estimate_of(tower_layers=2, tower_layer=30, tower_layer_input=5)
    assert layers_to_recompute(requested, estimate, budget) == expected
    if requested == "auto" and expected < 4:
        assert estimate.total(expected) <= budget
        assert not expected or estimate.total(expected - 1) > budget
    assert estimate.total(4) == 100 + 50 + 4 * 10 + 2 * 5


def test_the_loss_head_and_a_layers_backward_pass_do_not_add_up():
    """As measured on an H200: the peak is in the loss where that is larger, else in the last layer's backward pass."""
    kept = 100 + 4 * 50
    assert estimate_of(loss_head=80).total() == kept + 80
    assert estimate_of(loss_head=20).total() == kept + 50


@pytest.mark.parametrize("zero", ["auto", "deepspeed_configs/zero2.json"])
def test_a_card_that_is_too_small_is_named(tiny, tmp_path, zero):
    argv = flags(tiny, tmp_path, 2, deepspeed=zero, max_tokens_per_micro_batch=1024)
    small, large = rows_of_cards(argv, 8, (0, 24))
    assert "0 GB   DOES NOT FIT: " in small and "recomputing" in small
    assert "24 GB   0 of 22 GiB usable, micro-batches of 1024 tokens, zero2" in large and "recomputing" not in large


# --- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "lora", "bf16"),
    [("llama", False, True), ("llama", True, False), ("qwen_tied", False, False), ("qwen_tied", True, True)],
)
def test_the_estimate_of_a_model_without_weights_is_that_of_the_loaded_one(tiny, tmp_path, model, lora, bf16):
    overrides = {"bf16": bf16} | ({"mm_tunable_parts": LM_AND_PROJECTOR} | LORA if lora else {})
    model_args, data_args, args = parse_flags(flags(tiny, tmp_path, 2, model=model, norm="none", **overrides))
    args.deepspeed, args.hf_deepspeed_config = "zero2.json", SimpleNamespace(config={"zero_optimization": {"stage": 2}})
    planned = estimate_memory(memory.planned_model(model_args, args), args, 64)
    assert planned == estimate_memory(build_model(model_args, data_args, args), args, 64)


class Estimate:
    """100 bytes, of which recomputation saves 10, or 50 under ZeRO-3; offload takes 20."""

    def __init__(self, zero):
        self.zero = zero

    def total(self, recomputed):
        if self.zero == memory.OFFLOAD:
            return 20
        return 100 if not recomputed else 50 if self.zero == memory.ZERO_3 else 90


@pytest.mark.parametrize(
    ("usable", "ranks", "tokens", "expected"),
    [
        (100, 1, 64, ""),
        (90, 1, 64, ""),
        (89, 1, 64, "zero3_offload"),
        (50, 2, 64, "zero3"),
        (49, 2, 64, "zero3_offload"),
        (100, 2, None, "zero2"),
        (99, 2, None, "zero3"),
    ],
)
def test_auto_takes_no_deepspeed_on_one_card_splits_over_several_and_offloads_at_last(
    monkeypatch, usable, ranks, tokens, expected
):
    monkeypatch.setattr(memory, "layers_to_recompute", lambda requested, *_: requested)
    monkeypatch.setattr(memory, "estimate_under", lambda zero, *_: Estimate(zero))
    args = SimpleNamespace(device=torch.device("cuda"), world_size=ranks, model_max_length=64)
    choice = memory.choose(None, args, usable, tokens or memory.AUTO)
    assert choice.zero == (expected and f"deepspeed_configs/{expected}.json")
    assert choice.tokens == (memory.MOST_TOKENS if tokens is None and expected == "zero2" else 64)  # else the longest


def test_one_rank_that_sees_several_gpus_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="set CUDA_VISIBLE_DEVICES to one"):
        memory.resolve_auto(["--model_name_or_path", "model", "--deepspeed", "auto"])
