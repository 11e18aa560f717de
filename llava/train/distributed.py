"""What several ranks need besides Accelerate: CPU ranks under DeepSpeed, nodes that agree, an orderly end."""

import logging
import os
import platform
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from transformers import training_args

from llava.utils.locks import TRAINING_LOCK
from llava.utils.versions import PACKAGES, git_commit, version_of

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


def joined() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_first(function: Callable[[], Value]) -> Value:
    """What `function` returns on rank 0, where alone it runs; its error is raised on all. Every rank must call."""
    outcome: Any = None
    if PartialState().is_main_process:
        try:
            outcome = function(), None
        except Exception as error:
            outcome = None, error
    value, error = broadcast_object_list([outcome])[0]
    if error is not None:
        raise error
    return value


def leave_process_group() -> None:
    """Waits for the rank that saves, then ends the group: over gloo, ranks that exit without that sometimes abort."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def use_gloo_backend() -> None:
    """Lets several CPU ranks train under DeepSpeed, for tests and laptops. Call before `TrainingArguments` are parsed.

    Accelerate takes DeepSpeed for a GPU library: without a GPU it finds no backend and assumes a single process. And
    without `use_cpu`, with which the Trainer would drop DeepSpeed, the Trainer expects bf16 only of GPUs.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Without it DeepSpeed starts a program at every bucket of gradients, to count the processor's nodes.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend
    # Training never calls DeepSpeed's all-reduce over shared memory, which leaves 64 MiB per rank in /dev/shm for ever.
    operations: Any = import_module("deepspeed.comm.torch")
    operations.build_shm_op = lambda: None
    training_args.is_torch_bf16_gpu_available = lambda: True


def check_nodes(inputs: list[str], output_dir: str) -> None:
    """Raises ValueError if versions, commit, the paths `inputs` or the output folder of the run's nodes differ.

    Every rank must call, while rank 0 holds the folder, and before a model is loaded.
    """
    host = socket.gethostname()
    if len(set(gather_object([host]))) == 1:
        return
    facts = {name: version_of(name) for name in PACKAGES} | {"python": platform.python_version()}
    lock = Path(output_dir, TRAINING_LOCK)  # rank 0's, as the others see it
    facts |= {"commit": git_commit(), f"lock in --output_dir {output_dir}": lock.read_text() if lock.exists() else None}
    facts |= {name: Path(name).stat().st_size if Path(name).is_file() else Path(name).is_dir() for name in inputs}
    everyones = gather_object([(host, facts)])
    expected = everyones[0][1]
    faults = [
        f"rank {rank} on {host}: {name}: {own[name]}, rank 0 has {expected[name]}"
        for rank, (host, own) in enumerate(everyones)
        for name in expected
        if own[name] != expected[name]
    ]
    if faults:
        raise ValueError("the nodes differ; make them alike:\n" + "\n".join(faults))
    hosts = len({host for host, _ in everyones})
    logger.info("%d ranks on %d hosts have the same versions, commit and paths", len(everyones), hosts)
