"""Training on an accelerator mixes no devices, as far as a machine without one can tell.

Where PyTorch is built with CUDA its fake tensors pretend to be on a GPU (forward only: the backward pass wants a real
one). On every build tensors without data, on the device `meta`, stand for the accelerator, there and back.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import build, flags

from llava.model.attention import VARLEN
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.train.arguments import TrainingArguments

MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
CUDA = pytest.param(
    "cuda:0", marks=pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs PyTorch built with CUDA")
)


class OneDevice(TorchDispatchMode):
    """Refuses an operation on tensors of several devices, unless it moves one; numbers may come from anywhere."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim]
        devices = {x.device for x in tensors}
        if len(devices) > 1 and operation not in MOVES:
            raise RuntimeError(f"{operation}: Expected all tensors to be on the same device, found {devices}")
        return operation(*args, **kwargs or {})


@pytest.fixture
def accelerator(monkeypatch):
    """A function from a device's name to a context in which tensors can be on it, and the trainer believes it is."""

    def pretend(device):
        monkeypatch.setattr(TrainingArguments, "device", torch.device(device))
        if device != "meta":
            monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
            monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
            return FakeTensorMode(allow_non_fake_inputs=True)
        monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # meta has none
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *args: False)
        return OneDevice()

    return pretend


def move(model: nn.Module, device: str) -> None:
    """What `model.to(device)` moves, without its values: parameters, of which some are tied, and buffers."""
    moved = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in moved:
                    new = torch.empty_like(tensor, device=device)
                    moved[id(tensor)] = new if own is module._buffers else nn.Parameter(new, tensor.requires_grad)
                own[name] = None if tensor is None else moved[id(tensor)]


def train_on(accelerator, device, argv, dtype=None, autocast=False, samples=range(4), broken=None):
    """The loss of one micro-batch, after its backward pass where that can run."""
    model, trainer = build(argv)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in samples])
    batch.pop("indices", None)
    model.train()
    if dtype is not None:
        model.to(dtype)
    with accelerator(device):
        move(model, device)
        if broken:
            broken(model)
        context = torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            number = torch.ones((), device=device)
            loss = trainer.compute_loss(model, trainer.on_device(batch), num_items_in_batch=number)
        assert loss.device == torch.device(device) and loss.dtype == torch.float32
        if device == "meta":
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            assert gradients and {g.device.type for g in gradients} == {"meta"}
    return loss


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("model", ["llama", "qwen_tied"])
@pytest.mark.parametrize(
    ("device", "autocast"),
    [("meta", False), pytest.param("cuda:0", False, marks=CUDA.marks), pytest.param("cuda:0", True, marks=CUDA.marks)],
)
def test_both_stages_of_both_classes_train_on_one_device(tiny, tmp_path, accelerator, stage, model, device, autocast):
    options = {"autocast": True} if autocast else {"dtype": torch.bfloat16}
    argv = flags(tiny, tmp_path, stage, model=model, attn_implementation=VARLEN)
    train_on(accelerator, device, argv, **options)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["meta", CUDA])
@pytest.mark.parametrize("norm", NORM_TYPES)
def test_every_arm_trains_on_one_device(tiny, tmp_path, accelerator, device, norm):
    train_on(accelerator, device, flags(tiny, tmp_path, 2, norm=norm))


@pytest.mark.parametrize(
    ("device", "padding_free"),  # for a padded batch the library looks into its mask, which meta tensors do not have
    [("meta", True), pytest.param("cuda:0", True, marks=CUDA.marks), pytest.param("cuda:0", False, marks=CUDA.marks)],
)
def test_a_batch_without_images_makes_its_picture_up_on_the_device(tiny, tmp_path, accelerator, device, padding_free):
    argv = flags(tiny, tmp_path, 2, padding_free=padding_free)
    trainer = build(argv)[1]
    texts = [i for i, sample in enumerate(trainer.train_dataset) if "images" not in sample]
    assert texts
    train_on(accelerator, device, argv, samples=texts[:2])


@pytest.mark.parametrize("device", ["meta", CUDA])
def test_one_buffer_left_behind_is_seen(tiny, tmp_path, accelerator, device):
    """As when the tower was moved to the CPU after ZeRO-3 had placed it."""

    def leave_positions(model):
        embeddings = model.get_vision_tower().vision_model.embeddings
        embeddings.position_ids = torch.arange(4, device="cpu")[None]

    with pytest.raises(RuntimeError, match="all tensors to be on the same device|found two different devices"):
        train_on(accelerator, device, flags(tiny, tmp_path, 1), broken=leave_positions)
