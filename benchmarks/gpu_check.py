"""Runs the parts of benchmarks/gpu_parts.py one after another and writes a table of what was found.

Each part is its own process with a time limit, and leaves `gpu_<part>.json` (its state, machine and rows) in the
output folder. A part that has been measured is not rerun without --force; one that failed, was killed or could not
run is. Exit status: 0; 1 if a part failed, 2 if the call was refused, 130 after Ctrl-C. LLAVA_PYTHON names the
interpreter, WHEELS a folder of packages that it lacks (see the head of benchmarks/gpu_check.sh).

With --minutes and --call-minutes, a part runs only where its estimated minutes fit, and ends when the time is used up.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu_parts import FAILED, MEASURED, NOT_RUN, PARTS, run
from benchmarks.gpu_setting import Setting
from benchmarks.run_all import GPU_TARGETS, number, tables
from llava.utils.commands import Parser, whole
from llava.utils.files import replacing, write_text
from llava.utils.processes import descendants, is_running, kill, send

SUMMARY, ARCHIVE = "summary.md", "gpu_check.tar.gz"
GRACE = 10.0  # seconds between asking a part to end and killing it
RESERVE = 15.0  # seconds at the end of the time: ending a part, writing the table


def main() -> int:
    args = parse_arguments()
    if args.part:  # the process of one part
        threading.Thread(target=end_with, args=(args.parent,), daemon=True).start()
        run(Setting(args.part, args.output_dir, args.cpu))
        return 0
    if reason := refusal(args.cpu):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, interrupt)
    with only_one(args.output_dir):
        try:
            run_parts(args, Clock(args))
        except KeyboardInterrupt:
            print(
                "\ninterrupted: the part that was running is lost; rerun the same command to resume with it",
                file=sys.stderr,
            )
            return 130
        finally:
            save(args)
    print(f"\n{part_table(args.output_dir, args.cpu)}\n\nwith all figures: {args.output_dir / SUMMARY}")
    results = [read(args.output_dir, name, args.cpu) for name in args.parts]
    return int(any(result and result["status"] == FAILED for result in results))


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="gpu_check", description=__doc__,
        epilog="parts:\n" + "\n".join(f"  {name:12} {part.minutes:g} min: {part.what}" for name, part in PARTS.items()),
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU: shows that every part runs")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default all")
    parser.add_argument("--force", action="store_true", help="repeat the parts that have been measured, too")
    parser.add_argument("--output-dir", type=Path, help="default outputs/gpu_check, with --cpu outputs/gpu_check_cpu")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a part may take")
    parser.add_argument(
        "--minutes", type=whole(1), help="total of all calls with this output folder; parts that do not fit are skipped"
    )
    parser.add_argument(
        "--call-minutes", type=whole(1), help="total of this call; the next call continues with what does not fit"
    )
    parser.add_argument("--copy-to", type=Path, help=f"folder that gets {ARCHIVE}, results and logs, after every part")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)  # before WHEELS
    args = parser.parse_args()
    if args.force and args.call_minutes:
        parser.error("--force repeats the same parts in every call of --call-minutes; expected one of the two")
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


def only_one(output_dir: Path) -> Any:
    """Locks the folder against a second call; ends the program if another call holds the lock."""
    from filelock import FileLock, Timeout

    lock = FileLock(output_dir / ".lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"error: another gpu_check runs in {output_dir}; wait for it, or pass --output-dir", file=sys.stderr)
        sys.exit(2)


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


# --- the time ---------------------------------------------------------------------------------------------------------


class Clock:
    """The seconds that are left of --minutes, over all calls with one output folder, and of --call-minutes.

    The seconds used are in the folder's file `seconds`. A part counts there with its estimate while it runs, so that a
    call that is killed counts too.
    """

    def __init__(self, args: argparse.Namespace, now: Callable[[], float] = time.time):
        self.minutes, self.call_minutes, self.started, self.now = args.minutes, args.call_minutes, args.started, now
        self.file = args.output_dir / "seconds"
        self.before = float(self.file.read_text()) if self.file.is_file() else 0.0

    def call_left(self) -> float:
        return 60 * self.call_minutes - (self.now() - self.started) - RESERVE if self.call_minutes else float("inf")

    def total_left(self) -> float:
        used = self.before + self.now() - self.started
        return 60 * self.minutes - used - RESERVE if self.minutes else float("inf")

    def write(self, expected: float = 0.0) -> None:
        """Writes down the seconds used, and those that a part is expected to take."""
        write_text(self.file, f"{self.before + self.now() - self.started + expected:.1f}\n")


def run_parts(args: argparse.Namespace, clock: Clock) -> None:
    """Runs the parts that are not measured yet and that fit in the time that is left, and saves after each."""
    for name in args.parts:
        result, seconds = read(args.output_dir, name, args.cpu), 60 * PARTS[name].minutes
        about = f"takes about {PARTS[name].minutes:g} min"
        if result and result["status"] == MEASURED and not args.force:
            print(f"{name:12} measured before", flush=True)
        elif seconds > clock.total_left():
            left = max(0.0, clock.total_left()) / 60
            print(f"{name:12} skipped: {about}, {left:.1f} are left of --minutes {args.minutes}", flush=True)
        elif seconds > clock.call_left():
            left = max(0.0, clock.call_left()) / 60
            print(
                f"{name:12} next: {about}, {left:.1f} are left of --call-minutes {args.call_minutes}; rerun the same "
                "command to continue",
                flush=True,
            )
            break
        else:
            clock.write(seconds)
            try:
                run_part(name, args, min(args.limit, clock.call_left(), clock.total_left()))
            finally:
                clock.write()
            save(args)


def save(args: argparse.Namespace) -> None:
    """Writes the table, and with --copy-to the archive of results and logs."""
    write_text(args.output_dir / SUMMARY, summary(args.output_dir, args.cpu))
    if args.copy_to:
        args.copy_to.mkdir(parents=True, exist_ok=True)
        with replacing(args.copy_to / ARCHIVE) as partial, tarfile.open(partial, "w:gz") as archive:
            for pattern in (SUMMARY, "seconds", "gpu_*.json", "gpu_*.png", "logs/*.log"):
                for file in sorted(args.output_dir.glob(pattern)):
                    archive.add(file, file.relative_to(args.output_dir))


# --- one part ---------------------------------------------------------------------------------------------------------


def run_part(name: str, args: argparse.Namespace, limit: float) -> None:
    """Runs a part for at most `limit` seconds, and prints how it went."""
    setting = Setting(name, args.output_dir, args.cpu)
    setting.result.unlink(missing_ok=True)
    setting.log.parent.mkdir(exist_ok=True)
    print(f"{name:12} runs: {PARTS[name].what} (log: {setting.log})", flush=True)
    command = [sys.executable, "-u", "-m", "benchmarks.gpu_check", "--part", name, "--output-dir", args.output_dir]
    command += ["--parent", os.getpid()]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if args.cpu else {})
    start = time.monotonic()
    with setting.log.open("w") as log:
        process = subprocess.Popen(
            [*map(str, command), *["--cpu"] * args.cpu], cwd=ROOT, env=environment, stdout=log,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=limit)
            reason = f"it ended with {code} and left no result, see {setting.log}"
        except subprocess.TimeoutExpired:
            cause = "--limit" if limit == args.limit else "what was left of --minutes or --call-minutes"
            reason = f"it took longer than {limit:.4g} s ({cause})"
        finally:
            end(process)
            setting.rows = setting.measured_rows()  # all that is left of a part that was ended
            shutil.rmtree(setting.work, ignore_errors=True)
    if not read(args.output_dir, name, args.cpu):
        setting.write(FAILED, reason, time.monotonic() - start)
    result = read(args.output_dir, name, args.cpu)
    because = f": {result['reason']}" if result["reason"] else ""
    print(f"{name:12} {result['status']} in {time.monotonic() - start:.0f} s{because}", flush=True)


def end_with(parent: int) -> None:
    """Ends this process and all that it started once `parent` has ended, which a kill does not tell them."""
    while is_running(parent):
        time.sleep(0.5)
    for started in descendants(os.getpid()):
        send(started, signal.SIGKILL)
    os._exit(1)


def end(process: subprocess.Popen) -> None:
    """Ends a part and everything that it started; a further Ctrl-C kills them at once."""
    started = descendants(process.pid) | {process.pid}
    if process.poll() is not None and len(started) == 1:
        return
    try:
        deadline = time.monotonic() + GRACE
        for part in started:
            send(part, signal.SIGTERM)
        while time.monotonic() < deadline and (process.poll() is None or descendants(process.pid)):
            time.sleep(0.1)
    finally:
        kill(process.pid, started)
        process.wait()


def read(output_dir: Path, name: str, cpu: bool) -> dict[str, Any] | None:
    """A part's result on this kind of device, or None if there is none."""
    try:
        result = json.loads(Setting(name, output_dir, cpu).result.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return result if result["on"] == ("cpu" if cpu else "gpu") else None


# --- the table --------------------------------------------------------------------------------------------------------


def part_table(output_dir: Path, cpu: bool) -> str:
    """One line per part: measured, failed with the reason, or open with the command."""
    lines = ["| part | what | state | seconds |", "|---|---|---|---|"]
    for name, part in PARTS.items():
        result = read(output_dir, name, cpu)
        command = Setting(name, output_dir, cpu).command
        if result is None:
            state = f"open: `{command}`"
        elif result["status"] == NOT_RUN:
            state = f"open, {result['reason']}: `{command}`"
        else:
            state = result["status"] + (f": {result['reason']}" if result["reason"] else "")
        lines.append(f"| {name} | {part.what} | {state.replace('|', '/')} | {number(result and result['seconds'])} |")
    return "\n".join(lines)


def summary(output_dir: Path, cpu: bool) -> str:
    """The parts, the targets, and every part's rows."""
    lines = [
        "# GPU check" if not cpu else "# GPU check, as far as a CPU can run it",
        "",
        part_table(output_dir, cpu),
    ]
    if not cpu:
        lines += ["", "| what | target | measured | status |", "|---|---|---|---|"]
        lines += [target.line(output_dir) for target in GPU_TARGETS]
    for name in PARTS:
        if result := read(output_dir, name, cpu):
            versions, machine = result["environment"]["versions"], result["environment"]["machine"]
            where = f"{machine['gpu'] or machine['cpu']}, torch {versions.get('torch')}, commit "
            lines += ["", f"## {name}", "", where + str(result["environment"]["commit"]), *tables(result["rows"])]
            lines += ["", *(f"![{name}]({figure})" for figure in result["figures"])] if result["figures"] else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
