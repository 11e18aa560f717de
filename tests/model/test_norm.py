"""The norm layers: forward, compensated backward, and the measured target."""

import copy
import math

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

from llava.model.multimodal_projector.norm import (
    NORM_TYPES,
    GlobalWeightCompensatedLayerNorm,
    NormClip,
    ProjectorNorm,
    ProjectorNormArguments,
    mean_text_embedding_norm,
    norm_differences,
    resolve_target_norm,
)

D = 96
NORMS = [name for name, cls in NORM_TYPES.items() if cls]
NORMALIZING = [name for name in NORMS if name.endswith("norm")]
COMPENSATED = [name for name, cls in NORM_TYPES.items() if cls and cls.compensated]
PLAIN_OF = {name: name.removeprefix("gwc_") for name in COMPENSATED}


def make(name: str, seed: int | None = 0, **options) -> ProjectorNorm:
    """A norm whose gain and bias have moved away from their initial constants (seed None: they have not)."""
    norm = NORM_TYPES[name](D, **options)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            norm.weight.copy_(norm.gain_for(1, D) * torch.randn(norm.weight.shape, generator=generator).abs())
            if norm.bias is not None:
                norm.bias.copy_(0.01 * torch.randn(D, generator=generator))
    return norm


def inputs(seed: int = 1, rows: int = 7) -> torch.Tensor:
    return 30 * torch.randn(2, rows, D, generator=torch.Generator().manual_seed(seed)) + 3


def gradients(norm: nn.Module, x: torch.Tensor, call=None) -> dict[str, torch.Tensor]:
    """Gradients of a fixed non-linear function of the output, at the input and at the parameters."""
    x = x.detach().clone().requires_grad_()
    norm.zero_grad()
    y = (norm if call is None else call)(x)
    target = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    (y - target).square().sum().backward()
    return {"input": x.grad} | {name: p.grad.clone() for name, p in norm.named_parameters()}


def reference(norm: ProjectorNorm, x: torch.Tensor) -> torch.Tensor:
    """The textbook formula in float64 (of a norm: paper eq. 22, 23)."""
    x, gain = x.double(), norm.weight.double()
    if isinstance(norm, NormClip):
        return torch.where(x.norm(dim=-1, keepdim=True) > gain, x / x.norm(dim=-1, keepdim=True) * gain, x)
    if norm.has_bias:
        x = x - x.mean(-1, keepdim=True)
    x_hat = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return x_hat * gain + (norm.bias.double() if norm.has_bias else 0)


