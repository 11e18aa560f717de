"""About how long an item's measurements take, for its dry run.

    hours = 2 x parameters x TOKENS x samples x commands / (peak x SHARE x 3600)

Parameters are half the bytes of a model's weights, as of two bytes each: a checkpoint in fp32 counts twice, and so does
every expert of a mixture that a token does not use. Reading the weights is not counted.
"""

import os
import re
from collections.abc import Mapping

from llava.launch.devices import resolve_devices

TOKENS = 1500
"""Tokens of a sample in the language model, its picture's included; fewer in LLaVA-1.5, more in Qwen2.5-VL."""
SHARE = 0.1
"""Of the peak: small batches, whose states are copied and measured."""
CPU_PEAK = 0.05
"""TFLOP/s of a processor's core in fp32."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([bm])(?![a-z])", re.IGNORECASE)


def parameters_of(files: Mapping[str, int]) -> float:
    """About how many parameters a model has, by the bytes of its files."""
    return sum(size for path, size in files.items() if path.endswith((".safetensors", ".bin"))) / 2


def parameters_named(model: str) -> float | None:
    """How many parameters a model's name says that it has, as `Llama-3.2-3B`; None if it says nothing."""
    sizes = _SIZE.findall(model.rstrip("/").rpartition("/")[2])
    return float(sizes[-1][0]) * {"b": 1e9, "m": 1e6}[sizes[-1][1].lower()] if sizes else None


def peak() -> float | None:
    """TFLOP/s of the first GPU by its datasheet, or of the processor; None for a GPU that is not known."""
    if not resolve_devices(os.environ).on_gpu:
        return CPU_PEAK * (os.cpu_count() or 1)
    import torch

    from llava.train.flops import peak_tflops

    return peak_tflops(torch.device("cuda", 0))


def hours(parameters: float, samples: int, tflops: float) -> float:
    """The estimate for `samples` forward passes in all.

    Args:
        tflops: `peak()`.
    """
    return 2 * parameters * TOKENS * samples / (tflops * 1e12 * SHARE) / 3600
