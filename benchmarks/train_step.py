"""Tokens per second, MFU, memory and host syncs of a training step, by padding, attention backend and norm.

Random weights in the shapes of a preset, synthetic micro-batches with lengths like LLaVA's, one device, data in memory.
Each arm differs from the first in one thing. Liger's kernels come after the rest.
The losses of all arms with the same norm must agree. A failed arm says why, the others continue, and the exit status
is 1. A micro-batch has the recipe's tokens and the sample that crosses them; one that does not fit is a failed arm.
"""

import argparse
import gc
import math
import random
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from benchmarks.common import RESULTS, TOLERANCE, add_output_dir, write_result
from benchmarks.norm_layer import seconds
from benchmarks.shapes import PRESETS, STAGES, build_llava, projector_for
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.dataset import DataCollatorForSupervisedDataset
from llava.launch.recipe import resolved_run
from llava.model.attention import FLASH, SEGMENTS, VARLEN, runnable_flash
from llava.train.kernels import apply_liger, compile_layers, has_liger
from llava.train.optim import set_trainable
from llava.train.telemetry import batch_work, flop_costs, peak_tflops
from llava.utils.commands import Parser, whole

# Liger last: it exchanges a function for the whole process.
PLAIN, LIGER, LIGER_AND_COMPILED_TOWER = "plain", "liger", "liger_compiled_tower"
LONGEST = 2048  # tokens of the longest sample, and of a micro-batch where the recipe has no cap

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Arm:
    """One way to compute the step."""

    name: str
    backend: str
    padding_free: bool = True
    norm: str = "gwc_layernorm"
    layers: str = PLAIN


