"""What every benchmark shares: where it ran, how runs alternate, and where its numbers go.

A result is `results/<name>.json`: `{"name", "environment", ...meta, "rows": [...]}`. The files are committed, because
docs/performance.md is generated from them.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llava.utils.files import write_json, write_text
from llava.utils.machine import own_cores, processor
from llava.utils.versions import code_digest, git_commit, version_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
QUICK_RESULTS = ROOT / "outputs/benchmarks"
"""Where `--quick` writes: its few short runs are no figures for docs/performance.md."""
COMMIT_NOTE = "commit.txt"
SOURCES = (
    "benchmarks/**/*.py", "benchmarks/models/*.json", "deepspeed_configs/*.json", "llava/**/*.py", "playground/**/*.py",
    "scripts/**/*.sh", "tests/**/*.py",
)  # fmt: skip
"""What a figure may depend on; a noted commit is that of a copy only if these are the same."""
_PACKAGES = (
    "torch", "transformers", "tokenizers", "accelerate", "deepspeed", "numpy", "pillow", "pyarrow",
    "flash-attn", "liger-kernel",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Machine, versions and commit, without names of hosts, users or folders."""
    return {
        "machine": {
            "cpu": processor(),
            "cores": len(own_cores()),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": _gpu_name(),
            "system": platform.system(),
        },
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "versions": {"python": platform.python_version()} | package_versions(_PACKAGES),
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of this tree; in a copy without .git the noted one beside WHEELS, unless the sources have changed."""
    # Benchmarks write the results themselves, so a change there does not change the measured code.
    if known := git_commit(ignored=("benchmarks/results", "docs")):
        return known
    note = ROOT / os.environ.get("WHEELS", "") / COMMIT_NOTE
    noted, _, digest = (note.read_text(encoding="utf-8") if note.is_file() else "").strip().partition(" ")
    return noted if digest == code_digest(SOURCES) else None


def write_commit(folder: Path) -> None:
    """Notes this tree's commit and the digest of its sources in `folder`; nothing if the commit is unknown."""
    if known := commit():
        write_text(folder / COMMIT_NOTE, f"{known} {code_digest(SOURCES)}\n")


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """The installed versions of `names`; what is not installed is left out."""
    return {name: version for name in names if (version := version_of(name))}


def add_result_flags(parser: argparse.ArgumentParser, quick: str) -> None:
    """Adds `--output-dir` and `--quick`, whose help starts with `quick`, for `result_folder`."""
    folder = "folder of the result file; default benchmarks/results, with --quick outputs/benchmarks"
    parser.add_argument("--output-dir", type=Path, help=folder)
    parser.add_argument("--quick", action="store_true", help=f"{quick}; the page's figures stay")


def result_folder(args: argparse.Namespace) -> Path:
    """Where the flags of `add_result_flags` send the result."""
    return args.output_dir or (QUICK_RESULTS if args.quick else RESULTS)


def check_warmup(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program unless `--warmup-steps`, whose time is left out, leave some of `--steps` to be timed."""
    if args.warmup_steps >= args.steps:
        parser.error(f"--steps {args.steps}: expected more than --warmup-steps ({args.warmup_steps})")


def emptied(folder: Path) -> Path:
    """The folder's absolute path; it is made, or what an earlier benchmark left in it is removed.

    Raises:
        SystemExit: it holds something that no benchmark wrote, such as a home folder's files.
    """
    folder = folder.resolve()
    mark = folder / ".made-by-a-benchmark"
    if folder.exists() and not mark.is_file() and (folder.is_file() or any(folder.iterdir())):
        raise SystemExit(f"error: {folder} holds what no benchmark wrote; remove it, or give a new folder by --work")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.touch()
    return folder


def write_result(name: str, rows: Sequence[Mapping[str, Any]], folder: Path, **meta: Any) -> Path:
    """Writes `<folder>/<name>.json` and returns its path.

    Args:
        name: name of the benchmark, with a suffix if results of several machines or sizes are kept, as in
            `train_step_h200`.
        rows: the measurements, each a flat mapping of names (with units, as in `peak_mib`) to numbers or text.
        folder: folder of the file, by `result_folder` where a benchmark has its flags.
        meta: anything else that a reader needs to repeat the run, such as flags, or how the inputs were made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    result = {"name": name, "environment": environment(), **meta, "rows": list(rows)}
    write_json(path, result)
    return path


def preloaded_names(environment: Mapping[str, str]) -> str:
    """The names of the libraries that LD_PRELOAD loads, for a result; empty without any."""
    return ", ".join(Path(path).name for path in environment.get("LD_PRELOAD", "").split(":") if path)


def alternate(arms: Mapping[str, Callable[[], float]], repeats: int, warmup: int = 0) -> dict[str, list[float]]:
    """The values of every arm, measured in turns (a b a b ...), so that a machine that slows down slows all of them.

    Args:
        arms: a function for the name of each arm; it runs the arm once and returns its number.
        repeats: values per arm.
        warmup: rounds that come first and whose values are dropped.
    """
    values: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(warmup + repeats):
        for name, run in arms.items():
            value = float(run())
            if number >= warmup:
                values[name].append(value)
    return values


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of `values`."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of the ratio in each round, `over[i] / under[i]`."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def run_json(command: Sequence[str | Path], **kwargs: Any) -> Any:
    """What a command prints on its last line, read as JSON.

    Raises:
        RuntimeError: the command failed, or its last line is not JSON; the message shows the end of what it printed.
    """
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)
    lines = done.stdout.strip().splitlines()
    try:
        if done.returncode == 0 and lines:
            return json.loads(lines[-1])
    except json.JSONDecodeError:
        pass
    printed = (done.stdout + done.stderr).strip()[-3000:]
    raise RuntimeError(
        f"{' '.join(map(str, command))} ended with {done.returncode}; expected JSON on its last line, found:\n{printed}"
    )


def _gpu_name() -> str | None:
    torch = sys.modules.get("torch")  # a benchmark that does not use torch need not load it for this
    if torch is None or not torch.cuda.is_available():
        return None
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
