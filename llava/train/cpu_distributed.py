"""Lets several CPU ranks train under DeepSpeed, for tests and laptops; only CPU runs load this module.

Accelerate takes DeepSpeed for a GPU library: without a GPU it finds no backend and believes in one process, and with
`use_cpu` the Trainer drops DeepSpeed. Naming gloo as the backend is all that is missing.
"""

import os

from accelerate import PartialState
from accelerate.utils import DistributedType


def use_gloo_backend() -> None:
    """Makes Accelerate run its ranks on CPU over gloo. Call before `TrainingArguments` are parsed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend
