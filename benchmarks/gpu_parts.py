"""The parts of benchmarks/gpu_check.py: what each shows, and how. Each runs in its own process."""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Failed
from llava.utils.files import write_json
from llava.utils.paths import ROOT

MEASURED, FAILED, NOT_RUN = "measured", "failed", "not run"
SCRIPTS = {1: "pretrain", 2: "finetune"}


class NotRun(Exception):
    """A part cannot run on this machine; the message says what is missing."""


@dataclass
class PartRun:
    """A part's name, its files and folders, and what it measures."""

    name: str
    output_dir: Path
    cpu: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

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

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, and writes it where `measured_rows` finds it if the part is killed."""
        self.rows.append(row)
        write_json(self.work / "rows.json", {"rows": self.rows})

    def measured_rows(self) -> list[dict[str, Any]]:
        """The rows that the part's process, or benchmarks/train_step.py for it, has written so far."""
        files = [file for name in ("rows.json", "train_step.json") if (file := self.work / name).is_file()]
        return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]

    def write(self, status: str, reason: str, seconds: float) -> None:
        """Writes the result, from which the table is made."""
        if not self.cpu:
            import torch  # noqa: F401  (a result names the GPU only where it is loaded)
        meta = {"command": self.command, "on": "cpu" if self.cpu else "gpu", "status": status}
        meta |= {"reason": " ".join(reason.split()), "seconds": round(seconds, 1)}
        common.write_result(self.result.stem, self.rows, folder=self.output_dir, **meta)

    def execute(self) -> None:
        """Runs the part and writes what it measured, or why it measured nothing."""
        start, status, reason = time.monotonic(), MEASURED, ""
        shutil.rmtree(self.work, ignore_errors=True)  # of a call that was killed
        self.work.mkdir(parents=True)
        try:
            PARTS[self.name].run(self)
        except NotRun as missing:
            status, reason = NOT_RUN, str(missing)
        except Failed as wrong:
            status, reason = FAILED, str(wrong)
        except Exception as error:
            traceback.print_exc()
            status, reason = FAILED, f"{type(error).__name__}: {str(error).partition(chr(10))[0]} (log: {self.log})"
        self.write(status, reason, time.monotonic() - start)


def need(*packages: str) -> None:
    """Raises NotRun if one of the packages is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise NotRun(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")


def run_logged(part: PartRun, name: str, command: list[Any], variables: dict[str, Any] | None = None) -> str:
    """What a command printed, which also stands in its own log; raises Failed with the command's name."""
    path = part.log.with_name(f"{part.name}-{name}.log")
    print(f"{' '.join(map(str, command))} (log: {path})", flush=True)
    try:
        return common.run_logged(command, path, variables or {})
    except Failed as failed:
        raise Failed(f"{name} {failed} (log: {path})") from None


# --- tests and speed --------------------------------------------------------------------------------------------------


def tests(part: PartRun) -> None:
    """`pytest -m gpu`."""
    need("pytest")
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rsf", "-p", "no:cacheprovider", *files]
    part.add({"result": run_logged(part, "pytest", command).splitlines()[-1]})


def step(part: PartRun, arms: list[str]) -> None:
    """Arms of benchmarks/train_step.py at the recipe's micro-batches; rows remain if one of them fails."""
    from llava.train.kernels import has_liger

    if part.cpu:
        options = ["--steps", 2, "--repeats", 1, "--micro-batches", 2, "--micro-batch-tokens", 512]
        options += ["--arms", "packed", "padded"]
    else:
        runnable = [arm for arm in arms if has_liger() or not arm.startswith("liger")]
        options = ["--steps", 4, "--repeats", 2, "--micro-batches", 2, "--arms", *runnable]
    try:
        command = [sys.executable, "-m", "benchmarks.train_step", "--output-dir", part.work, *options]
        run_logged(part, "train_step", command)
    finally:
        part.rows += part.measured_rows()


def vs_upstream(part: PartRun) -> None:
    """Samples per second over those of LLaVA 1.2.2, in bf16; raises NotRun if its environment is missing."""
    upstream = Path(os.environ.get("UPSTREAM_VENV", ROOT / ".venv-upstream"))
    if not (upstream / "baseline.stamp").is_file():
        raise NotRun(
            f"upstream's environment {upstream.name} is missing; PREPARE_ONLY=1 bash scripts/upstream_baseline.sh "
            "makes it where there is a network"
        )
    need("sentencepiece")
    options = ["--size", "tiny", "--stages", "finetune"] if part.cpu else ["--size", "3b", "--bf16"]
    command = [sys.executable, "-m", "benchmarks.vs_upstream", "--output-dir", part.work, "--repeats", 1, *options]
    run_logged(part, "vs_upstream", command)
    for result in sorted(part.work.glob("vs_upstream_*.json"), reverse=True):  # stage 1 first
        part.rows += json.loads(result.read_text())["rows"]


# --- trainings --------------------------------------------------------------------------------------------------------


