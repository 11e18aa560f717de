"""Measures training from inside: norms along the visual path, throughput, a profile; writes the log and the progress.

docs/recipe.md lists what is logged. What is measured stays on the device; a log line sums it over the ranks and copies
it to the host once. Gradient norms at visual tokens are L2 norms over the whole optimizer step; norms of tokens are
means over the step's batches. Both are left out if a step has no image. No rate counts the time of evaluations.

Shapes: N images, V visual tokens per image, E vision hidden size, D LLM hidden size, H heads, C channels per head.
"""

import contextlib
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils import get_total_norm
from torch.profiler import profile
from transformers import TrainerCallback, TrainerState

from llava.data.collate import Batch
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.norm import ProjectorNorm, projector_norm
from llava.model.zero3 import full_shape, gathered
from llava.train.arguments import TrainingArguments
from llava.train.optim import is_trained, part_of
from llava.utils.files import write_text
from llava.utils.progress import in_terminal, progress

logger = logging.getLogger(__name__)

GRADIENTS = ("llm_input", "before_norm", "vision_features")
TOKENS = (*GRADIENTS, "text_embeddings")
LOG_FILE = "train_log.jsonl"
PROFILE = "profile"  # folder in the output folder
_ROWS = 60  # of the table of kernels

# The datasheets' dense bf16 TFLOP/s; the first name that the device's name contains counts.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H200 NVL": 835.0, "H100": 989.0, "H200": 989.0, "H800": 989.0,
    "A100": 312.0, "A800": 312.0,
}  # fmt: skip

Values = dict[str, torch.Tensor | float]


def read(meters: Sequence[Any], accelerator: Accelerator) -> dict[str, float]:
    """What the meters log, by one sum over the ranks and one copy to the host; every rank must call.

    Args:
        meters: each has `values(accelerator)`, this rank's scalars by name, of the device or the host, and
            `metrics(sums, ranks)`, the logged figures from their sums over the ranks.
    """
    measured = [meter.values(accelerator) for meter in meters]
    values = [value for own in measured for value in own.values()]
    # A GPU fetches the host's numbers from pinned memory while the host goes on.
    host = torch.tensor([0.0 if isinstance(v, torch.Tensor) else v for v in values], dtype=torch.float64)
    host = (host.pin_memory() if accelerator.device.type == "cuda" else host).to(accelerator.device, non_blocking=True)
    scalars = [v.double() if isinstance(v, torch.Tensor) else own for v, own in zip(values, host, strict=True)]
    sums = iter(accelerator.reduce(torch.stack(scalars), reduction="sum").tolist())
    metrics: dict[str, float] = {}
    for meter, own in zip(meters, measured, strict=True):
        metrics |= meter.metrics({name: next(sums) for name in own}, accelerator.num_processes)
    return metrics


# --- norms and gradients ----------------------------------------------------------------------------------------------


