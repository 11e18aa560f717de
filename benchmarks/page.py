"""The tables of docs/performance.md: `python -m benchmarks.page` writes them from the files of benchmarks/results."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT
from llava.utils.commands import Parser

PAGE = ROOT / "docs/performance.md"


@dataclass(frozen=True)
class Row:
    """What is promised, the figure of a result file, and the command that measures it.

    Attributes:
        goal: the bound of the figure, such as `>= 0.5`.
        result: name of the file in the folder of results.
        of: fields of the rows that count, with their values or a function that tells.
        least: how many such rows there must be; a part that was cut off may lack the worst.
        unit: what follows a figure.
    """

    what: str
    goal: str
    result: str
    field: str
    command: str
    of: dict[str, Any] = field(default_factory=dict)
    unit: str = ""
    least: int = 1

    def value(self, folder: Path) -> float | None:
        """The worst figure of the rows, or None if too few were measured."""
        path = folder / f"{self.result}.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": []}
        rows = [row for row in result["rows"] if all(fits(row.get(name), value) for name, value in self.of.items())]
        values = [row[self.field] for row in rows if row.get(self.field) is not None]
        if len(values) < self.least:
            return None
        return min(values) if self.goal.startswith(">=") else max(values)

    def line(self, folder: Path = RESULTS) -> str:
        """The row as Markdown."""
        value, (relation, bound) = self.value(folder), self.goal.split()
        measured, status = "not measured", "open"
        if value is not None:
            met = value >= float(bound) if relation == ">=" else value <= float(bound)
            measured, status = f"{number(value)}{self.unit}", "met" if met else "**missed**"
        return f"| {self.what} | {self.goal}{self.unit} | {measured} | {status} | `{self.command}` |"


def fits(value: Any, wanted: Any) -> bool:
    """Whether a field has the wanted value, or one that the function `wanted` accepts."""
    return wanted(value) if callable(wanted) else value == wanted


def number(value: Any) -> str:
    """A figure with three digits."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def targets(rows: tuple[Row, ...], folder: Path = RESULTS) -> str:
    """The table of targets."""
    return "\n".join(["| what | target | measured | status | command |", "|---|---|---|---|---|",
                      *(row.line(folder) for row in rows)])  # fmt: skip


def with_tables(page: str) -> str:
    """The page with the first table below each heading of `TABLES` rewritten."""
    for heading, rows in TABLES.items():
        pattern = re.compile(rf"(^## {re.escape(heading)}\n(?:(?!\||## ).*\n)*)(?:\|.*\n)+", re.MULTILINE)
        page, count = pattern.subn(lambda match, rows=rows: f"{match[1]}{targets(rows)}\n", page)
        if count != 1:
            raise ValueError(f"{PAGE}: expected one heading '## {heading}' with a table below, found {count}")
    return page


GPU = "bash benchmarks/gpu_check.sh --parts {}"
GPU_ROWS = (
    *(
        Row(f"3B shapes, stage {stage}, MFU", ">= 0.5", "gpu_step_3b", "mfu", GPU.format("step_3b"),
            {"stage": stage, "arm": "liger_compiled_tower"})
        for stage in (1, 2)
    ),
    *(
        Row(f"stage {stage}, waits of the host in a micro-batch", "<= 0", "gpu_step_3b", "syncs", GPU.format("step_3b"),
            {"stage": stage, "arm": "packed"})
        for stage in (1, 2)
    ),
    *(
        Row(f"3B shapes, stage {stage}, FlashAttention 4 on an H200, MFU", goal, "gpu_flash4_3b", "mfu",
            GPU.format("flash4_3b"), {"stage": stage, "arm": "flash4"})
        for stage, goal in ((1, ">= 0.58"), (2, ">= 0.56"))
    ),
    Row("3B shapes, stage 2 without DeepSpeed, MFU", ">= 0.5", "gpu_alone_3b", "mfu", GPU.format("alone_3b")),
    Row("3B shapes, stage 2, ZeRO-3 with 16,384 tokens, MFU", ">= 0.48", "gpu_zero3_3b_16k", "mfu",
        GPU.format("zero3_3b_16k")),
    Row("3B shapes, samples/s over LLaVA's code", ">= 2", "gpu_vs_upstream", "ratio", GPU.format("vs_upstream"),
        least=2),
    *(
        Row(f"{size.upper()} shapes, ZeRO-{stage}, memory estimate off by", "<= 0.1", f"gpu_zero{stage}_{size}",
            "estimate_error", GPU.format(f"zero{stage}_{size}"), least=2)
        for size in ("3b", "7b") for stage in (2, 3)
    ),
)  # fmt: skip