def train(part: PartRun, stage: int, variables: dict[str, Any], way: str = "") -> tuple[list[dict[str, Any]], str]:
    """Runs the stage's script; returns the log lines of its steps, and what it printed.

    Args:
        way: a name for the run's folder and log, where a part runs a stage more than once.
    """
    folder, script = part.work / way / f"stage{stage}", SCRIPTS[stage]
    defaults = {"NUM_GPUS": 0 if part.cpu else 1, "OUTPUT_DIR": folder, "REPORT_TO": "none", "SAVE_STRATEGY": "no"}
    if part.cpu:
        defaults |= {"BF16": "False", "NUM_WORKERS": 0}
    first = folder.with_name("stage1") / "mm_projector.bin"
    defaults |= {"PRETRAIN_ADAPTER": first if first.is_file() else ""}
    if "DATA_PATH" not in variables:
        defaults |= {"DATA_PATH": variables["IMAGE_FOLDER"].with_name(f"{script}.json")}
    command = ["bash", f"scripts/{script}.sh", "--disable_tqdm", "True"]
    environment = {"LLAVA_PYTHON": sys.executable} | defaults | variables
    log = run_logged(part, f"{way}-{script}".lstrip("-"), command, environment)
    if not way:  # a disk may not hold a 7B model's weights twice
        for weights in folder.glob("*.safetensors"):
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


WAYS = {
    "as it is": {},
    "norm before the MLP": {"PROJECTOR": "pre_layernorm_mlp2x_gelu", "NORM": "none"},
    "LoRA": {"LORA": 1},
    "ZeRO-3": {"DEEPSPEED_CONFIG": "deepspeed_configs/zero3.json"},
}
"""Variables of the scripts."""


def demo(part: PartRun) -> None:
    """`WAYS` to train the demo, side by side, on inputs that the playground makes; a row per way.

    Raises:
        Failed: one of them failed; the others have run to their end.
    """
    inputs, wrong, one_at_a_time = demo_inputs(part), [], threading.Lock()

    def run(way: str) -> None:
        try:
            row = {"way": way} | training_row(one_way(part, way, inputs | WAYS[way]))
        except Failed as reason:
            wrong.append(f"{way}: {reason}")
            return
        with one_at_a_time:
            part.add(row)

    ways = [way for way in WAYS if find_spec("deepspeed") or way != "ZeRO-3"]
    ways = ways[-2:] if part.cpu else ways  # each takes minutes there
    with ThreadPoolExecutor(len(ways)) as pool:
        list(pool.map(run, ways))
    if wrong:
        raise Failed("; ".join(wrong))


def one_way(part: PartRun, way: str, variables: dict[str, Any]) -> list[dict[str, Any]]:
    """Both stages, answers of the model, and stage 2's second half once more from its checkpoint; the steps' lines.

    Raises:
        Failed: a command failed, or the second half's losses are not those of the first time.
    """
    name, again = way.replace(" ", "-"), f"{way.replace(' ', '-')}-resumed"
    train(part, 1, variables, name)
    variables = variables | {"SAVE_STRATEGY": "steps", "SAVE_STEPS": 2, "SAVE_TOTAL_LIMIT": 2}
    variables |= {"PRETRAIN_ADAPTER": part.work / name / "stage1/mm_projector.bin"}
    lines, _ = train(part, 2, variables, name)
    (part.work / again / "stage2").mkdir(parents=True)
    shutil.move(part.work / name / "stage2/checkpoint-2", part.work / again / "stage2")
    later, _ = train(part, 2, variables, again)
    losses, repeated = ([line["loss"] for line in some[-2:]] for some in (lines, later))
    if not all(math.isclose(*pair, rel_tol=1e-2) for pair in zip(losses, repeated, strict=True)):
        raise Failed(f"the losses after checkpoint-2 are {repeated} when resumed, and were {losses} before")
    heldout = part.work / "playground/scenes/heldout.json"
    command = [sys.executable, "-m", "llava.eval.answer", "--model-path", part.work / name / "stage2"]
    command += ["--model-base", variables["MODEL_PATH"]] if "LORA" in variables else []
    command += ["--data", heldout, "--image-folder", heldout.with_name("images"), "--max-new-tokens", 8]
    run_logged(part, f"{name}-answers", [*command, "--output", part.work / f"{name}.jsonl"])
    return lines


def demo_inputs(part: PartRun) -> dict[str, Any]:
    """Makes pictures, a vision tower and a language model with random weights; the scripts' variables."""
    root = part.work / "playground"
    playground = [sys.executable, "-m", "playground"]
    numbers = ["--num-train", 100, "--num-crowded", 100, "--num-heldout", 8]
    run_logged(part, "scenes", [*playground, "scenes", "--root", root, *numbers])
    run_logged(part, "tower", [*playground, "tower", "--root", root, "--steps", 4])
    write_models(part, "tiny" if part.cpu else "demo")
    variables = {"PRESET": "demo", "MODEL_PATH": part.work / "language_model", "MAX_STEPS": 4}
    return variables | {"VISION_TOWER": root / "siglip-scenes", "IMAGE_FOLDER": root / "scenes/images"}


