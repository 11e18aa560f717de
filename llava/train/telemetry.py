"""Measures training from inside: gradient norms and token norms along the visual path, and throughput.

What is measured stays on the device. A log line sums it over the ranks and copies it to the host once.

Logged keys:
    `grad_norm/{llm_input,before_norm,vision_features}`: L2 norm, over the whole optimizer step, of the loss's gradient
        at the visual tokens there; left out, like their norms, if a step has no picture;
    `norm/{llm_input,before_norm,vision_features,text_embeddings}`: mean L2 norm of a token in the step's batches;
    `norm/gain_mean_abs`: mean |gain| of the norm; `norm/image_newline`: norm of that token, which does not pass through
        the projector's norm;
    `grad_share/{mm_mlp_adapter,mm_projector_norm,mm_vision_tower,mm_language_model}`: of each part that is trained, the
        share of the squared gradient norm that `--max_grad_norm` bounds; the projector's norm counts apart. Left out
        under DeepSpeed, which has freed the gradients by then;
    `clipped_share`: share of the steps since the last line whose gradient was scaled down to `--max_grad_norm`;
    `tokens_per_second`, `samples_per_second`: over all ranks, without padding;
    `model_tflops_per_second`: per device, the operations that the step requires (`llava.train.flops`) over its time;
    `mfu`: the same as a share of the device's datasheet peak in dense bf16; `peak_memory_gib`: of the fullest device
        (on a CPU: process), since the start;
    `eval/*`: see `llava.train.heldout`; none of the rates includes its time;
    `data_wait_share`: time waiting for data over all time.

Shapes: N images, V visual tokens per image, E vision hidden size, D LLM hidden size.
"""

import contextlib
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback, TrainerState

from llava.data.collate import Batch
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.norm import ProjectorNorm, projector_norm
from llava.model.zero3 import gathered
from llava.train.arguments import TrainingArguments
from llava.train.flops import Work, batch_work, flop_costs, peak_tflops, required_flops
from llava.train.optim import part_of
from llava.utils.files import write_text

logger = logging.getLogger(__name__)

GRADIENTS = ("llm_input", "before_norm", "vision_features")
TOKENS = (*GRADIENTS, "text_embeddings")
LOG_FILE = "train_log.jsonl"


@dataclass
class Reading:
    """What a rank measured.

    Attributes:
        values: [K] in fp64 on the device, to be summed over the ranks.
        metrics: the logged figures, from the sums.
    """

    values: torch.Tensor
    metrics: Callable[[list[float]], dict[str, float]]


def read(readings: Sequence[Reading], accelerator: Accelerator) -> dict[str, float]:
    """The logged figures of all readings, by one sum over the ranks and one copy; every rank must call."""
    sums = accelerator.reduce(torch.cat([reading.values for reading in readings]), reduction="sum").tolist()
    metrics = {}
    for reading in readings:
        own, sums = sums[: len(reading.values)], sums[len(reading.values) :]
        metrics |= reading.metrics(own)
    return metrics


