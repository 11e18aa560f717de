"""The faults of `tests/chaos/run.sh`: each starts the real scripts, breaks something, starts again, compares weights.

Every fault says how the first start is broken, what must be seen of it, and what is done before the second start, which
is the same command. Lost steps are those that are computed twice.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_models import write_tiny

ROOT = Path(__file__).parent.parent.parent
WORK = Path(os.environ["WORK"])
STEPS, SAVE_STEPS = 8, 3
# The hang's own limit, and an epsilon that keeps Adam from blowing up rounding noise where numbers of ranks differ.
COMMON = ("--hang_timeout", "15", "--adam_epsilon", "1e-4")
BOUND = 60.0  # seconds from the fault to the end of all processes


@dataclass
class Run:
    """One start of scripts/finetune.sh."""

    code: int
    output: str
    seconds: float


@dataclass
class Fault:
    """One row of the table."""

    name: str
    promise: str  # pattern in the first start's output
    ranks: int
    chaos: dict[str, Any]
    resume_at: int = SAVE_STEPS  # the checkpoint that the second start continues
    code: int | None = None  # exit code of the first start; None: any but 0
    flags: tuple[str, ...] = ()  # flags of both starts
    between: Callable[[Path], None] = lambda folder: None
    said: str = ""  # pattern in the second start's output
    refused: tuple[tuple[str, ...], str] | None = None  # flags of a start between the two, and what it must print
    again: dict[str, Any] = field(default_factory=dict)  # other ranks and flags of the second start
    tolerance: float = 0.0
    small_disk: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # variables of the scripts, in every start
    by_itself: bool = False  # the first start recovers by itself; there is no second one


def settings(folder: Path, ranks: int, zero3: bool, **more: Any) -> dict[str, str]:
    """The environment of stage 2 with the tiny model; a variable that is None is left to the preset."""
    tiny = WORK / "tiny"
    values = {
        "PRESET": "demo",
        "MODEL_PATH": tiny / "llama",
        "VISION_TOWER": tiny / "siglip",
        "DATA_PATH": tiny / "data/finetune.json",
        "IMAGE_FOLDER": tiny / "data/images",
        "PRETRAIN_ADAPTER": "",
        "OUTPUT_DIR": folder,
        "NUM_GPUS": 0,
        "CPU_RANKS": ranks,
        "LAUNCHER": "torchrun" if zero3 else "python",
        "DEEPSPEED_CONFIG": "deepspeed_configs/zero3.json" if zero3 else "",
        "OPTIM": "adamw_torch",
        "GLOBAL_BATCH": 4,
        "MAX_STEPS": STEPS,
        "SAVE_STRATEGY": "steps",
        "SAVE_STEPS": SAVE_STEPS,
        "SAVE_TOTAL_LIMIT": 2,
        "BF16": "False",
        "REPORT_TO": "none",
        "OMP_NUM_THREADS": 1,
    }
    env = os.environ | {name: str(value) for name, value in (values | more).items() if value is not None}
    env["PYTHONPATH"] = f"{Path(__file__).parent / 'inject'}:{env['PYTHONPATH']}"
    return env


def start(folder: Path, ranks: int, chaos: dict | None = None, flags: tuple[str, ...] = (), **more: Any) -> Run:
    """Trains by the script that people call."""
    env = settings(folder, ranks, ranks > 1 or "--zero3" in flags, **more)
    if chaos:
        (WORK / "struck").unlink(missing_ok=True)
        places = {"pid_file": str(WORK / "pid"), "folder": str(folder), "struck": str(WORK / "struck")}
        env["CHAOS"] = json.dumps({"ranks": [ranks - 1]} | places | chaos)
    words = ["bash", "scripts/finetune.sh", *COMMON, *(f for f in flags if f != "--zero3")]
    began = time.monotonic()
    with (WORK / "output.txt").open("w+") as output:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        (WORK / "pid").write_text(str(process.pid))
        code = process.wait(timeout=600)
        output.seek(0)
        text = output.read()
    return Run(code, text, time.monotonic() - began)


def damage(kind: str) -> Callable[[Path], None]:
    """Cuts off or flips a byte of the largest file of the newest checkpoint."""

    def apply(folder: Path) -> None:
        newest = max(folder.glob("checkpoint-*"), key=lambda f: int(f.name.rsplit("-", 1)[1]))
        file = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        content = bytearray(file.read_bytes())
        if kind == "truncate":
            del content[len(content) // 2 :]
        else:
            content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return apply


def kill_at(step: int, **more: Any) -> dict[str, Any]:
    return {"what": "kill", "step": step} | more


def without_filler(folder: Path) -> None:
    """Makes room again."""
    (folder / "filler").unlink()


BOTH = {"ranks": [0, 1]}
KILLED = "ended without a message: it was killed"
ON_RANK_1 = rf"rank 1 on .*{KILLED}"
IN_SAVE = {"what": "kill_in_save", "step": 6}
USR1, TERM, INT = ({"what": "signal", "signal": name, "step": 4} for name in ("SIGUSR1", "SIGTERM", "SIGINT"))
CTRL_C = "signal received: the ranks save|Ctrl-C: saving after the current step"
HANGS = r"the first of 2 errors in .*\n(?P<shown>rank 1 on .*)(.|\n)*no progress for (.|\n)*in strike"
NAN = r"step 6 is not applied: .*loss nan on rank 0: record \d+ \(id 'q\d+'\)(.|\n)*2 in a row"
OTHER_FLAGS = ("--learning_rate", "0.1", "--version", "qwen_1_5")
DIFFERENCES = "learning_rate: checkpoint 0.0001, now 0.1(.|\n)*template: checkpoint(.|\n)*would make it another run"
ONE_RANK = ("--zero3", "--resume_allow_changes", "world_size,per_device_train_batch_size")
FULL = "checkpoint-6 could not be written: .*checkpoint-3 is complete and untouched"
FAULTS = [
    Fault("kill -9 of one rank in a step", ON_RANK_1, 2, kill_at(5)),
    Fault("kill -9 of all ranks in a step", KILLED, 2, kill_at(5, **BOTH)),
    Fault("kill -9 of one rank in the save", ON_RANK_1, 2, IN_SAVE, said="removing what an interrupted run left"),
    Fault("kill -9 of all ranks in the save", KILLED, 2, IN_SAVE | BOTH, said="removing what an interrupted run left"),
    Fault("SIGUSR1, two ranks", "signal received: the ranks save", 2, USR1, resume_at=6, code=85),
    Fault("SIGUSR1, one rank", "SIGUSR1: saving after step 5 and stopping", 1, USR1, resume_at=5, code=85),
    Fault("Ctrl-C, two ranks", CTRL_C, 2, INT, resume_at=6, code=85),
    Fault("Ctrl-C, one rank", CTRL_C, 1, INT, resume_at=5, code=85),
    Fault("SIGTERM, one rank", "signal received: the ranks save", 1, TERM, resume_at=5, code=85),
    Fault(
        "checkpoint truncated", KILLED, 1, kill_at(7), between=damage("truncate"), said="bytes were written|is skipped"
    ),
    Fault("byte of checkpoint flipped", KILLED, 1, kill_at(7), between=damage("flip"), said="SHA-256 differs"),
    Fault("disk full in the save", FULL, 1, {"what": "fill_disk", "step": 5}, between=without_filler, small_disk=True),
    Fault(
        "loss not finite, 2 in a row",
        NAN,
        1,
        {"what": "nan", "step": 4, "times": 4},
        flags=("--max_nonfinite_steps", "2"),
    ),
    Fault(
        "one rank fails",
        "injected fault: this rank fails\n+$",
        2,
        {"what": "raise", "step": 5},
        settings={"LAUNCHER": "deepspeed"},
    ),
    Fault(
        "kill -9 of one rank, MAX_RESTARTS=1",
        r"resuming from \S*checkpoint-3",
        2,
        kill_at(5, once=True),
        code=0,
        settings={"MAX_RESTARTS": 1},
        by_itself=True,
    ),
    Fault("one rank hangs", HANGS, 2, {"what": "hang", "step": 5}),
    Fault("restart with other flags", KILLED, 1, kill_at(5), refused=(OTHER_FLAGS, DIFFERENCES)),
    Fault(
        "restart on one rank of two",
        KILLED,
        2,
        kill_at(5),
        refused=(("--zero3",), "world_size: checkpoint 2, now 1(.|\n)*accept with --resume_allow_changes"),
        again={"ranks": 1, "flags": ONE_RANK},
        said="accepted change:",
        tolerance=1e-6,
    ),
]


def check(fault: Fault, reference: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Runs a fault; returns its row and what was not as promised."""
    wrong: list[str] = []

    def expect(holds: Any, what: str, run: Run) -> None:
        if not holds:
            wrong.append(f"{what}\n{run.output[-3000:]}")

    place = "small" if fault.small_disk else "runs"
    folder = WORK / place / fault.name.replace(" ", "-").replace(",", "")
    first = start(folder, fault.ranks, fault.chaos, fault.flags, **fault.settings)
    ended = time.time() - float((WORK / "struck").read_text())
    right_code = first.code != 0 if fault.code is None else first.code == fault.code
    expect(right_code, f"exit code {first.code}, expected {'not 0' if fault.code is None else fault.code}", first)
    expect(re.search(fault.promise, first.output), f"not said: {fault.promise}", first)
    expect(ended < BOUND, f"ended only after {ended:.0f} s", first)
    happened = re.search(fault.promise, first.output)
    finished = fault.chaos["step"] if fault.by_itself else steps_finished(folder)
    fault.between(folder)
    if fault.refused:
        flags, said = fault.refused
        refused = start(folder, fault.again.get("ranks", fault.ranks), flags=flags)
        expect(refused.code != 0 and re.search(said, refused.output), f"not refused with: {said}", refused)
    second = first if fault.by_itself else start_again(fault, folder)
    expect(second.code == 0, f"the second start ended with {second.code}", second)
    expect(re.search(fault.said, second.output), f"not said: {fault.said}", second)
    resumed = re.search(r"resuming from \S*checkpoint-(\d+)", second.output)
    step = int(resumed[1]) if resumed else 0
    expect(step == fault.resume_at, f"continued after step {step}, expected {fault.resume_at}", second)
    same = second.code == 0 and same_weights(folder, reference, fault.tolerance)
    expect(same, "the final weights differ", second)
    text = (
        "not as promised"
        if happened is None
        else " ".join((happened.groupdict().get("shown") or happened[0]).split())[:70]
    )
    weights = "no" if not same else "yes, up to rounding" if fault.tolerance else "yes"
    return [fault.name, f"exit {first.code} after {ended:.0f} s: {text}", str(finished - step), weights], wrong


