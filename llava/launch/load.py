"""Whether other programs use this machine's cores, and what a CPU run does about it.

PyTorch's threads (OpenMP) spin while they wait for each other. Alone that is fastest; beside a program that takes a
core it is many times slower, because a waiting thread holds the core that another one needs.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import Path

POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100"}  # GCC's OpenMP takes the second, others the first
_SAMPLE_SECONDS = 0.3
_SPARE = 0.3  # of a core, which the machine's own services may take


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
