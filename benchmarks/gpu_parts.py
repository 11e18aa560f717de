"""The parts of benchmarks/gpu_check.py: what each shows, and how. Each runs in its own process."""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
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
        """The rows that the part's process, or a benchmark that it calls, has written so far."""
        names = ("rows.json", "train_step.json", "vs_upstream_*pretrain.json", "vs_upstream_*finetune.json")
        files = [file for name in names for file in self.work.glob(name)]
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
        self.rows = self.measured_rows()
        self.write(status, reason, time.monotonic() - start)


def need(*packages: str) -> None:
    """Raises NotRun if one of the packages is not installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise NotRun(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")


def run_logged(part: PartRun, name: str, command: list[Any], **options: Any) -> str:
    """`common.run_logged` with a log of its own; raises Failed with the command's name."""
    path = part.log.with_name(f"{part.name}-{name}.log")
    print(f"{' '.join(map(str, command))} (log: {path})", flush=True)
    try:
        return common.run_logged(command, path, **options)
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
    from llava.model.attention import runnable_flash

    if part.cpu:
        options = ["--steps", 2, "--repeats", 1, "--micro-batches", 2, "--micro-batch-tokens", 512]
        options += ["--arms", "packed", "padded"]
    else:
        if "flash4" in arms and "flash_attention_4" not in runnable_flash():
            raise NotRun("flash-attn-4 is not installed, or has no kernels for this GPU")
        need("liger_kernel")
        options = ["--steps", 4, "--repeats", 2, "--micro-batches", 2, "--arms", *arms]
    run_logged(part, "train_step", [sys.executable, "-m", "benchmarks.train_step", "--output-dir", part.work, *options])


def vs_upstream(part: PartRun) -> None:
    """Samples per second over those of LLaVA 1.2.2, in bf16; raises NotRun if its packages are missing."""
    if not Path(os.environ.get("UPSTREAM_PACKAGES", ""), "transformers").is_dir():
        raise NotRun("LLaVA's packages are missing; gpu_check.sh wheels collects them where there is a network")
    need("sentencepiece")
    options = ["--size", "check", "--stages", "pretrain"] if part.cpu else ["--size", "3b", "--bf16"]
    command = [sys.executable, "-m", "benchmarks.vs_upstream", "--output-dir", part.work, "--repeats", 1, *options]
    run_logged(part, "vs_upstream", command)


# --- trainings --------------------------------------------------------------------------------------------------------


def train(
    part: PartRun, stage: int, variables: dict[str, Any], *flags: str, name: str = "", saves: bool = True
) -> tuple[list[dict[str, Any]], str]:
    """Runs the stage's script; returns the log lines of its steps, and what it printed.

    Args:
        flags: of the script, beside its variables.
        name: of the run's folder and log; by default the stage's.
        saves: write the final folder; else the run is ended when its last step is logged.
    """
    name, script = name or f"stage{stage}", SCRIPTS[stage]
    folder = part.work / name
    defaults = {"NUM_GPUS": 0 if part.cpu else 1, "OUTPUT_DIR": folder, "REPORT_TO": "none", "SAVE_STRATEGY": "no"}
    if part.cpu:
        defaults |= {"BF16": "False", "NUM_WORKERS": 0}
    first = part.work / "stage1/mm_projector.bin"
    defaults |= {"PRETRAIN_ADAPTER": first if first.is_file() else ""}
    if "DATA_PATH" not in variables:
        defaults |= {"DATA_PATH": variables["IMAGE_FOLDER"].with_name(f"{script}.json")}

    def losses() -> list[dict[str, Any]]:
        log = folder / "train_log.jsonl"
        lines = log.read_text().rpartition("\n")[0].splitlines() if log.is_file() else []
        return [line for line in map(json.loads, lines) if "loss" in line]

    def all_logged() -> bool:
        return not saves and len(losses()) >= variables["MAX_STEPS"]

    command = ["bash", f"scripts/{script}.sh", "--disable_tqdm", "True", *flags]
    environment = {"LLAVA_PYTHON": sys.executable} | defaults | variables
    log = run_logged(part, name, command, variables=environment, enough=all_logged)
    return losses(), log


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


