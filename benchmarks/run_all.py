"""Runs every benchmark and writes docs/performance.md from their results: targets, and what was measured.

A benchmark that fails is reported, the others continue, and the exit status is 1. `--quick` shows that each works: its
results go to outputs/benchmarks and the page stays. `--report` only rewrites the page.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it also runs as a file

from benchmarks.common import QUICK_RESULTS, RESULTS, ROOT
from llava.utils.commands import Parser

PAGE = ROOT / "docs/performance.md"
BENCHMARKS = {
    "norm_layer": "The norm layer",
    "loss_head": "The loss over the vocabulary",
    "train_step": "A training step",
    "host_syncs": "Waits of the host for the device",
    "cpu_step": "The demo's step on a CPU",
    "vs_upstream": "Against LLaVA",
    "vs_peers": "Against other tools",
    "data_pipeline": "From record to tensors",
    "data_preflight": "Preparing and preflighting data",
    "startup": "First batch, and memory of workers",
    "scaling": "Full micro-batches and even ranks",
}
"""The titles of the modules' sections."""
FLAGS_OF = {"tiny": "--size tiny", "bf16": "--bf16", "profile": "--profile"}
FLAGS_OF |= {stage: f"--stages {stage}" for stage in ("pretrain", "finetune")}
"""The flags behind a part of a result's name."""
STAGES = {1: "pretrain", 2: "finetune"}
ON_GPU = "bash benchmarks/gpu_check.sh --parts {part}"  # fills gpu_<part>.json


def main() -> int:
    parser = Parser(description=__doc__)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="small runs, about 15 minutes on two cores; the page stays")
    names = f"some of: {' '.join(BENCHMARKS)} (default: all)"
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME", help=names)
    how.add_argument("--report", action="store_true", help="run nothing, write docs/performance.md from the results")
    args = parser.parse_args()
    failed = []
    for name in () if args.report else args.only:
        start = time.perf_counter()
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if args.quick else [])]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    failures = f"; failed: {', '.join(failed)}" if failed else ""
    if args.quick:
        print(f"results in {QUICK_RESULTS.relative_to(ROOT)}; {PAGE.relative_to(ROOT)} is unchanged{failures}")
        return int(bool(failed))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which the estimates import, warns without a GPU
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written{failures}")
    return int(bool(failed))


# --- targets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A line of the table of targets: what is promised, and where the results have the figure."""

    what: str
    bound: float
    at_least: bool
    result: str
    read: Callable[[dict], float | None]
    unit: str = ""

    def line(self, folder: Path = RESULTS) -> str:
        goal = f"{'>=' if self.at_least else '<='} {number(self.bound)}{self.unit}"
        result = load(self.result, folder)
        value = None if result is None else self.read(result)
        if value is None:
            part = self.result.removeprefix("gpu_")
            command = ON_GPU.format(part=part) if part != self.result else command_of(self.result)
            return f"| {self.what} | {goal} | not measured | open: `{command}` |"
        met = value >= self.bound if self.at_least else value <= self.bound
        return f"| {self.what} | {goal} | {number(value)}{self.unit} | {'met' if met else '**missed**'} |"


