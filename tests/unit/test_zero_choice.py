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


@pytest.mark.parametrize(
    ("model", "lora", "bf16"),
    [("llama", False, True), ("llama", True, False), ("qwen_tied", False, False), ("qwen_tied", True, True)],
)
def test_the_estimate_of_a_model_without_weights_is_that_of_the_loaded_one(tiny, tmp_path, model, lora, bf16):
    overrides = {"bf16": bf16} | ({"mm_tunable_parts": LM_AND_PROJECTOR} | LORA if lora else {})
    model_args, data_args, args = parse_flags(flags(tiny, tmp_path, 2, model=model, norm="none", **overrides))
    args.deepspeed, args.hf_deepspeed_config = "zero2.json", SimpleNamespace(config={"zero_optimization": {"stage": 2}})
    planned = estimate_memory(zero_choice.planned_model(model_args, args), args, 64)
    assert planned == estimate_memory(build_model(model_args, data_args, args), args, 64)


def chosen(monkeypatch, usable, words):
    """The ZeRO stage and whether layers are compiled, where ZeRO-2 takes 100 of `usable` bytes on a GPU."""

    def parsed(argv):
        given = FlagParser().parse_known_args(argv)[0]
        fields = {name: getattr(given, name) for name in ("bits", "lora_enable", "lora_use_dora", "padding_free")}
        fields["use_liger_kernel"] = choice("use_liger_kernel", given.use_liger_kernel, "auto")
        fields["device"] = torch.device("cuda")
        return None, None, SimpleNamespace(**fields, max_tokens_per_micro_batch=64, process_index=0)

    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    stubs = {"parse_flags": parsed, "fit_zero": lambda *_: None, "memory_budget": lambda *_: usable}
    stubs |= {"planned_model": lambda *_: SimpleNamespace(config=config), "missing_compiler": lambda: None}
    stubs["estimate_memory"] = lambda *_: SimpleNamespace(total=lambda plan: 100)
    for name, stub in stubs.items():
        monkeypatch.setattr(zero_choice, name, stub)
    given = FlagParser().parse_known_args(zero_choice.resolve_auto([*MODEL, "--deepspeed", "auto", *words]))[0]
    return given.deepspeed, given.compile_layers == "True"


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
    assert chosen(monkeypatch, usable, words) == (f"deepspeed_configs/zero{zero}.json", compiles)


@pytest.mark.parametrize("usable", [99, 100])
@pytest.mark.parametrize("words", [["--bits", "4"], ["--bits", "8"], ["--lora_use_dora"]])
def test_auto_takes_zero2_uncompiled_for_quantised_and_dora_runs(monkeypatch, usable, words):
    assert chosen(monkeypatch, usable, words) == ("deepspeed_configs/zero2.json", False)


@pytest.mark.parametrize(
    ("device", "attention", "missing", "lora", "compiles"),
    [
        ("cuda", "flash_attention_2", None, False, True),
        ("cpu", "flash_attention_2", None, False, False),
        ("cuda", "sdpa", None, False, False),
        ("cuda", "flash_attention_2", "Triton needs a C compiler", False, False),
        ("cuda", "flash_attention_2", None, True, False),
    ],
)
def test_layers_compile_on_a_gpu_with_a_kernel_a_compiler_and_no_adapters(
    monkeypatch, device, attention, missing, lora, compiles
):
    monkeypatch.setattr(zero_choice, "missing_compiler", lambda: missing)
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    args = SimpleNamespace(device=torch.device(device), lora_enable=lora)
    assert zero_choice.can_compile(model, args) is compiles


def test_without_auto_the_command_line_stays():
    for words in ([], ["--deepspeed", "auto", "--deepspeed", ""], ["--deepspeed", "deepspeed_configs/zero3.json"]):
        assert zero_choice.resolve_auto([*MODEL, *words]) == [*MODEL, *words]
