"""Memory per GPU and throughput of the recipes from 1 to 512 GPUs, by formula; nothing is run. Prints docs/scale.md.

Memory is the tree's own estimate (llava.train.memory), with DeepSpeed's estimator beside it. A step takes the longest
of three times, as if they overlapped fully:

    compute = FLOPs of the step per GPU / (peak x --mfu)
    network = bytes that one node receives (benchmarks.traffic) / bandwidth
    latency = micro-batches x collectives x GPUs x --hop-us

    python -m benchmarks.scale > docs/scale.md
    python -m benchmarks.scale --print traffic      # what each ZeRO file sends
    python -m benchmarks.scale --print pieces       # that of docs/performance.md: the pieces of a micro-batch
    python -m benchmarks.scale --print pieces --preset qwen2.5-7b --stage 1 --measured pieces.json
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import cards
from benchmarks.shapes import PRESETS, SO400M, STAGES
from benchmarks.traffic import step_traffic
from llava.launch.recipe import resolved_run
from llava.model.language_model.families import LLAVA_CLASSES
from llava.train.memory import estimate_memory
from llava.train.optim import set_trainable
from llava.train.telemetry import Work, flop_costs, required_flops
from llava.train.zero import fit_zero
from llava.utils.commands import Parser
from llava.utils.paths import ROOT

NAMES = ("llama-3.2-3b", "qwen2.5-7b")
SCRIPTS = {1: "pretrain", 2: "finetune"}
RUNS = {(name, stage): resolved_run(SCRIPTS[stage], PRESET=name, NUM_GPUS=1) for name in NAMES for stage in SCRIPTS}
CAPS = {key: int(run["flags"]["max_tokens_per_micro_batch"]) for key, run in RUNS.items()}
GLOBAL_BATCH = {stage: run["batch"]["global"] for (_, stage), run in RUNS.items()}  # every preset's is the same
VISUAL_TOKENS, TEXT_TOKENS, TARGETS = 729, {1: 25, 2: 300}, {1: 20, 2: 200}  # of a sample, on average
GPUS = (8, 16, 32, 64, 128, 256, 512)
GIB = 2**30
LAYOUTS = ("zero2", "zero3", "zero3_hpz")
NETWORKS = {"8 x 400 Gb/s per node": 400e9, "100 Gb/s per node": 12.5e9}  # bytes per second

# Assumptions about an H100; nothing was measured.
PEAK = 989.0  # TFLOP/s
EFFICIENCY = {"LLM products": 0.62, "attention": 0.35, "tower": 0.3, "head": 0.5}  # shares of --peak
HBM, NVLINK = 3.35e12, 450e9  # bytes per second of the memory, and between GPUs of a node
PASSES = 4  # elementwise kernels write and read what a layer keeps, forward and backward
PRINTED = ("page", "traffic", "pieces")
PIECES = (*EFFICIENCY, "elementwise", "communication", "other")


def build(name: str, stage: int) -> Any:
    """The preset's model in bf16 on the meta device, with `requires_grad` as the stage sets it."""
    preset = PRESETS[name]
    classes = LLAVA_CLASSES[preset.model_type]
    vision = {"mm_vision_tower": "siglip", "mm_vision_config": SO400M | {"model_type": "siglip_vision_model"}}
    tied = preset.model_type == "llava_llama"
    config = classes.config(**preset.language_model, **vision, tie_word_embeddings=tied, mm_projector_type="mlp2x_gelu")
    with torch.device("meta"):
        model = classes.causal_lm(config).bfloat16()
    if tied:
        model.tie_weights()
    set_trainable(model, frozenset(STAGES[stage]))
    model.config._attn_implementation = "flash_attention_2"
    return model


def arguments(layout: str, ranks: int) -> SimpleNamespace:
    """The training arguments that the estimate reads, with the file `layout` of deepspeed_configs."""
    config = SimpleNamespace(config=json.loads((ROOT / f"deepspeed_configs/{layout}.json").read_text()))
    options = {"optim": "adamw_torch_fused", "bf16": True, "fp16": False, "use_liger_kernel": False}
    options |= {"deepspeed": layout, "hf_deepspeed_config": config, "world_size": ranks}
    return SimpleNamespace(device=torch.device("cuda"), **options)


