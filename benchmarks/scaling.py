"""How full micro-batches are and how evenly ranks work, by simulation; two CPU ranks against one, by real training.

The simulation assigns an epoch of LLaVA-558K or LLaVA-NeXT 779K to 8 to 512 ranks, compares the slowest rank's tokens
with the mean over ranks: the sum of the maxima over the sum of the means, which says how long ranks wait.

- `recipe`: stage 2 of each preset with its own settings, on the 779K lengths. Ranks are compared in every micro-batch,
  because they wait for each other there; `fill` is the tokens over what the micro-batches could hold. `before` is the
  earlier rule: as many micro-batches in every step as the longest step needs, rounded up to a divisor of a rank's
  samples.
- `order`: what `--length_group_window` does to the global batches: how many kinds of records one holds (the exponential
  of the entropy of their shares), and how much of the variance of lengths is between batches instead of inside.
- The other rows compare ranks over whole steps, for more numbers of ranks, beside upstream's grouped sampler.

The lengths are drawn, not measured: images count 729 tokens (SigLIP, 384 px, patch 14). 558K: BLIP captions around 13
tokens. 779K: the ten parts of LLaVA-1.5's mixture with their published sizes (665,298 records), each with rounds per
record and tokens per round as those tasks have them, and 113,991 records of what LLaVA-NeXT added (documents, charts,
detailed captions). Only ShareGPT is text only; its long tail is cut at 4096. See `DISTRIBUTIONS`.
"""

import argparse
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import inputs
from benchmarks.common import ROOT, add_result_flags, alternate, ratio, result_folder, spread, write_result
from llava.data.sampler import ModalityLengthGroupedSampler, RandomOrder, assigned_by_length
from llava.launch.recipe import resolved_run
from llava.utils.commands import Parser, whole

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


def lengths_558k(rng: np.random.Generator) -> np.ndarray:
    """Text tokens of 558,128 captions; all have an image."""
    return np.clip(rng.lognormal(np.log(13), 0.4, 558_128).round(), 4, 80).astype(np.int64)


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


