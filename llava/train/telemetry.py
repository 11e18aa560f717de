"""Measures training from inside: norms along the visual path, throughput, a profile; writes the log and the progress.

docs/recipe.md lists what is logged. What is measured stays on the device; a log line sums it over the ranks and copies
it to the host once. Gradient norms at visual tokens are L2 norms over the whole optimizer step; norms of tokens are
means over the step's batches. Both are left out if a step has no image. No rate counts the time of evaluations.

Shapes: N images, V visual tokens per image, E vision hidden size, D LLM hidden size, H heads, C channels per head.
"""

import json
import logging
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.profiler import profile
from transformers import TrainerCallback

from llava.data.dataset import Batch
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.norm import ProjectorNorm, projector_norm
from llava.model.zero3 import full_shape
from llava.train.optim import is_trained
from llava.utils.files import write_text
from llava.utils.progress import progress

logger = logging.getLogger(__name__)

GRADIENTS = ("llm_input", "before_norm", "vision_features")
TOKENS = (*GRADIENTS, "text_embeddings")
MEANS = (*TOKENS, "gain_mean_abs")
LOG_FILE = "train_log.jsonl"
# The figures of a step that the progress shows.
_SHOWN = {
    "loss": "loss", "learning_rate": "learning rate", "samples_per_second": "samples/s",
    "norm/llm_input": "visual norm", "norm/text_embeddings": "text norm",
}  # fmt: skip

# The datasheets' dense bf16 TFLOP/s; the first name that the device's name contains counts.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H200 NVL": 835.0, "H100": 989.0, "H200": 989.0, "H800": 989.0,
    "A100": 312.0, "A800": 312.0,
}  # fmt: skip

Values = dict[str, torch.Tensor | float]


def read(meters: Sequence[Any], accelerator: Accelerator) -> dict[str, float]:
    """What the meters log, by one sum over the ranks and one copy to the host; every rank must call.

    Each meter has `values(accelerator)`, this rank's scalars by a name of their own, of the device or the host, and
    `metrics(sums, ranks)`, the logged figures from their sums over the ranks.
    """
    values = {name: value for meter in meters for name, value in meter.values(accelerator).items()}
    host = torch.tensor([0.0 if isinstance(v, torch.Tensor) else v for v in values.values()], dtype=torch.float64)
    host = host.to(accelerator.device, non_blocking=True)
    scalars = [v.double() if isinstance(v, torch.Tensor) else h for v, h in zip(values.values(), host, strict=True)]
    sums = dict(zip(values, accelerator.reduce(torch.stack(scalars), reduction="sum").tolist(), strict=True))
    return {k: v for meter in meters for k, v in meter.metrics(sums, accelerator.num_processes).items()}


# --- norms and gradients ----------------------------------------------------------------------------------------------