def deepspeed_estimate(model: Any, stage: int, ranks: int, offload: bool) -> float:
    """GiB per GPU for model states by DeepSpeed's estimator, which assumes that every weight is trained."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    elements = sum(p.numel() for p in model.parameters())
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    nodes = {"num_gpus_per_node": min(8, ranks), "num_nodes": -(-ranks // 8)}
    if stage == 2:
        return zero2(elements, cpu_offload=False, **nodes)[1] / GIB
    return zero3(elements, largest, cpu_offload=offload, cpu_offload_params=offload, **nodes)[1] / GIB


def memory_rows(ranks: tuple[int, ...] = (8, 64)) -> Iterator[list[str]]:
    """Memory of every preset, stage, layout and number of GPUs."""
    for name in NAMES:
        for stage in STAGES:
            model = build(name, stage)
            for layout in ("zero2", "zero3", "zero3_offload"):
                for n in ranks:
                    args = arguments(layout, n)
                    fit_zero(model, args)
                    estimate = estimate_memory(model, args, CAPS[name, stage])
                    states = (estimate.parameters + estimate.gradients + estimate.optimizer) / GIB
                    whole = estimate.total() / GIB
                    recomputed = estimate.total(estimate.num_layers) / GIB
                    theirs = deepspeed_estimate(model, 2 if layout == "zero2" else 3, n, layout == "zero3_offload")
                    recipes = (
                        " (the recipe's)" if RUNS[name, stage]["flags"]["deepspeed"].endswith(f"/{layout}.json") else ""
                    )
                    numbers = (states, theirs, whole, recomputed)
                    yield [name, str(stage), layout + recipes, str(n), *(f"{value:.1f}" for value in numbers)]


def step_work(name: str, stage: int, gpus: int) -> tuple[Work, int]:
    """A GPU's share of one optimizer step, and the number of its micro-batches."""
    samples, text = GLOBAL_BATCH[stage] / gpus, TEXT_TOKENS[stage]
    tokens = VISUAL_TOKENS + text
    micro_batches = max(1, -(-int(samples * tokens) // CAPS[name, stage]))
    pairs = tokens * (tokens + 1) / 2
    return Work(samples, samples * tokens, samples * pairs, samples, samples * TARGETS[stage]), micro_batches


def zero_section(layout: str) -> dict[str, Any]:
    """The section `zero_optimization` of a file of deepspeed_configs; `zero1` is `zero2` with stage 1."""
    file = ROOT / f"deepspeed_configs/{layout.replace('zero1', 'zero2')}.json"
    section = json.loads(file.read_text())["zero_optimization"]
    return section | {"stage": 1} if layout == "zero1" else section


def traffic_rows() -> Iterator[list[str]]:
    """GB that a GPU receives per step through rings of all GPUs, for each preset, stage, layout and number of nodes."""
    for name, stage in RUNS:
        model = build(name, stage)
        for layout in ("zero1", *LAYOUTS):
            cells = []
            for gpus in GPUS[:4]:
                _, micro_batches = step_work(name, stage, gpus)
                cells.append(f"{step_traffic(model, zero_section(layout), gpus, micro_batches).everywhere / 1e9:.3g}")
            yield [name, str(stage), layout, *cells]


def traffic_table() -> str:
    header = ["preset", "stage", "ZeRO", *(f"{gpus} GPUs" for gpus in GPUS[:4])]
    return table(header, traffic_rows())


def throughput_rows(stage: int, bandwidth: float, args: argparse.Namespace) -> Iterator[list[str]]:
    """Samples per second of every preset and layout for each number of GPUs, marked with what bounds them."""
    for name in NAMES:
        model = build(name, stage)
        for layout in LAYOUTS:
            yield [name, layout, *(step_cell(model, name, stage, layout, n, bandwidth, args) for n in GPUS)]


def step_cell(
    model: Any, name: str, stage: int, layout: str, gpus: int, bandwidth: float, args: argparse.Namespace
) -> str:
    """Samples per second, marked if network or latency bounds them; `-` if there are fewer samples than GPUs."""
    if gpus > GLOBAL_BATCH[stage]:
        return "-"
    work, micro_batches = step_work(name, stage, gpus)
    compute = required_flops(flop_costs(model), work) / (args.peak * 1e12 * args.mfu)
    zero, several_nodes = zero_section(layout), gpus > 8
    network = step_traffic(model, zero, gpus, micro_batches).everywhere / bandwidth * several_nodes
    layers = len(model.get_model().layers) + model.get_vision_tower().num_layers_used
    collectives = 1 if zero["stage"] == 2 else 3 * layers
    latency = micro_batches * collectives * gpus * args.hop_us * 1e-6 * several_nodes
    seconds = max(compute, network, latency)
    mark = "" if seconds == compute else " n" if seconds == network else " l"
    return f"{GLOBAL_BATCH[stage] / seconds:.0f}{mark}"


# --- the pieces of a micro-batch --------------------------------------------------------------------------------------


def pieces(name: str, stage: int, peak: float) -> dict[str, float]:
    """Estimated seconds of each piece of a full micro-batch, on a GPU of a node of 8 with the recipe's ZeRO."""
    model, tokens = build(name, stage), CAPS[name, stage]
    costs, work = flop_costs(model), micro_batch_work(name, stage)
    flops = {
        "LLM products": costs.per_token * work.tokens,
        "attention": costs.per_pair * work.pairs,
        "tower": costs.per_image * work.images,
        "head": costs.per_target * work.targets,
    }
    seconds = {piece: count / (peak * 1e12 * EFFICIENCY[piece]) for piece, count in flops.items()}
    layout = Path(RUNS[name, stage]["flags"]["deepspeed"]).stem
    args = arguments(layout, 8)
    fit_zero(model, args)
    kept = estimate_memory(model, args, tokens).activations(0)
    seconds["elementwise"] = PASSES * kept / HBM
    # A step of one micro-batch; in longer steps the weights of ZeRO-1 and 2 are gathered only once.
    seconds["communication"] = step_traffic(model, zero_section(layout), 8, 1).everywhere / NVLINK
    return seconds


def micro_batch_work(name: str, stage: int) -> Work:
    """The work of a micro-batch as large as the preset's cap."""
    work, _ = step_work(name, stage, 1)
    share = CAPS[name, stage] / work.tokens
    return Work(*(value * share for value in vars(work).values()))


def piece_table(name: str, stage: int, peak: float, measured: dict[str, float] | None = None) -> str:
    """The pieces in milliseconds, with their sum and MFU; `measured` beside them, and which gap is the largest.

    Communication is not part of the estimated sum, since it overlaps with arithmetic where it can.
    """
    estimated = pieces(name, stage, peak)
    columns = [estimated] if measured is None else [estimated, measured]
    sums = [sum(v for k, v in column.items() if k != "communication" or column is measured) for column in columns]
    header, rows = ["piece", "estimated, ms"], []
    for piece in (*estimated, *((measured or {}).keys() - estimated.keys())):
        rows.append([piece, *(f"{1e3 * column[piece]:.1f}" if piece in column else "" for column in columns)])
    flops = required_flops(flop_costs(build(name, stage)), micro_batch_work(name, stage))
    rows.append(["sum", *(f"{1e3 * value:.1f}" for value in sums)])
    rows.append(["MFU", *(f"{flops / (peak * 1e12 * value):.2f}" for value in sums)])
    if measured is None:
        return table(header, iter(rows))
    gaps = {piece: seconds - estimated.get(piece, 0.0) for piece, seconds in measured.items()}
    largest = max(gaps, key=lambda piece: abs(gaps[piece]))
    for row in rows:
        row.append(f"{1e3 * gaps[row[0]]:+.1f}" if row[0] in gaps else "")
    lines = table([*header, "measured, ms", "measured - estimated, ms"], iter(rows))
    return f"{lines}\n\nlargest gap: {largest}, {1e3 * gaps[largest]:+.1f} ms"


def piece_tables(
    preset: str | None = None,
    stage: int | None = None,
    peak: float = PEAK,
    measured: dict[str, float] | None = None,
) -> Iterator[str]:
    """The table of the chosen recipes, by default of all, each below a line that names it."""
    for name, number in RUNS:
        if preset in (None, name) and stage in (None, number):
            said = f"{name}, stage {number}, micro-batch of {CAPS[name, number]} tokens:"
            yield f"{said}\n\n{piece_table(name, number, peak, measured)}"


def read_measured(file: Path) -> dict[str, float]:
    """Seconds by piece from a JSON file.

    Raises:
        ValueError: it is something else, or names a piece that the estimate does not know.
    """
    expected = f'expected {{"piece": seconds}} with pieces from {", ".join(PIECES)}'
    try:
        measured = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--measured {file}: {expected}; {error}") from error
    if not isinstance(measured, dict) or not measured or not all(type(v) in (int, float) for v in measured.values()):
        raise ValueError(f"--measured {file}: {expected}, found {json.dumps(measured)[:60]}")
    if unknown := measured.keys() - set(PIECES):
        raise ValueError(f"--measured {file}: {expected}, found {', '.join(sorted(unknown))}")
    return measured


def table(header: list[str], rows: Iterator[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--peak", type=float, default=PEAK, help="TFLOP/s of a GPU, dense bf16")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of it that a single GPU reaches; an assumption")
    parser.add_argument("--hop-us", type=float, default=5.0, help="time from GPU to GPU in a ring, microseconds")
    parser.add_argument(
        "--print", choices=PRINTED, default="page", help="docs/scale.md, or the table of another page (default: page)"
    )
    parser.add_argument("--preset", choices=NAMES, help="of --print pieces; default: all")
    parser.add_argument("--stage", type=int, choices=SCRIPTS, help="of --print pieces; default: both")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help='with --print pieces: seconds of a full micro-batch by piece, as JSON, such as {"attention": 0.012, '
        f'"tower": 0.06}}, to be shown beside the estimate. Pieces: {", ".join(PIECES)}',
    )
    args = parser.parse_args()
    if args.measured and (args.print != "pieces" or not (args.preset and args.stage)):
        parser.error("--measured: only with --print pieces, --preset and --stage, which say what was measured")
    try:
        measured = args.measured and read_measured(args.measured)
    except ValueError as error:
        parser.error(str(error))
    with contextlib.redirect_stdout(sys.stderr):  # else its first log lines would be part of the page
        import deepspeed  # noqa: F401
    if args.print == "traffic":
        print(traffic_table())
    elif args.print == "pieces":
        print(*piece_tables(args.preset, args.stage, args.peak, measured), sep="\n\n")
    else:
        print_page(args)


def print_page(args: argparse.Namespace) -> None:
    """Prints docs/scale.md."""
    memory = ["preset", "stage", "layout", "GPUs", "states", "DeepSpeed's estimate", "total", "total, all recomputed"]
    print(INTRODUCTION)
    print(table(memory, memory_rows()))
    print(THROUGHPUT.format(mfu=args.mfu, peak=args.peak, hop=args.hop_us, text=TEXT_TOKENS, visual=VISUAL_TOKENS))
    for stage in STAGES:
        for network, bandwidth in NETWORKS.items():
            print(f"\nStage {stage}, global batch {GLOBAL_BATCH[stage]}, {network}:\n")
            print(table(["preset", "layout", *map(str, GPUS)], throughput_rows(stage, bandwidth, args)))
    print(cards.section(args.mfu))
    print(table(cards.header(), cards.rows(args.mfu, TEXT_TOKENS, TARGETS)))
    print(BREAKS)


INTRODUCTION = """# From 1 to 512 GPUs

Printed by `python -m benchmarks.scale`. Everything here is arithmetic; [performance.md](performance.md#notes) says what
one GPU reached.

## Memory per GPU

In GiB, for micro-batches as large as the preset's cap. `states` are weights, gradients (which add up in fp32) and
optimizer states by the tree's estimate, the table that a run prints before its first step; `total` adds activations
and the loss head, without and with recomputation of every layer, on PyTorch's kernels (Liger's keep less). DeepSpeed's
estimator (`estimate_zero{2,3}_model_states_mem_needs`) ignores frozen weights and activations: in stage 1 it
counts optimizer states that do not exist. In stage 2 the two differ in the weights that ZeRO-3 gathers: DeepSpeed's
estimator counts the largest layer, ours up to 10^9 weights (`stage3_max_live_parameters`). `zero3_hpz.json` needs the
16-bit weights, split over 8 GPUs, on top of ZeRO-3's rows.
"""
THROUGHPUT = """
## Throughput

Samples per second over all GPUs, nodes of 8. `n`: limited by the network, `l`: by latency, `-`: fewer samples than
GPUs. Assumptions:

- A single GPU reaches {mfu:g} of {peak:g} TFLOP/s (one H200, without communication, reached 0.49 to 0.52 in
  the shapes of llama-3.2-3b: [performance.md](performance.md#notes)).
- A sample has {visual} visual tokens, and {text[1]} of text in stage 1, {text[2]} in stage 2; all GPUs get the same.
- Communication and arithmetic overlap fully; inside a node communication costs nothing; a node's network cards work
  together.
- What each configuration sends is in [clusters.md](clusters.md#which-zero).
- A collective takes {hop:g} microseconds per GPU in the ring; ZeRO-3 has three per layer and micro-batch, because a
  layer is gathered as one.
- Reading data keeps up."""
BREAKS = """
## What breaks first

1. **The batch.** The recipes' global batches are 256 and 128: the scripts refuse more GPUs than samples. Stage 2
   is limited to 128 GPUs, stage 1 to 256. More GPUs need a larger batch, and so another learning rate.
2. **Work per GPU.** Long before that, a GPU has one or two samples per step, and ZeRO-3 moves all weights for them. On
   a slow network this limits throughput from two nodes on: `zero3_hpz.json` sends the fewest bytes between nodes.
3. **Uneven samples.** With a single sample per GPU, a step takes as long as its longest sample;
   `--length_group_window` helps ([data.md](data.md#even-work-for-all-ranks)).
4. **Latency.** A ring over hundreds of GPUs costs milliseconds per collective, whatever its size.
5. **Checkpoints.** Only rank 0 writes the gathered 16-bit weights (15 GiB for 7B); optimizer states are written by
   all ranks.
6. **Failures.** Their rate grows with the number of nodes; [clusters.md](clusters.md#faults) says what a run does."""


if __name__ == "__main__":
    main()
