"""Every device computes the same: attention, loss heads, Liger's layers and whole models.

They run on the GPU where there is one, else on the CPU, so that they cannot rot where there is none.
"""

import pytest
import torch
from accelerate.utils import send_to_device
from batches import BATCHES, batch, loss_and_gradients
from tiny_models import STAGE_1, STAGE_2, trained
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import eager_attention_forward

from benchmarks.shapes import PRESETS, build_llava
from benchmarks.train_step import backends, random_samples
from llava.data.dataset import DataCollatorForSupervisedDataset
from llava.model.attention import MASKED, SEGMENTS, packed_attention
from llava.model.loss import _CHUNK_ELEMENTS, LMHead
from llava.train.kernels import apply_liger, has_liger
from llava.train.optim import set_trainable

pytestmark = pytest.mark.gpu  # as in pytest -m gpu

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
# Relative to the exact tensor's own norm; rounding to bf16 alone is 2e-3.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
needs_liger = pytest.mark.skipif(not CUDA or not has_liger(), reason="needs an NVIDIA GPU and liger-kernel")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Convolutions would round fp32 to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same values on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: torch.Tensor, exact: torch.Tensor, tolerance: float, name: str = "") -> None:
    ours, exact = ours.detach().cpu().double(), exact.detach().cpu().double()
    error = (ours - exact).norm() / exact.norm().clamp(min=1e-30)
    assert error <= tolerance, f"{name}: relative error {error:.2e}, expected at most {tolerance:.0e}"


class Attention(nn.Module):
    """What the library's attention functions read of a layer."""

    is_causal, layer_idx, num_key_value_groups = True, 0, 2

    def __init__(self, backend: str):
        super().__init__()
        self.config = build_llava(PRESETS["tiny"], torch.device("meta"), torch.bfloat16, num_hidden_layers=1).config
        self.config._attn_implementation = backend


def allowed(lengths: list[int], window: int | None) -> torch.Tensor:
    """Which keys each query sees [T, T]."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(sample))[:, None] - torch.arange(len(sample))
    return (sample[:, None] == sample) & (distance >= 0) & (distance < (window or len(sample)))


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize("lengths", [[7, 1, 130], [1025, 3]], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("backend", "dtype"), [(name, dtype) for dtype in DTYPES for name in backends(DEVICE, dtype)])
def test_attention_over_packed_samples_equals_float64(backend, dtype, window, lengths):
    tokens, channels, mask = sum(lengths), 64, allowed(lengths, window)
    inputs = [random_tensor(1, heads, tokens, channels, seed=heads, dtype=dtype) for heads in (4, 2, 2)]
    gradient = random_tensor(1, tokens, 4, channels, seed=9, dtype=dtype)

    exact = [x.double().requires_grad_() for x in inputs]
    keys, values = (x.repeat_interleave(2, dim=1) for x in exact[1:])
    scores = (exact[0] @ keys.transpose(2, 3) / channels**0.5).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    expected.backward(gradient.double())

    ours = [x.to(DEVICE).requires_grad_() for x in inputs]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    arguments = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    arguments |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    arguments |= {"segment_lengths": lengths} if backend == SEGMENTS else {}
    seen = None
    if backend in MASKED:
        seen = torch.zeros(1, 1, tokens, tokens, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min).to(DEVICE)
    else:
        arguments["sliding_window"] = window
    function = ALL_ATTENTION_FUNCTIONS.get(backend, eager_attention_forward)
    output, _ = function(Attention(backend), *ours, seen, scaling=channels**-0.5, dropout=0.0, **arguments)
    output.backward(gradient.to(DEVICE))
    for name, x, y in zip("qkv", ours, exact, strict=True):
        assert_near(x.grad, y.grad, TOLERANCE[dtype], f"gradient of {name}")
    assert_near(output, expected, TOLERANCE[dtype], "output")


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("trained_head", [True, False])
def test_the_loss_equals_float64_in_chunks(monkeypatch, trained_head, rows):
    dtype = torch.bfloat16 if CUDA else torch.float32
    rows, width, vocabulary = (10 * rows, 512, 32_000) if CUDA else (rows, 64, 1000)
    monkeypatch.setitem(_CHUNK_ELEMENTS, "gpu" if CUDA else "cpu", 10 * vocabulary)  # ten rows at a time
    hidden = random_tensor(rows, width, seed=1, dtype=dtype)
    weight = random_tensor(vocabulary, width, seed=2, dtype=dtype) / width**0.5
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(3))
    results = []
    for device, kind in ((DEVICE, dtype), ("cpu", torch.float64)):
        layer = LMHead(width, vocabulary, bias=False, device=device, dtype=kind)
        layer.weight = nn.Parameter(weight.to(device, kind), requires_grad=trained_head)
        x = hidden.detach().to(device, kind).requires_grad_()
        exact = kind is torch.float64
        loss = F.cross_entropy(layer(x), targets, reduction="sum") if exact else layer(x, targets.to(device))
        (loss / rows).backward()
        results.append([loss, x.grad, *([layer.weight.grad] if trained_head else [])])
    for ours, exact in zip(*results, strict=True):
        assert_near(ours, exact, TOLERANCE[dtype])


def assert_same_step(ours: tuple, exact: tuple, tolerance: float) -> None:
    """Losses, and the gradients of all parameters together, so that one near 0 does not decide."""
    assert ours[0] == pytest.approx(exact[0], rel=tolerance)
    assert ours[1].keys() == exact[1].keys()
    flat = [
        torch.cat([gradients[name].flatten().cpu().double() for name in exact[1]]) for _, gradients in (ours, exact)
    ]
    assert_near(*flat, tolerance)


@pytest.mark.slow
@pytest.mark.skipif(not CUDA, reason="a CPU would be compared with itself")
@pytest.mark.parametrize("parts", [STAGE_1, STAGE_2], ids=["stage 1", "stage 2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("name", ["llama", "qwen", "qwen_tied"])
def test_models_have_the_cpus_loss_and_gradients(tiny, name, dtype, tolerance, parts):
    inputs = batch(BATCHES["several_images"])
    exact = loss_and_gradients(trained(tiny, parts, language_model=name), True, SEGMENTS, **inputs)
    model = trained(tiny, parts, language_model=name).to(DEVICE, dtype)
    backend = packed_attention(None, DEVICE, dtype)
    assert_same_step(loss_and_gradients(model, True, backend, **send_to_device(inputs, DEVICE)), exact, tolerance)


@needs_liger
def test_ligers_layers_equal_the_plain_ones(monkeypatch):
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):  # exchanged for the whole process
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    model = build_llava(PRESETS["tiny"], DEVICE, torch.float32)
    set_trainable(model, STAGE_2)
    samples = random_samples(2, 1500, 0, model, torch.float32)
    inputs = send_to_device(DataCollatorForSupervisedDataset(0)(samples), DEVICE)
    backend = packed_attention(None, DEVICE, torch.float32)
    plain = loss_and_gradients(model, True, backend, **inputs)
    apply_liger(model)
    assert_same_step(loss_and_gradients(model, True, backend, **inputs), plain, 1e-3)
