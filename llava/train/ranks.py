"""Agreement between ranks; with one process everything here returns at once."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def joined() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_all(value: Value) -> list[Value]:
    """Every rank's `value`, by rank. Every rank must call."""
    if not joined():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Value) -> Value:
    """Rank 0's `value`. Every rank must call."""
    if not joined():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_first(function: Callable[[], Value]) -> Value:
    """What `function` returns on rank 0, where alone it runs; its error is raised on all. Every rank must call."""
    outcome: Any = None
    if not joined() or dist.get_rank() == 0:
        try:
            outcome = function(), None
        except Exception as error:
            outcome = None, error
    value, error = from_first(outcome)
    if error is not None:
        raise error
    return value


def barrier() -> None:
    """Waits for all ranks."""
    if joined():
        dist.barrier()


def leave_process_group() -> None:
    """Waits for the rank that saves, then ends the group: over gloo, ranks that exit without that sometimes abort."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
