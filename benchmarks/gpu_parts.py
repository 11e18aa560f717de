"""The parts of benchmarks/gpu_check.py: what each shows, and how. Each runs in its own process."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, package_versions
from benchmarks.gpu_setting import Failed, NotRun, Setting, need, run_logged
from benchmarks.gpu_training import demo, paths, zero

MEASURED, FAILED, NOT_RUN = "measured", "failed", "not run"
# What is turned off if a package is missing.
LACKING = {
    "deepspeed": "parts zero2_*, zero3_* and offload_3b do not run, paths resumes nothing",
    "flash-attn": "attention by PyTorch's own variable-length kernel, or by SDPA with a mask",
    "liger-kernel": "plain norms, MLPs and rotary embedding; the chunked loss head",
    "peft": "no LoRA",
    "pytest": "part tests does not run",
    "matplotlib": "part mfu has a table and no figure",
    "gguf": "part demo takes a language model with random weights",
    "ninja": "DeepSpeed cannot build ops (offload)",
}
# The modules of packages that may be installed and yet not fit the installed PyTorch.
COMPILED = {"deepspeed": "deepspeed", "flash-attn": "flash_attn", "liger-kernel": "liger_kernel"}


def run(setting: Setting) -> None:
    """Runs the part and writes what it found, or why it found nothing."""
    start, status, reason = time.monotonic(), MEASURED, ""
    shutil.rmtree(setting.work, ignore_errors=True)  # of a call that was killed
    setting.work.mkdir(parents=True)
    try:
        PARTS[setting.name].run(setting)
    except NotRun as missing:
        status, reason = NOT_RUN, str(missing)
    except Failed as wrong:
        status, reason = FAILED, str(wrong)
    except Exception as error:
        traceback.print_exc()
        status, reason = FAILED, f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (log: {setting.log})"
    setting.write(status, reason, time.monotonic() - start)


# --- environment and tests --------------------------------------------------------------------------------------------


def environment(setting: Setting) -> None:
    """GPU, driver and versions; what is missing and what that turns off."""
    import torch
    import transformers

    from llava.model.attention import packed_attention

    def add(what: str, state: Any, without: str = "") -> None:
        setting.rows.append({"what": what, "found": str(state), "without it": without})

    gpu = not setting.cpu
    if gpu:
        properties = torch.cuda.get_device_properties(0)
        smi = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.split()
        add(
            "GPU",
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}",
        )
        add("driver", smi[0] if smi else "unknown")
    add("CUDA of PyTorch", torch.version.cuda)
    for name, version in {"python": platform.python_version(), "torch": torch.__version__}.items():
        add(name, version)
    add("transformers", transformers.__version__)
    versions = package_versions([*LACKING, "accelerate", "triton"])
    for name in ("accelerate", "triton"):
        add(name, versions.get(name, "missing"))
    for name, off in LACKING.items():
        version, broken = versions.get(name, "missing"), ""
        if name in versions and name in COMPILED and (broken := import_error(COMPILED[name])):
            version += f", but cannot be imported: {broken}"
        add(name, version, off if broken or name not in versions else "")
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    add("attention over packed samples", packed_attention(None, device, dtype))


def import_error(module: str) -> str:
    """The last line that importing `module` prints in its own process; empty if the import works."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def tests(setting: Setting) -> None:
    """`pytest -m gpu`, a row per test."""
    need("pytest")
    report = setting.work / "report.xml"
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    try:
        run_logged(setting, "pytest", [*command, *map(str, files)])
    except Failed:
        if not report.is_file():
            raise
    setting.rows += test_rows(report)
    if wrong := [row["test"] for row in setting.rows if row["failed"]]:
        raise Failed(f"{', '.join(wrong)} (log: {setting.log.with_name('tests-pytest.log')})")