class NormProbe:
    """Hooks that measure norms and gradient norms while `active`; inactive hooks cost nothing measurable.

    The hooks must be registered before DeepSpeed wraps the model, so that they run while ZeRO-3 has the gain gathered.
    """

    def __init__(self, model: LlavaMetaForCausalLM):
        self.start_step(False)
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
        self.squared_gradients: Values = dict.fromkeys(GRADIENTS, 0.0)
        self.norm_sums: Values = dict.fromkeys(TOKENS, 0.0)
        self.token_counts = dict.fromkeys(TOKENS, 0)
        self.mean_abs_gain: torch.Tensor | None = None
        self.gradient_shares: dict[str, torch.Tensor] = {}
        self.dummy = False

    def _see_batch(self, module: nn.Module, args: tuple, batch: dict[str, Any]) -> None:
        self.dummy = batch.get("images") is None  # then the model makes up an image, since it must run the tower

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

    def values(self, accelerator: Accelerator) -> Values:
        """The step's sums; what is the same on all ranks comes from the first. Every rank must call."""
        shared: Values = dict(self.gradient_shares)
        if self.mean_abs_gain is not None:
            shared["norm/gain_mean_abs"] = self.mean_abs_gain
        if self.newline is not None:
            with gathered(self.newline):
                shared["norm/image_newline"] = self.newline.detach().float().norm()
        if not accelerator.is_main_process:
            shared = dict.fromkeys(shared, 0.0)
        kinds = {"square": self.squared_gradients, "sum": self.norm_sums, "count": self.token_counts}
        return {f"{kind} {place}": value for kind, own in kinds.items() for place, value in own.items()} | shared

    def metrics(self, sums: dict[str, float], ranks: int) -> dict[str, float]:
        """Norms of the places that had tokens, gradient norms there, and what all ranks share."""
        seen = [place for place in TOKENS if sums[f"count {place}"]]
        metrics = {f"norm/{place}": sums[f"sum {place}"] / sums[f"count {place}"] for place in seen}
        # The Trainer multiplies each rank's loss by the number of ranks, because gradients are averaged afterwards.
        metrics |= {f"grad_norm/{p}": sums[f"square {p}"] ** 0.5 / ranks for p in seen if p in GRADIENTS}
        return metrics | {name: value for name, value in sums.items() if "/" in name}


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
        self.steps = 0
        self.clipped: torch.Tensor | int = 0

    def add(self, grad_norm: Any) -> None:
        """Counts a step by its gradient norm, of the host or the device; one that is not finite was not applied."""
        self.steps += 1
        self.clipped = self.clipped + ((grad_norm > self.max_norm) & (grad_norm < math.inf))

    def values(self, accelerator: Accelerator) -> Values:
        """The numbers since the last call."""
        values: Values = {"clipped": self.clipped, "steps": self.steps}
        self.clipped = self.steps = 0
        return values

    def metrics(self, sums: dict[str, float], ranks: int) -> dict[str, float]:
        """The share of clipped steps."""
        return {"clipped_share": sums["clipped"] / sums["steps"]} if sums["steps"] else {}


# --- operations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What decides the operations of some batches."""

    samples: float = 0
    tokens: float = 0  # of the decoder, without padding
    pairs: float = 0  # (query, key) that see each other in a layer of the decoder, the mean over its layers
    images: float = 0  # squares that the tower sees: an image's crops, where it has several
    targets: float = 0  # positions whose next token is supervised

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class FlopCosts(NamedTuple):
    """Operations per unit of `Work`, forward and backward; the windows are those of the decoder's layers."""

    per_token: int
    per_pair: int
    per_image: int
    per_target: int
    windows: tuple[int | None, ...] = (None,)  # the keys that a query sees at most


