"""The processor and the cores that this process has."""

import math
import os
import platform
from pathlib import Path

# What a step's speed depends on, the fastest first; a processor's name may be "AMD EPYC" and no more.
INSTRUCTIONS = {"amx_bf16": "AMX bf16", "avx512_bf16": "AVX-512 bf16", "avx512f": "AVX-512", "avx2": "AVX2"}


def machine() -> str:
    """The processor and the number of its cores."""
    return f"{processor()}, {available_cores()} cores"


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, and the widest of `INSTRUCTIONS` that it has."""
    lines = info.read_text().splitlines() if info.is_file() else []
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = values.get("model name") or platform.processor() or platform.machine()
    flags = values.get("flags", "").split()
    widest = next((words for flag, words in INSTRUCTIONS.items() if flag in flags), None)
    return f"{name} with {widest}" if widest else name


def available_cores() -> int:
    """Number of cores that this process may use, by its affinity and the container's quota."""
    cores = len(own_cores())
    return max(1, min(cores, math.ceil(cpu_quota() or cores)))


def own_cores() -> set[int]:
    """Numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Cores' worth of time that the container gets, or None where nothing limits it."""
    try:
        quota, period = map(float, file.read_text().split())
    except (OSError, ValueError):  # no such file, or `max`
        return None
    return quota / period
