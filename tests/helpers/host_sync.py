"""What would stop the host until a GPU has caught up, seen on a CPU.

`python host_sync.py FLAGS` trains as the flags say, and prints the waits of the last step by the line of code, as JSON.
What is not seen is the copy of a tensor to the device from memory that is not pinned.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

Lines = Counter[tuple[str, str]]  # by package and line of code


class Reads(TorchDispatchMode):
    """Sees the operations that stop the host until a GPU has reached them; on a CPU, where nothing waits."""

    NAMES = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_consecutive"}

    def __init__(self, count: Callable[[str], Any]):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name.startswith(("index", "_index", "_unsafe_index")) and isinstance(args[1], list | tuple)
        if by_mask and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            self.count(f"{name} by a mask")
        if name in self.NAMES or function is torch.ops.aten.repeat_interleave.Tensor:
            self.count(name)
        return function(*args, **kwargs or {})


class Waits(Reads):
    """Counts the operations that would stop the host until a GPU has reached them."""

    def __init__(self):
        self.seen = Counter()
        super().__init__(lambda name: self.seen.update([name]))


def caller() -> tuple[str, str]:
    """Package and line of the innermost frame that is not PyTorch's, Python's or this file's."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if not (package == "torch" or package in sys.stdlib_module_names or frame.f_code.co_filename == __file__):
            return package, f"{module}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch", "no other code"


def counting(lines: Lines, wait: Callable[..., Any]) -> Callable[..., Any]:
    """`wait`, and each call is counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        lines[caller()] += 1
        return wait(*args, **kwargs)

    return call


@contextlib.contextmanager
def cpu_syncs(lines: Lines) -> Iterator[None]:
    """Counts on a CPU what would make the host wait for a GPU, and makes DeepSpeed take the path of a GPU."""
    from deepspeed.accelerator import get_accelerator

    class Stream:
        """A GPU's stream or event; only `synchronize` stops the host."""

        synchronize = counting(lines, lambda self: None)

        def query(self) -> bool:
            return False

        def ordered(self, *args: Any) -> None:
            """Orders work on the device."""

        wait_stream = wait_event = record_event = record = wait = ordered

    stream, accelerator, make_tensor = Stream(), type(get_accelerator()), torch.tensor
    as_gpu: dict[str, Any] = dict.fromkeys(("Stream", "Event"), property(lambda self: lambda *args, **kwargs: Stream()))
    as_gpu |= dict.fromkeys(("current_stream", "default_stream"), lambda self, index=None: stream)
    as_gpu |= {"is_synchronized_device": lambda self: False, "use_host_timers": lambda self: True}
    as_gpu |= {"synchronize": counting(lines, accelerator.synchronize)}
    copied = counting(lines, make_tensor)  # to a device; the host waits until it is there

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return (make_tensor if device is None else copied)(*args, device=device, **kwargs)

    calls = [(torch.Tensor, name) for name in ("cpu", "tolist", "numpy")] + [(torch.distributed, "barrier")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(accelerator, **as_gpu))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        for owner, name in calls:
            stack.enter_context(mock.patch.object(owner, name, counting(lines, getattr(owner, name))))
        stack.enter_context(Reads(lambda operation: lines.update([caller()])))
        yield


def counted_run(argv: list[str]) -> list[dict[str, Any]]:
    """Trains as the flags say; returns the lines of code that wait in the last step.

    Raises:
        RuntimeError: the step has fewer than two micro-batches.
    """
    from llava.train.llava_trainer import LLaVATrainer
    from llava.train.train import train

    lines: Lines = Counter()
    step = LastStep(lines)
    train_all, compute = LLaVATrainer.train, Trainer.training_step  # LLaVATrainer's own training_step is of a step

    def train_counted(trainer: LLaVATrainer, *args: Any, **kwargs: Any) -> Any:
        trainer.add_callback(step)
        with cpu_syncs(lines):
            return train_all(trainer, *args, **kwargs)

    def micro_batch(*args: Any, **kwargs: Any) -> Any:
        step.cut()
        return compute(*args, **kwargs)

    counted = mock.patch.object(LLaVATrainer, "train", train_counted)
    with counted, mock.patch.object(Trainer, "training_step", micro_batch):
        train(argv)
    if len(step.pieces) < 3:
        raise RuntimeError(f"the last step has {len(step.pieces) - 1} micro-batches; expected two or more")
    return [
        {"package": package, "line": line, "in_a_micro_batch": step.pieces[1][package, line], "in_a_step": count}
        for (package, line), count in sorted(sum(step.pieces, Counter()).items())
    ]


class LastStep(TrainerCallback):
    """Cuts the count of the last step where its micro-batches start and the step ends."""

    def __init__(self, lines: Lines):
        self.lines = lines
        self.pieces: list[Lines] = []  # before the first micro-batch; each micro-batch, the last with the optimizer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.lines.clear()
        self.pieces.clear()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.cut()

    def cut(self) -> None:
        self.pieces.append(Counter(self.lines))
        self.lines.clear()


def main() -> None:
    lines = json.dumps(counted_run(sys.argv[1:]))
    if os.environ["RANK"] == "0":
        print(lines, flush=True)


if __name__ == "__main__":
    main()
