"""A training step never waits for a value on its device: no shape and no branch of it depends on one."""

import pytest
import torch
from anyres_data import ANYRES, write_shapes
from batches import BATCHES, collated
from host_sync import Waits
from pairwise import pairwise
from tiny_models import SIZES, STAGE_1, STAGE_2, make
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data._utils.pin_memory import pin_memory
from training import build, flags
from transformers.integrations import flash_attention

from llava.layout import Layout
from llava.model.attention import FLASH, SEGMENTS, VARLEN
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.train.optim import set_trainable
from llava.train.telemetry import NormProbe

MIXED = BATCHES["image_first_middle_last"] + BATCHES["text_only"]


def trainable(tiny, parts=STAGE_2, backend=SEGMENTS, padding_free=True, **options):
    model = make(tiny, **options).train()
    set_trainable(model, parts)
    model.padding_free, model.config._attn_implementation = padding_free, backend
    return model


def step_on_fake_tensors(model, batch: dict) -> dict[str, torch.Tensor]:
    """Gradients of a step whose tensors have shapes but no values, so that whatever asks for one raises."""
    mode = FakeTensorMode()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
    batch = tree_map_only(torch.Tensor, mode.from_tensor, batch)
    with mode:
        loss = functional_call(model, state, kwargs=batch | {"num_items_in_batch": 10}).loss
        loss.backward()
    return {name: tensor.grad for name, tensor in state.items() if tensor.grad is not None}


# Of the samples, "image_alone" has no target.
KINDS = pairwise(NORM_TYPES, ("mixed", "text_only", "image_alone"), ("stage 1", "stage 2"), ("packed", "padded"))


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "samples", "stage", "layout"), KINDS)
def test_forward_and_backward_need_no_value_of_the_device(tiny, norm, samples, stage, layout):
    padding_free = layout == "packed"
    model = trainable(tiny, STAGE_1 if stage == "stage 1" else STAGE_2, padding_free=padding_free, norm=norm)
    probe = NormProbe(model)
    probe.active = True
    gradients = step_on_fake_tensors(
        model, collated(BATCHES.get(samples, MIXED), max_length=6, padding_free=padding_free)
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    unused = {id(p) for p in model.get_vision_tower().unused_parameters()}
    assert gradients.keys() == {n for n in trained if id(model.get_parameter(n)) not in unused}


@pytest.mark.slow
@pytest.mark.parametrize("padding_free", [True, False], ids=["packed", "padded"])
def test_crops_and_their_newlines_need_no_value_of_the_device(tiny, tmp_path, padding_free):
    data = write_shapes(tmp_path / "data")
    model, trainer = build(flags(tiny, tmp_path / "run", 2, **data, **ANYRES, padding_free=padding_free))
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(10)])
    gradients = step_on_fake_tensors(model.train(), {k: v for k, v in batch.items() if k != "indices"})
    assert {"model.image_newline", "model.mm_projector.0.weight"} <= gradients.keys()


def test_nothing_is_copied_from_the_device_to_the_host(tiny, monkeypatch):
    """Tensors of the device `meta` cannot be copied, so `.to("cpu")` raises; the loss asks for autocast there."""
    monkeypatch.setattr("llava.model.loss.chunked_loss", lambda hidden_states, weight, targets: hidden_states.sum())
    batch = tree_map_only(torch.Tensor, lambda x: x.to("meta"), collated(MIXED))
    trainable(tiny).to("meta")(**batch, num_items_in_batch=10).loss.backward()


def packed_kernel(monkeypatch, backend: str) -> list[dict]:
    """Replaces a GPU's attention kernel by one that returns its queries; gives the list of what each call was given."""
    calls = []

    def flash(query, key, value, attention_mask, **kwargs):
        calls.append({"mask": attention_mask, "boundaries": kwargs["cu_seq_lens_q"], "longest": kwargs["max_length_q"]})
        return query

    def varlen(query, key, value, boundaries, _, longest, *args, **kwargs):
        calls.append({"mask": None, "boundaries": boundaries, "longest": longest})
        return query

    if backend in FLASH:
        monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash)
    if backend == VARLEN:
        monkeypatch.setattr("llava.model.attention.varlen_attn", varlen)
    return calls


@pytest.mark.parametrize("language_model", ["llama", "qwen"])
@pytest.mark.parametrize("backend", [SEGMENTS, VARLEN, *FLASH])
def test_neither_the_model_nor_the_library_looks_at_values(tiny, monkeypatch, backend, language_model):
    calls = packed_kernel(monkeypatch, backend)
    model, batch = trainable(tiny, backend=backend, language_model=language_model), collated(MIXED)
    with Waits() as waits:
        model(**batch).loss.backward()
    assert waits.seen == {}
    assert len(calls) == (0 if backend == SEGMENTS else SIZES["num_hidden_layers"])
    for call in calls:
        assert call["mask"] is None and call["longest"] == 7 and call["boundaries"].dtype == torch.int32
        assert call["boundaries"].tolist() == [0, 6, 13, 20, 23, 24]


# --- what travels to the device ---------------------------------------------------------------------------------------


def test_copies_to_the_device_do_not_wait_and_leave_from_pinned_memory(tiny, tmp_path, monkeypatch):
    """A CPU cannot show either; the calls can."""
    _, trainer = build(flags(tiny, tmp_path, 2))
    batch, pinned, copies = collated(MIXED), [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = pin_memory(batch)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: copies.append((self, kwargs)) or self)
    prepared = trainer.on_device(batch)
    tensors = {id(x) for x in tree_leaves(batch) if isinstance(x, torch.Tensor)}
    assert {id(x) for x in pinned} == {id(x) for x, _ in copies} == tensors
    assert all(options["non_blocking"] for _, options in copies)
    assert type(prepared["layout"]) is Layout and prepared["layout"].lengths == [6, 7, 7, 3, 1]


@pytest.mark.parametrize(("precision", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)])
def test_pixels_are_sent_in_the_runs_precision_and_the_tower_sees_no_other(tiny, tmp_path, precision, dtype):
    model, trainer = build(flags(tiny, tmp_path, 1, **precision))
    dataset = trainer.train_dataset
    index = int((dataset.modality_lengths() > 0).argmax())
    pixels = trainer.data_collator([dataset[index]])["images"]
    dataset.pixel_dtype = torch.float32
    whole = trainer.data_collator([dataset[index]])["images"]
    assert pixels.dtype == dtype == model.get_vision_tower().dtype and whole.dtype == torch.float32
    assert torch.equal(model.get_vision_tower()(pixels), model.get_vision_tower()(whole))
