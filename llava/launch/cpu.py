"""How a CPU run shares its machine: an allocator that keeps its memory, and threads that sleep beside other work.

A training step allocates gigabytes and frees them. glibc returns large blocks to the system, which must clear every
page again: one page fault for each 4 KiB that a step uses. PyTorch's threads (OpenMP) spin while they wait for each
other. Alone that is fastest; beside a program that takes a core it is several times slower, because a waiting thread
holds the core that another one needs (docs/clusters.md has both measurements).
"""

import time
from collections.abc import Collection, Mapping
from ctypes.util import find_library
from pathlib import Path

# The library's name, and the variables that make it keep its memory; the first library that is installed is taken.
ALLOCATORS: dict[str, dict[str, str]] = {
    "tcmalloc_minimal": {},
    "tcmalloc": {},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
}
POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100"}  # GCC's OpenMP takes the second, others the first
_SAMPLE_SECONDS = 0.3
_SPARE = 0.3  # of a core, which the machine's own services may take


def keeping_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that put an installed allocator in glibc's place; empty without one, or where the user chose."""
    if "LD_PRELOAD" in environment:
        return {}
    for name, variables in ALLOCATORS.items():
        if library := find_library(name):
            return {"LD_PRELOAD": library} | {k: v for k, v in variables.items() if k not in environment}
    return {}


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
