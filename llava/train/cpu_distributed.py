"""Lets several CPU ranks train under DeepSpeed, for tests and laptops; only CPU runs load this module.

Accelerate takes DeepSpeed for a GPU library: without a GPU it finds no backend and believes in one process, and with
`use_cpu` the Trainer drops DeepSpeed. What is missing is to name gloo as the backend, and to let the Trainer have bf16,
which it expects of GPUs alone where `use_cpu` is not set.
"""

import os

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import training_args


def use_gloo_backend() -> None:
    """Makes Accelerate run its ranks on CPU over gloo. Call before `TrainingArguments` are parsed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend
    training_args.is_torch_bf16_gpu_available = lambda: True