def load(name: str, folder: Path = RESULTS) -> dict | None:
    """A result file, or None where the benchmark has not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def number(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def value_of(field: str, **conditions: Any) -> Callable[[dict], float | None]:
    """Reads `field` of the first row whose other fields are `wanted`."""

    def read(result: dict) -> float | None:
        rows = (row for row in result["rows"] if all(row.get(key) == value for key, value in conditions.items()))
        return next((row[field] for row in rows if row.get(field) is not None), None)

    return read


def largest(field: str, of: Callable[[dict], bool] = bool) -> Callable[[dict], float | None]:
    return lambda result: max((row[field] for row in result["rows"] if field in row and of(row)), default=None)


def least(field: str, of: Callable[[dict], bool] = bool) -> Callable[[dict], float | None]:
    return lambda result: min((row[field] for row in result["rows"] if field in row and of(row)), default=None)


def largest_of_stages(field: str) -> Callable[[dict], float | None]:
    """Reads the larger `field` of both stages; None if a part ended before its second stage."""

    def read(result: dict) -> float | None:
        values = {row["stage"]: row[field] for row in result["rows"] if field in row}
        return max(values.values()) if values.keys() == {1, 2} else None

    return read


def best_mfu(stage: int) -> Callable[[dict], float | None]:
    """The best MFU of the arms that compute as the recipe does; None if the part was cut off before the fused ones."""
    arms = ("packed", "compiled", "liger", "liger_compiled_tower")
    best = largest("mfu", lambda row: row["stage"] == stage and row["arm"] in arms)

    def read(result: dict) -> float | None:
        cut = result.get("status") == "failed" and arms[-1] not in {row["arm"] for row in result["rows"]}
        return None if cut else best(result)

    return read


GPU_TARGETS = (
    Target("one GPU, 3B shapes, stage 1, MFU", 0.5, True, "gpu_step1_3b", best_mfu(1)),
    Target("one GPU, 3B shapes, stage 2, MFU", 0.5, True, "gpu_step2_3b", best_mfu(2)),
    Target("one GPU, 3B shapes, samples/s over upstream's own code path", 2.0, True, "gpu_vs_upstream",
           least("ratio")),
    *(Target(f"one GPU, stage {stage}, host syncs of a micro-batch", 0.0, False, f"gpu_step{stage}_3b",
             largest("syncs", lambda row: row["arm"] == "packed")) for stage in (1, 2)),
    *(Target(f"one GPU, {size.upper()} shapes, ZeRO-{stage}, memory estimate off by", 0.1, False,
             f"gpu_zero{stage}_{size}", largest_of_stages("estimate_error"))
      for size in ("3b", "7b") for stage in (2, 3)),
)  # fmt: skip


REAL_SIZES = (
    Target("record to tensors, one worker, over LLaVA-NeXT's Qwen path: text", 5.0, True, "data_pipeline",
           value_of("over_upstream_median", kind="text", arm="this_tree")),
    Target("the same with a 1-megapixel JPEG", 1.3, True, "data_pipeline",
           value_of("over_upstream_median", kind="image", arm="this_tree")),
    Target("the norm layer's share of a step", 0.005, False, "norm_layer",
           value_of("share_of_step", norm="gwc_layernorm")),
    Target("peak memory of the loss head at 152k vocabulary over the plain one", 0.15, False, "loss_head",
           value_of("memory_over_all_rows", vocabulary=152_064, variant="chunked")),
    Target("first batch with 779k records, warm cache", 10.0, False, "startup",
           value_of("first_batch_s", records=779_289, cache="warm"), " s"),
    Target("memory of a further worker, any number of records", 150.0, False, "startup",
           largest("further_worker_mib", lambda row: "further_worker_mib" in row), " MiB"),
    Target("index of 779k Parquet rows, files in the page cache", 120.0, False, "data_preflight",
           value_of("index_s", records=779_289, cache="cold"), " s"),
    Target("memory of preparing and preflighting 100k records, all processes", 1000.0, False, "data_preflight",
           largest("peak_mib", lambda row: row["records"] == 100_000), " MiB"),
    Target("the recipes' stage 2, 779K lengths, 8 ranks: tokens over micro-batches x cap", 0.9, True, "scaling",
           least("fill", lambda row: row.get("rule") == "after" and row["ranks"] == 8)),
    Target("the same on 8, 32 and 64 ranks: slowest rank of a micro-batch over the mean", 1.05, False, "scaling",
           largest("slowest_over_mean", lambda row: row.get("rule") == "after")),
)  # fmt: skip


def least_ratio(stage: int, environment: bool) -> Callable[[dict], float | None]:
    """The smallest ratio over a peer in a stage, as the peers come, or in this tree's environment."""
    return least("ratio", lambda row: row["stage"] == stage and row["ratio"] and row["tool"] != "this tree"
                 and ("environment" in row["setting"]) == environment)  # fmt: skip


SMALL_MODELS = (
    *(Target(f"CPU, the demo's shapes, {what}, samples/s over upstream", bound, True,
             f"vs_upstream_demo_{stage}", value_of("ratio", stage=stage)) for stage, what, bound in (
                 ("pretrain", "stage 1", 2.5), ("finetune", "stage 2", 5.0))),
    *(Target(f"CPU, the demo's shapes in {precision}, stage {stage}, samples/s over the best peer{how}", bound, True,
             f"vs_peers_demo{suffix}_{STAGES[stage]}", least_ratio(stage, environment))
      for precision, suffix in (("fp32", ""), ("bf16", "_bf16"))
      for environment, how in ((False, " at its best settings"), (True, " in this tree's environment"))
      for stage, bound in ((1, 1.3), (2, 1.5))),
    *(Target(f"CPU, a model of width 256, stage {stage}, samples/s over the best peer at its best settings", 1.1, True,
             f"vs_peers_tiny_{STAGES[stage]}", least_ratio(stage, False)) for stage in (1, 2)),
    *(Target(f"CPU, the demo's stage 2 in {arm}: share of its products' floor", 0.6, True, name,
             value_of("share_of_floor", arm=arm))
      for name, arm in (("cpu_step", "fp32"), ("cpu_step_bf16", "bf16 masters"))),
)  # fmt: skip


TARGETS = {
    "One GPU": GPU_TARGETS,
    "CPU, at the sizes of real runs": REAL_SIZES,
    "CPU, small models against other tools": SMALL_MODELS,
}


# --- page -------------------------------------------------------------------------------------------------------------