def demo(part: PartRun, packages: tuple[str, ...] = (), flags: tuple[str, ...] = (), **variables: Any) -> None:
    """Both stages of the demo, stage 2's second half once more from its checkpoint, and answers of the model.

    Args:
        flags, variables: of the scripts; the flags are stage 2's.

    Raises:
        Failed: a command failed, or the second half's losses are not those of the first time.
    """
    need(*packages)
    variables = demo_inputs(part) | variables
    train(part, 1, variables)
    saving = variables | {"SAVE_STRATEGY": "steps", "SAVE_STEPS": 2, "SAVE_TOTAL_LIMIT": 2}
    lines, _ = train(part, 2, saving, *flags)
    part.add(training_row(lines))
    (part.work / "resumed").mkdir()
    shutil.move(part.work / "stage2/checkpoint-2", part.work / "resumed")
    later, _ = train(part, 2, saving, *flags, name="resumed")
    losses, repeated = ([line["loss"] for line in some[-2:]] for some in (lines, later))
    if not all(math.isclose(*pair, rel_tol=1e-2) for pair in zip(losses, repeated, strict=True)):
        raise Failed(f"the losses after checkpoint-2 are {repeated} when resumed, and were {losses} before")
    images = variables["IMAGE_FOLDER"]
    command = [sys.executable, "-m", "llava.eval.answer", "--model-path", part.work / "stage2"]
    command += ["--model-base", variables["MODEL_PATH"]] if "LORA" in variables else []
    command += ["--data", images.with_name("heldout.json"), "--image-folder", images, "--max-new-tokens", 8]
    run_logged(part, "answers", [*command, "--output", part.work / "answers.jsonl"])


def demo_inputs(part: PartRun) -> dict[str, Any]:
    """Variables of pictures and a vision tower that the playground makes, and of a model with random weights."""

    def make(root: Path) -> None:
        playground = [sys.executable, "-m", "playground"]
        numbers = ["--num-train", 100, "--num-crowded", 100, "--num-heldout", 8]
        run_logged(part, "scenes", [*playground, "scenes", "--root", root, *numbers])
        run_logged(part, "tower", [*playground, "tower", "--root", root, "--steps", 4])

    root = kept(part, "playground", make)
    variables = models(part, "demo") | {"PRESET": "demo", "MAX_STEPS": 4}
    return variables | {"VISION_TOWER": root / "siglip-scenes", "IMAGE_FOLDER": root / "scenes/images"}


def models(part: PartRun, preset: str, layers: int | None = None) -> dict[str, Any]:
    """Variables of a language model and a tower with random weights, made by a process that frees the GPU again."""
    preset = "tiny" if part.cpu else preset
    command = [sys.executable, "-m", "benchmarks.shapes", preset]
    command += ["--layers", layers] if layers else []
    name = f"{preset}-{layers}-layers" if layers else preset
    folder = kept(part, name, lambda place: run_logged(part, "models", [*command, place]))
    return {"MODEL_PATH": folder / "language_model", "VISION_TOWER": folder / "tower"}