def module(words: str) -> str:
    return f"python -m benchmarks.{words}"


REAL_SIZES = (
    Row("the norm layer's share of a step", "<= 0.005", "norm_layer", "share_of_step", module("norm_layer"),
        {"norm": "gwc_layernorm"}),
    Row("first batch with 779k records, warm cache", "<= 10", "startup", "first_batch_s",
        module("startup"), {"records": 779_289, "cache": "warm", "workers": 2}, " s"),
    Row("memory of a further worker", "<= 150", "startup", "further_worker_mib", module("startup"), unit=" MiB"),
    Row("index of 779k Parquet rows, files in the page cache", "<= 120", "data_preflight", "index_s",
        module("data_preflight"), {"records": 779_289}, " s"),
    Row("memory of preparing and preflighting 100k records, all processes", "<= 1000", "data_preflight", "peak_mib",
        module("data_preflight"), {"records": 100_000}, " MiB"),
    Row("the recipes' stage 2, 8 ranks: tokens over micro-batches x cap", ">= 0.9", "scaling", "fill",
        module("scaling"), {"ranks": 8, "recipe": bool}),
    Row("the same on 8, 32 and 64 ranks: slowest rank of a micro-batch over the mean", "<= 1.05", "scaling",
        "slowest_over_mean", module("scaling"), {"recipe": bool}),
)  # fmt: skip


def over_peers(what: str, goals: tuple[str, str], name: str, flags: str, environment: bool = False) -> tuple[Row, ...]:
    """A row for each stage: the smallest ratio over a peer, as they come or in this tree's environment."""
    of = {"tool": lambda tool: tool != "this tree", "setting": lambda text: ("environment" in text) == environment}
    return tuple(
        Row(f"{what}, stage {stage}, over the {'best' if not environment else 'fastest'} tool"
            + environment * " in this tree's environment", goal, f"vs_peers_{name}_{script}", "ratio",
            module(f"vs_peers{flags} --stages {script}"), of)
        for stage, script, goal in zip((1, 2), ("pretrain", "finetune"), goals, strict=True)
    )  # fmt: skip


SMALL_MODELS = (
    *(
        Row(f"fp32, stage {stage}, over LLaVA", goal, f"vs_upstream_demo_{script}", "ratio",
            module(f"vs_upstream --stages {script}"))
        for stage, script, goal in ((1, "pretrain", ">= 2.5"), (2, "finetune", ">= 5"))
    ),
    *over_peers("fp32", (">= 1.3", ">= 1.5"), "demo", ""),
    *over_peers("fp32", (">= 1.3", ">= 1.5"), "demo", "", environment=True),
    *over_peers("bf16", (">= 1.3", ">= 1.5"), "demo_bf16", " --bf16"),
    *over_peers("bf16", (">= 1.3", ">= 1.5"), "demo_bf16", " --bf16", environment=True),
    *over_peers("width 256", (">= 1.1", ">= 1.1"), "tiny", " --size tiny"),
)  # fmt: skip
TABLES = {
    "One GPU": GPU_ROWS,
    "CPU, sizes of real runs": REAL_SIZES,
    "CPU, samples per second over others": SMALL_MODELS,
}


def main() -> None:
    Parser(description=__doc__).parse_args()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