def page() -> str:
    lines = [
        "# Performance",
        "",
        "Written by `python benchmarks/run_all.py`; each section's figures come from the command and machine that it "
        "names. Compare figures of one section only: ratios were measured side by side, absolute figures depend on the "
        "machine.",
    ]
    for heading, targets in TARGETS.items():
        lines += ["", f"## {heading}", "", "| what | target | measured | status |", "|---|---|---|---|"]
        lines += [target.line() for target in targets]
    lines += ["", *estimate()]
    notes = ROOT / "benchmarks/notes.md"
    if notes.is_file():
        lines += ["", notes.read_text(encoding="utf-8").strip()]
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: (not path.name.startswith("gpu_"), path.name)):
        lines += ["", *section(json.loads(path.read_text(encoding="utf-8")))]
    return "\n".join(lines) + "\n"


def estimate() -> list[str]:
    """The section with the estimated pieces of a micro-batch."""
    from benchmarks import scale

    shares = ", ".join(f"{piece} {share:g}" for piece, share in scale.EFFICIENCY.items())
    return [
        "## Estimated pieces of a micro-batch",
        "",
        "By `python -m benchmarks.scale --print pieces`, for an H100; nothing here was measured. Products reach a "
        f"share of {scale.PEAK:g} TFLOP/s ({shares}). Elementwise kernels move {scale.PASSES} times what the "
        f"decoder's layers keep, at {scale.HBM / 1e12:g} TB/s. Communication is that of a step of one micro-batch on "
        f"8 GPUs, at {scale.NVLINK / 1e9:g} GB/s; the sum is without it, because it overlaps with arithmetic where it "
        "can.",
        "",
        'A run\'s own seconds of a full micro-batch, such as `{"LLM products": 0.26, "tower": 0.08}`, are shown beside '
        "the estimate, with the largest gap:",
        "",
        "```bash",
        "python -m benchmarks.scale --print pieces --preset llama-3.2-3b --stage 2 --measured pieces.json",
        "```",
        "",
        "\n\n".join(scale.piece_tables()),
    ]


def section(result: dict) -> list[str]:
    """The section of a result: a heading, where it comes from, and a table per kind of row."""
    environment = result["environment"]
    machine = environment["machine"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    apart = ("name", "environment", "rows", "upstream", "command", "on", "figures", "status", "reason")
    meta = {k: v for k, v in result.items() if k not in apart}
    upstream = ", ".join(f"{k} {v}" for k, v in result.get("upstream", {}).items())
    origin = (
        f"torch {environment['versions'].get('torch')}, commit {environment['commit']}; "
        f"{', '.join(f'{words(k)} {in_words(v)}' for k, v in meta.items() if v not in (None, ''))}."
        + (f" Upstream: {upstream}." if upstream else "")
    )
    lines = [
        f"## {title_of(result['name'])}",
        "",
        f"`{result.get('command') or command_of(result['name'])}`, {where}, {short_hashes(origin)}"
        + (f" Cut off or failed: {result['reason']}." if result.get("reason") else ""),
    ]
    return lines + tables(result["rows"])


def words(name: str) -> str:
    """A name of the code as words."""
    return name.replace("_", " ")


def in_words(value: Any) -> str:
    """A setting's value without the code's spelling."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = re.sub(r"\blib(\w+)\.so(\.\d+)?", lambda library: words(library[1]), str(value))  # preloaded libraries
    return text.removeprefix("torch.")


def short_hashes(text: str) -> str:
    """`text` with nine digits of each commit; the results have all."""
    return re.sub(r"\b([0-9a-f]{9})[0-9a-f]{31}\b", r"\1", text)


def tables(rows: list[dict]) -> list[str]:
    """A table per kind of row."""
    kinds: dict[tuple, list[dict]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    lines = []
    for columns, alike in kinds.items():
        lines += ["", f"| {' | '.join(map(heading, columns))} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cell(column, row[column]) for column in columns)} |" for row in alike]
    return lines


def cell(column: str, value: Any) -> str:
    """A cell's text; what a row compares is called by words."""
    text = number(value).replace("|", "/")
    return words(text) if column in ("arm", "kind", "variant") else text


def heading(column: str) -> str:
    """The words of a column's name, with its unit after a comma."""
    parts, units = column.split("_"), {"s": "s", "ms": "ms", "mib": "MiB", "mb": "MB"}
    if parts[-1] in units and parts[-2:-1] != ["per"]:
        return f"{' '.join(parts[:-1])}, {units[parts[-1]]}"
    return words(column)


def title_of(name: str) -> str:
    """What a result is about: a part of the GPU check, or a benchmark and what its command added to the name."""
    if name.startswith("gpu_"):
        from benchmarks.gpu_parts import PARTS  # takes seconds, and DeepSpeed prints

        return f"GPU: {PARTS[name.removeprefix('gpu_')].what}"
    module = module_of(name)
    return BENCHMARKS.get(module, module) + name.removeprefix(module).replace("_", ", ")


def command_of(name: str) -> str:
    """The command that makes a result."""
    module = module_of(name)
    words = name.removeprefix(module).split("_")
    return " ".join([f"python -m benchmarks.{module}", *(flag for word, flag in FLAGS_OF.items() if word in words)])


def module_of(name: str) -> str:
    return max((module for module in BENCHMARKS if name.startswith(module)), key=len, default=name)


if __name__ == "__main__":
    sys.exit(main())
