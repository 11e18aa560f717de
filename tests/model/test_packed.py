"""Padding-free batches: whatever the backend and the loss head, loss and gradients are those of each sample alone."""

from functools import partial

import pytest
import torch
from batches import BATCHES, IMG, assert_layouts_agree, batch, loss_and_gradients, one_by_one
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make
from torch.nn import functional as F

from llava.constants import IGNORE_INDEX
from llava.data.sampler import RandomOrder, StepSampler, assigned_by_length, assigned_in_order
from llava.layout import lay_out, pad_layout
from llava.model import attention
from llava.model.attention import MASKED, SEGMENTS, VARLEN, packed_attention, segments_attention
from llava.model.loss import _CHUNK_ELEMENTS, chunked_loss


@pytest.fixture(scope="module")
def model(tiny):
    model = make(tiny, tower="clip").train()
    model.requires_grad_(True)
    return model


@pytest.mark.numeric
@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_packed_padded_and_one_by_one_give_the_same_loss_and_gradients(model, name, limit):
    model.config.tokenizer_model_max_length = limit
    inputs = batch(BATCHES[name])
    assert_layouts_agree(one_by_one(model, inputs), partial(loss_and_gradients, model, **inputs))


@pytest.mark.numeric
def test_a_cpu_attends_over_packed_samples_in_fp32_also_under_autocast():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    parts = [x.float().split([5, 7], dim=2) for x in (query, key, value)]
    samples = zip(*parts, strict=True)
    expected = [F.scaled_dot_product_attention(*sample, is_causal=True, enable_gqa=True) for sample in samples]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = segments_attention(None, query, key, value, None, segment_lengths=[5, 7])
    assert torch.equal(output, torch.cat(expected, dim=2).transpose(1, 2).bfloat16())


def test_a_model_in_training_still_evaluates_padded_batches_and_generates(model):
    """The backend for packed rows takes the library's SDPA where rows are not packed."""
    model.config.tokenizer_model_max_length = None
    inputs = batch(BATCHES["several_images"])
    model.eval()
    try:
        results = []
        for backend in ("sdpa", SEGMENTS):
            model.config._attn_implementation = backend
            answer = model.generate(inputs["input_ids"][:1], images=inputs["images"][:2], max_new_tokens=4)
            results.append((model(**inputs).logits.detach(), answer))
    finally:
        model.train()
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), "234c", "flash_attention_4"),  # Hopper
        ((9, 0), "234", "flash_attention_3"),  # 4 without its compiler
        ((10, 0), "23", "flash_attention_2"),  # Blackwell
        ((10, 0), "4c", "flash_attention_4"),
        ((8, 0), "34c", VARLEN),  # Ampere
        ((9, 0), "", VARLEN),
        ((7, 5), "234c", SEGMENTS),  # Turing
    ],
)
def test_the_fastest_attention_that_is_installed_and_has_kernels_for_the_gpu_is_taken(
    capability, installed, chosen, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    for number in "234":
        monkeypatch.setattr(attention, f"is_flash_attn_{number}_available", lambda number=number: number in installed)
    monkeypatch.setattr(attention, "find_spec", lambda name: name if "c" in installed else None)
    assert packed_attention(None, torch.device("cuda"), torch.bfloat16) == chosen
    assert packed_attention(None, torch.device("cuda"), torch.float32) == SEGMENTS


def test_the_backend_is_chosen_by_the_machine_and_others_are_refused(caplog):
    assert packed_attention(None, torch.device("cpu"), torch.float32) == SEGMENTS
    assert packed_attention("sdpa", torch.device("cpu"), torch.float32) in MASKED
    with pytest.raises(ValueError, match="--attn_implementation paged.*packed_segments.*--padding_free False"):
        packed_attention("paged", torch.device("cpu"), torch.float32)


# --- layouts against loops over samples and tokens --------------------------------------------------------------------

SAMPLES = [[5, IMG, 6], [7], [IMG, 8, IMG, IMG, 9]]
WIDTHS = [2, 3, 1, 2]  # visual tokens of the four images


def laid_out(max_length=None, widths=WIDTHS):
    longest = max(map(len, SAMPLES))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in SAMPLES])
    mask = torch.tensor([[True] * len(s) + [False] * (longest - len(s)) for s in SAMPLES])
    return lay_out(ids, mask, ids.where(ids != IMG, IGNORE_INDEX), widths, max_length)


def by_hand(max_length):
    """For every sample a list of (input, target) per position; visual tokens are numbered over all samples."""
    widths, row, samples = iter(WIDTHS), 0, []
    for sample in SAMPLES:
        rows = []
        for token in sample:
            if token == IMG:
                width = next(widths)
                rows += [(f"visual {row + i}", IGNORE_INDEX) for i in range(width)]
                row += width
            else:
                rows.append((token, token))
        samples.append(rows[:max_length])
    return samples


