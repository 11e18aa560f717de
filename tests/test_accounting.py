"""Operations and memory: what is counted equals hand counts, PyTorch's own counter, and what autograd really keeps."""

from dataclasses import replace

import pytest
import torch
from test_model import IMG, make
from test_packed import batch
from torch.utils.flop_counter import FlopCounterMode

from llava.model.lora import add_lora
from llava.train.flops import Work, batch_work, flop_costs, peak_tflops, required_flops
from llava.train.optim import ADAPTER, LANGUAGE_MODEL, VISION_TOWER, set_trainable

STAGE_1, STAGE_2 = frozenset({ADAPTER}), frozenset({ADAPTER, LANGUAGE_MODEL, VISION_TOWER})
V = 4  # visual tokens per image: 16 px in patches of 8
# Weight elements of the tiny models, by hand: width 32, 4 heads of 8, 2 of them for keys; tower 24 wide.
LAYERS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
HEAD = 320 * 32
PATCHES = 3 * 8 * 8 * 24
TOWER = 2 * (4 * 24 * 24 + 2 * 24 * 32)  # two of the three layers run
PROJECTOR = (24 * 32, 32 * 32)


def trained(tiny, parts, **options):
    model = make(tiny, **options).train()
    set_trainable(model, parts)
    model.padding_free = True
    return model


def test_costs_of_stage_1_equal_hand_counts(tiny):
    costs = flop_costs(trained(tiny, STAGE_1))
    assert costs.per_token == 4 * LAYERS
    assert costs.per_pair == 3 * (2 * 2 * 32) * 2
    assert costs.per_target == 4 * HEAD
    tower = V * 2 * PATCHES + V * 2 * TOWER + 2 * 4 * V * V * 24
    assert costs.per_image == tower + V * (4 * PROJECTOR[0] + 6 * PROJECTOR[1])


def test_costs_of_stage_2_equal_hand_counts(tiny):
    costs = flop_costs(trained(tiny, STAGE_2))
    assert costs.per_token == 6 * LAYERS
    assert costs.per_target == 6 * HEAD
    tower = V * 4 * PATCHES + V * 6 * TOWER + 3 * 2 * 4 * V * V * 24
    assert costs.per_image == tower + V * 6 * sum(PROJECTOR)


def test_without_gradients_below_the_decoder_costs_two_per_weight(tiny):
    model = trained(tiny, STAGE_2)
    model.requires_grad_(False)
    costs = flop_costs(model)
    assert (costs.per_token, costs.per_target) == (2 * LAYERS, 2 * HEAD)


def test_work_of_a_batch_equals_hand_counts():
    work = batch_work(batch([[5, IMG, 6, 7], [8, 9]]), V)
    assert [int(x) for x in work.values()] == [2, 9, 14, 7 * 8 // 2 + 3, 1, 2]
    cut = batch_work(batch([[5, IMG, 6, 7], [8, 9]]), V, max_length=5)
    assert [int(x) for x in cut.values()][:4] == [2, 7, 10, 15 + 3]


@pytest.mark.parametrize("tower", ["siglip", "clip"])
@pytest.mark.parametrize("case", ["stage 1", "stage 2", "decoder only", "lora"])
def test_counted_operations_equal_pytorchs_counter(tiny, tower, case):
    """Eager attention computes all pairs, so these are counted here as well."""
    parts = {
        "stage 1": STAGE_1,
        "stage 2": STAGE_2,
        "decoder only": {LANGUAGE_MODEL},
        "lora": {ADAPTER, LANGUAGE_MODEL},
    }
    model = make(tiny, tower=tower).train()
    if case == "lora":
        add_lora(model, r=4, alpha=8, dropout=0.0, bias="none", dtype=torch.float32)
    set_trainable(model, frozenset(parts[case]))
    model.padding_free = True
    model.config._attn_implementation = "eager"
    model.get_vision_tower().vision_model.set_attn_implementation("eager")
    inputs = batch([[5, IMG, *range(6, 40), IMG, 41]])
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    work = batch_work(inputs, V)
    work = replace(work, pairs=work.tokens**2)
    assert counter.get_total_flops() == required_flops(flop_costs(model), work)


def test_work_adds_up():
    assert Work(1, 2, 3, 4, 5, 6) + Work(1, 1, 1, 1, 1, 1) == Work(2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce GTX 1060", None),
    ],
)
def test_peak_is_the_datasheets_dense_bf16(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda")) == expected
    assert peak_tflops(torch.device("cpu")) is None
