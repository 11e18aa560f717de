"""Lets several CPU ranks train under DeepSpeed, for tests and laptops; only CPU runs load this module.

Accelerate takes DeepSpeed for a GPU library: without a GPU it finds no backend and assumes a single process, and with
`use_cpu` the Trainer drops DeepSpeed. Three things are missing: gloo has to be named as the backend, the Trainer has
to accept bf16, which without `use_cpu` it expects only of GPUs, and a gather of several tensors has to wait for all of
them. DeepSpeed (0.19.8, `comm/torch.py`) waits for the last alone. NCCL ends requests in their order, but gloo's
threads do not: under PyTorch 2.11 ZeRO-3 now and then computed with, and saved, memory that held no weights.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import training_args


def use_gloo_backend() -> None:
    """Makes Accelerate run its ranks on the CPU over gloo. Call it before `TrainingArguments` are parsed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_CPU

    from deepspeed.comm.torch import TorchBackend  # after its accelerator is chosen

    PartialState._prepare_backend = prepare_backend
    training_args.is_torch_bf16_gpu_available = lambda: True
    TorchBackend.all_gather_coalesced = all_gather_coalesced


class Pending(NamedTuple):
    """Requests that are complete only together."""

    requests: Sequence[torch.distributed.Work]

    def wait(self) -> None:
        for request in self.requests:
            request.wait()


def all_gather_coalesced(
    backend: object,
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: torch.distributed.ProcessGroup | None = None,
    async_op: bool = False,
) -> Pending | None:
    """Gathers each input [n] of every rank into its output [ranks * n]; `async_op` returns before that is done."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    pending = Pending([torch.distributed.all_gather_into_tensor(*pair, group=group, async_op=True) for pair in pairs])
    if async_op:
        return pending
    pending.wait()
    return None
