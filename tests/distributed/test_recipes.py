"""The recipes' own ZeRO configurations on two CPU ranks: for each model, tied and untied, and in each precision."""

import functools
import json
from pathlib import Path

import pytest
import torch
from pairwise import pairwise
from safetensors.torch import load_file
from tiny_models import make
from training import flags, greedy_tokens, loaded
from two_ranks import COMPARABLE, assert_same, launch_in_turn, zero_1

from llava.train import train as train_module

CONFIGS = {"zero1": zero_1()} | {name: name for name in ("zero2", "zero3", "zero3_offload", "zero3_hpz")}
CHOSEN = pairwise(("zero2", "zero3", "zero3_offload"), ("llama", "qwen"), ("", "_tied"))
EQUAL = [(config, model + tied) for config, model, tied in CHOSEN] + [
    ("zero1", "llama_tied"),
    ("zero3_hpz", "qwen_tied"),
]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISE = [(config, "bf16") for config in CONFIGS if config != "zero1"] + [("zero2", "fp16"), ("zero3", "fp16")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks(tiny, tmp_path_factory):
    """A folder with the final folders of all runs, `<configuration>-<model or precision>`, each trained on two ranks.

    No run may move what ZeRO-3 has placed.
    """
    folder = tmp_path_factory.mktemp("two")
    runs = [(flags(tiny, folder / f"{c}-{m}", 2, model=m, **COMPARABLE), CONFIGS[c]) for c, m in EQUAL]
    for config, precision in PRECISE:
        options = COMPARABLE | {"model": "llama", "max_steps": 2, precision: True}
        runs.append((flags(tiny, folder / f"{config}-{precision}", 2, **options), CONFIGS[config]))
    output = launch_in_turn(runs, folder)
    zero3 = sum(config.startswith("zero3") for config, _ in EQUAL + PRECISE)
    assert output.count("gathers the weights of each of 4 layers at once") == zero3
    return folder


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    """A function from a model to the final folder of the same steps in one process."""
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def train(model):
        train_module.train(flags(tiny, folder / model, 2, model=model, per_device_train_batch_size=8, **COMPARABLE))
        return folder / model

    return train


@pytest.mark.parametrize(("config", "model"), EQUAL)
def test_three_steps_equal_one_process(two_ranks, one_process, config, model):
    two, one = two_ranks / f"{config}-{model}", one_process(model)
    assert_same(two, one)
    assert first_norms(two) == pytest.approx(first_norms(one), rel=1e-4)


def first_norms(folder: Path) -> dict[str, float]:
    """Norms and gradient norms that a run logged after its first step."""
    line = json.loads((folder / "train_log.jsonl").read_text().splitlines()[0])
    return {name: value for name, value in line.items() if "norm" in name}


@pytest.mark.parametrize(("config", "precision"), PRECISE)
def test_the_loss_scale_of_half_precision_is_in_no_logged_norm(two_ranks, one_process, config, precision):
    assert first_norms(two_ranks / f"{config}-{precision}") == pytest.approx(
        first_norms(one_process("llama")), rel=0.05
    )


@pytest.mark.parametrize(("config", "precision"), PRECISE)
def test_a_half_precision_folder_gives_the_trained_models_outputs(two_ranks, config, precision):
    """Also if that model was partitioned; and the folder loads in every other precision."""
    folder, dtype = two_ranks / f"{config}-{precision}", HALF[precision]
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {dtype}
    for requested in (dtype, torch.bfloat16, torch.float16, torch.float32):
        model = loaded(folder, requested)
        assert {p.dtype for p in model.parameters()} == {requested}
        tokens = greedy_tokens(model)
        if requested is dtype:
            assert tokens == json.loads((folder / "greedy_tokens.json").read_text())


@pytest.mark.parametrize(("config", "precision"), PRECISE)
def test_every_buffer_has_type_and_values_of_a_model_made_without_zero(tiny, two_ranks, config, precision):
    """`zero.Init` makes buffers in the training's precision, and the engine may cast them again."""
    buffers = torch.load(two_ranks / f"{config}-{precision}" / "buffers.pt")
    expected = dict(make(tiny, "llama").named_buffers())
    assert buffers.keys() == expected.keys() and any(buffer.is_floating_point() for buffer in expected.values())
    for name, buffer in expected.items():
        assert buffers[name].dtype is buffer.dtype and torch.equal(buffers[name], buffer), name
