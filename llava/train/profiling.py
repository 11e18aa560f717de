"""Profiles some steps of a run on rank 0, by `--profile_steps`: a trace, a table of kernels, seconds by piece.

Forward operations belong to the tower, the decoder or the head by the module that runs them. A backward operation
belongs where the forward operation with the same autograd sequence number does.
"""

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.utils.files import write_text

logger = logging.getLogger(__name__)

PROFILE = "profile"  # folder in the output folder
PIECES = ("LLM products", "attention", "tower", "head", "elementwise", "communication")
"""What `seconds_by_piece` gives, besides `other`; the decoder has three pieces."""
ROWS = 60  # of the table of kernels

_STEP, _DECODER = "step", "decoder"  # names of ranges in the trace, as `tower` and `head`
_COMMUNICATION = re.compile("nccl|gloo|c10d|param_comms", re.IGNORECASE)
_ATTENTION = re.compile("attention|attn|softmax|bmm", re.IGNORECASE)
_PRODUCT = re.compile(r"aten::(mm|addmm|linear|matmul)\b|mkldnn_linear|^(Addm|M)mBackward")


class StepProfiler(TrainerCallback):
    """Profiles steps of the whole run, counted from 1, also where the run was resumed.

    Args:
        steps: the steps.
        model: the model, before DeepSpeed wraps it.
        output_dir: gets the folder `profile`.
    """

    def __init__(self, steps: range, model: LlavaMetaForCausalLM, output_dir: str):
        self.steps, self.folder = steps, Path(output_dir, PROFILE)
        self.profile: Any = None
        self.step_range: Any = None  # inside a profiled step
        self.first = 0
        decoder = model.get_model()
        for name, module in (("tower", decoder.vision_tower), (_DECODER, decoder), ("head", model.lm_head)):
            self._mark(name, module)

    def _mark(self, name: str, module: nn.Module) -> None:
        """Makes every forward pass of `module` in a profiled step a range of the trace."""
        entered = []

        def enter(*_: object) -> None:
            if self.step_range is not None:
                entered.append(record_function(name).__enter__())

        def leave(*_: object) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def check(self, done: int, last: int) -> None:
        """Raises ValueError if a step is beyond the run's last; logs if all are done."""
        first_to_last = f"--profile_steps {self.steps[0]}:{self.steps[-1]}"
        if self.steps[-1] > last:
            raise ValueError(f"{first_to_last}: the run has {last} steps; choose steps up to {last}")
        if self.steps[-1] <= done:
            logger.info("%s: %d steps are done, so that nothing is profiled", first_to_last, done)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 not in self.steps or not state.is_world_process_zero:
            return
        if self.profile is None:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
            self.profile, self.first = profile(activities=activities), state.global_step + 1
            self.profile.start()
        self.step_range = record_function(_STEP).__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if self.step_range is None:
            return
        self.step_range = self.step_range.__exit__(None, None, None)
        if state.global_step == self.steps[-1]:
            self._write(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        if self.profile is not None:  # the run was stopped earlier
            self._write(state.global_step)

    def _write(self, last: int) -> None:
        self.profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.folder}/steps_{self.first}-{last}"
        self.profile.export_chrome_trace(f"{stem}.trace.json.gz")
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        write_text(Path(f"{stem}.kernels.txt"), self.profile.key_averages().table(order, ROWS) + "\n")
        pieces = seconds_by_piece(self.profile.events())
        write_text(Path(f"{stem}.pieces.json"), json.dumps(pieces, indent=2) + "\n")
        logger.info("steps %d to %d are profiled: %s.*", self.first, last, stem)
        self.profile = None


def seconds_by_piece(events: Iterable[Any]) -> dict[str, float]:
    """Seconds of a micro-batch by piece: of kernels where a GPU ran, of the host otherwise.

    `other` is the rest of the steps' time: projector, optimizer, gaps between kernels.

    Args:
        events: those of a profile (`torch.autograd.profiler_util.FunctionEvent`), with a range for each step.
    """
    host = [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]
    steps = [event.time_range for event in host if event.name == _STEP]
    inside = [e for e in host if any(step.start <= e.time_range.start < step.end for step in steps)]
    on_gpu = any(event.kernels for event in inside)
    made: dict[tuple[int, int], str] = {}  # the part of the forward operation with this sequence number
    seconds = dict.fromkeys(PIECES, 0.0)
    for event in sorted(inside, key=lambda event: event.time_range.start):
        names, part = _place(event, made)
        if not event.fwd_thread and event.sequence_nr >= 0:
            made[event.thread, event.sequence_nr] = part  # the last operation with the number makes the node
        if piece := _piece(names, part):
            seconds[piece] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
    whole = sum(step.elapsed_us() for step in steps) / 1e6
    seconds["other"] = max(0.0, whole - sum(seconds.values()))
    micro_batches = sum(event.name == _DECODER for event in inside)
    return {piece: value / max(micro_batches, 1) for piece, value in seconds.items()}


def _place(event: Any, made: dict[tuple[int, int], str]) -> tuple[list[str], str]:
    """The names of an event and of those around it in its part, and the part: tower, decoder, head or none."""
    names, recomputed = [], False
    while event is not None:
        if event.name in ("tower", _DECODER, "head"):
            return names, event.name
        if not event.fwd_thread:
            recomputed |= event.sequence_nr >= 0
        elif part := made.get((event.fwd_thread, event.sequence_nr)):  # of a backward pass
            return names if recomputed else [*names, event.name], part
        names.append(event.name)
        event = event.cpu_parent
    return names, ""


def _piece(names: list[str], part: str) -> str:
    """The piece of an event, or nothing where it is part of `other`."""
    if any(map(_COMMUNICATION.search, names)):
        return "communication"
    if part != _DECODER:
        return part
    if any(map(_ATTENTION.search, names)):
        return "attention"
    return "LLM products" if any(map(_PRODUCT.search, names)) else "elementwise"
