"""How a CPU run uses its machine: an allocator that keeps its memory, threads that may sleep.

A training step allocates gigabytes and frees them. glibc returns large blocks to the system, which must clear every
page again: one page fault for each 4 KiB that a step uses. PyTorch's threads (OpenMP) spin while they wait for each
other. Alone that is fastest; beside a program that takes a core it is several times slower, because a waiting thread
holds the core that another one needs (docs/clusters.md has the measurements).
"""

import sys
import time
from collections.abc import Collection, Mapping
from ctypes.util import find_library
from pathlib import Path

# The library's name, and the variables that make it keep its memory; the first library that is installed is taken.
# mimalloc comes as a wheel (pyproject.toml); the system must clear its huge pages, which takes longer than they save.
MIMALLOC = "mimalloc"
ALLOCATORS: dict[str, dict[str, str]] = {
    "tcmalloc_minimal": {},
    "tcmalloc": {},
    MIMALLOC: {"MIMALLOC_PURGE_DELAY": "10000", "MIMALLOC_ALLOW_THP": "0"},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
}
POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100"}  # GCC's OpenMP takes the second, others the first
_SAMPLE_SECONDS = 0.3
_SPARE = 0.3  # of a core, which the machine's own services may take


def preloads(environment: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    """The variables that put an installed allocator in glibc's place; empty without one, or where the user chose.

    Args:
        python: the interpreter that will run, whose environment may have the allocator's wheel.
    """
    if "LD_PRELOAD" in environment:
        return {}
    for name, variables in ALLOCATORS.items():
        library = wheels_mimalloc(python) if name == MIMALLOC else find_library(name)
        if library and not {" ", ":"} & set(library):  # either ends a path for the loader
            return {"LD_PRELOAD": library} | {k: v for k, v in variables.items() if k not in environment}
    return {}


def wheels_mimalloc(python: str) -> str | None:
    """The path of mimalloc's library in an interpreter's environment; None without the wheel."""
    found = Path(python).parent.parent.glob("lib/python3*/*-packages/cmeel.prefix/lib/libmimalloc.so.3")
    return next(map(str, found), None)


def wait_policy(environment: Mapping[str, str], threads: int, idle: float) -> dict[str, str]:
    """The variables that let waiting threads sleep, if fewer cores are idle than threads run; empty if the user chose.

    Args:
        environment: may already hold one of these variables: the user's choice.
        threads: number of threads that this machine's ranks will run.
        idle: how many cores nobody uses; may be a fraction.
    """
    chosen = any(name in environment for name in POLICY)
    return {} if chosen or idle >= threads - _SPARE else dict(POLICY)


def idle_cores(cores: Collection[int], stat: Path = Path("/proc/stat"), seconds: float = _SAMPLE_SECONDS) -> float:
    """How many of `cores` nobody uses, averaged over `seconds`; all of them where the system does not tell."""
    try:
        before = _ticks(stat, cores)
        time.sleep(seconds)
        after = _ticks(stat, cores)
    except (OSError, ValueError):
        return float(len(cores))
    total, idle = (new - old for new, old in zip(after, before, strict=True))
    return len(cores) * idle / total if total else float(len(cores))


def _ticks(stat: Path, cores: Collection[int]) -> tuple[int, int]:
    """All ticks of these cores, and those without work (idle, waiting for disks); user time includes guests' time."""
    total = idle = 0
    for line in stat.read_text().splitlines():
        name, *times = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            total += sum(map(int, times[:8]))
            idle += sum(map(int, times[3:5]))
    return total, idle
