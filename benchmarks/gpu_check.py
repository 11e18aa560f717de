"""Runs the parts of benchmarks/gpu_parts.py one after another and writes a table of what was measured.

Each part is its own process with a time limit, and leaves `gpu_<part>.json` (its state, machine and rows) in the
output folder. A part that has been measured is not rerun while that file is there; one that failed, was killed or could
not run is. Exit status: 0; 1 if a part failed, 2 if the call was refused, 130 after Ctrl-C. LLAVA_PYTHON names the
interpreter, WHEELS a folder of packages that it lacks (see the head of benchmarks/gpu_check.sh).

With --minutes, a part runs only where its estimated seconds fit, and ends when the time is used up.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, end_all, is_running
from benchmarks.gpu_parts import FAILED, MEASURED, NOT_RUN, PARTS, PartRun
from benchmarks.page import GPU_ROWS, number, targets
from llava.utils.commands import Parser, whole
from llava.utils.files import write_text
from llava.utils.locks import InUse, locked
from llava.utils.processes import descendants, send, start

SUMMARY = "summary.md"
RESERVE = 15.0  # seconds at the end of the time: ending a part, writing the table


def main() -> int:
    args = parse_arguments()
    if args.part:  # the process of one part
        threading.Thread(target=end_with, args=(args.parent,), daemon=True).start()
        PartRun(args.part, args.output_dir, args.cpu).execute()
        return 0
    if args.plan:
        print(plan(args.parts))
        return 0
    if reason := refusal(args.cpu):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    try:
        with locked(args.output_dir / ".lock", f"another gpu_check runs in {args.output_dir}"):
            run_parts(args)
    except InUse as busy:
        print(f"error: {busy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        text = "interrupted: the part that was running is lost; rerun the same command to resume with it"
        print(f"\n{text}", file=sys.stderr)
        return 130
    print(
        f"\n{part_table(args.output_dir, args.cpu)}\n\nwith the targets: {args.output_dir / SUMMARY}; rows: gpu_*.json"
    )
    results = [read(args.output_dir, name, args.cpu) for name in args.parts]
    return int(any(result and result["status"] == FAILED for result in results))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(prog="gpu_check", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU: shows that every part runs")
    parser.add_argument("--plan", action="store_true", help="print order and seconds of the parts")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default all")
    parser.add_argument("--output-dir", type=Path, help="default outputs/gpu_check, with --cpu outputs/gpu_check_cpu")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a part may take")
    parser.add_argument("--minutes", type=whole(1), help="total of this call; the next call continues")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)  # before WHEELS
    args = parser.parse_args()
    args.parts = [name for name in args.parts.split(",") if name]
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"--parts: unknown {', '.join(unknown)}; expected some of {','.join(PARTS)}")
    args.output_dir = (args.output_dir or ROOT / f"outputs/gpu_check{'_cpu' * args.cpu}").resolve()
    return args


def refusal(cpu: bool) -> str:
    """Why nothing can run here; empty if something can."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} cannot import torch ({error}); set LLAVA_PYTHON to an interpreter that has it"
    if not cpu and (not torch.cuda.is_available() or torch.version.hip):
        return f"no NVIDIA GPU: PyTorch {torch.__version__} sees none; --cpu shows that every part runs"
    return ""


def plan(names: list[str]) -> str:
    """The parts in their order, with the seconds that each is estimated to take and their sum so far."""
    lines, total = ["| part | seconds | sum | what |", "|---|---|---|---|"], 0
    for name in names:
        total += PARTS[name].seconds
        lines.append(f"| {name} | {PARTS[name].seconds} | {total} | {PARTS[name].what} |")
    return "\n".join(lines)


def run_parts(args: argparse.Namespace) -> None:
    """Runs the parts that are not measured yet and that fit in the time that is left; writes the table between."""
    for name in args.parts:
        write_text(args.output_dir / SUMMARY, summary(args.output_dir, args.cpu))
        result, seconds = read(args.output_dir, name, args.cpu), PARTS[name].seconds
        left = args.started + 60 * args.minutes - time.time() - RESERVE if args.minutes else float("inf")
        if result and result["status"] == MEASURED:
            print(f"{name:12} measured before", flush=True)
        elif seconds > left:
            print(f"{name:12} open: takes about {seconds} s, {max(0.0, left):.0f} are left of --minutes "
                  f"{args.minutes}; rerun the same command to continue", flush=True)  # fmt: skip
        else:
            run_part(name, args, min(args.limit, left))
    write_text(args.output_dir / SUMMARY, summary(args.output_dir, args.cpu))


def run_part(name: str, args: argparse.Namespace, limit: float) -> None:
    """Runs a part for at most `limit` seconds, and prints how it went."""
    part = PartRun(name, args.output_dir, args.cpu)
    part.result.unlink(missing_ok=True)
    part.log.parent.mkdir(exist_ok=True)
    print(f"{name:12} runs: {PARTS[name].what} (log: {part.log})", flush=True)
    command = [sys.executable, "-u", "-m", "benchmarks.gpu_check", "--part", name, "--output-dir", args.output_dir]
    command += ["--parent", os.getpid(), *["--cpu"] * args.cpu]
    began, reason = time.monotonic(), "it ended and left no result"
    with part.log.open("w") as log:
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if args.cpu else {})
        process = start([str(word) for word in command], environment, log, cwd=ROOT)
        try:
            process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            reason = f"it took longer than {limit:.4g} s ({'--limit' if limit == args.limit else '--minutes'})"
        finally:
            end_all(process)  # also what is left of a part that was killed
            part.rows = part.measured_rows()
            shutil.rmtree(part.work, ignore_errors=True)
    if not read(args.output_dir, name, args.cpu):
        part.write(FAILED, f"{reason}, see {part.log}", time.monotonic() - began)
    result = read(args.output_dir, name, args.cpu)
    because = f": {result['reason']}" if result["reason"] else ""
    print(f"{name:12} {result['status']} in {time.monotonic() - began:.0f} s{because}", flush=True)


def end_with(parent: int) -> None:
    """Ends this process and all that it started once `parent` has ended, which a kill does not tell them."""
    while is_running(parent):
        time.sleep(0.5)
    for started in descendants(os.getpid()):
        send(started, signal.SIGKILL)
    os._exit(1)


def read(output_dir: Path, name: str, cpu: bool) -> dict[str, Any] | None:
    """A part's result on this kind of device, or None if there is none."""
    try:
        result = json.loads(PartRun(name, output_dir, cpu).result.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return result if result["on"] == ("cpu" if cpu else "gpu") else None


def part_table(output_dir: Path, cpu: bool) -> str:
    """One line per part: measured, failed with the reason, or open with the command."""
    lines = ["| part | what | state | seconds |", "|---|---|---|---|"]
    for name, part in PARTS.items():
        result = read(output_dir, name, cpu)
        command = PartRun(name, output_dir, cpu).command
        if result is None:
            state = f"open: `{command}`"
        elif result["status"] == NOT_RUN:
            state = f"open, {result['reason']}: `{command}`"
        else:
            state = result["status"] + (f": {result['reason']}" if result["reason"] else "")
        lines.append(f"| {name} | {part.what} | {state.replace('|', '/')} | {number(result and result['seconds'])} |")
    return "\n".join(lines)


def summary(output_dir: Path, cpu: bool) -> str:
    """The parts and the targets; every row stands in its part's file, with machine, versions and commit."""
    lines = ["# GPU check" + ", as far as a CPU can run it" * cpu, part_table(output_dir, cpu)]
    lines += [] if cpu else [targets(GPU_ROWS, output_dir)]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