def write_models(part: PartRun, preset: str, *options: Any) -> None:
    """Writes `language_model` and `tower` into the part's folder, by a process that frees the GPU when it ends."""
    run_logged(part, "models", [sys.executable, "-m", "benchmarks.shapes", preset, part.work, *options])


def zero(part: PartRun, preset: str, config: str) -> None:
    """Both stages in a preset's shapes with a file of deepspeed_configs on one GPU; peak memory beside the estimate.

    Stage 2 has fewer layers where the states of the whole model exceed the GPU's memory.
    """
    need("deepspeed")
    batch, steps = (4, 2) if part.cpu else (32, 4)
    variables = {"PRESET": preset, "VISION_TOWER": part.work / "tower", "MODEL_PATH": part.work / "language_model"}
    variables |= {"DEEPSPEED_CONFIG": f"deepspeed_configs/{config}.json", "IMAGE_FOLDER": part.work}
    variables |= {"GLOBAL_BATCH": batch, "PER_DEVICE_BATCH": 1, "MAX_STEPS": steps}
    variables |= {"DATA_PATH": part.work / "records.json"}
    if part.cpu:
        variables |= {"MAX_TOKENS_PER_MICRO_BATCH": 512, "MODEL_MAX_LENGTH": 256}
    common.write_photo(part.work / "photo.jpg", 384, 384)
    for stage in SCRIPTS:
        layers = None if part.cpu or stage == 1 or "offload" in config else layers_that_fit(preset)
        if stage == 1 or layers:
            write_models(part, "tiny" if part.cpu else preset, *(["--layers", layers] if layers else []))
        if stage == 1:
            records = common.caption_records(batch * steps, "photo.jpg")
        else:
            records = common.conversation_records(batch * steps, "photo.jpg", text_only=1 / 11)
        common.write_records(part.work / "records.json", records)
        lines, log = train(part, stage, variables)
        row = {"stage": stage, "config": config, "layers": layers or "all"} | training_row(lines)
        row["estimate_gib"] = estimated_gib(log)
        if not part.cpu:  # on a CPU the peak is that of the whole process
            row["estimate_error"] = abs(row["estimate_gib"] / row["peak_memory_gib"] - 1)
        part.add(row)


def layers_that_fit(preset: str) -> int | None:
    """Decoder layers whose states, 18 bytes per trained weight, leave memory for activations; None: all of them."""
    # Not by PyTorch, which would hold memory on the GPU while the training runs.
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    large_card = int(subprocess.check_output(command, text=True).split()[0]) > 100 * 1024  # MiB
    return {"llama-3.2-3b": None if large_card else 16, "qwen2.5-7b": 12 if large_card else 4}[preset]


def estimated_gib(log: str) -> float:
    """The total, in GiB, of the last memory estimate that a run printed.

    Raises:
        Failed: the log has none.
    """
    totals = re.findall(r"total with working space ([\d.]+) of ", log)
    if not totals:
        raise Failed("the run printed no line 'total with working space', which holds the memory estimate")
    return float(totals[-1])


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a part shows, and its estimated minutes on one GPU, which decide what --minutes skips."""

    what: str
    minutes: float
    run: Callable[[PartRun], None]


def zero_part(preset: str, config: str, minutes: float) -> Part:
    what = f"{config}.json, shapes of {preset}: both stages, memory"
    return Part(what, minutes, partial(zero, preset=preset, config=config))


RECIPES_ARMS = ["packed", "liger", "liger_compiled_tower"]
OTHER_ARMS = ["packed", "no_norm", "padded"]  # the last may need more than 80 GB
# The most valuable first: what --minutes leaves no time for is at the end.
PARTS = {
    "step_3b": Part("a step in 3B shapes, both stages, as the recipes run it: MFU, tokens/s, memory, host "
                    "syncs", 3, partial(step, arms=RECIPES_ARMS)),
    "tests": Part("tests marked `gpu`: kernels against float64, both model classes against the CPU", 1, tests),
    "demo": Part("the demo: both stages, resume and answers, by LoRA, with another projector, under ZeRO-3", 4, demo),
    "zero3_3b": zero_part("llama-3.2-3b", "zero3", 4),
    "zero2_3b": zero_part("llama-3.2-3b", "zero2", 4),
    "zero3_7b": zero_part("qwen2.5-7b", "zero3", 5),
    "zero2_7b": zero_part("qwen2.5-7b", "zero2", 5),
    "vs_upstream": Part("samples/s over LLaVA's own code in bf16", 6, vs_upstream),
    "arms_3b": Part("a step in 3B shapes: no norm, padding", 6, partial(step, arms=OTHER_ARMS)),
    "offload_3b": zero_part("llama-3.2-3b", "zero3_offload", 5),
}  # fmt: skip
