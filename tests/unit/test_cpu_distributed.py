"""What CPU ranks need of DeepSpeed and Accelerate."""

import pytest
import torch

from llava.train.cpu_distributed import use_gloo_backend


class Request:
    """A gather that writes its output when it is waited for, as a slow thread of gloo does."""

    def __init__(self, output, part):
        self.output, self.part = output, part

    def wait(self):
        self.output.copy_(self.part.repeat(2))


@pytest.mark.parametrize("async_op", [False, True])
def test_a_gather_of_several_tensors_waits_for_all_of_them(monkeypatch, async_op):
    from accelerate import PartialState
    from deepspeed.comm.torch import TorchBackend
    from transformers import training_args

    for owner, name in (
        (PartialState, "_prepare_backend"),
        (training_args, "is_torch_bf16_gpu_available"),
        (TorchBackend, "all_gather_coalesced"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored afterwards
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    gather = "all_gather_into_tensor"
    monkeypatch.setattr(torch.distributed, gather, lambda out, own, group, async_op: Request(out, own))
    use_gloo_backend()
    parts = [torch.full((3,), float(i)) for i in range(4)]
    outputs = [torch.full((6,), torch.nan) for _ in parts]
    pending = TorchBackend.all_gather_coalesced(None, outputs, parts, async_op=async_op)
    if async_op:
        pending.wait()
    assert all(torch.equal(output, part.repeat(2)) for output, part in zip(outputs, parts, strict=True))
