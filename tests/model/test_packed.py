"""Padding-free batches: whatever the backend and the loss head, loss and gradients are those of each sample alone."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from batches import BACKENDS, BATCHES, IMG, batch, loss_and_gradients, one_by_one
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import eager_attention_forward

from llava.constants import IGNORE_INDEX
from llava.data.sampler import RandomOrder, StepSampler, assigned_by_length, assigned_in_order, balanced_groups
from llava.model.attention import MASKED, SEGMENTS, packed_attention, segments_attention
from llava.model.loss import _CHUNK_ELEMENTS, chunked_loss, rows_at_a_time


@pytest.fixture(scope="module")
def model(tiny):
    model = make(tiny, tower="clip").train()
    model.requires_grad_(True)
    return model


@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_packed_padded_and_one_by_one_give_the_same_loss_and_gradients(model, name, limit):
    model.config.tokenizer_model_max_length = limit
    inputs = batch(BATCHES[name])
    expected_loss, expected = one_by_one(model, inputs)
    for padding_free, backend in [(False, "sdpa"), *((True, backend) for backend in BACKENDS)]:
        loss, gradients = loss_and_gradients(model, padding_free, backend, **inputs)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert gradients.keys() == expected.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_of_a_row_do_not_see_each_other(model, backend):
    """A different second sample changes nothing at all in the first and the third."""
    model.padding_free, model.config.tokenizer_model_max_length = True, None
    model.config._attn_implementation = backend
    rows = []
    hook = model.get_model().norm.register_forward_hook(lambda module, args, out: rows.append(out[0]))
    samples = [[5, IMG, 6, 7], [8, 9, 10, 11, 12], [13, 14, IMG, 15]]
    for second in (samples[1], [20, 21, 22, 23, 24]):
        inputs = batch([samples[0], second, samples[2]])
        model(**inputs)
    hook.remove()
    first, other = rows
    changed = (first != other).any(dim=-1).nonzero().flatten().tolist()
    assert changed == list(range(7, 12))


def test_a_sample_that_is_not_learnt_from_shifts_no_targets(model):
    """The last token of a sample never predicts the first of the next."""
    model.padding_free, model.config.tokenizer_model_max_length = True, None
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    only_first = torch.tensor([[IGNORE_INDEX] * 3, [8, IGNORE_INDEX, IGNORE_INDEX]])
    assert model(input_ids=ids, labels=only_first).loss.item() == 0


def test_half_precision_on_a_cpu_is_computed_in_fp32():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 6, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    lengths = [2, 7]
    exact, _ = segments_attention(None, query, key, value, None, segment_lengths=lengths)
    half, _ = segments_attention(None, *(x.bfloat16() for x in (query, key, value)), None, segment_lengths=lengths)
    rounded = [x.bfloat16().float() for x in (query, key, value)]
    expected, _ = segments_attention(None, *rounded, None, segment_lengths=lengths)
    assert torch.equal(half, expected.bfloat16())
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [[1], [2, 1, 40], [70] * 3, [130, 71, 3], [300, 299], [1100]], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_every_backend_equals_float64_at_every_length(backend, lengths, dtype, tolerance):
    """Outputs and gradients [1, heads, T, C] against each sample's softmax(q k / sqrt(C)) v, relative to their norm.

    A query's gradient is zero where it sees one key; what rounding leaves there is relative to the output's gradient.
    """
    torch.manual_seed(0)
    total = sum(lengths)
    shapes = {"query": (1, 6, total, 8), "key": (1, 2, total, 8), "value": (1, 2, total, 8)}
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes.values()]
    weights = torch.randn(1, total, 6, 8)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    visible = (sample[:, None] == sample) & torch.ones(total, total, dtype=torch.bool).tril()

    exact = [x.detach().double().requires_grad_() for x in inputs]
    query, key, value = (x.repeat_interleave(6 // x.shape[1], 1) for x in exact)
    scores = (query @ key.transpose(2, 3) / 8**0.5).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)

    module = SimpleNamespace(is_causal=True, num_key_value_groups=3, training=False)
    mask, options = None, {"segment_lengths": lengths}
    if backend != SEGMENTS:
        mask, options = torch.zeros(total, total, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min), {}
        mask = mask[None, None]
    attention = AttentionInterface().get(backend, eager_attention_forward)
    found, _ = attention(module, *inputs, mask, scaling=8**-0.5, dropout=0.0, **options)
    for output in (expected, found):
        (output * weights).sum().backward()
    for ours, theirs in zip((found, *(x.grad for x in inputs)), (expected, *(x.grad for x in exact)), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-6 * weights.norm()


def test_a_model_in_training_still_evaluates_padded_batches_and_generates(model):
    """The backend for packed rows takes the library's SDPA where rows are not packed."""
    model.config.tokenizer_model_max_length = None
    inputs = batch(BATCHES["several_images"])
    model.eval()
    try:
        results = []
        for backend in ("sdpa", SEGMENTS):
            model.config._attn_implementation = backend
            logits = model(**inputs).logits.detach()
            results.append(
                (logits, model.generate(inputs["input_ids"][:1], images=inputs["images"][:2], max_new_tokens=4))
            )
    finally:
        model.train()
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_the_backend_is_chosen_by_the_machine_and_others_are_refused(caplog):
    assert packed_attention(None, torch.device("cpu"), torch.float32) == SEGMENTS
    assert packed_attention("sdpa", torch.device("cpu"), torch.float32) in MASKED
    with pytest.raises(ValueError, match="--attn_implementation paged.*packed_segments.*--padding_free False"):
        packed_attention("paged", torch.device("cpu"), torch.float32)


