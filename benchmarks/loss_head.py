"""Time and peak memory of the loss over the vocabulary: all logits, or chunks of the rows that have a target.

Both compute the same loss and gradients; the script compares the losses before it reports. Each runs in its own
process, because peak memory is counted per process.
"""

import argparse
import json
import sys
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.common import add_result_flags, peak_mib, result_folder, run_json, spread, write_result
from benchmarks.norm_layer import seconds
from llava.model.loss import chunked_loss
from llava.utils.commands import Parser, whole


def all_rows_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What upstream computes: logits of every position in fp32, labels ignored afterwards."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=-100, reduction="sum")


VARIANTS = {"all_rows": all_rows_loss, "chunked": chunked_loss}
TOKENS, HIDDEN, SUPERVISED = 4096, 512, 0.1  # positions, their width, the share of them that are targets


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--vocabularies", type=whole(1), nargs="+", default=[32_000, 128_256, 152_064])
    parser.add_argument("--repeats", type=whole(1), default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    add_result_flags(parser, quick="one repeat of the smallest")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.vocabularies = 1, [min(args.vocabularies)]
    if args.one:
        variant, vocabulary = args.one.split(":")
        print(json.dumps(measure(variant, int(vocabulary), args.repeats)))
        return
    rows = []
    for vocabulary in args.vocabularies:
        command = [sys.executable, "-m", "benchmarks.loss_head", *sys.argv[1:], "--one"]
        measured = {variant: run_json([*command, f"{variant}:{vocabulary}"]) for variant in VARIANTS}
        losses = [m["loss"] for m in measured.values()]
        if max(losses) - min(losses) > 1e-3 * max(losses):
            sys.exit(f"error: the two disagree about the loss: {dict(zip(measured, losses, strict=True))}")
        plain = measured["all_rows"]
        for variant, result in measured.items():
            ratios = {"memory_over_all_rows": result["peak_mib"] / plain["peak_mib"]}
            ratios["time_over_all_rows"] = result["seconds"] / plain["seconds"]
            rows.append({"vocabulary": vocabulary, "variant": variant} | result | ratios)
            print(rows[-1], flush=True)
    meta = {"tokens": TOKENS, "supervised": SUPERVISED, "hidden": HIDDEN, "repeats": args.repeats}
    print(write_result("loss_head", rows, folder=result_folder(args), dtype=str(precision()), **meta))


def precision() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def measure(variant: str, vocabulary: int, repeats: int) -> dict[str, Any]:
    """Seconds of a forward and backward pass, and the memory it needs beyond inputs, weight and their gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, HIDDEN, device=device) / HIDDEN**0.5).to(precision()).requires_grad_()
    hidden = torch.randn(TOKENS, HIDDEN, device=device).to(precision()).requires_grad_()
    labels = torch.randint(vocabulary, (TOKENS,), device=device)
    labels[torch.rand(TOKENS, device=device) >= SUPERVISED] = -100
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    losses = []

    def step() -> None:
        rows = slice(None) if variant == "all_rows" else labels != -100
        loss = VARIANTS[variant](hidden[rows], weight, labels[rows])
        loss.backward()
        losses.append(loss.item())

    def peak() -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else peak_mib()

    before = peak()
    step()
    memory = peak() - before
    times = [seconds(step, device) for _ in range(repeats)]
    return {"loss": losses[0], "peak_mib": round(memory, 1), "seconds": spread(times)["median"]}


if __name__ == "__main__":
    main()