def on_device(values: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """Scalars of the host or the device in fp64 on the device; the host does not wait."""
    known = sent(torch.tensor([0.0 if isinstance(v, torch.Tensor) else v for v in values], dtype=torch.float64), device)
    return torch.stack([v.double() if isinstance(v, torch.Tensor) else k for v, k in zip(values, known, strict=True)])


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device; a GPU fetches it from pinned memory while the host goes on."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class NormProbe:
    """Hooks that measure norms and gradient norms while `active`; inactive hooks cost nothing measurable.

    The hooks must be registered before DeepSpeed wraps the model, so that they run while ZeRO-3 has the gain gathered.
    """

    def __init__(self, model: LlavaMetaForCausalLM):
        self.active = False
        self.reset()
        decoder = model.get_model()
        self.norm = projector_norm(decoder.mm_projector)
        self.newline = decoder.image_newline
        model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        decoder.mm_projector.register_forward_pre_hook(self._see_features)
        decoder.mm_projector.register_forward_hook(self._see_projector_output)
        decoder.embed_tokens.register_forward_hook(lambda module, args, out: self._measure("text_embeddings", out))
        if self.norm is not None:
            self.norm.register_forward_hook(self._see_norm)

    def start_step(self, measured: bool) -> None:
        """Switches the hooks on for a step that is measured, and off for one that is not."""
        self.active = measured
        self.reset()

    def reset(self) -> None:
        self.squared_gradients: dict[str, torch.Tensor | float] = dict.fromkeys(GRADIENTS, 0.0)
        self.norm_sums: dict[str, torch.Tensor | float] = dict.fromkeys(TOKENS, 0.0)
        self.token_counts = dict.fromkeys(TOKENS, 0)
        self.mean_abs_gain: torch.Tensor | None = None
        self.gradient_shares: dict[str, torch.Tensor] = {}
        self.dummy = False

    def _see_batch(self, module: nn.Module, args: tuple, batch: dict[str, Any]) -> None:
        self.dummy = batch.get("images") is None  # then the model makes up a picture, since it must run the tower

    def _see_features(self, module: nn.Module, args: tuple) -> tuple | None:
        """Watches the projector's input [N, V, E], which after a frozen tower has to be made to require a gradient."""
        if not self.active:
            return None
        (features,) = args
        if torch.is_grad_enabled() and not features.requires_grad:
            features = features.detach().requires_grad_()
        self._watch("vision_features", features)
        return (features,)

    def _see_norm(self, module: ProjectorNorm, args: tuple, output: torch.Tensor) -> None:
        if self.active:
            self._watch("before_norm", args[0])
            self.mean_abs_gain = module.mean_abs_gain()

    def _see_projector_output(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if self.active:
            self._watch("llm_input", output)
            if self.norm is None:
                self._watch("before_norm", output)

    def _watch(self, place: str, tokens: torch.Tensor) -> None:
        if not self.dummy:
            self._measure(place, tokens)
        if tokens.requires_grad:
            tokens.register_hook(lambda grad: self._add_gradient(place, grad))

    def _add_gradient(self, place: str, grad: torch.Tensor) -> None:
        self.squared_gradients[place] = self.squared_gradients[place] + grad.float().square().sum()

    def _measure(self, place: str, tokens: torch.Tensor) -> None:
        if self.active:
            norms = tokens.detach().float().norm(dim=-1)
            self.norm_sums[place] = self.norm_sums[place] + norms.sum()
            self.token_counts[place] += norms.numel()

    def see_gradients(self, parts: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Measures each part's share of the gradient; `parts` names the part of each of the `parameters`."""
        gradients: dict[str, list[torch.Tensor]] = {part: [] for part in parts}
        for part, parameter in zip(parts, parameters, strict=True):
            if parameter.grad is not None:
                gradients[part].append(parameter.grad)
        squares = {part: get_total_norm(some).double().square() for part, some in gradients.items() if some}
        total = sum(squares.values(), torch.finfo(torch.float64).tiny)  # text alone gives stage 1 gradients of zero
        self.gradient_shares = {f"grad_share/{part}": square / total for part, square in squares.items()}

    def reading(self, accelerator: Accelerator) -> Reading:
        """The step's measurements; every rank must call."""
        shared = dict(self.gradient_shares)  # what is the same on all ranks, so that the first rank's counts
        if self.mean_abs_gain is not None:
            shared["norm/gain_mean_abs"] = self.mean_abs_gain
        if self.newline is not None:
            with gathered(self.newline):
                shared["norm/image_newline"] = self.newline.detach().float().norm()
        values = [*self.squared_gradients.values(), *self.norm_sums.values(), *self.token_counts.values()]
        values += shared.values() if accelerator.is_main_process else [0.0] * len(shared)
        # The Trainer multiplies each rank's loss by the number of ranks, because gradients are averaged afterwards.
        ranks = accelerator.num_processes

        def metrics(totals: list[float]) -> dict[str, float]:
            squares, sums, counts, others = totals[:3], totals[3:7], totals[7:11], totals[11:]
            norms = {f"norm/{p}": s / n for p, s, n in zip(TOKENS, sums, counts, strict=True) if n}
            seen = [(p, s) for p, s in zip(GRADIENTS, squares, strict=True) if f"norm/{p}" in norms]
            gradients = {f"grad_norm/{p}": s**0.5 / ranks for p, s in seen}
            return norms | gradients | dict(zip(shared, others, strict=True))

        return Reading(on_device(values, accelerator.device), metrics)


def gradient_parts(model: LlavaMetaForCausalLM, parameters: Iterable[nn.Parameter]) -> list[str]:
    """The part that each of the model's `parameters` belongs to, with the projector's norm as a part of its own."""
    norm = projector_norm(model.get_model().mm_projector)
    parts = {parameter: part_of(name) for name, parameter in model.named_parameters()}
    parts |= dict.fromkeys(() if norm is None else norm.parameters(), "mm_projector_norm")
    return [parts[parameter] for parameter in parameters]


class Clipping:
    """Counts the steps between two log lines whose gradient is scaled down to `max_norm`."""

    def __init__(self, max_norm: float):
        self.max_norm = max_norm
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.clipped: torch.Tensor | int = 0

    def add(self, grad_norm: Any) -> None:
        """Counts a step by its gradient norm, of the host or the device; one that is not finite was not applied."""
        self.steps += 1
        self.clipped = self.clipped + ((grad_norm > self.max_norm) & (grad_norm < math.inf))

    def reading(self, accelerator: Accelerator) -> Reading:
        """The share since the last call."""
        values = on_device([self.clipped, self.steps], accelerator.device)
        self.reset()
        return Reading(values, lambda totals: {"clipped_share": totals[0] / totals[1]} if totals[1] else {})


class Throughput:
    """Counts work, waiting time and memory between two log lines.

    Args:
        model: the model; its `requires_grad` decides which operations a batch requires.
        device: the device whose peak rate and memory are logged.
        peak: the peak TFLOP/s for `mfu`; None takes the datasheet's.
    """

    def __init__(self, model: LlavaMetaForCausalLM, device: torch.device, peak: float | None = None):
        self.costs = flop_costs(model)
        self.device = device
        self.peak = peak_tflops(device) if peak is None else peak
        if self.peak is None and device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            logger.info("mfu is not logged: no datasheet figure is known for %s; --peak_tflops gives one", name)
        self.paused_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.data_wait = 0.0
        self.work = Work()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context for work that is not training: its time counts only in `paused_seconds`."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # work that is still running belongs to training
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.start += seconds
            self.paused_seconds += seconds

    def add(self, batches: list[Batch], data_wait: float) -> None:
        """Counts the micro-batches of one optimizer step, without waiting for the device."""
        self.data_wait += data_wait
        for batch in batches:
            self.work += batch_work(batch, self.costs.sliding_window)

    def reading(self, accelerator: Accelerator) -> Reading:
        """Rates since the last call."""
        seconds, ranks = time.perf_counter() - self.start, accelerator.num_processes
        memory = [0.0] * ranks
        memory[accelerator.process_index] = peak_memory_gib(self.device)
        own = [*self.work.values(), self.data_wait / seconds, *memory]  # all of the host
        values = sent(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in own]), self.device)
        self.reset()

        def metrics(totals: list[float]) -> dict[str, float]:
            *counts, wait = totals[:-ranks]
            work = Work(*counts)
            tflops = required_flops(self.costs, work) / seconds / ranks / 1e12
            return {
                "tokens_per_second": float(work.tokens) / seconds,
                "samples_per_second": float(work.samples) / seconds,
                "model_tflops_per_second": tflops,
                **({} if self.peak is None else {"mfu": tflops / self.peak}),
                "peak_memory_gib": max(totals[-ranks:]),
                "data_wait_share": wait / ranks,
            }

        return Reading(values, metrics)


def without_pauses(logs: dict[str, float], paused_seconds: float) -> dict[str, float]:
    """The library's figures of a whole run, `train_runtime` and the rates, without the time that was not training."""
    seconds = max(logs["train_runtime"] - paused_seconds, 1e-9)
    rates = {name: value for name, value in logs.items() if name.startswith("train_") and name.endswith("_per_second")}
    corrected = {name: round(value * logs["train_runtime"] / seconds, 3) for name, value in rates.items()}
    return corrected | {"train_runtime": round(seconds, 4)}


def peak_memory_gib(device: torch.device) -> float:
    """The most memory so far, in GiB, that tensors took on a GPU, or that this process took on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def measures_step(args: TrainingArguments, state: TrainerState, step: int) -> bool:
    """Whether optimizer step `step` (from 1) is measured, according to `--telemetry_steps` or `--logging_steps`."""
    every = state.logging_steps if args.telemetry_steps is None else args.telemetry_steps
    return bool(every) and step % every == 0


class JsonlCallback(TrainerCallback):
    """Appends every log line to `train_log.jsonl` in the output folder; a resumed run continues the file."""

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir, LOG_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = whole_lines(path) if path.exists() and state.global_step else []
        # Steps that an interrupted run logged after its last checkpoint are computed again.
        earlier = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        write_text(path, "".join(line + "\n" for line in earlier), synced=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            with Path(args.output_dir, LOG_FILE).open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logged_names(logs)}) + "\n")


def whole_lines(path: Path) -> list[str]:
    """The lines of a log without a last one that was cut off, by a full disk or a kill, which is named."""
    *lines, cut = path.read_text(errors="replace").split("\n")
    if cut:
        logger.warning("%s: dropping the last line, which was cut off after %d characters", path, len(cut))
    return lines


def logged_names(logs: dict[str, Any]) -> dict[str, Any]:
    """Held-out figures under the names that TensorBoard and others use: `eval/loss`, not the library's `eval_loss`."""
    return {f"eval/{k.removeprefix('eval_')}" if k.startswith("eval_") else k: v for k, v in logs.items()}
