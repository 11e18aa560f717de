"""The faults of `tests/nightly/chaos/run.sh`: each starts real scripts, breaks something, starts again.

Every fault says how the first start is broken and what must be printed, quoted whole, with `...` for what the program
fills in; the second start is the same command. Lost steps are those that are computed twice.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
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


@dataclass
class Fault:
    """What is broken, on how many ranks, and what was promised."""

    name: str
    promise: tuple[str, ...]  # messages of the first start
    ranks: int
    chaos: dict[str, Any]
    resume_at: int = SAVE_STEPS  # the checkpoint that the second start continues
    code: int | None = None  # exit code of the first start; None: any but 0; 0: it recovers, and there is no second one
    said: tuple[str, ...] = ()  # messages of the second start
    settings: dict[str, Any] = field(default_factory=dict)  # variables of the scripts, in every start


def settings(folder: Path, ranks: int, zero3: bool, **more: Any) -> dict[str, str]:
    """The environment of stage 2 with the tiny model."""
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
    env = os.environ | {name: str(value) for name, value in (values | more).items()}
    env["PYTHONPATH"] = f"{Path(__file__).parent / 'inject'}:{env['PYTHONPATH']}"
    return env


def start(folder: Path, ranks: int, chaos: dict | None = None, **more: Any) -> Run:
    """Trains by the script that people call."""
    env = settings(folder, ranks, ranks > 1, **more)
    if chaos:
        places = {"pid_file": str(WORK / "pid"), "folder": str(folder), "struck": str(WORK / "struck")}
        env["CHAOS"] = json.dumps({"ranks": [ranks - 1]} | places | chaos)
        (WORK / "struck").unlink(missing_ok=True)
    words = ["bash", "scripts/finetune.sh", *COMMON]
    with (WORK / "output.txt").open("w+") as output:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
        (WORK / "pid").write_text(str(process.pid))
        code = process.wait(timeout=600)
        output.seek(0)
        return Run(code, output.read())


def after(step: int) -> str:
    """What rank 0 says at the end of a run that was stopped."""
    return (
        f"...: stopped after step {step} of {STEPS}, checkpoint .../checkpoint-{step}; rerun the same command to resume"
    )


def signalled(name: str, ranks: int) -> Fault:
    """A signal to the launcher, which ends the run after the step."""
    promise = (f"{name} received: the ranks save after the current step and stop...", after(5))
    chaos = {"what": "signal", "signal": name, "step": 4}
    return Fault(f"{name}, {ranks} rank(s)", promise, ranks, chaos, resume_at=5, code=85)


KILLED = ("if no line above names an error, it was killed, by hand or because memory ran out",)
LEFT = ("...: removing what an interrupted run left half written",)
KILL, IN_SAVE, BOTH = {"what": "kill", "step": 5}, {"what": "kill_in_save", "step": 6}, {"ranks": [0, 1]}
# Of inject/sitecustomize.py: its error, and its place in a stack. Every other message is the code's.
INJECTED, IN_STRIKE = "injected fault: this rank fails", "in strike"
HANGS = (
    "the first of 2 errors in ...:\nrank 1 on ..., process ..., ...",
    "no progress for ... s (--hang_timeout 15); its stack traces:",
    IN_STRIKE,
)
FILLER = "filler"  # the file that fills the disk
FAULTS = [
    Fault("kill -9 of one rank in a step", KILLED, 2, KILL),
    Fault("kill -9 of all ranks in a step", KILLED, 2, KILL | BOTH),
    Fault("kill -9 of one rank in the save", KILLED, 2, IN_SAVE, said=LEFT),
    Fault("kill -9 of all ranks in the save", KILLED, 2, IN_SAVE | BOTH, said=LEFT),
    *(signalled(name, ranks) for name in ("SIGUSR1", "SIGINT", "SIGTERM") for ranks in (2, 1)),
    Fault("SIGTERM to a rank", (after(5),), 2, {"what": "signal_rank", "signal": "SIGTERM", "step": 4}, 5, 85),
    Fault("disk full in the save", (), 1, {"what": "fill_disk", "step": 5}),  # the words are the library's
    Fault("one rank fails", (INJECTED,), 2, {"what": "raise", "step": 5}, settings={"LAUNCHER": "deepspeed"}),
    Fault(
        "kill -9, MAX_RESTARTS=1",
        ("resuming from .../checkpoint-3",),
        2,
        KILL | {"once": True},
        code=0,
        settings={"MAX_RESTARTS": 1},
    ),
    Fault("one rank hangs", HANGS, 2, {"what": "hang", "step": 5}),
]


def check(fault: Fault, reference: dict[str, torch.Tensor]) -> list[str]:
    """Runs a fault and prints its line; returns what was not as promised."""
    wrong: list[str] = []

    def expect(holds: Any, what: str, run: Run) -> None:
        if not holds:
            wrong.append(f"{fault.name}: {what}\n{run.output[-3000:]}")

    place = "small" if fault.chaos["what"] == "fill_disk" else "runs"
    folder = WORK / place / re.sub(r"\W+", "-", fault.name)
    first = second = start(folder, fault.ranks, fault.chaos, **fault.settings)
    ended = time.time() - float((WORK / "struck").read_text())
    expect(first.code == fault.code if fault.code is not None else first.code, f"exit code {first.code}", first)
    expect(ended < BOUND, f"ended only after {ended:.0f} s", first)
    finished = fault.chaos["step"]
    if fault.code != 0:
        finished = steps_finished(folder)
        (folder / FILLER).unlink(missing_ok=True)  # makes room again
        second = start(folder, fault.ranks, **fault.settings)
    expect(second.code == 0, f"the second start ended with {second.code}", second)
    for quotes, run in ((fault.promise, first), (fault.said, second)):
        for quote in quotes:
            words = map(re.escape, quote.split("..."))  # which matches anything
            expect(re.search(".*?".join(words), run.output), f"not printed: {quote}", run)
    resumed = re.search(r"resuming from \S*checkpoint-(\d+)", second.output)
    step = int(resumed[1]) if resumed else 0
    expect(step == fault.resume_at, f"continued after step {step}, expected {fault.resume_at}", second)
    expect(second.code == 0 and same_weights(folder, reference), "the final weights differ", second)
    happened = f"exit {first.code} after {ended:.0f} s, {finished - step} lost steps"
    print(f"  {'FAIL' if wrong else 'ok  '} {fault.name}: {happened}", flush=True)
    return wrong


def steps_finished(folder: Path) -> int:
    """The number of steps in the log."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    return max((line["step"] for line in lines if "loss" in line), default=0)


def same_weights(folder: Path, reference: dict[str, torch.Tensor]) -> bool:
    """Whether the final folder holds the uninterrupted run's weights."""
    weights = load_file(folder / "model.safetensors")
    return all(torch.equal(weights[name], tensor) for name, tensor in reference.items())


def main(names: list[str]) -> int:
    """Prints a line for every fault; returns 1 if anything is not as promised."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    (WORK / "runs").mkdir()
    write_tiny(WORK / "tiny")
    chosen = [f for f in FAULTS if not names or any(name in f.name for name in names)]
    references, failures = {}, []
    for ranks in sorted({f.ranks for f in chosen}):
        whole = start(WORK / f"runs/whole-{ranks}", ranks)
        assert whole.code == 0, whole.output
        references[ranks] = load_file(WORK / f"runs/whole-{ranks}/model.safetensors")
    for fault in chosen:
        failures += check(fault, references[fault.ranks])
    print("\n\n".join(failures), file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