def main() -> int:
    parser = Parser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--preset", choices=PRESETS, default="llama-3.2-3b" if gpu else "tiny")
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--micro-batch-tokens", type=whole(1), help="default: the recipe's")
    parser.add_argument("--micro-batches", type=whole(1), default=4, help="different micro-batches, used in turn")
    parser.add_argument("--steps", type=whole(1), default=8 if gpu else 4, help="steps of a round")
    parser.add_argument("--repeats", type=whole(1), default=3, help="rounds, after one that is not timed")
    parser.add_argument("--arms", nargs="+", help="default: all that run here")
    add_output_dir(parser)
    args = parser.parse_args()
    device = torch.device("cuda" if gpu else "cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    arms = {arm.name: arm for arm in runnable_arms(device, dtype)}
    if unknown := set(args.arms or ()) - arms.keys():
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; this machine has {', '.join(arms)}")
    names = args.arms or list(arms)
    meta = {name: getattr(args, name) for name in ("preset", "micro_batches", "steps", "repeats")}
    write = partial(write_result, "train_step", folder=args.output_dir, dtype=str(dtype), **meta)
    measured, rows = [], []
    for layers in (PLAIN, LIGER, LIGER_AND_COMPILED_TOWER):
        chosen = [arms[name] for name in names if arms[name].layers == layers]
        for stage in args.stages if chosen else ():
            measured += measure(args, stage, chosen, device, dtype)
            rows = compared(measured, TOLERANCE[dtype == torch.bfloat16])
            if args.output_dir != RESULTS:  # what a killed run has measured; benchmarks/results has whole runs only
                write(rows=rows)
            release(device)  # the model of one stage must be gone before the next
    print(write(rows=rows))
    failed = [f"stage {row['stage']} {row['arm']}: {row['failed']}" for row in rows if "failed" in row]
    if failed:
        print("error: " + "; ".join(failed), file=sys.stderr)
    return int(bool(failed))


# --- what is measured -------------------------------------------------------------------------------------------------


def runnable_arms(device: torch.device, dtype: torch.dtype) -> list[Arm]:
    """The reference first; every other arm differs from it in one thing."""
    there = backends(device, dtype)
    usual = VARLEN if VARLEN in there else SEGMENTS
    arms = [Arm("packed", usual), Arm("padded", "sdpa", padding_free=False), Arm("no_norm", usual, norm="none")]
    arms += [Arm(f"packed_{name.removeprefix('packed_')}", name) for name in there if name != usual]
    if device.type == "cuda" and has_liger():
        arms += [Arm(layers, usual, layers=layers) for layers in (LIGER, LIGER_AND_COMPILED_TOWER)]
        flash = {name.replace("flash_attention_", "flash"): name for name in there if name in FLASH}
        arms += [Arm(short, name, layers=LIGER_AND_COMPILED_TOWER) for short, name in flash.items()]
    return arms


def backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """The attention backends for packed samples that run on this machine."""
    if device.type == "cpu":
        return [SEGMENTS, "sdpa", "eager"]
    half = dtype in (torch.float16, torch.bfloat16)
    there = {
        SEGMENTS: True,
        "sdpa": True,
        VARLEN: half and torch.cuda.get_device_capability(device) >= (8, 0),
    }
    return [name for name, runs in there.items() if runs] + (runnable_flash() if half else [])


def random_samples(stage: int, tokens: int, number: int, model: Any, dtype: torch.dtype) -> list[Sample]:
    """Stage 1: a picture and a caption of about 20 tokens. Stage 2: log-normal texts, one in eleven without picture."""
    generator = random.Random(100 * stage + number)
    values = torch.Generator().manual_seed(number)
    visual, side = model.get_vision_tower().num_tokens, model.get_vision_tower().image_size
    samples, total = [], 0
    while total < tokens:
        has_image = stage == 1 or generator.random() > 1 / 11
        median = 20 if stage == 1 else 220
        length = int(min(LONGEST - visual, max(8, generator.lognormvariate(math.log(median), 0.8))))
        ids = torch.randint(5, model.config.vocab_size, (length,), generator=values)
        labels = ids.clone()
        labels[: 0 if stage == 1 else length // 3] = IGNORE_INDEX
        if has_image:
            ids = torch.cat([torch.tensor([IMAGE_TOKEN_INDEX]), ids])
            labels = torch.cat([torch.tensor([IGNORE_INDEX]), labels])
        sample = {"input_ids": ids, "labels": labels}
        if has_image:
            sample["images"] = torch.randn(1, 3, side, side, generator=values).to(dtype)
        samples.append(sample)
        total += expanded(sample, visual)
    return samples


def expanded(sample: Sample, visual: int) -> int:
    """Tokens of a sample, visual ones included."""
    return len(sample["input_ids"]) + (visual - 1) * ("images" in sample)


def recipe_tokens(preset: str, stage: int, device: torch.device) -> int:
    """The recipe's cap on the tokens of a micro-batch; fewer on a CPU."""
    if device.type == "cpu" or preset not in ("llama-3.2-3b", "qwen2.5-7b"):
        return LONGEST
    flags = resolved_run("pretrain" if stage == 1 else "finetune", PRESET=preset, NUM_GPUS=1)["flags"]
    return int(flags["max_tokens_per_micro_batch"])


# --- measuring --------------------------------------------------------------------------------------------------------


class Bench:
    """A model with plain or Liger's layers, its tower compiled or not, and the arms that use it.

    Args:
        arms: arms that all have the same `layers`.
    """

    def __init__(self, args: argparse.Namespace, stage: int, arms: list[Arm], device: torch.device, dtype: torch.dtype):
        self.args, self.stage, self.device, self.dtype = args, stage, device, dtype
        self.model = build_llava(PRESETS[args.preset], device, dtype)
        self.visual = self.model.get_vision_tower().num_tokens
        torch._dynamo.reset()
        if arms[0].layers != PLAIN:
            apply_liger(self.model)
        if arms[0].layers == LIGER_AND_COMPILED_TOWER:
            compile_layers(self.model.get_model().vision_tower.layers)
        self.projectors = {arm.norm: projector_for(self.model, arm.norm, device, dtype) for arm in arms}
        set_trainable(self.model, frozenset(STAGES[stage]))
        trained = {p for p in self.model.parameters() if p.requires_grad}
        trained |= {p for projector in self.projectors.values() for p in projector.parameters()}
        # Weights stay as they are, so that losses agree.
        self.optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True)

    def prepare(self, arm: Arm) -> None:
        """Sets the model to compute as the arm does."""
        self.model.get_model().mm_projector = self.projectors[arm.norm]
        set_trainable(self.model, frozenset(STAGES[self.stage]))
        self.model.padding_free = arm.padding_free
        self.model.config._attn_implementation = arm.backend

    def on_device(self, arm: Arm, samples: list[Sample]) -> dict[str, Any]:
        """The samples as a batch, with the number of their targets."""
        batch = DataCollatorForSupervisedDataset(0, self.visual, LONGEST, arm.padding_free)(samples)
        targets = sum(int((sample["labels"][1:] != IGNORE_INDEX).sum()) for sample in samples)
        return send_to_device(batch, self.device) | {"num_items_in_batch": targets}

    def backward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Runs the forward and backward pass of a micro-batch; returns its loss."""
        loss = self.model(**batch).loss
        loss.backward()
        return loss.detach()

    def run(self, batches: list[dict[str, Any]], steps: int) -> tuple[float, float]:
        """Seconds per step, and the first step's loss."""
        losses = []

        def train() -> None:
            for step in range(steps):
                losses.append(self.backward(batches[step % len(batches)]))
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)

        return seconds(train, self.device) / steps, losses[0].item()


