"""Time and peak memory of the loss over the vocabulary: all logits, or chunks of the rows that have a target.

Both compute the same loss and gradients; the script compares the losses before it reports. Each runs in its own
process, because peak memory is counted per process.
"""

import statistics
import sys
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.common import add_output_dir, own_process, peak_mib, write_result
from benchmarks.norm_layer import seconds
from llava.model.loss import chunked_loss
from llava.utils.commands import Parser


def all_rows_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What upstream computes: logits of every position in fp32, labels ignored afterwards."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=-100, reduction="sum")


VARIANTS = {"all_rows": all_rows_loss, "chunked": chunked_loss}
PRECISION = torch.bfloat16 if torch.cuda.is_available() else torch.float32
VOCABULARY, REPEATS = 152_064, 3  # Qwen2.5's
TOKENS, HIDDEN, SUPERVISED = 4096, 512, 0.1  # positions, their width, the share of them that are targets


def main() -> None:
    parser = Parser(description=__doc__)
    add_output_dir(parser)
    args = parser.parse_args()
    measured = {}
    for variant in VARIANTS:
        with own_process() as process:
            measured[variant] = process.submit(measure, variant).result()
    plain, losses = measured["all_rows"], [m["loss"] for m in measured.values()]
    if max(losses) - min(losses) > 1e-3 * max(losses):
        sys.exit(f"error: the two disagree about the loss: {dict(zip(measured, losses, strict=True))}")
    rows = []
    for variant, result in measured.items():
        ratios = {"memory_over_all_rows": result["peak_mib"] / plain["peak_mib"]}
        ratios["time_over_all_rows"] = result["seconds"] / plain["seconds"]
        rows.append({"vocabulary": VOCABULARY, "variant": variant} | result | ratios)
        print(rows[-1], flush=True)
    meta = {"tokens": TOKENS, "supervised": SUPERVISED, "hidden": HIDDEN, "repeats": REPEATS}
    print(write_result("loss_head", rows, folder=args.output_dir, dtype=str(PRECISION), **meta))


def measure(variant: str) -> dict[str, Any]:
    """Seconds of a forward and backward pass, and the memory it needs beyond inputs, weight and their gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    weight = (torch.randn(VOCABULARY, HIDDEN, device=device) / HIDDEN**0.5).to(PRECISION).requires_grad_()
    hidden = torch.randn(TOKENS, HIDDEN, device=device).to(PRECISION).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), device=device)
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
    times = [seconds(step, device) for _ in range(REPEATS)]
    return {"loss": losses[0], "peak_mib": round(memory, 1), "seconds": statistics.median(times)}


if __name__ == "__main__":
    main()
