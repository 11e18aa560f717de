"""Time and peak memory of the loss over the vocabulary: all logits, supervised rows only, chunks of rows.

Every variant computes the same loss and gradients; the script compares the losses before it reports. Each variant runs
in its own process, because peak memory is counted per process.
"""

import argparse
import json
import resource
import sys
import time

import torch
from torch.nn import functional as F

from benchmarks.common import add_result_flags, result_folder, run_json, spread, write_result
from llava.model.loss import chunked_loss
from llava.utils.commands import Parser, whole


def all_rows_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What upstream computes: logits of every position in fp32, labels ignored afterwards."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=-100, reduction="sum")


VARIANTS = {"all_rows": all_rows_loss, "supervised_rows": all_rows_loss, "chunked": chunked_loss}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--vocabularies", type=whole(1), nargs="+", default=[32_000, 128_256, 152_064])
    parser.add_argument("--tokens", type=whole(1), default=4096, help="positions in the micro-batch")
    parser.add_argument("--supervised", type=float, default=0.1, help="share of positions that are targets")
    parser.add_argument("--hidden", type=whole(1), default=512, help="hidden size; real models have 3072 to 3584")
    parser.add_argument("--repeats", type=whole(1), default=3)
    parser.add_argument("--frozen-head", action="store_true", help="stage 1: no gradient of the head's weight")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--suffix", default="", help="suffix of the result file's name")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    add_result_flags(parser, quick="one repeat of the smallest")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.vocabularies = 1, [min(args.vocabularies)]
    args.dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    if args.one:
        variant, vocabulary = args.one.split(":")
        print(json.dumps(measure(variant, int(vocabulary), args)))
        return
    rows = []
    for vocabulary in args.vocabularies:
        measured = {}
        for variant in VARIANTS:
            command = [sys.executable, "-m", "benchmarks.loss_head", "--one", f"{variant}:{vocabulary}"]
            command += [*sys.argv[1:]]
            measured[variant] = run_json(command)
        losses = [m["loss"] for m in measured.values()]
        if max(losses) - min(losses) > 1e-3 * max(losses):
            sys.exit(f"error: the variants disagree about the loss: {dict(zip(measured, losses, strict=True))}")
        for variant, result in measured.items():
            result |= {"vocabulary": vocabulary, "variant": variant}
            result["memory_over_all_rows"] = result["peak_mib"] / measured["all_rows"]["peak_mib"]
            result["time_over_all_rows"] = result["seconds"] / measured["all_rows"]["seconds"]
            rows.append(result)
            print(
                f"C {vocabulary:7,}  {variant:16} {result['seconds']:8.3f} s  {result['peak_mib']:9.1f} MiB  "
                f"{result['memory_over_all_rows']:.3f} of all_rows' memory, "
                f"{result['time_over_all_rows']:.3f} of its time"
            )
    names = ("tokens", "supervised", "hidden", "dtype", "frozen_head", "repeats")
    meta = {name: getattr(args, name) for name in names}
    print(write_result(f"loss_head{args.suffix}", rows, folder=result_folder(args), **meta))


def measure(variant: str, vocabulary: int, args: argparse.Namespace) -> dict:
    """Seconds of a forward and backward pass, and the memory it needs beyond inputs, weight and their gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, args.hidden, device=device) / args.hidden**0.5).to(dtype)
    weight.requires_grad_(not args.frozen_head)
    hidden = torch.randn(args.tokens, args.hidden, device=device).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (args.tokens,), device=device)
    labels[torch.rand(args.tokens, device=device) >= args.supervised] = -100
    hidden.grad, weight.grad = torch.zeros_like(hidden), None if args.frozen_head else torch.zeros_like(weight)

    def step() -> float:
        if variant == "all_rows":
            loss = all_rows_loss(hidden, weight, labels)
        else:
            rows = labels != -100
            loss = VARIANTS[variant](hidden[rows], weight, labels[rows])
        loss.backward()
        return loss.item()

    before = peak_mib(device)
    loss = step()
    peak = peak_mib(device) - before
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"loss": loss, "peak_mib": round(peak, 1), "seconds": spread(seconds)["median"]}


def peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