def measure(
    args: argparse.Namespace, stage: int, arms: list[Arm], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """A row per arm; one that failed has the field `failed`."""
    bench = Bench(args, stage, arms, device, dtype)
    tokens = args.micro_batch_tokens or recipe_tokens(args.preset, stage, device)
    samples = [random_samples(stage, tokens, n, bench.model, dtype) for n in range(args.micro_batches)]
    return [measure_arm(bench, arm, tokens, samples) for arm in arms]


def measure_arm(bench: Bench, arm: Arm, tokens: int, samples: list[list[Sample]]) -> dict[str, Any]:
    """The row of an arm, which takes the same micro-batches as all others; with the field `failed` if it fails."""
    row: dict[str, Any] = {"stage": bench.stage, "arm": arm.name, "micro_batch_tokens": tokens, "norm": arm.norm}
    try:
        bench.prepare(arm)
        row |= timed(bench, arm, samples)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    bench.optimizer.zero_grad(set_to_none=True)
    release(bench.device)
    print(row, flush=True)
    return row


def timed(bench: Bench, arm: Arm, samples: list[list[Sample]]) -> dict[str, Any]:
    """Time, work and memory of an arm for which the model is prepared."""
    args, gpu, facts = bench.args, bench.device.type == "cuda", {}
    batches = [bench.on_device(arm, some) for some in samples]
    if gpu:
        bench.backward(batches[0])  # compiles and chooses kernels, which waits for the device
        facts["syncs"] = host_syncs(lambda: bench.backward(batches[0]))
        bench.optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
    _, loss = bench.run(batches, args.steps)
    if gpu:
        facts["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    times = [bench.run(batches, args.steps)[0] for _ in range(args.repeats)]
    median = statistics.median(times)
    collate = DataCollatorForSupervisedDataset(0, bench.visual, LONGEST)
    work = np.mean(
        [batch_work(collate(some)) for some in map(samples.__getitem__, np.arange(args.steps) % len(samples))], axis=0
    )
    tflops = float(flop_costs(bench.model) @ work) / median / 1e12
    rates = {"seconds": median, "seconds_max": max(times), "tflops": tflops}
    rates["tokens_per_second"] = float(work[0]) / median
    if peak := peak_tflops(bench.device):
        rates["mfu"] = tflops / peak
    return rates | facts | {"loss": loss}


def compared(rows: list[dict[str, Any]], tolerance: float) -> list[dict[str, Any]]:
    """The rows; one whose loss is not that of the first with its stage and norm has failed."""
    kinds, first, checked = ("stage", "norm"), {}, []
    for row in rows:
        expected = first.setdefault(tuple(row[name] for name in kinds), row["loss"]) if "loss" in row else None
        if expected is not None and not abs(row["loss"] - expected) <= tolerance * abs(expected):
            short = {name: row[name] for name in (*kinds, "arm", "micro_batch_tokens")}
            row = short | {"failed": f"its loss is {row['loss']:.6g}, expected {expected:.6g}"}
        checked.append(row)
    return checked


def host_syncs(compute: Callable[[], Any]) -> int:
    """How often `compute` makes the host wait for the GPU, as PyTorch's warnings say."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            compute()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def release(device: torch.device) -> None:
    """Frees the memory that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
