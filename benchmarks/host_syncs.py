"""How often the host waits for the device in a training step under DeepSpeed, and in whose code.

Trains a tiny model in stage 2 under ZeRO-2 and ZeRO-3, with one rank and with two, and counts the third step, from its
first micro-batch to the end of the optimizer's step. A wait belongs to the innermost line outside PyTorch.

On a CPU the counts are upper bounds. DeepSpeed takes the path of a GPU, whose events are never done when it looks, so
that it waits wherever it may. What is not seen is the copy of a tensor to the device from memory that is not pinned.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

from benchmarks.common import ROOT, add_result_flags, result_folder, run_json, write_result
from benchmarks.gpu_training import write_records
from benchmarks.shapes import PRESETS, write_language_model, write_tower
from llava.utils.commands import Parser, whole

MICRO_BATCHES = 3  # of a step
STEPS = 3  # the last is counted: DeepSpeed records the order of modules in the first, and its timer starts in the third
TREE = ("llava", "benchmarks")
CODE = ("llava", "deepspeed", "accelerate", "transformers")  # a row each, even if it never waits

Lines = Counter[tuple[str, str]]  # by package and line of code


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--zero", type=int, nargs="+", choices=(1, 2, 3), default=(2, 3), help="stages of ZeRO")
    ranks = sorted({1, min(2, torch.cuda.device_count() or 2)})
    parser.add_argument("--ranks", type=whole(1), nargs="+", default=ranks, help="numbers of ranks")
    add_result_flags(parser, quick="only the most ranks")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        lines = json.dumps(counted_run(args.train))
        if os.environ["RANK"] == "0":
            print(lines, flush=True)
        return
    if args.quick:
        args.ranks = [max(args.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), max(args.ranks))
        runs = {(zero, ranks): run(Path(folder), zero, ranks) for zero in args.zero for ranks in args.ranks}
    rows = [{"zero": zero, "ranks": ranks} | row for (zero, ranks), lines in runs.items() for row in totals(lines)]
    rows += [{"zero": zero, "ranks": ranks} | line for (zero, ranks), lines in runs.items() for line in lines]
    for row in rows:
        print(row)
    print(write_result("host_syncs", rows, folder=result_folder(args), micro_batches_of_a_step=MICRO_BATCHES))


def write_inputs(folder: Path, ranks: int) -> None:
    """Writes a model, a tower and records for the steps of `ranks` ranks."""
    cpu = torch.device("cpu"), torch.float32
    write_language_model("tiny", folder / "language_model", *cpu)
    write_tower(PRESETS["tiny"].tower_name, folder / "tower", *cpu)
    write_records(folder / "records.json", 2, ranks * MICRO_BATCHES * STEPS)


def run(folder: Path, zero: int, ranks: int) -> list[dict[str, Any]]:
    """The lines of a run that wait."""
    config = json.loads((ROOT / "deepspeed_configs" / f"zero{max(zero, 2)}.json").read_text(encoding="utf-8"))
    config["zero_optimization"]["stage"] = zero
    file = folder / f"zero{zero}.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    flags = {"model_name_or_path": folder / "language_model", "vision_tower": folder / "tower", "version": "chatml"}
    flags |= {"data_path": folder / "records.json", "image_folder": folder, "mm_projector_norm": "gwc_layernorm"}
    flags |= {"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter,mm_language_model", "model_max_length": 512}
    flags |= {"output_dir": folder / f"zero{zero}_{ranks}", "deepspeed": file, "per_device_train_batch_size": 1}
    flags |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    flags |= {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks, "-m", "benchmarks.host_syncs"]
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return run_json([sys.executable, *map(str, launcher), "--train", *map(str, words)], cwd=ROOT)


def totals(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sums of the lines by package."""
    fields = ("in_a_micro_batch", "in_a_step")
    packages = dict.fromkeys((*CODE, *(line["package"] for line in lines)))
    return [
        {"package": package}
        | {field: sum(line[field] for line in lines if line["package"] == package) for field in fields}
        for package in packages
    ]


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
        with (gpu_syncs if torch.cuda.is_available() else cpu_syncs)(lines):
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


# --- counting ---------------------------------------------------------------------------------------------------------


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
def gpu_syncs(lines: Lines) -> Iterator[None]:
    """Counts what makes the host wait for a GPU: PyTorch's warnings where a value is read, and calls that wait."""

    def warned(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            lines[caller()] += 1

    owners = dict.fromkeys((torch.cuda, torch.cuda.Stream, torch.cuda.Event), "synchronize")
    with contextlib.ExitStack() as stack:
        for owner, name in (owners | {torch.distributed: "barrier"}).items():  # PyTorch does not warn of them
            stack.enter_context(mock.patch.object(owner, name, counting(lines, getattr(owner, name))))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = warned
        torch.cuda.set_sync_debug_mode("warn")
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield


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


if __name__ == "__main__":
    main()
