"""Rotary frequencies stay fp32, and exact, whatever ZeRO does to a model's buffers."""

import json
from pathlib import Path

import pytest
import rotary_under_zero
import torch
from decoder_families import NAMES, write_families
from paths import ROOT
from tiny_models import SIZES, byte_tokenizer, make
from training import flags, rotary_frequencies
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from two_ranks import run_on_ranks

pytestmark = pytest.mark.slow

# Kinds of frequencies besides each family's default; no factor is a number of bf16.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.7, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.07] * 4, "long_factor": [2.03] * 4} | {
    "original_max_position_embeddings": 32
}
SCALED = {
    "yarn": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=YARN)),
    "longrope": (Phi3ForCausalLM, Phi3Config(**SIZES, pad_token_id=0, rope_parameters=LONG)),
}
CASTING = "casting"  # the run of one step whose engine casts all buffers


@pytest.fixture(scope="module")
def models(tiny):
    """The folders in `tiny` of every family and of the scaled kinds."""
    write_families(tiny)
    for name, (model, config) in SCALED.items():
        model(config).save_pretrained(tiny / name)
        byte_tokenizer().save_pretrained(tiny / name)
    return [*(f"families/{name}" for name in NAMES), *SCALED]


@pytest.fixture(scope="module")
def seen(tiny, models, tmp_path_factory):
    """A function from a model, or CASTING, to the frequencies of the bf16 model that training has made of it."""
    folder = tmp_path_factory.mktemp("rotary")
    casting = json.loads((ROOT / "deepspeed_configs/zero2.json").read_text())
    casting["data_types"]["buffer_dtype"] = "bf16"
    (folder / "casting.json").write_text(json.dumps(casting))
    options = {"bf16": True, "max_steps": 1}
    zero3 = options | {"deepspeed": ROOT / "deepspeed_configs/zero3.json"}
    runs = [flags(tiny, folder / model, 2, model=model, **zero3) for model in models]
    runs.append(flags(tiny, folder / CASTING, 2, model="yarn", deepspeed=folder / "casting.json", **options))
    (folder / "runs.json").write_text(json.dumps(runs))
    run_on_ranks(1, Path(rotary_under_zero.__file__), [str(folder / "runs.json")], timeout=600)
    return lambda name: torch.load(folder / name / "rotary.pt")


def test_frequencies_under_zero_are_those_of_a_model_made_without_it(tiny, models, seen):
    for name in [*models, CASTING]:
        expected = rotary_frequencies(make(tiny, "yarn" if name == CASTING else name))
        assert expected
        found = seen(name)
        assert found.keys() == expected.keys()
        for buffer, value in expected.items():
            assert found[buffer].dtype is value.dtype is torch.float32, f"{name} {buffer}"
            assert torch.equal(found[buffer], value), f"{name} {buffer}"