@pytest.mark.numeric
@pytest.mark.parametrize("name", NORMS)
def test_forward_equals_float64_formula(name):
    norm, x = make(name), inputs()
    torch.testing.assert_close(norm(x).double(), reference(norm, x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NORMALIZING)
def test_a_gain_in_fp32_is_not_rounded_under_autocast(name):
    norm = make(name, seed=None, init_gain=0.1003)  # bf16 has 0.1001
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norms = norm(inputs(rows=100).bfloat16()).float().norm(dim=-1)
    assert norms.mean().item() == pytest.approx(0.1003 * math.sqrt(D), rel=5e-4)


@pytest.mark.parametrize("name", NORMALIZING)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
def test_initial_output_norm_is_the_text_norm(name, dtype, tolerance):
    text_norm = 1.09
    norm = make(name, seed=None, init_gain=text_norm / math.sqrt(D)).to(dtype)
    norms = norm(inputs().to(dtype)).float().norm(dim=-1)
    assert (norms / text_norm - 1).abs().max() < tolerance


@pytest.mark.numeric
@pytest.mark.parametrize("name", COMPENSATED)
def test_gradients_are_plain_and_the_inputs_is_divided_by_mean_gain(name):
    norm, x = make(name), inputs()
    plain = NORM_TYPES[PLAIN_OF[name]](D)
    plain.load_state_dict(norm.state_dict())
    ours, theirs = gradients(norm, x), gradients(plain, x)
    mean_gain = norm.weight.detach().double().abs().mean()
    torch.testing.assert_close(ours["input"].double(), theirs["input"].double() / mean_gain, rtol=1e-5, atol=1e-6)
    for parameter in dict(norm.named_parameters()):
        assert torch.equal(ours[parameter], theirs[parameter])


@pytest.mark.numeric
@pytest.mark.parametrize("name", COMPENSATED)
def test_compensation_equals_scaling_at_x_hat_in_float64(name):
    """The paper scales the gradient at the normalised tensor (eq. 26); ours, at the input, must give the same."""
    norm, x = make(name).double(), inputs().double()
    ours = gradients(norm, x)["input"]
    scale = 1 / norm.weight.detach().abs().mean()

    def paper(x):
        centred = x - x.mean(-1, keepdim=True) if norm.has_bias else x
        root = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        x_hat = centred / root
        x_hat.register_hook(lambda grad: grad * scale)
        return x_hat * norm.weight + (norm.bias if norm.has_bias else 0)

    torch.testing.assert_close(ours, gradients(norm, x, paper)["input"], rtol=1e-12, atol=1e-14)


def test_mean_gain_follows_the_gain_as_it_trains_down_to_min_gain():
    norm, x = GlobalWeightCompensatedLayerNorm(D, init_gain=0.02, min_gain=1e-3), inputs()
    plain = NORM_TYPES["layernorm"](D)
    for gain in (0.02, 0.5, 3.0, 1e-6):
        with torch.no_grad():
            norm.weight.fill_(gain)
        plain.load_state_dict(norm.state_dict())
        expected = gradients(plain, x)["input"] / max(gain, 1e-3)
        torch.testing.assert_close(gradients(norm, x)["input"], expected, rtol=1e-4, atol=0)


@pytest.mark.numeric
@pytest.mark.parametrize("name", NORMS)
def test_no_scaling_in_eval_mode_nor_in_plain_norms(name):
    norm, x = make(name), inputs()
    expected = x.detach().double().requires_grad_()
    y = reference(copy.deepcopy(norm).double(), expected)
    target = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).double()
    (y - target).square().sum().backward()
    norm.train(name not in COMPENSATED)
    torch.testing.assert_close(gradients(norm, x)["input"].double(), expected.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.numeric
@pytest.mark.parametrize("name", COMPENSATED)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_same_gradients_under_activation_checkpointing(name, use_reentrant):
    norm, x = make(name), inputs()
    plain = gradients(norm, x)
    checkpointed = gradients(norm, x, lambda x: checkpoint(norm, x, use_reentrant=use_reentrant))
    for key in plain:
        assert torch.equal(plain[key], checkpointed[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPENSATED)
def test_same_gradients_under_torch_compile_and_no_compilation_for_another_gain(name):
    norm, x = make(name), inputs()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    for _ in range(2):
        eager, ours = gradients(norm, x), gradients(norm, x, compiled)
        for key in eager:
            torch.testing.assert_close(ours[key], eager[key], rtol=1e-5, atol=1e-7)
        with torch.no_grad():
            norm.weight.mul_(30)
    assert counter.frame_count == 1


@pytest.mark.numeric
@pytest.mark.parametrize("name", COMPENSATED)
def test_bf16_autocast_keeps_the_compensation(name):
    projector = nn.Sequential(nn.Linear(D, D), make(name))
    plain = copy.deepcopy(projector)
    plain[1] = NORM_TYPES[PLAIN_OF[name]](D)
    plain[1].load_state_dict(projector[1].state_dict())

    def autocast(module):
        def call(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return module(x)

        return call

    ours = gradients(projector, inputs(), autocast(projector))
    theirs = gradients(plain, inputs(), autocast(plain))
    mean_gain = float(projector[1].weight.detach().abs().mean())
    difference = ours["input"] * mean_gain - theirs["input"]
    assert difference.norm() < 2e-2 * theirs["input"].norm()
    assert torch.equal(ours["1.weight"], theirs["1.weight"])


@pytest.mark.numeric
def test_target_is_the_mean_over_nonzero_rows_in_any_chunking():
    weight = torch.randn(1000, D, generator=torch.Generator().manual_seed(0))
    weight[::7] = 0
    expected = weight.double().norm(dim=-1)
    expected = expected[expected > 0].mean().item()
    for chunk_rows in (1, 13, 4096):
        assert mean_text_embedding_norm(weight, chunk_rows) == pytest.approx(expected, rel=1e-6)
    assert mean_text_embedding_norm(weight.bfloat16()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_target_refuses_rows_that_are_not_finite(value):
    weight = torch.ones(10, D)
    weight[3, 5] = value
    with pytest.raises(ValueError, match="1 of 10 rows.*row 3"):
        mean_text_embedding_norm(weight)


def test_init_flag_means_text_norm_default_or_a_norm():
    weight = torch.full((5, D), 2.0)
    assert resolve_target_norm("text_norm", weight) == pytest.approx(2 * math.sqrt(D))
    assert resolve_target_norm("default", weight) == pytest.approx(math.sqrt(D))
    assert resolve_target_norm("1.5", weight) == 1.5
    assert resolve_target_norm("0.25x", weight) == pytest.approx(0.5 * math.sqrt(D))
    for bad in ("x", "-1", "-3x", "nan", "0", "textnorm"):
        with pytest.raises(ValueError, match="--mm_projector_norm_init.*text_norm"):
            resolve_target_norm(bad, weight)


@pytest.mark.numeric
def test_clip_keeps_tokens_below_the_target_bit_for_bit_and_zeros_zero():
    norm = NORM_TYPES["clip"](D, init_gain=NormClip.gain_for(2.0, D))
    x = torch.nn.functional.normalize(inputs(), dim=-1) * torch.tensor([0.0, 0.5, 1, 1.9, 2.1, 40, 4000])[:, None]
    y = norm(x)
    assert torch.equal(y[:, :4], x[:, :4])
    torch.testing.assert_close(y[:, 4:].norm(dim=-1), torch.full((2, 3), 2.0))
    x.requires_grad_()
    norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_settings_that_define_a_norm_are_compared_with_their_defaults():
    recorded = {"mm_projector_norm": "rmsnorm", "mm_projector_norm_init": "default", "mm_projector_norm_eps": 1e-6}
    requested = ProjectorNormArguments(mm_projector_norm="rmsnorm", mm_projector_norm_learnable=False)
    assert norm_differences(recorded, requested) == [("mm_projector_norm_eps", 1e-6, 1e-5)]
    assert norm_differences({}, requested) == [("mm_projector_norm", "none", "rmsnorm")]
    assert norm_differences({}, ProjectorNormArguments(mm_projector_norm_eps=1.0)) == []
