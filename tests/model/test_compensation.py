"""What compensation changes under an optimizer (docs/norm.md)."""

import math

import pytest
import torch
from torch import nn

from llava.model.multimodal_projector.norm import NORM_TYPES

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
