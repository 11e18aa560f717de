"""Seconds of the demo's training step on a CPU, by precision, and the floor that its matrix products set.

Stage 2 at the shapes of SmolLM2-135M with random weights: forward, backward, gradient clipping and AdamW on a fixed
batch. fp32, or with `--bf16` bf16 weights with fp32 masters, which is how a bf16 run trains here (`llava.train.optim`).
The floor is the time of the decoder's matrix products alone, at this machine's own rate for each shape. What this
tree's scripts load first is loaded here too; with `LD_PRELOAD=` nothing is.
"""

import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.common import add_output_dir, preloaded_names, write_result
from benchmarks.norm_layer import seconds
from benchmarks.shapes import PRESETS, build_llava
from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.collate import DataCollatorForSupervisedDataset
from llava.launch.command import preloads
from llava.model.attention import packed_attention
from llava.train.optim import PARTS, MasterWeights, set_trainable
from llava.utils.commands import Parser

FP32, MASTERS = "fp32", "bf16 masters"
CPU = torch.device("cpu")
DTYPES = {FP32: torch.float32, MASTERS: torch.bfloat16}
REPEATS = 5  # timed steps per arm
SAMPLES, TOKENS, TARGETS = 8, 70, 12  # of the batch; of a sample, with its 16 visual ones; of a sample


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--bf16", action="store_true", help="bf16 masters; minutes a step without instructions for it")
    add_output_dir(parser)
    args = parser.parse_args()
    if variables := preloads(os.environ):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.cpu_step", *sys.argv[1:]], os.environ | variables)
    arm = MASTERS if args.bf16 else FP32
    step = make_step(arm)
    loss = step()
    median, least = statistics.median(seconds(step, CPU) for _ in range(REPEATS)), floor(DTYPES[arm])
    row = {"arm": arm, "seconds": median, "floor_s": least, "share_of_floor": least / median, "first_loss": loss}
    print(row)
    meta = {"samples": SAMPLES, "tokens": TOKENS, "targets": TARGETS, "repeats": REPEATS}
    meta |= {"torch_threads": torch.get_num_threads(), "preloaded": preloaded_names(os.environ)}
    print(write_result("cpu_step_bf16" if args.bf16 else "cpu_step", [row], folder=args.output_dir, **meta))


def make_step(arm: str) -> Callable[[], float]:
    """A function that does one step and returns its loss."""
    model = build_llava(PRESETS["demo"], CPU, DTYPES[arm], use_cache=False)
    set_trainable(model, frozenset(PARTS))
    model.get_model().mm_projector.float()
    model.padding_free = True
    model.config._attn_implementation = packed_attention(None, CPU, DTYPES[arm])
    parameters = [p for p in model.parameters() if p.requires_grad]
    masters = MasterWeights(parameters) if arm == MASTERS else None
    updated = masters.of(parameters) if masters else parameters
    optimizer = torch.optim.AdamW(updated, lr=0.0, fused=True)  # lr 0, so that all steps have the same loss
    if masters:
        masters.attach(optimizer)
    batch = make_batch(model)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=arm == MASTERS):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(updated, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def make_batch(model: Any) -> dict[str, Any]:
    """A batch of samples with random tokens and a picture each, as the collator makes it."""
    tower = model.get_vision_tower()
    values = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(SAMPLES):
        ids = torch.randint(5, model.config.vocab_size, (TOKENS - tower.num_tokens + 1,), generator=values)
        ids[3] = IMAGE_TOKEN_INDEX
        labels = ids.clone()
        labels[:-TARGETS] = IGNORE_INDEX
        images = torch.randn(1, 3, tower.image_size, tower.image_size, generator=values)
        samples.append({"input_ids": ids, "labels": labels, "images": images.to(next(tower.parameters()).dtype)})
    return DataCollatorForSupervisedDataset(0, tower.num_tokens, 2048, True)(samples)


def floor(dtype: torch.dtype) -> float:
    """Seconds of the decoder's matrix products, forward and backward to inputs and weights; the head's for targets."""
    sizes = PRESETS["demo"].language_model
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    tokens, layers = SAMPLES * TOKENS, sizes["num_hidden_layers"]
    products = Counter({(tokens, width, width): 2, (tokens, width, keys): 2, (tokens, width, inner): 2})
    products[tokens, inner, width] += 1
    products = Counter({shape: count * layers for shape, count in products.items()})
    products[SAMPLES * TARGETS, width, sizes["vocab_size"]] += 1
    return sum(count * seconds_of_product(*shape, dtype) for shape, count in products.items())


def seconds_of_product(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> float:
    """Seconds of a linear layer's three products (forward, to inputs, to weights), each the best of ten."""
    x, weight, gradient = (
        torch.randn(shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    passes = (lambda: F.linear(x, weight), lambda: gradient @ weight, lambda: gradient.T @ x)
    return sum(min(seconds(forward_or_backward, CPU) for _ in range(10)) for forward_or_backward in passes)


if __name__ == "__main__":
    main()
