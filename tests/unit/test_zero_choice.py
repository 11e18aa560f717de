"""`--deepspeed auto`: the model by which it decides, and the flags that it adds."""

from types import SimpleNamespace

import pytest
import torch
from training import LM_AND_PROJECTOR, LORA, flags

from llava.train import zero_choice
from llava.train.arguments import choice
from llava.train.building import build_model
from llava.train.flags import FlagParser, parse_flags
from llava.train.memory import estimate_memory

MODEL = ["--model_name_or_path", "model"]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model", ["llama", "qwen_tied"])
def test_the_estimate_of_a_model_without_weights_is_that_of_the_loaded_one(tiny, tmp_path, model, lora):
    overrides = {"mm_tunable_parts": LM_AND_PROJECTOR} | LORA if lora else {}
    model_args, data_args, args = parse_flags(flags(tiny, tmp_path, 2, model=model, norm="none", **overrides))
    planned = estimate_memory(zero_choice.planned_model(model_args, args), args, 64)
    assert planned == estimate_memory(build_model(model_args, data_args, args), args, 64)


@pytest.mark.parametrize(
    ("usable", "words", "zero", "compiles"),
    [
        (100, [], 2, True),
        (99, [], 3, False),
        (100, ["--compile_layers", "False"], 2, False),
        (100, ["--use_liger_kernel"], 2, False),
        (100, ["--use_liger_kernel", "auto"], 2, True),
        (100, ["--lora_enable"], 2, False),
    ],
)
def test_auto_compiles_layers_that_fit_unless_the_user_says_otherwise(monkeypatch, usable, words, zero, compiles):
    def parsed(argv):
        given = FlagParser().parse_known_args(argv)[0]
        fields = {name: getattr(given, name) for name in ("bits", "lora_enable", "lora_use_dora", "padding_free")}
        fields["use_liger_kernel"] = choice("use_liger_kernel", given.use_liger_kernel, "auto")
        fields["device"] = torch.device("cuda")
        return None, None, SimpleNamespace(**fields, max_tokens_per_micro_batch=64, process_index=0)

    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    stubs = {"parse_flags": parsed, "fit_zero": lambda *_: None, "memory_budget": lambda *_: usable}
    stubs |= {"planned_model": lambda *_: SimpleNamespace(config=config), "which": lambda program: program}
    stubs["estimate_memory"] = lambda *_: SimpleNamespace(total=lambda plan: 100)
    for name, stub in stubs.items():
        monkeypatch.setattr(zero_choice, name, stub)
    given = FlagParser().parse_known_args(zero_choice.resolve_auto([*MODEL, "--deepspeed", "auto", *words]))[0]
    assert (given.deepspeed, given.compile_layers == "True") == (f"deepspeed_configs/zero{zero}.json", compiles)


def test_without_auto_the_command_line_stays():
    for words in ([], ["--deepspeed", "auto", "--deepspeed", ""], ["--deepspeed", "deepspeed_configs/zero3.json"]):
        assert zero_choice.resolve_auto([*MODEL, *words]) == [*MODEL, *words]