def test_rows(report: Path) -> list[dict[str, Any]]:
    """Passed, failed and skipped cases of every test in a JUnit report, and why cases were skipped."""
    counts: dict[str, Counter] = {}
    reasons: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name").partition("[")[0] or case.get("classname")
        states = {child.tag for child in case} & {"failure", "error", "skipped"}
        counts.setdefault(name, Counter())[
            "skipped" if states == {"skipped"} else "failed" if states else "passed"
        ] += 1
        if states == {"skipped"}:
            reasons[name] = case.find("skipped").get("message", "")
    return [
        {
            "test": name,
            **{state: tally[state] for state in ("passed", "failed", "skipped")},
            "why": reasons.get(name, ""),
        }
        for name, tally in counts.items()
    ]


# --- speed ------------------------------------------------------------------------------------------------------------


def step(setting: Setting, stage: int) -> None:
    """The arms of benchmarks/train_step.py at the recipe's micro-batches."""
    options = ["--steps", 4, "--repeats", 2, "--micro-batches", 2]
    tiny = ["--quick", "--micro-batch-tokens", 512, "--arms", "packed", "padded", "packed_sdpa", "no_norm"]
    step_rows(setting, ["--stages", stage, *(tiny if setting.cpu else options)])


def mfu(setting: Setting) -> None:
    """MFU over the size of the micro-batch, and its figure."""
    from llava.train.kernels import has_liger

    # Besides PyTorch's own kernels, what a recipe chooses where Liger is installed and no ZeRO-3 splits the tower.
    arms = ["--arms", "packed", *["liger_compiled_tower"] * (has_liger() and not setting.cpu)]
    sizes = [1024, 2048, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768]
    options = ["--micro-batch-tokens", *sizes, "--steps", 4, "--repeats", 1, "--micro-batches", 2]
    tiny = ["--quick", "--micro-batch-tokens", 256, 512]
    step_rows(setting, [*(tiny if setting.cpu else options), *arms])
    if find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed", flush=True)
        return
    draw(setting.rows, setting.output_dir / "gpu_mfu.png")
    setting.figures.append("gpu_mfu.png")


def step_rows(setting: Setting, options: list[Any]) -> None:
    """Adds the rows of a run of benchmarks/train_step.py, even if an arm failed."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--output-dir", setting.work, *options]
    try:
        run_logged(setting, "train_step", command)
    finally:
        setting.rows += setting.measured_rows()


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws MFU (TFLOP/s if the device's peak is unknown) over tokens per micro-batch, a line per stage and arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "failed" not in row]
    quantity = "mfu" if rows and all("mfu" in row for row in rows) else "tflops"
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for stage, arm in sorted({(row["stage"], row["arm"]) for row in rows}):
        points = sorted((r["micro_batch_tokens"], r[quantity]) for r in rows if (r["stage"], r["arm"]) == (stage, arm))
        axes.plot(*zip(*points, strict=True), marker="o", label=f"stage {stage}, {arm}")
    axes.set(xlabel="tokens of a micro-batch", ylabel="MFU" if quantity == "mfu" else "TFLOP/s", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def vs_upstream(setting: Setting) -> None:
    """Samples per second over those of LLaVA 1.2.2, in bf16; raises NotRun if its environment is missing."""
    upstream = Path(os.environ.get("UPSTREAM_VENV", ROOT / ".venv-upstream"))
    if not (upstream / "baseline.stamp").is_file():
        raise NotRun(
            f"upstream's environment {upstream.name} is missing; PREPARE_ONLY=1 bash scripts/upstream_baseline.sh "
            "makes it where there is a network"
        )
    need("sentencepiece")
    shapes = "--hidden 3072 --intermediate 8192 --layers 28 --heads 24 --kv-heads 24 --vocabulary 32000 "
    shapes += "--vision-hidden 1024 --vision-layers 24 --image-size 336 --bf16 --batch 8 --steps 12 --repeats 1"
    options = ["--steps", "6", "--repeats", "1", "--stages", "finetune"] if setting.cpu else shapes.split()
    command = [sys.executable, "-m", "benchmarks.vs_upstream", "--size", "tiny", "--work", setting.work / "runs"]
    run_logged(setting, "vs_upstream", [*command, "--output-dir", setting.work, *options])
    for result in sorted(setting.work.glob("vs_upstream_tiny_*.json"), reverse=True):  # stage 1 first
        setting.rows += json.loads(result.read_text())["rows"]


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a part shows, and its estimated minutes on one GPU, which decide what --minutes skips."""

    what: str
    minutes: float
    run: Callable[[Setting], None]


def zero_part(preset: str, config: str, minutes: float) -> Part:
    return Part(
        f"{config}.json, shapes of {preset}: both stages, memory", minutes, partial(zero, preset=preset, config=config)
    )


def step_part(stage: int, minutes: float) -> Part:
    what = f"stage {stage}, arms of a step in 3B shapes: MFU, tokens/s, memory, host syncs"
    return Part(what, minutes, partial(step, stage=stage))


# The most valuable first: what --minutes leaves no time for is at the end.
PARTS = {
    "environment": Part("GPU, driver and versions; what is missing and what that turns off", 1, environment),
    "demo": Part("the demo preset, both stages", 3, demo),
    "tests": Part("tests marked `gpu`: kernels against float64, both model classes against the CPU", 1, tests),
    "paths": Part("LoRA, resume, further projectors, answers and analysis, each on the demo", 3, paths),
    "step1_3b": step_part(1, 3),
    "step2_3b": step_part(2, 3),
    "zero3_3b": zero_part("llama-3.2-3b", "zero3", 4),
    "zero2_3b": zero_part("llama-3.2-3b", "zero2", 4),
    "zero3_7b": zero_part("qwen2.5-7b", "zero3", 5),
    "zero2_7b": zero_part("qwen2.5-7b", "zero2", 5),
    "vs_upstream": Part("tokens/s over upstream's own code path in bf16", 6, vs_upstream),
    "mfu": Part("MFU over the size of the micro-batch, with a figure", 6, mfu),
    "offload_3b": zero_part("llama-3.2-3b", "zero3_offload", 5),
}
