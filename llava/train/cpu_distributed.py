"""Lets several CPU ranks train under DeepSpeed, for tests and laptops; only CPU runs load this module.

Accelerate takes DeepSpeed for a GPU library: without a GPU it finds no backend and assumes a single process, and with
`use_cpu` the Trainer drops DeepSpeed. Two things are missing: gloo has to be named as the backend, and the Trainer has
to accept bf16, which without `use_cpu` it expects only of GPUs.
"""

import os

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import training_args


def use_gloo_backend() -> None:
    """Makes Accelerate run its ranks on the CPU over gloo. Call it before `TrainingArguments` are parsed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend
    training_args.is_torch_bf16_gpu_available = lambda: True
