"""`--profile_steps` writes where the time of some steps goes, and changes nothing else."""

import gzip
import json
import time

import pytest
import torch
from training import build, flags, losses

from llava.train import train as train_module
from llava.train.arguments import steps_to_profile
from llava.train.profiling import PIECES

SECONDS = 0.3


class Slow(torch.autograd.Function):
    """An identity that takes time, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SECONDS)
        return gradient


def slowed(forward):
    return lambda hidden_states, *args, **kwargs: forward(Slow.apply(hidden_states), *args, **kwargs)


def profiled(folder) -> dict[str, float]:
    (file,) = folder.glob("profile/*.pieces.json")
    return json.loads(file.read_text())


def test_profiled_steps_leave_a_trace_a_table_and_the_same_losses(tiny, tmp_path):
    options = {"max_steps": 4, "gradient_accumulation_steps": 2}
    train_module.train(flags(tiny, tmp_path / "plain", 2, **options))
    train_module.train(flags(tiny, tmp_path / "run", 2, **options, profile_steps="2:3"))
    assert losses(tmp_path / "run/train_log.jsonl") == losses(tmp_path / "plain/train_log.jsonl")
    folder = tmp_path / "run/profile"
    with gzip.open(folder / "steps_2-3.trace.json.gz") as file:
        ranges = [e for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]
    counts = [sum(e["name"] == name for e in ranges) for name in ("step", "decoder", "tower", "head")]
    assert counts == [2, 4, 4, 4]
    assert "aten::addmm" in (folder / "steps_2-3.kernels.txt").read_text()
    pieces = profiled(tmp_path / "run")
    assert tuple(pieces) == (*PIECES, "other")
    assert all(pieces[piece] > 0 for piece in pieces if piece != "communication")
    whole = sum(e["dur"] for e in ranges if e["name"] == "step") / 1e6
    assert sum(pieces.values()) * 4 == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_seconds_of_both_passes_belong_to_the_piece_that_takes_them(tiny, tmp_path, monkeypatch, checkpointing):
    options = {"max_steps": 1, "activation_checkpointing": checkpointing}
    model, trainer = build(flags(tiny, tmp_path, 2, **options, profile_steps="1:1"))
    decoder = model.get_model()
    modules = {"tower": decoder.vision_tower.layers[0], "elementwise": decoder.layers[0].mlp, "head": model.lm_head}
    modules |= {"other": decoder.mm_projector}
    for module in modules.values():
        monkeypatch.setattr(module, "forward", slowed(module.forward))
    trainer.train()
    pieces = profiled(tmp_path)
    recomputed = {"elementwise"} if checkpointing else set()
    for place in modules:
        assert pieces[place] > (3 if place in recomputed else 2) * SECONDS, place


def test_a_resumed_run_counts_steps_globally(tiny, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train_module.train(flags(tiny, tmp_path / "whole", 1, **options))
    options |= {"resume_from_checkpoint": tmp_path / "whole/checkpoint-2"}
    train_module.train(flags(tiny, tmp_path / "resumed", 1, **options, profile_steps="2:3"))
    assert sorted(file.name for file in (tmp_path / "resumed/profile").iterdir()) == [
        "steps_3-3.kernels.txt",
        "steps_3-3.pieces.json",
        "steps_3-3.trace.json.gz",
    ]


@pytest.mark.parametrize("text", ["8:5", "0:3", "five", "5", "5:", "-1:3", "1:2:3", ""])
def test_steps_that_are_not_first_to_last_are_refused(text):
    with pytest.raises(ValueError, match=r"--profile_steps: expected FIRST:LAST with 1 <= FIRST <= LAST.*found"):
        steps_to_profile(text)


def test_steps_beyond_the_last_are_refused_before_the_first(tiny, tmp_path):
    with pytest.raises(ValueError, match="--profile_steps 2:3: the run has 2 steps; choose steps up to 2"):
        train_module.train(flags(tiny, tmp_path, 1, profile_steps="2:3"))
    assert not (tmp_path / "train_log.jsonl").exists()