def batch_work(batch: Batch, windows: Sequence[int | None] = (None,)) -> Work:
    """The work of one collated micro-batch with a `layout`; `windows` are those of `FlopCosts`."""
    layout = batch["layout"]
    shorter = [[min(n, window or n) for n in layout.lengths] for window in windows]
    pairs = [m * (m + 1) // 2 + (n - m) * m for own in shorter for n, m in zip(layout.lengths, own, strict=True)]
    images = sum(picture.crops for picture in layout.pictures)
    return Work(len(layout.lengths), sum(layout.lengths), sum(pairs) / len(windows), images, len(layout.targets))


def required_flops(costs: FlopCosts, work: Work) -> float:
    """The operations that `work` takes."""
    operations = work.tokens * costs.per_token + work.pairs * costs.per_pair
    return float(operations + work.images * costs.per_image + work.targets * costs.per_target)


def flop_costs(model: LlavaMetaForCausalLM) -> FlopCosts:
    """The operations that a LLaVA requires whose `requires_grad` is set.

    A product with a weight of n elements costs 2n per token, 2n more for the gradient of its input if anything before
    it is trained, and 2n more for that of the weight if it is trained: 6n, 4n or 2n. Attention costs 4 H C per layer
    and pair, three times that with gradients. Not counted: padding, recomputation, dummy images, norms, activation
    functions. LoRA's matrices count like any others.
    """
    decoder, tower = model.get_model(), model.get_model().vision_tower
    config = decoder.config
    tower_trained = is_trained(tower)
    through = any(map(is_trained, (tower, decoder.mm_projector, decoder.embed_tokens, decoder.layers)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * config.num_attention_heads * head_dim * len(decoder.layers)
    inside = tower.num_inner_tokens
    tower_flops = tower.num_patches_per_side**2 * _product_flops(tower.patch_embedding(), passes_gradient=False)
    tower_flops += inside * _linear_flops(tower.layers, passes_gradient=tower_trained)
    tower_flops += inside**2 * 4 * tower.hidden_size * len(tower.layers) * (3 if tower_trained else 1)
    projector, passes_gradient = 0, tower_trained
    for layer in decoder.mm_projector.modules():
        projector += _product_flops(layer, passes_gradient) if isinstance(layer, nn.Linear) else 0
        passes_gradient = passes_gradient or any(p.requires_grad for p in layer.parameters(recurse=False))
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(decoder.layers)
    return FlopCosts(
        per_token=_linear_flops(decoder.layers, passes_gradient=through),
        per_pair=attention * (3 if through else 1),
        per_image=tower_flops + model.crop_rules().tokens_per_crop * projector,
        per_target=_product_flops(model.lm_head, passes_gradient=through),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
    )


def _linear_flops(module: nn.Module, passes_gradient: bool) -> int:
    """Operations per token of every linear layer inside `module`; whether gradients of their inputs are needed."""
    return sum(_product_flops(m, passes_gradient) for m in module.modules() if isinstance(m, nn.Linear))


def _product_flops(module: nn.Module, passes_gradient: bool) -> int:
    weight = module.get_parameter("weight")
    if isinstance(module, nn.Linear):  # its weight may be quantised or partitioned, and then has another shape
        elements = module.in_features * module.out_features
    else:
        elements = full_shape(weight).numel()
    return 2 * elements * (1 + passes_gradient + weight.requires_grad)


def peak_tflops(device: torch.device) -> float | None:
    """The datasheet's dense bf16 TFLOP/s of a GPU; None for other devices and unknown ones."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


# --- throughput -------------------------------------------------------------------------------------------------------


class Throughput:
    """Counts work, waiting time and memory between two log lines.

    Args:
        model: the model; its `requires_grad` decides which operations a batch requires.
        device: the device whose peak rate and memory are logged.
        peak: the peak TFLOP/s for `mfu`; None takes the datasheet's.
    """

    def __init__(self, model: LlavaMetaForCausalLM, device: torch.device, peak: float | None = None):
        self.costs, self.device = flop_costs(model), device
        self.peak = peak_tflops(device) if peak is None else peak
        if self.peak is None and device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            logger.info("mfu is not logged: no datasheet figure is known for %s; --peak_tflops gives one", name)
        self.paused_seconds = 0.0
        self._reset()

    def _reset(self) -> None:
        self.start, self.data_wait, self.work = time.perf_counter(), 0.0, Work()

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
            self.work += batch_work(batch, self.costs.windows)

    def values(self, accelerator: Accelerator) -> Values:
        """The counts since the last call; the memory of each rank is a value of its own."""
        self.seconds = time.perf_counter() - self.start
        memory: Values = {f"memory {rank}": 0.0 for rank in range(accelerator.num_processes)}
        memory[f"memory {accelerator.process_index}"] = peak_memory_gib(self.device)
        values: Values = vars(self.work) | {"wait": self.data_wait / self.seconds} | memory
        self._reset()
        return values

    def metrics(self, sums: dict[str, float], ranks: int) -> dict[str, float]:
        """Rates, MFU, memory and the share of waiting."""
        work = Work(*(sums[name] for name in vars(Work())))
        tflops = required_flops(self.costs, work) / self.seconds / ranks / 1e12
        return {
            "tokens_per_second": work.tokens / self.seconds,
            "samples_per_second": work.samples / self.seconds,
            "model_tflops_per_second": tflops,
            **({} if self.peak is None else {"mfu": tflops / self.peak}),
            "peak_memory_gib": max(sums[f"memory {rank}"] for rank in range(ranks)),
            "data_wait_share": sums["wait"] / ranks,
        }


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


# --- what is written --------------------------------------------------------------------------------------------------


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


class TrainingProgress(TrainerCallback):
    """A bar with a line per logged step in a terminal, elsewhere a plain line from time to time.

    Args:
        step_size: samples of a step over all ranks.
        paused_seconds: gives the seconds so far of evaluation and other work that is not training.
    """

    bar: progress  # from `on_train_begin` on

    def __init__(self, step_size: int, paused_seconds: Callable[[], float] = lambda: 0.0):
        self.step_size, self.paused_seconds = step_size, paused_seconds
        self.loss = ""

    def on_train_begin(self, args, state, control, **kwargs):
        hidden = not state.is_world_process_zero
        self.paused = self.paused_seconds()  # seconds that the bar leaves out so far
        self.bar = progress(state.max_steps, "training", "steps", done=state.global_step, hidden=hidden)

    def on_step_end(self, args, state, control, **kwargs):
        bar = self.bar
        if bar.disable:  # of another rank
            return
        paused = self.paused_seconds()
        bar.start_t += paused - self.paused
        self.paused = paused
        rate = self.step_size * (state.global_step - bar.initial) / max(bar.format_dict["elapsed"], 1e-9)
        bar.set_postfix_str(f"{self.loss}{rate:.3g} samples/s", refresh=False)
        bar.update(state.global_step - bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        figures: dict[str, Any] = {}
        if "loss" in logs:
            self.loss = f"loss {logs['loss']:.4g}, "
            names = {"loss": "loss", "learning rate": "learning_rate", "samples/s": "samples_per_second"}
            figures = {title: logs[name] for title, name in names.items() if name in logs and in_terminal()}
            if figures and logs.get("norm/text_embeddings") and "norm/llm_input" in logs:
                figures["visual over text norm"] = logs["norm/llm_input"] / logs["norm/text_embeddings"]
        elif "eval_loss" in logs:
            figures = {name: value for name, value in logged_names(logs).items() if name.startswith("eval/")}
        if figures and state.is_world_process_zero:
            line = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            self.bar.write(f"step {state.global_step}: {line}", file=sys.stderr)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class StepProfiler(TrainerCallback):
    """Profiles steps of the run on rank 0: PyTorch's trace and its table of kernels, in the folder `profile`.

    Args:
        steps: the steps, counted from 1 over the whole run, also where it was resumed.
        output_dir: gets the folder.
    """

    def __init__(self, steps: range, output_dir: str):
        self.steps, self.folder = steps, Path(output_dir, PROFILE)
        self.profile: profile | None = None
        self.first = 0

    def check(self, done: int, last: int) -> None:
        """Raises ValueError if a step is beyond the run's last; logs if all are done."""
        first_to_last = f"--profile_steps {self.steps[0]}:{self.steps[-1]}"
        if self.steps[-1] > last:
            raise ValueError(f"{first_to_last}: the run has {last} steps; choose steps up to {last}")
        if self.steps[-1] <= done:
            logger.info("%s: %d steps are done, so that nothing is profiled", first_to_last, done)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.profile is None and state.global_step + 1 in self.steps and state.is_world_process_zero:
            self.profile, self.first = profile(), state.global_step + 1
            self.profile.start()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.steps[-1]:
            self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        if self.profile is None:
            return
        self.profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.folder}/steps_{self.first}-{state.global_step}"
        self.profile.export_chrome_trace(f"{stem}.trace.json.gz")
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        write_text(Path(f"{stem}.kernels.txt"), self.profile.key_averages().table(order, _ROWS) + "\n")
        logger.info("steps %d to %d are profiled: %s.*", self.first, state.global_step, stem)
        self.profile = None
