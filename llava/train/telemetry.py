"""What training looks like from inside: gradient norms and token norms along the visual path, and throughput.

Logged keys:
    `grad_norm/{llm_input,before_norm,vision_features}`: L2 norm, over the whole optimizer step, of the loss's gradient
        at the visual tokens there;
    `norm/{llm_input,before_norm,vision_features,text_embeddings}`: mean L2 norm of a token of the step's batches;
    `norm/gain_mean_abs`: mean |gain| of the norm;
    `tokens_per_second`, `samples_per_second`: over all ranks, padding not counted;
    `padding_share`: padded positions over all positions; `data_wait_share`: time waiting for data over all time.

Shapes: N images, V visual tokens per image, E vision hidden size, D LLM hidden size.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from llava.constants import IMAGE_TOKEN_INDEX
from llava.model.multimodal_projector.norm import projector_norm

GRADIENTS = ("llm_input", "before_norm", "vision_features")
TOKENS = (*GRADIENTS, "text_embeddings")
LOG_FILE = "train_log.jsonl"


class NormProbe:
    """Hooks that measure norms and gradient norms while `active`; inactive hooks cost nothing measurable.

    The hooks must be registered before DeepSpeed wraps the model, so that they run while ZeRO-3 has the gain gathered.
    """

    def __init__(self, model: nn.Module):
        self.active = False
        self.reset()
        decoder = model.get_model()
        self.norm = projector_norm(decoder.mm_projector)
        decoder.vision_tower.register_forward_pre_hook(self._see_images)
        decoder.mm_projector.register_forward_pre_hook(self._see_features)
        decoder.mm_projector.register_forward_hook(self._see_projector_output)
        decoder.embed_tokens.register_forward_hook(lambda module, args, out: self._measure("text_embeddings", out))
        if self.norm is not None:
            self.norm.register_forward_hook(self._see_norm)

    def reset(self) -> None:
        self.squared_gradients: dict[str, torch.Tensor | float] = dict.fromkeys(GRADIENTS, 0.0)
        self.norm_sums: dict[str, torch.Tensor | float] = dict.fromkeys(TOKENS, 0.0)
        self.token_counts = dict.fromkeys(TOKENS, 0)
        self.mean_abs_gain: torch.Tensor | None = None
        self.dummy = False

    def _see_images(self, module: nn.Module, args: tuple) -> None:
        if self.active:
            self.dummy = not bool(args[0].any())

    def _see_features(self, module: nn.Module, args: tuple) -> tuple | None:
        """Watches the projector's input [N, V, E]; behind a frozen tower it has no gradient until asked for one."""
        if not self.active:
            return None
        (features,) = args
        if torch.is_grad_enabled() and not features.requires_grad:
            features = features.detach().requires_grad_()
        self._watch("vision_features", features)
        return (features,)

    def _see_norm(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
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

    def metrics(self, accelerator: Any) -> dict[str, float]:
        """The step's measurements over all ranks; every rank must call."""
        values = [*self.squared_gradients.values(), *self.norm_sums.values(), *self.token_counts.values()]
        totals = torch.tensor([float(v) for v in values], dtype=torch.float64, device=accelerator.device)
        totals = accelerator.reduce(totals, reduction="sum").tolist()
        squares, sums, counts = totals[:3], totals[3:7], totals[7:]
        # The Trainer multiplies each rank's loss by the number of ranks, because gradients are averaged afterwards.
        ranks = accelerator.num_processes
        metrics = {f"grad_norm/{p}": s**0.5 / ranks for p, s in zip(GRADIENTS, squares, strict=True)}
        metrics |= {f"norm/{p}": s / n for p, s, n in zip(TOKENS, sums, counts, strict=True) if n}
        if self.mean_abs_gain is not None:
            metrics["norm/gain_mean_abs"] = float(self.mean_abs_gain)
        return metrics


class Throughput:
    """Counts samples, tokens, padding and waiting time between two log lines."""

    def __init__(self, num_visual_tokens: int):
        self.num_visual_tokens = num_visual_tokens
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.data_wait = 0.0
        self.samples = self.tokens = self.positions = 0

    def add(self, batches: list[dict[str, torch.Tensor]], data_wait: float) -> None:
        """Counts the micro-batches of one optimizer step, without waiting for the device."""
        self.data_wait += data_wait
        for batch in batches:
            placeholders = (batch["input_ids"] == IMAGE_TOKEN_INDEX).sum(dim=1)
            lengths = batch["attention_mask"].sum(dim=1) + placeholders * (self.num_visual_tokens - 1)
            self.samples += len(lengths)
            self.tokens = self.tokens + lengths.sum()
            self.positions = self.positions + lengths.max() * len(lengths)

    def metrics(self, accelerator: Any) -> dict[str, float]:
        """Rates over all ranks since the last call; every rank must call."""
        seconds = time.perf_counter() - self.start
        counts = torch.tensor(
            [self.samples, float(self.tokens), float(self.positions), self.data_wait / seconds],
            dtype=torch.float64,
            device=accelerator.device,
        )
        samples, tokens, positions, wait = accelerator.reduce(counts, reduction="sum").tolist()
        self.reset()
        return {
            "tokens_per_second": tokens / seconds,
            "samples_per_second": samples / seconds,
            "padding_share": 1 - tokens / positions if positions else 0.0,
            "data_wait_share": wait / accelerator.num_processes,
        }


def measures_step(args: Any, state: Any, step: int) -> bool:
    """Whether optimizer step `step` (from 1) is measured, by `--telemetry_steps` or else `--logging_steps`."""
    every = state.logging_steps if args.telemetry_steps is None else args.telemetry_steps
    return bool(every) and step % every == 0


class TelemetryCallback(TrainerCallback):
    """Switches the probe on for the steps that are measured."""

    def __init__(self, probe: NormProbe):
        self.probe = probe

    def on_step_begin(self, args, state, control, **kwargs):
        self.probe.active = measures_step(args, state, state.global_step + 1)
        if self.probe.active:
            self.probe.reset()

    def on_step_end(self, args, state, control, **kwargs):
        self.probe.active = False


class JsonlCallback(TrainerCallback):
    """Appends every log line to `train_log.jsonl` in the output folder; a resumed run continues the file."""

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir, LOG_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        # What an interrupted run logged behind its last checkpoint is computed again.
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step and state.global_step]
        path.write_text("".join(line + "\n" for line in kept))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            with Path(args.output_dir, LOG_FILE).open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
