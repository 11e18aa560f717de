"""What compensation changes under an optimizer (docs/norm.md), and what the log says of clipping."""

import json
import math

import pytest
import torch
from torch import nn
from training import build, flags, run

from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.train.telemetry import LOG_FILE, Clipping

E, D, GAIN = 12, 24, 0.02
PLAIN_OF = {"gwc_layernorm": "layernorm", "gwc_rmsnorm": "rmsnorm"}


def trained(name: str, optimizer: type, max_norm: float = math.inf, steps: int = 12, **options) -> torch.Tensor:
    """The weights of a projector in fp64 that ends in a norm of fixed gain, after some steps on changing batches."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(E, D), nn.GELU(), nn.Linear(D, D)]
    projector = nn.Sequential(*layers, NORM_TYPES[name](D, init_gain=GAIN, learnable=False)).double()
    weights = [p for layer in layers for p in layer.parameters()]
    for parameter in weights:
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    stepper = optimizer(weights, **options)
    for _ in range(steps):
        tokens, target = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (E, D))
        projector.zero_grad()
        (projector(tokens) - target).square().sum().backward()
        nn.utils.clip_grad_norm_(weights, max_norm)
        stepper.step()
    return torch.cat([parameter.detach().flatten() for parameter in weights])


@pytest.mark.parametrize("name", PLAIN_OF)
def test_adamw_without_clipping_and_epsilon_undoes_compensation(name):
    options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-30}
    ours, plain = (trained(norm, torch.optim.AdamW, **options) for norm in (name, PLAIN_OF[name]))
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PLAIN_OF)
@pytest.mark.parametrize("max_norm", [math.inf, 3.0])
def test_compensation_is_a_smaller_epsilon_and_a_larger_clipping_norm(name, max_norm):
    """Compensated with eps and max_norm equals plain with both multiplied by the gain, and not plain with the same."""
    ours = trained(name, torch.optim.AdamW, max_norm, lr=1e-2, eps=1e-1)
    same, scaled = (
        trained(PLAIN_OF[name], torch.optim.AdamW, factor * max_norm, lr=1e-2, eps=factor * 1e-1)
        for factor in (1, GAIN)
    )
    torch.testing.assert_close(ours, scaled, rtol=0, atol=1e-7)  # clipping adds 1e-6 to the norm
    assert (ours - same).norm() > 0.1 * (ours - trained(name, torch.optim.AdamW, steps=0)).norm()


@pytest.mark.parametrize("name", PLAIN_OF)
def test_sgd_steps_are_longer_by_compensation(name):
    start, ours, plain = (
        trained(norm, torch.optim.SGD, steps=steps, lr=1e-2)
        for norm, steps in ((name, 0), (name, 1), (PLAIN_OF[name], 1))
    )
    torch.testing.assert_close(ours - start, (plain - start) / GAIN, rtol=1e-6, atol=1e-12)  # the gain is fp32


# --- the log ----------------------------------------------------------------------------------------------------------


def lines(folder) -> list[dict]:
    return [line for line in map(json.loads, (folder / LOG_FILE).read_text().splitlines()) if "loss" in line]


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, False), (2, True)])
def test_shares_of_the_gradient_equal_sums_over_parameters_by_name(tiny, tmp_path, stage, bf16):
    model, trainer = build(flags(tiny, tmp_path, stage, max_steps=1, bf16=bf16))
    words = {"vision_tower": "mm_vision_tower", "mm_projector.3": "mm_projector_norm", "mm_projector": "mm_mlp_adapter"}
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        part = next((part for word, part in words.items() if word in name), "mm_language_model")

        def add(gradient, part=part):
            squares[part] = squares.get(part, 0.0) + float(gradient.double().square().sum())

        if parameter.requires_grad:
            parameter.register_hook(add)
    trainer.train()
    (line,) = lines(tmp_path)
    shares = {key.removeprefix("grad_share/"): value for key, value in line.items() if key.startswith("grad_share/")}
    whole = sum(squares.values())
    assert shares == pytest.approx({part: square / whole for part, square in squares.items()}, rel=1e-4)
    assert len(shares) == (2 if stage == 1 else 4) and line["grad_norm"] == pytest.approx(whole**0.5, rel=1e-3)


def test_a_line_says_how_many_steps_since_the_last_were_clipped(tiny, tmp_path):
    options = {"max_steps": 6, "logging_steps": 1, "learning_rate": 0}
    run(tiny, tmp_path / "each", 1, **options)
    norms = [line["grad_norm"] for line in lines(tmp_path / "each")]
    assert [line["clipped_share"] for line in lines(tmp_path / "each")] == [float(norm > 1) for norm in norms]
    bound = sorted(norms)[3]
    run(tiny, tmp_path / "some", 1, **options | {"logging_steps": 3, "max_grad_norm": bound - 1e-6 * bound})
    expected = [sum(norm >= bound for norm in some) / 3 for some in (norms[:3], norms[3:])]
    assert [line["clipped_share"] for line in lines(tmp_path / "some")] == pytest.approx(expected, rel=1e-5)
    run(tiny, tmp_path / "never", 1, **options | {"max_grad_norm": 0})
    assert [line["clipped_share"] for line in lines(tmp_path / "never")] == [0.0] * 6


@pytest.mark.parametrize("value", [float, torch.tensor], ids=["host", "device"])
def test_a_step_that_is_not_finite_counts_as_not_clipped(value):
    clipping = Clipping(1.0)
    for norm in (0.5, 2.0, math.inf, math.nan):
        clipping.add(value(norm))
    assert (int(clipping.clipped), clipping.steps) == (1, 4)
