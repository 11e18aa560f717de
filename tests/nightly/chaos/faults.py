"""The faults of `tests/nightly/chaos/run.sh`: each starts real scripts, breaks something, starts again.

Every fault says how the first start is broken, what must be printed, and what is done before the second start, which
is the same command. Lost steps are those that are computed twice. What must be printed is quoted whole, with `...` for
what the program fills in.
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
from messages import is_quoted
from paths import ROOT
from safetensors.torch import load_file
from tiny_models import write_tiny

WORK = Path(os.environ.get("WORK", ""))  # set by run.sh
STEPS, SAVE_STEPS = 8, 3
COMMON = ("--hang_timeout", "15")
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
    promise: tuple[str, ...]  # messages of the first start
    ranks: int
    chaos: dict[str, Any]
    resume_at: int = SAVE_STEPS  # the checkpoint that the second start continues
    code: int | None = None  # exit code of the first start; None: any but 0
    between: Callable[[Path], None] = lambda folder: None
    said: tuple[str, ...] = ()  # messages of the second start
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


def start(folder: Path, ranks: int, chaos: dict | None = None, **more: Any) -> Run:
    """Trains by the script that people call."""
    env = settings(folder, ranks, ranks > 1, **more)
    if chaos:
        (WORK / "struck").unlink(missing_ok=True)
        places = {"pid_file": str(WORK / "pid"), "folder": str(folder), "struck": str(WORK / "struck")}
        env["CHAOS"] = json.dumps({"ranks": [ranks - 1]} | places | chaos)
    words = ["bash", "scripts/finetune.sh", *COMMON]
    began = time.monotonic()
    with (WORK / "output.txt").open("w+") as output:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        (WORK / "pid").write_text(str(process.pid))
        code = process.wait(timeout=600)
        output.seek(0)
        text = output.read()
    return Run(code, text, time.monotonic() - began)


def kill_at(step: int, **more: Any) -> dict[str, Any]:
    return {"what": "kill", "step": step} | more


def without_filler(folder: Path) -> None:
    """Makes room again."""
    (folder / "filler").unlink()


def stopped(name: str, step: int) -> tuple[str, ...]:
    """What a run says that the signal to its launcher ends after `step` steps."""
    return (f"{name} received: the ranks save after the current step and stop...", after(step))


def after(step: int) -> str:
    """What rank 0 says at the end of a run that was stopped."""
    return (
        f"...: stopped after step {step} of {STEPS}, checkpoint .../checkpoint-{step}; rerun the same command to resume"
    )


BOTH = {"ranks": [0, 1]}
# Of inject/sitecustomize.py: its error, and its place in a stack. Every other message is the code's.
INJECTED, IN_STRIKE = "injected fault: this rank fails", "in strike"
KILLED = ("if no line above names an error, it was killed, by hand or because memory ran out",)
LEFT = ("...: removing what an interrupted run left half written",)
IN_SAVE = {"what": "kill_in_save", "step": 6}
USR1, TERM, INT = ({"what": "signal", "signal": name, "step": 4} for name in ("SIGUSR1", "SIGTERM", "SIGINT"))
FAULTS = [
    Fault("kill -9 of one rank in a step", KILLED, 2, kill_at(5)),
    Fault("kill -9 of all ranks in a step", KILLED, 2, kill_at(5, **BOTH)),
    Fault("kill -9 of one rank in the save", KILLED, 2, IN_SAVE, said=LEFT),
    Fault("kill -9 of all ranks in the save", KILLED, 2, IN_SAVE | BOTH, said=LEFT),
    Fault("SIGUSR1, two ranks", stopped("SIGUSR1", 5), 2, USR1, resume_at=5, code=85),
    Fault("SIGUSR1, one rank", stopped("SIGUSR1", 5), 1, USR1, resume_at=5, code=85),
    Fault("Ctrl-C, two ranks", stopped("SIGINT", 5), 2, INT, resume_at=5, code=85),
    Fault("Ctrl-C, one rank", stopped("SIGINT", 5), 1, INT, resume_at=5, code=85),
    Fault("SIGTERM, two ranks", stopped("SIGTERM", 5), 2, TERM, resume_at=5, code=85),
    Fault("SIGTERM, one rank", stopped("SIGTERM", 5), 1, TERM, resume_at=5, code=85),
    Fault("SIGTERM to one rank of two", (after(5),), 2, TERM | {"what": "signal_rank"}, resume_at=5, code=85),
    Fault(
        "disk full in the save",
        (),  # the words are the library's
        1,
        {"what": "fill_disk", "step": 5},
        between=without_filler,
        small_disk=True,
    ),
    Fault(
        "one rank fails",
        (INJECTED,),
        2,
        {"what": "raise", "step": 5},
        settings={"LAUNCHER": "deepspeed"},
    ),
    Fault(
        "kill -9 of one rank, MAX_RESTARTS=1",
        ("resuming from .../checkpoint-3",),
        2,
        kill_at(5, once=True),
        code=0,
        settings={"MAX_RESTARTS": 1},
        by_itself=True,
    ),
    Fault(
        "one rank hangs",
        (
            "the first of 2 errors in ...:\nrank 1 on ..., process ..., ...",
            "no progress for ... s (--hang_timeout 15); its stack traces:",
            IN_STRIKE,
        ),
        2,
        {"what": "hang", "step": 5},
    ),
]


def check(fault: Fault, reference: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Runs a fault; returns its row and what was not as promised."""
    wrong: list[str] = []

    def expect(holds: Any, what: str, run: Run) -> None:
        if not holds:
            wrong.append(f"{what}\n{run.output[-3000:]}")

    def expect_printed(quotes: tuple[str, ...], run: Run) -> None:
        for quote in quotes:
            expect(is_quoted(quote, run.output), f"not printed: {quote}", run)

    place = "small" if fault.small_disk else "runs"
    folder = WORK / place / fault.name.replace(" ", "-").replace(",", "")
    first = start(folder, fault.ranks, fault.chaos, **fault.settings)
    ended = time.time() - float((WORK / "struck").read_text())
    right_code = first.code != 0 if fault.code is None else first.code == fault.code
    expect(right_code, f"exit code {first.code}, expected {'not 0' if fault.code is None else fault.code}", first)
    expect_printed(fault.promise, first)
    expect(ended < BOUND, f"ended only after {ended:.0f} s", first)
    message = fault.promise[0] if fault.promise else "the library's error"
    happened = "not as promised" if wrong else message.replace("...", "").splitlines()[-1][:70]
    finished = fault.chaos["step"] if fault.by_itself else steps_finished(folder)
    fault.between(folder)
    second = first if fault.by_itself else start(folder, fault.ranks, **fault.settings)
    expect(second.code == 0, f"the second start ended with {second.code}", second)
    expect_printed(fault.said, second)
    resumed = re.search(r"resuming from \S*checkpoint-(\d+)", second.output)
    step = int(resumed[1]) if resumed else 0
    expect(step == fault.resume_at, f"continued after step {step}, expected {fault.resume_at}", second)
    same = second.code == 0 and same_weights(folder, reference)
    expect(same, "the final weights differ", second)
    happened = f"exit {first.code} after {ended:.0f} s: {happened}"
    row = [fault.name, happened, str(finished - step), "yes" if same else "no"]
    return row, wrong


def steps_finished(folder: Path) -> int:
    """The number of steps in the log."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return max((line["step"] for line in lines if "loss" in line), default=0)


def same_weights(folder: Path, reference: dict[str, torch.Tensor]) -> bool:
    """Whether the final folder holds the uninterrupted run's weights."""
    weights = load_file(folder / "model.safetensors")
    return all(torch.equal(weights[name], tensor) for name, tensor in reference.items())


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