# --- loss head --------------------------------------------------------------------------------------------------------


def plain_loss(hidden_states, weight, targets):
    """From all logits at once."""
    return F.cross_entropy(F.linear(hidden_states, weight).float(), targets, reduction="sum")


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("trained_head", [True, False])
def test_chunked_loss_equals_float64(monkeypatch, rows, trained_head):
    monkeypatch.setitem(_CHUNK_ELEMENTS, "cpu", 10 * 50)  # ten rows at a time
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator)
    targets = torch.randint(50, (rows,), generator=generator)
    results = []
    for function, dtype in ((chunked_loss, torch.float32), (plain_loss, torch.float64)):
        h = hidden.to(dtype, copy=True).requires_grad_()
        w = weight.to(dtype, copy=True).requires_grad_(trained_head)
        loss = function(h, w, targets)
        (3 * loss).backward()
        results.append((loss, h.grad, w.grad if trained_head else torch.zeros(())))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-5, atol=1e-5)


def test_few_rows_are_one_chunk_and_chunks_are_alike():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert rows_at_a_time(0, 50, cpu) == 1 and rows_at_a_time(7, 10**9, cpu) == 1
    assert rows_at_a_time(1000, 128_256, gpu) == 1000  # the weight is read twice
    assert rows_at_a_time(1100, 128_256, gpu) == 550
    assert rows_at_a_time(1100, 128_256, cpu) == 220


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


def test_the_loss_in_a_step_is_that_of_all_logits(model, monkeypatch):
    inputs = batch(BATCHES["several_images"])
    loss, gradients = loss_and_gradients(model, True, SEGMENTS, **inputs)
    monkeypatch.setattr("llava.model.loss.chunked_loss", plain_loss)
    expected_loss, expected = loss_and_gradients(model, True, SEGMENTS, **inputs)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5)


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
    cap, order, step_size = (
        4000 if deal == "cap" else None,
        list(RandomOrder(len(lengths), seed=3)),
        ranks * micro * size,
    )
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


def test_groups_are_within_one_sample_of_even():
    lengths = torch.randint(50, 2000, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    sums = [sum(lengths[i] for i in group) for group in balanced_groups(lengths, 8)]
    assert max(sums) - min(sums) <= min(lengths)
    assert max(sums) <= 1.01 * sum(lengths) / 8


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
