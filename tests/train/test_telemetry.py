"""A step never waits for a value on its device; telemetry waits once per log line, and its numbers are right."""

import gzip
import json
from collections import Counter

import pytest
import torch
from batches import BATCHES, collated
from host_sync import Waits
from tiny_models import SIZES, STAGE_2, make
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data._utils.pin_memory import pin_memory
from training import build, flags, losses
from transformers.integrations import flash_attention

from llava.layout import Layout
from llava.model.attention import FLASH, SEGMENTS, VARLEN
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.train import train as train_module
from llava.train.llava_trainer import LLaVATrainer
from llava.train.optim import set_trainable
from llava.train.telemetry import GRADIENTS, TOKENS, NormProbe, read

MIXED = BATCHES["image_first_middle_last"] + BATCHES["text_only"]


def trainable(tiny, backend=SEGMENTS, **options):
    model = make(tiny, **options).train()
    set_trainable(model, STAGE_2)
    model.padding_free, model.config._attn_implementation = True, backend
    return model


def test_nothing_is_copied_from_the_device_to_the_host(tiny, monkeypatch):
    """Tensors of the device `meta` cannot be copied, so `.to("cpu")` raises; the loss asks for autocast there."""
    monkeypatch.setattr("llava.model.loss.chunked_loss", lambda hidden_states, weight, targets: hidden_states.sum())
    batch = tree_map_only(torch.Tensor, lambda x: x.to("meta"), collated(MIXED))
    trainable(tiny).to("meta")(**batch, num_items_in_batch=10).loss.backward()


@pytest.mark.parametrize("norm", NORM_TYPES)
def test_no_norm_looks_at_values(tiny, norm):
    model = trainable(tiny, norm=norm)
    NormProbe(model).start_step(True)
    for samples in ("image_alone", "text_only"):  # the first has no target
        batch = collated(BATCHES[samples], max_length=6)
        with Waits() as waits:
            model(**batch, num_items_in_batch=10).loss.backward()
        assert waits.seen == {}


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


# --- telemetry --------------------------------------------------------------------------------------------------------


def reads_by_step(monkeypatch) -> list[Counter]:
    """What each step of the trainer reads from the device, from its first micro-batch to the end of its log line."""
    steps, waits = [], Waits()
    methods = {name: getattr(torch.Tensor, name) for name in ("tolist", "cpu", "numpy")}
    train, log = LLaVATrainer.training_step, LLaVATrainer._maybe_log_save_evaluate

    def start(*args, **kwargs):
        for name, method in methods.items():
            monkeypatch.setattr(torch.Tensor, name, lambda self, n=name, m=method: waits.seen.update([n]) or m(self))
        waits.seen = Counter()
        waits.__enter__()
        return train(*args, **kwargs)

    def end(*args, **kwargs):
        log(*args, **kwargs)
        if torch.Tensor.tolist is not methods["tolist"]:  # the end of an epoch asks for a log line again
            waits.__exit__(None, None, None)
            steps.append(waits.seen)
            for name, method in methods.items():
                monkeypatch.setattr(torch.Tensor, name, method)

    monkeypatch.setattr(LLaVATrainer, "training_step", start)
    monkeypatch.setattr(LLaVATrainer, "_maybe_log_save_evaluate", end)
    return steps


def test_a_log_line_adds_two_reads_and_other_steps_read_one_number(tiny, tmp_path, monkeypatch):
    """Every step reads its gradient norm; a log line the loss, by the library, and all telemetry at once."""
    options = {"logging_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2}
    _, trainer = build(flags(tiny, tmp_path / "run", 2, **options))
    steps = reads_by_step(monkeypatch)
    trainer.train()
    assert "norm/gain_mean_abs" in trainer.state.log_history[0]
    one, logged = Counter(_local_scalar_dense=1), Counter(_local_scalar_dense=2, tolist=1)
    assert steps == [one, logged, one, logged]


def test_norms_and_gradient_norms_are_those_of_hooks_of_ones_own_in_float64(tiny, tmp_path):
    """All four places, with and without pictures, and the gain of the norm."""
    model, trainer = build(flags(tiny, tmp_path, 2))
    model.train()
    probe, decoder = NormProbe(model), model.get_model()
    tokens = {place: [] for place in TOKENS}
    gradients = {place: [] for place in GRADIENTS}

    def see(place, states):
        tokens[place].append(states.detach().double().square().sum(-1).sqrt().flatten())
        if place in GRADIENTS:
            states.register_hook(lambda gradient: gradients[place].append(gradient.double().square().sum()))

    decoder.embed_tokens.register_forward_hook(lambda module, args, out: see("text_embeddings", out))
    decoder.mm_projector.register_forward_hook(lambda module, args, out: see("llm_input", out))
    decoder.mm_projector[0].register_forward_pre_hook(lambda module, args: see("vision_features", args[0]))
    decoder.mm_projector[3].register_forward_pre_hook(lambda module, args: see("before_norm", args[0]))
    probe.start_step(True)
    for samples in ("image_first_middle_last", "text_only"):
        model(**collated(BATCHES[samples])).loss.backward()
    for place in GRADIENTS:
        tokens[place].pop()  # of the picture that the model makes up where a batch has none
    expected = {f"norm/{place}": float(torch.cat(norms).mean()) for place, norms in tokens.items()}
    expected |= {f"grad_norm/{place}": float(sum(squares)) ** 0.5 for place, squares in gradients.items()}
    expected["norm/gain_mean_abs"] = float(decoder.mm_projector[3].weight.detach().double().abs().mean())
    assert read([probe], trainer.accelerator) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_profiled_steps_leave_a_trace_a_table_and_the_same_losses(tiny, tmp_path):
    options = {"max_steps": 4, "gradient_accumulation_steps": 2}
    train_module.train(flags(tiny, tmp_path / "plain", 2, **options))
    train_module.train(flags(tiny, tmp_path / "run", 2, **options, profile_steps="2:3"))
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    folder = tmp_path / "run/profile"
    with gzip.open(folder / "steps_2-3.trace.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert "aten::addmm" in (folder / "steps_2-3.kernels.txt").read_text()


def test_a_profile_ends_with_the_training_and_one_that_never_began_is_named(tiny, tmp_path, caplog):
    train_module.train(flags(tiny, tmp_path / "short", 1, profile_steps="2:9"))
    assert (tmp_path / "short/profile/steps_2-2.kernels.txt").is_file()
    train_module.train(flags(tiny, tmp_path / "none", 1, profile_steps="8:9"))
    assert "no step is profiled, the last one was 2" in caplog.text
