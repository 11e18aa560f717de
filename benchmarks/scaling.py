"""How full micro-batches are and how evenly ranks work, by simulation with lengths like those of LLaVA-NeXT's data.

Stage 2 of each preset runs with the recipe's own `--length_group_window` (`recipe` is true) and with others. Ranks are
compared in every micro-batch, because they wait for each other there: the sum of the slowest ranks' tokens over the sum
of the means. `fill` is the tokens over what the micro-batches could hold.

The lengths are drawn, not measured: images count 729 tokens (SigLIP, 384 px, patch 14). The ten parts of LLaVA-1.5's
mixture have their published sizes (665,298 records), each with rounds per record and tokens per round as those tasks
have them; 113,991 records are what LLaVA-NeXT added (documents, charts, detailed captions). Only ShareGPT is text only;
its long tail is cut at 4096.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks.common import add_output_dir, write_result
from llava.data.sampler import ModalityLengthGroupedSampler, assigned_by_length
from llava.launch.recipe import resolved_run
from llava.utils.commands import Parser

VISUAL_TOKENS = 729
MAX_LENGTH = 4096
TURN_MARKERS = 10  # tokens that a chat template writes around a question and its answer
# part: records, (least, most) rounds per record, median tokens of a round and the sigma of their logarithm
NEXT_PARTS = {
    "LLaVA-Instruct conversation": (57_669, (2, 6), 60, 0.5),
    "LLaVA-Instruct detail": (23_240, (1, 1), 130, 0.35),
    "LLaVA-Instruct complex": (76_803, (1, 1), 250, 0.35),
    "VQAv2": (82_783, (3, 8), 12, 0.3),
    "GQA": (72_140, (5, 20), 14, 0.3),
    "OKVQA": (8_998, (1, 2), 16, 0.3),
    "OCR-VQA": (80_000, (3, 8), 18, 0.5),
    "A-OKVQA": (66_160, (1, 2), 60, 0.3),
    "TextCaps": (21_953, (1, 1), 45, 0.3),
    "RefCOCO": (48_447, (3, 20), 30, 0.3),
    "Visual Genome": (86_417, (3, 20), 32, 0.3),
    "documents, charts, detailed captions": (113_991, (1, 3), 90, 0.9),
}
SHARE_GPT = (40_688, 900, 0.9)  # records, median tokens, sigma
PRESETS = ("llama-3.2-3b", "qwen2.5-7b")
RANKS = (8, 32, 64)
WINDOWS = (1, 16)
STEPS = 1000  # optimizer steps to simulate, spread evenly


def main() -> None:
    parser = Parser(description=__doc__)
    add_output_dir(parser)
    args = parser.parse_args()
    signed = lengths_with_images(lengths_779k(np.random.default_rng(0)))
    rows = []
    for row in rank_rows(signed, STEPS):
        print(row, flush=True)
        rows.append(row)
    meta = {"steps": STEPS, "visual_tokens": VISUAL_TOKENS, "max_length": MAX_LENGTH}
    print(write_result("scaling", rows, folder=args.output_dir, **meta))


def lengths_779k(rng: np.random.Generator) -> np.ndarray:
    """Text tokens of 779,289 records, negative for the text-only ones."""
    parts = []
    for count, (least, most), median, sigma in NEXT_PARTS.values():
        rounds = rng.integers(least, most + 1, count)
        # The tokens of a record are those of its rounds, which resemble each other.
        parts.append(20 + rounds * (TURN_MARKERS + rng.lognormal(np.log(median), sigma, count)))
    count, median, sigma = SHARE_GPT
    parts.append(-rng.lognormal(np.log(median), sigma, count).clip(30, None))
    return np.concatenate(parts).round().astype(np.int64)


def lengths_with_images(text: np.ndarray) -> np.ndarray:
    """Tokens of samples with `text` tokens, negative for the text-only ones, as the sampler takes them."""
    return np.sign(text) * np.minimum(np.abs(text) + VISUAL_TOKENS * (text > 0), MAX_LENGTH)


def rank_rows(signed: np.ndarray, steps: int) -> Iterator[dict[str, Any]]:
    """Fill, micro-batches per step and balance of each preset's stage 2."""
    lengths = np.abs(signed)
    for preset, ranks, window in itertools.product(PRESETS, RANKS, WINDOWS):
        run = resolved_run("finetune", PRESET=preset, NUM_GPUS=8, NNODES=ranks // 8)
        batch, cap = run["batch"]["global"], int(run["flags"]["max_tokens_per_micro_batch"])
        seed, own = int(run["flags"]["seed"]), int(run["flags"]["length_group_window"]) == window
        order = some_of(full_steps(ModalityLengthGroupedSampler(signed, batch, seed, window), batch), steps)
        assigned = [assigned_by_length(step.tolist(), lengths, ranks, 1, max_tokens=cap) for step in order]
        # Tokens of every micro-batch of every step [micro-batches, ranks].
        work = np.concatenate([np.array([[lengths[b].sum() for b in rank] for rank in step]).T for step in assigned])
        yield {
            "preset": preset, "recipe": own, "ranks": ranks, "length_group_window": window, "cap": cap,
            "micro_batches_per_step": len(work) / len(assigned),
            "fill": float(work.sum() / (work.size * cap)),
            "slowest_over_mean": float(work.max(1).sum() / work.mean(1).sum()),
        }  # fmt: skip


def full_steps(order: Iterable[int], batch: int) -> np.ndarray:
    """The samples of every step of an epoch [steps, batch], without a short last one."""
    samples = np.fromiter(order, np.int64)
    return samples[: len(samples) - len(samples) % batch].reshape(-1, batch)


def some_of(steps: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the steps, spread evenly."""
    return steps[np.linspace(0, len(steps), min(count, len(steps)), endpoint=False).astype(int)]


if __name__ == "__main__":
    main()
