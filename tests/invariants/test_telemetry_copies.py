"""Telemetry waits for the device once per log line, and logs the numbers that single reads would give."""

from collections import Counter
from types import SimpleNamespace

import torch
from anyres_data import ANYRES, write_shapes
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
    data = write_shapes(tmp_path / "data")  # an image_newline is measured too
    options = {"logging_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2} | ANYRES
    _, trainer = build(flags(tiny, tmp_path / "run", 2, **data, **options))
    steps = reads_by_step(monkeypatch)
    trainer.train()
    assert "norm/image_newline" in trainer.state.log_history[0]
    one, logged = Counter(_local_scalar_dense=1), Counter(_local_scalar_dense=2, tolist=1)
    assert steps == [one, logged, one, logged]


def test_norms_in_one_copy_equal_norms_read_one_by_one_bit_for_bit(tiny, tmp_path):
    model, trainer = build(flags(tiny, tmp_path, 2))
    probe = NormProbe(model.train())
    probe.start_step(True)
    for samples in ("image_first_middle_last", "text_only"):
        model(**collated(BATCHES[samples])).loss.backward()
    metrics = read([probe], trainer.accelerator)
    expected = {f"grad_norm/{place}": float(probe.squared_gradients[place]) ** 0.5 for place in GRADIENTS}
    expected |= {f"norm/{place}": float(probe.norm_sums[place]) / probe.token_counts[place] for place in TOKENS}
    assert metrics == expected | {"norm/gain_mean_abs": float(probe.mean_abs_gain)}


def test_each_meter_gets_its_own_sums(tiny, tmp_path):
    _, trainer = build(flags(tiny, tmp_path, 1))

    def meter(*names: str) -> SimpleNamespace:
        values = {name: torch.tensor(float(ord(name))) if name < "c" else float(ord(name)) for name in names}
        return SimpleNamespace(values=lambda accelerator: values, metrics=lambda sums, ranks: sums)

    sums = read([meter("a"), meter(), meter("b", "c")], trainer.accelerator)
    assert sums == {"a": 97.0, "b": 98.0, "c": 99.0}
