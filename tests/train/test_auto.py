"""`--deepspeed auto`: the model by which it decides, and the flags that it adds."""

import os
from types import SimpleNamespace

import pytest
import torch
from training import LM_AND_PROJECTOR, LORA, flags, training_arguments

from benchmarks import scale
from benchmarks.shapes import PRESETS, build_llava, sizes_of
from llava.train import memory
from llava.train.arguments import parse_flags, read_flags
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


def chosen(monkeypatch, usable, words, ranks=2):
    """The file of DeepSpeed, where runs take what `Estimate` says, on GPUs."""

    def parsed(argv):
        given = read_flags(argv)
        cap = given.max_tokens_per_micro_batch or 64
        cap = cap if cap == "auto" else int(cap)
        fields = {"max_tokens_per_micro_batch": cap, "use_liger_kernel": False}
        fields |= {"device": torch.device("cuda"), "world_size": ranks, "model_max_length": 64, "process_index": 0}
        return None, None, SimpleNamespace(**fields)

    stubs = {"parse_flags": parsed, "memory_budget": lambda *_: usable, "planned_model": lambda *_: None}
    stubs["gather_object"] = lambda values: values  # without a group of ranks
    stubs["layers_to_recompute"] = lambda requested, *_: requested
    stubs["estimate_under"] = lambda zero, *_: Estimate(zero)
    for name, stub in stubs.items():
        monkeypatch.setattr(memory, name, stub)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    given = read_flags(memory.resolve_auto([*MODEL, "--deepspeed", "auto", *words]))
    assert ("RANK" in os.environ) == bool(given.deepspeed)  # without DeepSpeed one process has no ranks
    cap = memory.MOST_TOKENS if given.deepspeed in ("", memory.ZERO_2) and usable >= 100 else 64  # else the longest
    assert given.max_tokens_per_micro_batch == (str(cap) if words[:1] == ["--max_tokens_per_micro_batch"] else None)
    return given.deepspeed


@pytest.mark.parametrize(("usable", "zero"), [(100, 2), (99, 3)])
def test_auto_chooses_the_size_of_micro_batches_too(monkeypatch, usable, zero):
    words = ["--max_tokens_per_micro_batch", "auto"]
    assert chosen(monkeypatch, usable, words) == f"deepspeed_configs/zero{zero}.json"


@pytest.mark.parametrize(
    ("usable", "ranks", "zero"),
    [(100, 1, ""), (90, 1, ""), (89, 1, "zero3_offload"), (50, 2, "zero3"), (49, 2, "zero3_offload")],
)
def test_auto_takes_no_deepspeed_on_one_card_splits_over_several_and_offloads_at_last(monkeypatch, usable, ranks, zero):
    assert chosen(monkeypatch, usable, [], ranks) == (zero and f"deepspeed_configs/{zero}.json")


def test_one_rank_that_sees_several_gpus_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="set CUDA_VISIBLE_DEVICES to one"):
        memory.resolve_auto([*MODEL, "--deepspeed", "auto"])


def test_without_auto_the_command_line_stays():
    for words in ([], ["--deepspeed", "auto", "--deepspeed", ""], ["--deepspeed", "deepspeed_configs/zero3.json"]):
        assert memory.resolve_auto([*MODEL, *words]) == [*MODEL, *words]


# --- the presets for one card -----------------------------------------------------------------------------------------

PUBLISHED = {"qwen3-0.6b": 0.596, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086}
"""Billions of weights, as the models' cards say."""
FIXED = ("llama-3.2-3b", "qwen2.5-7b")
"""Presets that name DeepSpeed's file and the cap themselves."""


@pytest.fixture(
    scope="module",
    params=[r for r in scale.RECIPES if r.name not in FIXED],
    ids=lambda recipe: f"{recipe.name} {recipe.label}",
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
            choice = memory.choose(model, args, card.budget, None)
            assert choice.needed <= card.budget, (card, count)
            assert choice.tokens >= args.model_max_length  # no sample is longer
            if choice.recomputes or choice.tokens == memory.MOST_TOKENS:
                continue
            # One more step of the cap would not fit.
            more = memory.estimate_under(choice.zero, model, args, choice.tokens + 512)
            assert more.total() > card.budget


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_weights(name):
    preset = next(preset for preset in PRESETS.values() if preset.name == name)
    model = build_llava(preset, torch.device("meta"), torch.bfloat16)
    model.tie_weights()
    decoder = model.get_model()
    parts = (decoder.embed_tokens, decoder.layers, decoder.norm)
    assert sizes_of(name)["tie_word_embeddings"]
    assert sum(p.numel() for part in parts for p in part.parameters()) / 1e9 == pytest.approx(PUBLISHED[name], abs=1e-3)


def test_a_cap_by_memory_needs_deepspeed_auto(tmp_path):
    args = training_arguments(tmp_path, max_tokens_per_micro_batch="auto")
    assert args.max_tokens_per_micro_batch == "auto"
    with pytest.raises(ValueError, match="many"):
        training_arguments(tmp_path, max_tokens_per_micro_batch="many")
