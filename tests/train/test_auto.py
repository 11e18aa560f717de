"""`--deepspeed auto`: the model by which it decides, and the flags that it adds."""

from types import SimpleNamespace

import pytest
import torch
from training import LM_AND_PROJECTOR, LORA, flags, training_arguments

from benchmarks import scale
from llava.train import memory
from llava.train.arguments import parse_flags
from llava.train.build import build_model
from llava.train.memory import estimate_memory

MODEL = ["--model_name_or_path", "model"]


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
        memory.resolve_auto([*MODEL, "--deepspeed", "auto"])


def test_without_auto_the_command_line_stays():
    for words in ([], ["--deepspeed", "auto", "--deepspeed", ""], ["--deepspeed", "deepspeed_configs/zero3.json"]):
        assert memory.resolve_auto([*MODEL, *words]) == [*MODEL, *words]


# --- the presets for one card -----------------------------------------------------------------------------------------

FIXED = ("llama-3.2-3b", "qwen2.5-7b")
"""Presets that name DeepSpeed's file and the cap themselves."""


@pytest.fixture(
    scope="module",
    params=[r for r in scale.RECIPES if r.name not in FIXED and (r.stage, r.lora) == (2, False)],
    ids=lambda recipe: recipe.name,
)
def recipe(request):
    run = request.param.resolved()
    return request.param, run, scale.build(request.param, run["flags"])


@pytest.mark.slow
def test_every_preset_for_one_card_fits_on_cards_of_24_48_and_80_gb_alone_and_by_eight(recipe):
    _, run, model = recipe
    assert (run["flags"]["deepspeed"], run["flags"]["max_tokens_per_micro_batch"]) == ("auto", "auto")
    for count in scale.COUNTS:
        for card in scale.CARDS:
            args = scale.arguments(run["flags"], count)
            choice = memory.choose(model, args, card.budget, memory.AUTO)
            assert choice.needed <= card.budget, (card, count)
            assert choice.tokens >= args.model_max_length  # no sample is longer
            if choice.recomputes or choice.tokens == memory.MOST_TOKENS:
                continue
            # One more step of the cap would not fit.
            more = memory.estimate_under(choice.zero, model, args, choice.tokens + 512)
            assert more.total() > card.budget


def test_a_cap_by_memory_needs_deepspeed_auto(tmp_path):
    args = training_arguments(tmp_path, max_tokens_per_micro_batch="auto")
    assert args.max_tokens_per_micro_batch == "auto"
    with pytest.raises(ValueError, match="many"):
        training_arguments(tmp_path, max_tokens_per_micro_batch="many")
