"""How a CPU run uses its machine: an allocator that keeps its memory, MKL's fast kernels, threads that may sleep.

A training step allocates gigabytes and frees them. glibc returns large blocks to the system, which must clear every
page again: one page fault for each 4 KiB that a step uses. MKL, from which PyTorch's wheels take fp32 products and
fp32 attention, keeps its kernels for AVX2 and AVX-512 from AMD's CPUs: products take up to twice as long. PyTorch's
threads (OpenMP) spin while they wait for each other. Alone that is fastest; beside a program that takes a core it is
several times slower, because a waiting thread holds the core that another one needs (docs/clusters.md has the
measurements).
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from ctypes.util import find_library
from pathlib import Path

from llava.utils.files import replacing

# The library's name, and the variables that make it keep its memory; the first library that is installed is taken.
# mimalloc comes as a wheel (pyproject.toml); the system must clear its huge pages, which takes longer than they save.
MIMALLOC = "mimalloc"
ALLOCATORS: dict[str, dict[str, str]] = {
    "tcmalloc_minimal": {},
    "tcmalloc": {},
    MIMALLOC: {"MIMALLOC_PURGE_DELAY": "10000", "MIMALLOC_ALLOW_THP": "0"},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
}
# MKL calls this function and chooses its kernels by the answer.
_MKL_ANSWER = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
_MKL_LIBRARY = "libmkl_as_on_intel.so"
POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100"}  # GCC's OpenMP takes the second, others the first
_SAMPLE_SECONDS = 0.3
_SPARE = 0.3  # of a core, which the machine's own services may take


def preloads(environment: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    """The variables that load what makes a CPU run faster: an allocator, MKL's kernels; empty where the user chose.

    Args:
        python: the interpreter that will run, whose environment may have the allocator's wheel.
    """
    if "LD_PRELOAD" in environment:
        return {}
    variables = keeping_allocator(environment, python)
    libraries = [variables.pop("LD_PRELOAD", None), mkl_as_on_intel(environment)]
    # The loader takes a space or a colon for the end of a path.
    loadable = [library for library in libraries if library and not {" ", ":"} & set(library)]
    return variables | ({"LD_PRELOAD": ":".join(loadable)} if loadable else {})


def keeping_allocator(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """The variables that put an installed allocator in glibc's place; empty without one."""
    for name, variables in ALLOCATORS.items():
        if library := wheels_mimalloc(python) if name == MIMALLOC else find_library(name):
            return {"LD_PRELOAD": library} | {k: v for k, v in variables.items() if k not in environment}
    return {}


def wheels_mimalloc(python: str) -> str | None:
    """The path of mimalloc's library in an interpreter's environment; None without the wheel."""
    found = Path(python).parent.parent.glob("lib/python3*/*-packages/cmeel.prefix/lib/libmimalloc.so.3")
    return next(map(str, found), None)


def mkl_as_on_intel(environment: Mapping[str, str], cpu: Path = Path("/proc/cpuinfo")) -> str | None:
    """The path of a library with which MKL takes on AMD's CPUs the kernels that it has for Intel's.

    It is compiled once into the user's cache. None on other CPUs, on AMD's without AVX2, without a C compiler, and
    where ATEN_CPU_CAPABILITY makes PyTorch itself do without the CPU's widest instructions.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    try:
        library = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llava", _MKL_LIBRARY)
        words = set(cpu.read_text().split())
        widest = "avx512" if "avx512f" in words else "avx2"
        wanted = environment.get("ATEN_CPU_CAPABILITY", widest) == widest
        if not wanted or not {"AuthenticAMD", "avx2"} <= words or not (library.is_file() or compiler):
            return None
        if not library.is_file():
            library.parent.mkdir(parents=True, exist_ok=True)
            with replacing(library, contended=True) as partial:
                command = [str(compiler), "-shared", "-fPIC", "-x", "c", "-o", str(partial), "-"]
                subprocess.run(command, input=_MKL_ANSWER, text=True, check=True, capture_output=True)
    except (OSError, RuntimeError, subprocess.CalledProcessError):  # no home, a full disk, a compiler without headers
        return None
    return str(library)


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