def kept(part: PartRun, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder of inputs that `make` fills once, for all parts of this and later calls."""
    folder = part.output_dir / "inputs" / name
    if not folder.is_dir():
        partial = folder.with_name(f"{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder


def zero(part: PartRun, preset: str, config: str, stages: tuple[int, ...], **variables: Any) -> None:
    """Stages in a preset's shapes on one GPU; peak memory beside the estimate, a row when a stage's last step is done.

    Stage 2 has fewer layers where its states exceed the GPU's memory, no projector of stage 1, and its end profiled.

    Args:
        config: a file of deepspeed_configs; empty for none.
        variables: of the scripts.
    """
    need(*["deepspeed"] * bool(config))
    batch, steps = (4, 2) if part.cpu else (32, 10)  # the first ones compile and take memory
    records = part.work / "records.json"
    variables |= {"PRESET": preset, "DEEPSPEED_CONFIG": f"deepspeed_configs/{config}.json" if config else ""}
    variables |= {"GLOBAL_BATCH": batch, "PER_DEVICE_BATCH": 1, "MAX_STEPS": steps, "PRETRAIN_ADAPTER": ""}
    variables |= {"IMAGE_FOLDER": part.work, "DATA_PATH": records}
    if part.cpu:
        variables |= {"MAX_TOKENS_PER_MICRO_BATCH": 512, "MODEL_MAX_LENGTH": 256}
    common.write_photo(part.work / "photo.jpg", 384, 384)
    for stage in stages:
        layers = None if part.cpu or stage == 1 or "offload" in config else layers_that_fit(preset)
        if stage == 1:
            common.write_records(records, common.caption_records(batch * steps, "photo.jpg"))
        else:
            common.write_records(records, common.conversation_records(batch * steps, "photo.jpg", text_only=1 / 11))
        profiling = ("--profile_steps", f"{steps}:{steps}") if stage == 2 else ()
        lines, log = train(part, stage, variables | models(part, preset, layers), *profiling, saves=False)
        for table in (part.work / f"stage{stage}/profile").glob("*.kernels.txt"):
            shutil.copy(table, part.log.with_name(f"{part.name}-kernels.txt"))
        row = {"stage": stage, "config": config or "none", "layers": layers or "all"} | training_row(lines)
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
    """What a part shows, and its estimated seconds on one GPU, which decide what --minutes skips."""

    what: str
    seconds: int
    run: Callable[[PartRun], None]


def zero_part(
    size: str, config: str, seconds: int, what: str = "memory", stages: tuple[int, ...] = (1, 2), **variables: Any
) -> Part:
    preset = {"3b": "llama-3.2-3b", "7b": "qwen2.5-7b"}[size]
    title = f"{config or 'no DeepSpeed'}, shapes of {preset}, stage {' and '.join(map(str, stages))}: {what}"
    return Part(title, seconds, partial(zero, preset=preset, config=config, stages=stages, **variables))


def demo_part(what: str, **options: Any) -> Part:
    return Part(f"the demo {what}: both stages, resume and answers", 70, partial(demo, **options))


ZERO = "deepspeed_configs/zero{}.json"
# The order in which one card's half hour is best spent: what --minutes leaves no time for is at the end.
PARTS = {
    "step_3b": Part("a step in 3B shapes, both stages: MFU, tokens/s, memory, host syncs", 135,
                    partial(step, arms=["packed", "padded", "liger", "liger_compiled_tower"])),
    "zero2_3b": zero_part("3b", "zero2", 190),
    "zero3_3b": zero_part("3b", "zero3", 180),
    "alone_3b": zero_part("3b", "", 110, "MFU, memory", (2,)),
    "tests": Part("tests marked `gpu`: kernels against float64, both model classes against the CPU", 45, tests),
    "flash4_3b": Part("a step by FlashAttention 4", 75, partial(step, arms=["liger_compiled_tower", "flash4"])),
    "zero3_7b": zero_part("7b", "zero3", 190),
    "zero2_7b": zero_part("7b", "zero2", 190),
    "zero3_3b_16k": zero_part("3b", "zero3", 110, "MFU of micro-batches of 16,384 tokens", (2,),
                              MAX_TOKENS_PER_MICRO_BATCH=16_384),
    "vs_upstream": Part("samples/s over LLaVA's own code in bf16", 300, vs_upstream),
    "qlora": demo_part("by QLoRA", packages=("bitsandbytes",), flags=("--bits", "4"), LORA=1),
    "resume_zero2": demo_part("under ZeRO-2", packages=("deepspeed",), DEEPSPEED_CONFIG=ZERO.format(2)),
    "recompute_zero3": demo_part("under ZeRO-3, its leaf modules recomputed", packages=("deepspeed",),
                           DEEPSPEED_CONFIG=ZERO.format(3), ACTIVATION_CHECKPOINTING="True"),
    "offload_3b": zero_part("3b", "zero3_offload", 240),
}  # fmt: skip
