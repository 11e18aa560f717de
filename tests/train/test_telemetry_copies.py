"""Telemetry waits for the device once per log line, and logs the numbers that single reads would give."""

from collections import Counter

import pytest
import torch
from batches import BATCHES, collated
from host_sync import Waits
from training import build, flags

from llava.train.llava_trainer import LLaVATrainer
from llava.train.telemetry import GRADIENTS, TOKENS, NormProbe, read


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