@pytest.mark.parametrize("max_length", [None, 1, 2, 3, 4, 5])
def test_images_may_have_different_numbers_of_tokens_and_be_cut_anywhere(max_length):
    layout, expected = laid_out(max_length), by_hand(max_length)
    table = ["zeros", *layout.text_ids.tolist(), *(f"visual {i}" for i in range(sum(WIDTHS)))]
    assert [table[i] for i in layout.source[0].tolist()] == [token for rows in expected for token, _ in rows]
    assert layout.labels[0].tolist() == [label for rows in expected for _, label in rows]
    assert layout.position_ids[0].tolist() == [i for rows in expected for i in range(len(rows))]
    assert layout.lengths == [len(rows) for rows in expected] == layout.cu_seqlens.diff().tolist()
    assert layout.attention_mask is None


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("max_length", [None, 2])
def test_targets_are_predicted_by_the_row_before_in_the_same_sample(side, max_length):
    layout, expected = laid_out(max_length), by_hand(max_length)
    layout = layout if side is None else pad_layout(layout, side)
    longest, pairs = max(layout.lengths), []
    for number, rows in enumerate(expected):
        first = sum(layout.lengths[:number]) if side is None else number * longest
        first += longest - len(rows) if side == "left" else 0
        pairs += [(first + i - 1, label) for i, (_, label) in enumerate(rows) if i and label != IGNORE_INDEX]
    assert list(zip(layout.predicting.tolist(), layout.targets.tolist(), strict=True)) == pairs
    if side is not None:
        assert layout.source.bool().equal(layout.attention_mask)


def test_visual_tokens_of_too_few_images_are_an_error():
    with pytest.raises(ValueError, match=r"4 image placeholders \(\[1, 0, 3\] per sample\).*of 3 images"):
        laid_out(widths=WIDTHS[:3])


# --- loss head --------------------------------------------------------------------------------------------------------


def plain_loss(hidden_states, weight, targets):
    """From all logits at once."""
    return F.cross_entropy(F.linear(hidden_states, weight).float(), targets, reduction="sum")


@pytest.mark.numeric
def test_chunked_loss_under_autocast_equals_the_plain_one(monkeypatch):
    monkeypatch.setitem(_CHUNK_ELEMENTS, "cpu", 10 * 50)
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(64, 16), torch.randn(50, 16), torch.randint(50, (64,))
    gradients = []
    for function in (plain_loss, chunked_loss):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            function(h, w, targets).backward()
        gradients.append((h.grad, w.grad))
    for ours, plain in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)


def test_the_chunked_loss_refuses_a_second_derivative():
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(chunked_loss(hidden, weight, torch.arange(4)), hidden, create_graph=True)


# --- micro-batches ----------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


@settings(derandomize=True, max_examples=200, deadline=None, database=None)
@given(
    lengths=LENGTHS,
    ranks=st.integers(1, 5),
    micro=st.integers(1, 4),
    size=st.integers(1, 6),
    deal=st.sampled_from(["evenly", "cap", "in order"]),
)
def test_each_step_is_assigned_exactly_in_equal_micro_batches_per_rank(lengths, ranks, micro, size, deal):
    cap, order = 4000 if deal == "cap" else None, list(RandomOrder(len(lengths), seed=3))
    step_size = ranks * micro * size
    deal = partial(assigned_in_order, batch_size=size) if deal == "in order" else partial(
        assigned_by_length, lengths=lengths, micro_batches=micro, max_tokens=cap
    )  # fmt: skip
    per_rank = [list(StepSampler(order, step_size, partial(deal, ranks=ranks), rank)) for rank in range(ranks)]
    assert {len(steps) for steps in per_rank} == {-(-len(lengths) // step_size)}
    for start, steps in zip(range(0, len(lengths), step_size), zip(*per_rank, strict=True), strict=True):
        samples = order[start : start + step_size]
        assert len({len(micro_batches) for micro_batches in steps}) == 1
        assert all(batch for micro_batches in steps for batch in micro_batches)
        assert cap or len(steps[0]) <= micro
        dealt = [i for micro_batches in steps for batch in micro_batches for i in batch]
        assert sorted(i for i in dealt if i >= 0) == sorted(samples)
        assert sum(i < 0 for i in dealt) < ranks  # repeated without targets
        if cap:
            fullest = (sum(lengths[max(i, ~i)] for i in b) for batches in steps for b in batches if len(b) > 1)
            assert max(fullest, default=0) <= cap


def test_a_step_takes_the_fewest_micro_batches_that_hold_its_tokens():
    """As few as its tokens allow; where no way to deal samples reaches that, one more."""

    def count(lengths, cap, ranks=1):
        return len(assigned_by_length(list(range(len(lengths))), lengths, ranks, 1, cap)[0])

    assert count([1000] * 16, 8000) == 2 and count([1000] * 16, 7999) == 3
    assert count([1000] * 16, 8000, ranks=2) == 1 and count([1000] * 16, 7999, ranks=2) == 2
    assert count([3000, 3000, 3000], 5000) == 3  # two could hold 9000 tokens but not these samples
    assert count([9000, 10, 10], 5000) == 2  # a sample that is longer stands alone
    assert count([900, 900, 600, 600, 600], 1800) == 2  # longest first makes 2100 and 1500; exchanging two mends it


def test_llavas_slices_go_round_the_ranks():
    assert assigned_in_order(list(range(8)), ranks=2, batch_size=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert assigned_in_order(list(range(9)), ranks=1, batch_size=4) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8]]]
    assert assigned_in_order(list(range(5)), ranks=2, batch_size=2) == [[[0, 1], [3]], [[2], [4]]]
    assert assigned_in_order([7], ranks=2, batch_size=2) == [[[7]], [[~7]]]
    assert assigned_in_order([7], ranks=2, batch_size=2, repeats=True) == [[[7]], [[7]]]


def test_epochs_differ_and_repeat_and_a_short_last_step_may_be_left_out():
    order = RandomOrder(22, seed=1)
    deal = partial(assigned_by_length, lengths=[5] * 22, ranks=1, micro_batches=2)
    sampler = StepSampler(order, 4, deal, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first and len(sampler) == len(first) == 6
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(StepSampler(order, 4, deal, 0, drop_last=True)) == first[:5]