# name: (signed text tokens, global batch of the recipe)
DISTRIBUTIONS = {"558K": (lengths_558k, 256), "779K": (lengths_779k, 128)}
# preset: its cap in stage 2 under the earlier rule
EARLIER_CAPS = {"llama-3.2-3b": 8192, "qwen2.5-7b": 6144}
RECIPE_RANKS = (8, 32, 64)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=whole(1), nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument(
        "--windows", type=whole(1), nargs="+", default=[1, 4, 16, 64], help="values of --length_group_window"
    )
    parser.add_argument("--steps", type=whole(1), default=1000, help="optimizer steps to simulate, spread evenly")
    parser.add_argument("--repeats", type=whole(0), default=3, help="runs on two ranks and on one; 0: only simulate")
    add_result_flags(parser, quick="64 ranks, two windows, 40 steps, no runs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.windows, args.steps, args.repeats = [64], [1, 16], 40, 0
    rows = [*recipe_rows(args.steps), *order_rows(args.windows)]
    for row in rows:
        print(row, flush=True)
    for name, ranks in itertools.product(DISTRIBUTIONS, args.ranks):
        for row in simulated(name, ranks, args):
            print(row, flush=True)
            rows.append(row)
    if args.repeats:
        rows += measured(args.repeats)
        print(rows[-1])
    meta = {"steps": args.steps, "visual_tokens": VISUAL_TOKENS, "max_length": MAX_LENGTH}
    path = write_result("scaling", rows, folder=result_folder(args), **meta)
    print(f"written to {path}")


# --- simulation -------------------------------------------------------------------------------------------------------


def lengths_with_images(text: np.ndarray) -> np.ndarray:
    """Tokens of samples with `text` tokens, negative for the text-only ones, as the sampler takes them."""
    return np.sign(text) * np.minimum(np.abs(text) + VISUAL_TOKENS * (text > 0), MAX_LENGTH)


def recipe_rows(steps: int) -> Iterator[dict]:
    """Fill, micro-batches per step and balance of each preset's stage 2, by the earlier rule and by this tree's."""
    signed = lengths_with_images(lengths_779k(np.random.default_rng(0)))
    lengths = np.abs(signed)
    for (preset, earlier_cap), ranks in itertools.product(EARLIER_CAPS.items(), RECIPE_RANKS):
        run = resolved_run("finetune", PRESET=preset, NUM_GPUS=8, NNODES=ranks // 8)
        batch, cap = run["batch"]["global"], int(run["flags"]["max_tokens_per_micro_batch"])
        window, seed = int(run["flags"]["length_group_window"]), int(run["flags"]["seed"])
        before = full_steps(ModalityLengthGroupedSampler(signed, batch, seed), batch)
        needed = -(-lengths[before].sum(1).max() // (ranks * earlier_cap))
        fixed = next(n for n in range(1, batch // ranks + 1) if batch // ranks % n == 0 and n >= needed)
        after = full_steps(ModalityLengthGroupedSampler(signed, batch, seed, window), batch)
        for rule, order, of_window, limit, rest in (
            ("before", before, 1, earlier_cap, {"micro_batches": fixed}),
            ("after", after, window, cap, {"micro_batches": 1, "max_tokens": cap}),
        ):
            assigned = [assigned_by_length(step.tolist(), lengths, ranks, **rest) for step in some_of(order, steps)]
            # Tokens of every micro-batch of every step [micro-batches, ranks].
            work = [np.array([[lengths[b].sum() for b in rank] for rank in step]).T for step in assigned]
            work = np.concatenate(work)
            row = {"recipe": preset, "ranks": ranks, "rule": rule, "length_group_window": of_window, "cap": limit}
            row["micro_batches_per_step"] = len(work) / len(assigned)
            row["fill"] = float(work.sum() / (work.size * limit))
            row["slowest_over_mean"] = float(work.max(1).sum() / work.mean(1).sum())
            yield row


def order_rows(windows: list[int]) -> Iterator[dict]:
    """How each window mixes the global batches of 128 of the 779K data."""
    signed = lengths_with_images(lengths_779k(np.random.default_rng(0)))
    kinds = np.repeat(np.arange(len(NEXT_PARTS) + 1), [*(part[0] for part in NEXT_PARTS.values()), SHARE_GPT[0]])
    with_image = signed > 0
    for window in windows:
        steps = full_steps(ModalityLengthGroupedSampler(signed, 128, window=window), 128)
        steps = steps[with_image[steps].all(1)]
        shares = [np.bincount(kinds[step], minlength=len(NEXT_PARTS) + 1) / 128 for step in steps]
        entropy = [-(share[share > 0] * np.log(share[share > 0])).sum() for share in shares]
        row = {"order": "779K, batches with images", "length_group_window": window}
        row["kinds_of_records_in_a_batch"] = float(np.exp(entropy).mean())
        row["variance_of_lengths_between_batches"] = float(signed[steps].mean(1).var() / signed[steps].var())
        yield row


def simulated(name: str, ranks: int, args: argparse.Namespace) -> list[dict]:
    """This tree with each window, and upstream, for one data set and number of ranks."""
    make, batch = DISTRIBUTIONS[name]
    text = make(np.random.default_rng(0))
    signed = lengths_with_images(text)
    total = np.abs(signed)
    # The recipe's batch where each rank gets two samples of it, else the smallest that gives two.
    batch = max(batch, 2 * ranks)
    # Upstream sorts by the number of words of the text; the number of its tokens gives much the same order.
    samplers = {"upstream, micro-batch 1": upstream_order(text, ranks, 1, batch // ranks)}
    samplers["upstream, one micro-batch"] = upstream_order(text, ranks, batch // ranks, 1)
    samplers["random order, balanced"] = RandomOrder(len(text))
    for window in args.windows:
        samplers[f"--length_group_window {window}"] = ModalityLengthGroupedSampler(signed, batch, window=window)
    rows = []
    for sampler, order in samplers.items():
        steps = some_of(full_steps(order, batch), args.steps)
        micro = batch // ranks if sampler.endswith("micro-batch 1") else 1
        deal = assigned_by_position if sampler.startswith("upstream") else of_each_rank
        work = np.array([[total[samples].sum() for samples in deal(step, total, ranks, micro)] for step in steps])
        row = {"data": name, "ranks": ranks, "global_batch": batch, "sampler": sampler, "steps": len(steps)}
        row["slowest_over_mean"] = float(work.max(1).sum() / work.mean(1).sum())
        row["slowest_over_mean_p99"] = float(np.quantile(work.max(1) / work.mean(1), 0.99))
        rows.append(row)
    return rows


def full_steps(order: Iterable[int], batch: int) -> np.ndarray:
    """The samples of every step of an epoch [steps, batch], without a short last one."""
    samples = np.fromiter(order, np.int64)
    return samples[: len(samples) - len(samples) % batch].reshape(-1, batch)


def some_of(steps: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the steps, spread evenly."""
    return steps[np.linspace(0, len(steps), min(count, len(steps)), endpoint=False).astype(int)]


def of_each_rank(step: np.ndarray, lengths: np.ndarray, ranks: int, micro: int) -> list[np.ndarray]:
    """Each rank's samples of one step, by this tree's sampler."""
    return [np.concatenate(batches) for batches in assigned_by_length(step.tolist(), lengths, ranks, micro)]


def assigned_by_position(step: np.ndarray, lengths: np.ndarray, ranks: int, micro: int) -> list[np.ndarray]:
    """Each rank's samples of one step, when micro-batches go round the ranks in the order of the sampler."""
    batches = step.reshape(micro, ranks, -1)
    return [batches[:, rank].ravel() for rank in range(ranks)]


def upstream_order(text: np.ndarray, ranks: int, batch_size: int, accumulation: int, seed: int = 0) -> Iterator[int]:
    """An epoch as LLaVA's grouped sampler orders it.

    Per modality: random global batches, each sorted from long to short and split into `ranks * accumulation` chunks of
    `batch_size`, every sample going to the chunk with the fewest tokens that still has room. Global batches come in
    random order, the short ones of both modalities together at the end.
    """
    rng, chunks = np.random.default_rng(seed), ranks * accumulation
    full, rest = [], []
    for members in (np.flatnonzero(text > 0), np.flatnonzero(text < 0)):
        shuffled = rng.permutation(members)
        whole = len(shuffled) - len(shuffled) % (chunks * batch_size)
        full += [grouped(part, np.abs(text), chunks) for part in shuffled[:whole].reshape(-1, chunks * batch_size)]
        rest.append(shuffled[whole:])
    for part in rng.permutation(len(full)):
        yield from full[part]
    yield from np.concatenate(rest)


def grouped(part: np.ndarray, lengths: np.ndarray, chunks: int) -> np.ndarray:
    part = part[np.argsort(-lengths[part], kind="stable")]
    size = len(part) // chunks
    if size == 1:
        return part
    members: list[list[int]] = [[] for _ in range(chunks)]
    tokens = np.zeros(chunks)
    for index in part:
        chunk = int(tokens.argmin())
        members[chunk].append(index)
        tokens[chunk] = tokens[chunk] + lengths[index] if len(members[chunk]) < size else np.inf
    return np.array(members).ravel()


# --- real training ----------------------------------------------------------------------------------------------------


def measured(repeats: int) -> list[dict]:
    """Samples per second of two CPU ranks and of one, each with one thread, under ZeRO-2, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_inputs(work)
        rates = alternate({str(ranks): (lambda ranks=ranks: trained(work, ranks)) for ranks in (1, 2)}, repeats)
    rows = []
    for ranks, values in rates.items():
        rows.append({"measured": "training on CPU ranks", "ranks": int(ranks)})
        rows[-1] |= {f"samples_per_s_{key}": value for key, value in spread(values).items()}
    rows[-1] |= {f"over_one_rank_{key}": value for key, value in ratio(rates["2"], rates["1"]).items()}
    return rows


def write_inputs(work: Path) -> None:
    """Writes a Llama of four layers with random weights, and conversations with and without a picture."""
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    golden = ROOT / "tests/golden/train/inputs"
    tokenizer = AutoTokenizer.from_pretrained(golden / "qwen_untied")
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(work / "llama")
    tokenizer.save_pretrained(work / "llama")
    Image.new("RGB", (64, 48), "teal").save(work / "picture.png")
    inputs.write_json(work / "data.json", inputs.conversation_records(256, "picture.png", text_only=0.3))


def trained(work: Path, ranks: int) -> float:
    """Median samples per second of the steps after the first two."""
    golden, output = ROOT / "tests/golden/train/inputs", work / f"run{ranks}"
    shutil.rmtree(output, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "model_name_or_path": work / "llama", "vision_tower": golden / "siglip", "version": "qwen_1_5",
        "data_path": work / "data.json", "image_folder": work, "mm_projector_norm": "gwc_layernorm",
        "mm_tunable_parts": "mm_mlp_adapter,mm_language_model", "group_by_modality_length": True,
        "per_device_train_batch_size": 8 // ranks, "gradient_accumulation_steps": 1, "max_steps": 10,
        "model_max_length": 512, "logging_steps": 1, "telemetry_steps": 0, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "output_dir": output, "deepspeed": ROOT / "deepspeed_configs/zero2.json",
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    command += [ROOT / "llava/train/train_mem.py", *(text for flag in flags.items() for text in flag)]
    command = [f"--{text}" if text in flags else str(text) for text in command]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"error: training on {ranks} ranks failed:\n{(done.stdout + done.stderr)[-4000:]}")
    steps = [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]
    return statistics.median(step["samples_per_second"] for step in steps[2:] if "samples_per_second" in step)


if __name__ == "__main__":
    main()
