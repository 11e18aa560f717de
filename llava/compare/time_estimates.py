"""About how long an item's trainings and measurements take, for its dry run.

    training    OPERATIONS x parameters x tokens x samples / (devices x peak x TRAINING_SHARE)
    measuring   2 x parameters x TOKENS x samples x commands / (peak x SHARE)

To measure, parameters are half the bytes of a model's weights, as of two bytes each: a checkpoint in fp32 counts twice,
and so does every expert of a mixture that a token does not use. To train, they are what the language model's name says;
the tower is not counted. Reading weights, evaluation and communication are not counted either.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llava.data.prepare import SOURCES
from llava.launch.devices import resolve_devices
from llava.launch.recipe import STAGES

TOKENS = 1500
"""Tokens of a sample in the language model, its picture's included; fewer in LLaVA-1.5, more in Qwen2.5-VL."""
SHARE = 0.1
"""Of the peak: small batches, whose states are copied and measured."""
TRAINING_SHARE = 0.4
"""Of the peak, as `python -m benchmarks.scale` assumes."""
OPERATIONS = dict(zip(STAGES, (4, 6), strict=True))
"""Per parameter and token: two forward, two back to the projector, and two for the gradients of weights."""
TRAINED_TOKENS = dict(zip(STAGES, (754, 1029), strict=True))
"""Of a sample in training: 729 of its picture, and text as `benchmarks.scale` counts it."""
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
    """TFLOP/s of the first GPU by its datasheet, or of the processor; None for a GPU that is not known or not here."""
    if not resolve_devices(os.environ).on_gpu:
        return CPU_PEAK * (os.cpu_count() or 1)
    import torch

    from llava.train.flops import peak_tflops

    return peak_tflops(torch.device("cuda", 0)) if torch.cuda.is_available() else None


def hours(parameters: float, samples: int, tflops: float) -> float:
    """The estimate for `samples` forward passes in all.

    Args:
        tflops: `peak()`.
    """
    return 2 * parameters * TOKENS * samples / (tflops * 1e12 * SHARE) / 3600


def training_hours(stage: str, recipe: Mapping[str, Any], tflops: float) -> float | None:
    """The estimate for a stage; None if the model's name or the data do not say how large they are.

    Args:
        recipe: the stage's run, as `DRY_RUN=json` prints it.
        tflops: `peak()`.
    """
    flags, devices = recipe["flags"], recipe["devices"]
    parameters, steps = parameters_named(flags["model_name_or_path"]), int(flags["max_steps"])
    if steps > 0:
        samples = steps * recipe["batch"]["global"]
    else:
        place = Path(flags["data_path"])
        known = [source.records for source in SOURCES.values() if place.is_relative_to(source.folder)]
        samples = float(flags["num_train_epochs"]) * sum(known)
    if not parameters or not samples:
        return None
    count = devices["nodes"] * devices["ranks"] if devices["on_gpu"] else 1  # ranks on a CPU share its peak
    operations = OPERATIONS[stage] * parameters * TRAINED_TOKENS[stage] * samples
    return operations / (count * tflops * 1e12 * TRAINING_SHARE) / 3600