class NormProbe:
    """Hooks that measure norms and gradient norms while `active`; inactive hooks cost nothing measurable.

    The hooks must be registered before DeepSpeed wraps the model, so that they run while ZeRO-3 has the gain gathered.
    """

    def __init__(self, model: LlavaMetaForCausalLM):
        self.start_step(False)
        decoder = model.get_model()
        self.norm = projector_norm(decoder.mm_projector)
        model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        decoder.mm_projector.register_forward_pre_hook(self._see_features)
        decoder.mm_projector.register_forward_hook(self._see_projector_output)
        decoder.embed_tokens.register_forward_hook(self._see_text)
        if self.norm is not None:
            self.norm.register_forward_hook(self._see_norm)

    def start_step(self, measured: bool, loss_scale: float = 1.0) -> None:
        """Switches the hooks on for a step that is measured, and off for one that is not."""
        self.active, self.dummy, self.loss_scale = measured, False, loss_scale
        self.squared_gradients: Values = dict.fromkeys(GRADIENTS, 0.0)
        self.sums: Values = dict.fromkeys(MEANS, 0.0)
        self.counts: Values = dict.fromkeys(MEANS, 0)

    def _see_batch(self, module: nn.Module, args: tuple, batch: dict[str, Any]) -> None:
        self.dummy = batch.get("images") is None  # then the model makes up an image, since it must run the tower

    def _see_text(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if self.active:
            self._measure("text_embeddings", output.detach().float().norm(dim=-1))

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
            self._measure("gain_mean_abs", module.mean_abs_gain()[None])

    def _see_projector_output(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if self.active:
            self._watch("llm_input", output)
            if self.norm is None:
                self._watch("before_norm", output)

    def _watch(self, place: str, tokens: torch.Tensor) -> None:
        def add_gradient(grad: torch.Tensor) -> None:
            self.squared_gradients[place] = self.squared_gradients[place] + grad.float().square().sum()

        if not self.dummy:
            self._measure(place, tokens.detach().float().norm(dim=-1))
        if tokens.requires_grad:
            tokens.register_hook(add_gradient)

    def _measure(self, name: str, values: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + values.sum()
        self.counts[name] = self.counts[name] + values.numel()

    def values(self, accelerator: Accelerator) -> Values:
        """The step's sums."""
        kinds = {"square": self.squared_gradients, "sum": self.sums, "count": self.counts}
        return {f"{kind} {name}": value for kind, own in kinds.items() for name, value in own.items()}

    def metrics(self, sums: dict[str, float], ranks: int) -> dict[str, float]:
        """Means of what was seen, and gradient norms at the places that had tokens."""
        seen = [name for name in MEANS if sums[f"count {name}"]]
        metrics = {f"norm/{name}": sums[f"sum {name}"] / sums[f"count {name}"] for name in seen}
        # The Trainer multiplies each rank's loss by the number of ranks, because gradients are averaged afterwards.
        scale = ranks * self.loss_scale
        return metrics | {f"grad_norm/{p}": sums[f"square {p}"] ** 0.5 / scale for p in seen if p in GRADIENTS}


# --- operations -------------------------------------------------------------------------------------------------------


def batch_work(batch: Batch, windows: Sequence[int | None] = (None,)) -> np.ndarray:
    """What decides the operations of a collated micro-batch, fp64 [4].

    These are the decoder's tokens without padding, the pairs (query, key) that see each other in a layer (the mean over
    the layers; `windows` are the keys that a query sees at most in each), the squares that the tower sees, and the
    supervised positions.
    """
    layout = batch["layout"]
    seen = [(n, min(n, window or n)) for window in windows for n in layout.lengths]
    pairs = sum(m * (m + 1) // 2 + (n - m) * m for n, m in seen) / len(windows)
    images = sum(picture.crops for picture in layout.pictures)
    return np.array([sum(layout.lengths), pairs, images, len(layout.targets)], dtype=np.float64)


def attention_windows(config: Any) -> list[int | None]:
    """The keys that a query sees at most in each layer of the decoder; None for all."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [getattr(config, "sliding_window", None) if kind == "sliding_attention" else None for kind in kinds]


def flop_costs(model: LlavaMetaForCausalLM) -> np.ndarray:
    """The operations per unit of `batch_work`, fp64 [4], that a LLaVA requires whose `requires_grad` is set.

    A product with a weight of n elements costs 2n per token, 2n more for the gradient of its input if anything before
    it is trained, and 2n more for that of the weight if it is trained: 6n, 4n or 2n. Attention costs 4 H C per layer
    and pair, three times that with gradients. Not counted: padding, recomputation, dummy images, norms, activation
    functions. LoRA's matrices count like any others.
    """
    decoder, tower, config = model.get_model(), model.get_model().vision_tower, model.config
    tower_trained = is_trained(tower)
    through = any(map(is_trained, (tower, decoder.mm_projector, decoder.embed_tokens, decoder.layers)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inside = tower.num_inner_tokens
    per_image = tower.num_patches_per_side**2 * _product_flops(tower.patch_embedding(), passes_gradient=False)
    per_image += inside * _product_flops(tower.layers, passes_gradient=tower_trained)
    per_image += inside**2 * 4 * tower.hidden_size * len(tower.layers) * (3 if tower_trained else 1)
    passes_gradient = tower_trained
    for layer in decoder.mm_projector.modules():
        if isinstance(layer, nn.Linear):
            per_image += model.crop_rules().tokens_per_crop * _product_flops(layer, passes_gradient)
        passes_gradient = passes_gradient or any(p.requires_grad for p in layer.parameters(recurse=False))
    per_token = _product_flops(decoder.layers, passes_gradient=through)
    per_pair = 4 * config.num_attention_heads * head_dim * len(decoder.layers) * (3 if through else 1)
    per_target = _product_flops(model.lm_head, passes_gradient=through)
    return np.array([per_token, per_pair, per_image, per_target], dtype=np.float64)


def _product_flops(module: nn.Module, passes_gradient: bool) -> int:
    """Operations per token of the products inside `module`; whether gradients of their inputs are needed."""
    total = 0
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            weight = layer.weight  # a quantised or partitioned one has another shape
            linear = isinstance(layer, nn.Linear)
            elements = layer.in_features * layer.out_features if linear else full_shape(weight).numel()
            total += 2 * elements * (1 + passes_gradient + weight.requires_grad)
    return total


def peak_tflops(device: torch.device) -> float | None:
    """The datasheet's dense bf16 TFLOP/s of a GPU; None for other devices and unknown ones."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)


# --- throughput -------------------------------------------------------------------------------------------------------


class Throughput:
    """Counts work, waiting time and memory between two log lines.

    `requires_grad` of the model decides which operations a batch requires; rates and memory are of `device`.
    """

    def __init__(self, model: LlavaMetaForCausalLM, device: torch.device):
        self.costs, self.windows = flop_costs(model), attention_windows(model.config)
        self.device, self.peak = device, peak_tflops(device)
        self._reset()

    def _reset(self) -> None:
        self.start, self.data_wait, self.samples, self.work = time.perf_counter(), 0.0, 0, np.zeros(4)

    def add(self, batches: list[Batch], data_wait: float) -> None:
        """Counts the micro-batches of one optimizer step, without waiting for the device."""
        self.data_wait += data_wait
        for batch in batches:
            self.samples += len(batch["layout"].lengths)
            self.work += batch_work(batch, self.windows)

    def values(self, accelerator: Accelerator) -> Values:
        """The counts since the last call; the memory of each rank is a value of its own."""
        self.seconds = time.perf_counter() - self.start
        values: Values = {f"memory {rank}": 0.0 for rank in range(accelerator.num_processes)}
        values[f"memory {accelerator.process_index}"] = peak_memory_gib(self.device)
        values |= {"samples": self.samples, "tokens": float(self.work[0]), "wait": self.data_wait / self.seconds}
        values["operations"] = float(self.costs @ self.work)
        self._reset()
        return values

    def metrics(self, sums: dict[str, float], ranks: int) -> dict[str, float]:
        """Rates, MFU, memory and the share of waiting."""
        tflops = sums["operations"] / self.seconds / ranks / 1e12
        return {
            "tokens_per_second": sums["tokens"] / self.seconds,
            "samples_per_second": sums["samples"] / self.seconds,
            "model_tflops_per_second": tflops,
            **({"mfu": tflops / self.peak} if self.peak else {}),
            "peak_memory_gib": max(sums[f"memory {rank}"] for rank in range(ranks)),
            "data_wait_share": sums["wait"] / ranks,
        }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory so far, in GiB, that tensors took on a GPU, or that this process took on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# --- what is written --------------------------------------------------------------------------------------------------


class JsonlCallback(TrainerCallback):
    """Appends every log line to `train_log.jsonl` in the output folder; a resumed run continues the file."""

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir, LOG_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(errors="replace") if path.exists() and state.global_step else ""
        *lines, cut = text.split("\n")  # a full disk or a kill may cut off the last line
        if cut:
            logger.warning("%s: dropping the last line, which was cut off after %d characters", path, len(cut))
        # Steps that an interrupted run logged after its last checkpoint are computed again.
        try:
            earlier = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: a line is damaged ({error}); remove it, or move the file away") from error
        write_text(path, "".join(line + "\n" for line in earlier), synced=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            with Path(args.output_dir, LOG_FILE).open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logged_names(logs)}) + "\n")


def logged_names(logs: dict[str, Any]) -> dict[str, Any]:
    """Held-out figures under the names that TensorBoard and others use: `eval/loss`, not the library's `eval_loss`."""
    return {f"eval/{k.removeprefix('eval_')}" if k.startswith("eval_") else k: v for k, v in logs.items()}


class TrainingProgress(TrainerCallback):
    """A bar with a line per logged step in a terminal, elsewhere a plain line from time to time."""

    bar: Any  # a bar of `progress`, from `on_train_begin` on

    def on_train_begin(self, args, state, control, **kwargs):
        hidden = not state.is_world_process_zero
        self.bar = progress(state.max_steps, "training", "steps", done=state.global_step, hidden=hidden)

    def on_step_end(self, args, state, control, **kwargs):
        if not control.should_log:  # else `on_log`, with this step's loss
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        names = _SHOWN if "loss" in logs else [name for name in logs if name.startswith("eval_")]
        figures = logged_names({name: logs[name] for name in names if name in logs})
        line = ", ".join(f"{_SHOWN.get(name, name)} {value:.4g}" for name, value in figures.items())
        if "loss" in figures:
            self.bar.set_postfix_str(line, refresh=False)
            self.bar.update(state.global_step - self.bar.n)
        if line and state.is_world_process_zero and (sys.stderr.isatty() or "loss" not in figures):
            self.bar.write(f"step {state.global_step}: {line}", file=sys.stderr)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class StepProfiler(TrainerCallback):
    """Profiles `steps`, counted from 1 over the whole run, on rank 0: PyTorch's trace and its table of kernels."""

    def __init__(self, steps: range):
        self.steps = steps
        self.profile: profile | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.steps[0] and state.is_world_process_zero:
            self.profile = profile()
            self.profile.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.profile is not None and state.global_step == self.steps[-1]:
            self.on_train_end(args, state, control)

    def on_train_end(self, args, state, control, **kwargs):
        """Writes the profile, which a signal or fewer steps than the flag names may end early."""
        if self.profile is None:
            if state.global_step < self.steps[0]:
                logger.warning("--profile_steps: no step is profiled, the last one was %d", state.global_step)
            return
        self.profile.stop()
        stem = Path(args.output_dir, "profile", f"steps_{self.steps[0]}-{state.global_step}")
        stem.parent.mkdir(parents=True, exist_ok=True)
        self.profile.export_chrome_trace(f"{stem}.trace.json.gz")
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        write_text(Path(f"{stem}.kernels.txt"), self.profile.key_averages().table(order, row_limit=60) + "\n")
        logger.info("steps %d to %d are profiled: %s.*", self.steps[0], state.global_step, stem)
        self.profile = None
