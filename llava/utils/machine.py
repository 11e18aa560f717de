"""The processor and the cores that this process has."""

import math
import os
import platform
from pathlib import Path


def machine() -> str:
    """The processor and the number of its cores."""
    return f"{processor()}, {available_cores()} cores"


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def available_cores() -> int:
    """Number of cores that this process may use, by its affinity and the container's quota."""
    cores = len(own_cores())
    return max(1, min(cores, math.ceil(cpu_quota() or cores)))


def own_cores() -> set[int]:
    """Numbers of the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that the container gets, or None where nothing limits it."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()  # version 1, where -1 is no limit
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return int(quota) / int(period) if quota.strip().isdecimal() else None