def start_again(fault: Fault, folder: Path) -> Run:
    """The second start: the same command, unless the fault says with what else."""
    flags = fault.again.get("flags", fault.flags)
    return start(folder, fault.again.get("ranks", fault.ranks), flags=flags, **fault.settings)


def steps_finished(folder: Path) -> int:
    """The number of steps in the log."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return max((line["step"] for line in lines if "loss" in line), default=0)


def same_weights(folder: Path, reference: dict[str, torch.Tensor], tolerance: float) -> bool:
    """Whether the final folder holds the uninterrupted run's weights."""
    weights = load_file(folder / "model.safetensors")
    return all(bool(((weights[name] - tensor).abs() <= tolerance).all()) for name, tensor in reference.items())


def main(names: list[str]) -> int:
    """Prints the table; returns 1 if anything is not as promised."""
    (WORK / "runs").mkdir()
    write_tiny(WORK / "tiny")
    chosen = [f for f in FAULTS if not names or any(name in f.name for name in names)]
    references, rows, failures = {}, [], []
    began = time.monotonic()
    for ranks in sorted({f.ranks for f in chosen}):
        whole = start(WORK / f"runs/whole-{ranks}", ranks)
        assert whole.code == 0, whole.output
        references[ranks] = load_file(WORK / f"runs/whole-{ranks}/model.safetensors")
        print(f"uninterrupted run on {ranks} rank(s): {whole.seconds:.0f} s", flush=True)
    for fault in chosen:
        row, wrong = check(fault, references[fault.ranks])
        rows.append([*row, "NO" if wrong else "yes"])
        failures += [f"{fault.name}: {text}" for text in wrong]
        print(f"  {'FAIL' if wrong else 'ok  '} {fault.name}", flush=True)
    header = ["fault", "what happened", "lost steps", "same final weights", "as promised"]
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    for line in [header, ["-" * w for w in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"{len(rows)} faults in {time.monotonic() - began:.0f} s")
    print("\n\n".join(failures), file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
