"""How many nodes and devices a run has (GPUs, CPU ranks, hostfile), and what this machine can do."""

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llava.launch.settings import Refusal, whole_number

SHARED_MEMORY_OF_RANK = 64  # MiB; Docker's default for a whole container, however many ranks it has


@dataclass(frozen=True)
class Devices:
    """`ranks` on each of `nodes`, one per device; a device is a GPU or, on the CPU, a share of the cores."""

    nodes: int
    ranks: int
    on_gpu: bool

    @property
    def total(self) -> int:
        return self.nodes * self.ranks

    @property
    def variable(self) -> str:
        """The variable that says how many ranks a node has."""
        return "NUM_GPUS" if self.on_gpu else "CPU_RANKS"

    @property
    def settings(self) -> str:
        """The two numbers with their variables."""
        return f"NNODES={self.nodes} x {self.variable}={self.ranks}"

    def __str__(self) -> str:
        unit = "GPU" if self.on_gpu else "CPU rank"
        return f"{self.total} = {count_of(self.nodes, 'node')} x {count_of(self.ranks, unit)}"


def count_of(number: int, noun: str) -> str:
    """The number with its noun, as in `1 node` or `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def resolve_devices(environment: Mapping[str, str]) -> Devices:
    """The devices that the variables ask for, or else those that are here.

    Raises:
        Refusal: a count is not a number, the hostfile gives none, or SLURM gave this node fewer GPUs.
    """
    nodes, gpus = environment.get("NNODES", ""), environment.get("NUM_GPUS", "")
    if hostfile := environment.get("HOSTFILE", ""):
        nodes, gpus = read_hostfile(hostfile, nodes, gpus)
    nodes_number = whole_number("NNODES", nodes or "1", 1)
    gpus_number = whole_number("NUM_GPUS", gpus, 0) if gpus else count_gpus(environment)
    allocated = environment.get("SLURM_GPUS_ON_NODE", "")  # of this task's own node
    if allocated.isdecimal() and gpus_number > int(allocated):
        raise Refusal(
            f"NUM_GPUS={gpus_number}, but SLURM gave {socket.gethostname()} SLURM_GPUS_ON_NODE={allocated}; "
            "every node needs the same number: sbatch --gpus-per-node=..., or set NUM_GPUS"
        )
    cpu_ranks = whole_number("CPU_RANKS", environment.get("CPU_RANKS") or "1", 1)
    return Devices(nodes_number, gpus_number or cpu_ranks, gpus_number > 0)


def read_hostfile(name: str, nodes: str = "", gpus: str = "") -> tuple[str, str]:
    """Nodes and GPUs per node from lines like `host slots=8`; a count that is not empty stays as it is.

    Raises:
        Refusal: there is no such file or line, or hosts have different slots.
    """
    if not Path(name).is_file():
        if nodes and gpus:
            return nodes, gpus  # enough for a dry run, which lists the file as missing
        raise Refusal(f"HOSTFILE={name} does not exist; give a file with lines 'host slots=8'")
    slots = re.findall(r"^[^#\n]*\sslots=(\d+)", Path(name).read_text(), re.MULTILINE)
    if not slots:
        raise Refusal(f"HOSTFILE={name} has no line 'host slots=8'")
    if not gpus and len(set(slots)) > 1:
        raise Refusal(f"HOSTFILE={name} has hosts with different slots; set NUM_GPUS to what each node should use")
    return nodes or str(len(slots)), gpus or slots[0]


def count_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that this machine shows to a program."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return sum(name not in ("", "-1") for name in environment["CUDA_VISIBLE_DEVICES"].split(","))
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, env=dict(environment))
        return len(re.findall(r"^GPU", done.stdout, re.MULTILINE))
    except OSError:  # a container may have the devices without the tool
        return len(list(Path("/dev").glob("nvidia[0-9]*")))


def gpu_memory(environment: Mapping[str, str]) -> int | None:
    """Memory in GiB of the smallest GPU that `nvidia-smi` lists, or None where it lists none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, env=dict(environment))
    except OSError:
        return None
    mebibytes = re.findall(r"^\s*(\d+)\s*$", done.stdout, re.MULTILINE)
    return round(min(map(int, mebibytes)) / 1024) if mebibytes else None


def memory_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the container may still allocate, its page cache counted as free; None where nothing limits it."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "file"),  # version 2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_cache"),  # version 1
    ):
        try:
            left = int((cgroup / limit).read_text()) - int((cgroup / used).read_text())  # no number: no limit
            stat = dict(line.split() for line in (cgroup / limit).with_name("memory.stat").read_text().splitlines())
            return left + int(stat[cache])
        except (OSError, ValueError, KeyError):
            continue
    return None


def shared_memory_note(ranks: int, workers: int, folder: str = "/dev/shm") -> str:
    """A note where a node's shared memory is too small for the batches of its ranks' loader processes; else empty."""
    try:
        mebibytes = shutil.disk_usage(folder).total // 2**20
    except OSError:  # a system without it
        return ""
    if not workers or mebibytes > SHARED_MEMORY_OF_RANK * ranks:
        return ""
    return (
        f"note: {folder} has {mebibytes} MiB, through which {ranks} x {workers} loader processes hand over batches; "
        "when it is full they die (Bus error). Start the container with --shm-size=16g or --ipc=host, or set "
        "NUM_WORKERS=0"
    )


def has_bf16_instructions() -> bool:
    """Whether the CPU computes in bf16 itself; one that does not is several times slower in it than in fp32."""
    try:
        return bool(re.search("avx512_bf16|amx_bf16", Path("/proc/cpuinfo").read_text()))
    except OSError:
        return False
