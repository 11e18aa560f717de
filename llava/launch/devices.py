"""How many nodes and devices a run has, what this machine can do, and the batch that the devices share."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llava.launch.settings import Refusal, whole_number
from llava.utils.machine import processor

_ENOUGH_TO_BE_EVEN = 8  # samples of a step per device, as measured by python -m benchmarks.scaling


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
    def settings(self) -> str:
        """The two numbers with their variables."""
        return f"NNODES={self.nodes} x {'NUM_GPUS' if self.on_gpu else 'CPU_RANKS'}={self.ranks}"

    def __str__(self) -> str:
        unit = "GPU" if self.on_gpu else "CPU rank"
        return f"{self.total} = {count_of(self.nodes, 'node')} x {count_of(self.ranks, unit)}"


def count_of(number: int, noun: str) -> str:
    """The number with its noun, as in `1 node` or `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def resolve_devices(environment: Mapping[str, str]) -> Devices:
    """The devices that the variables ask for, or else those that are here; raises Refusal where they cannot be."""
    nodes, gpus = environment.get("NNODES", ""), environment.get("NUM_GPUS", "")
    if hostfile := environment.get("HOSTFILE", ""):
        nodes, gpus = read_hostfile(hostfile, nodes, gpus)
    nodes_number = whole_number("NNODES", nodes or "1", 1)
    gpus_number = whole_number("NUM_GPUS", gpus, 0) if gpus else count_gpus(environment)
    allocated = environment.get("SLURM_GPUS_ON_NODE", "")  # of this task's own node
    if allocated.isdecimal() and gpus_number > int(allocated):
        raise Refusal(
            f"NUM_GPUS={gpus_number}: SLURM gave this node SLURM_GPUS_ON_NODE={allocated}; give all nodes the same"
        )
    cpu_ranks = whole_number("CPU_RANKS", environment.get("CPU_RANKS") or "1", 1)
    return Devices(nodes_number, gpus_number or cpu_ranks, gpus_number > 0)


def read_hostfile(name: str, nodes: str = "", gpus: str = "") -> tuple[str, str]:
    """Nodes and GPUs per node from lines like `host slots=8`; a count that is not empty stays as it is."""
    text = Path(name).read_text() if Path(name).is_file() else ""
    slots = re.findall(r"^[^#\n]*\sslots=(\d+)", text, re.MULTILINE)
    if nodes and gpus and not text:
        return nodes, gpus  # a missing file is listed with the inputs
    if not slots:
        raise Refusal(f"HOSTFILE={name} is not a file with lines 'host slots=8'")
    if nodes and whole_number("NNODES", nodes, 1) > len(slots):  # DeepSpeed would train on fewer nodes
        raise Refusal(f"NNODES={nodes}, but HOSTFILE={name} has {count_of(len(slots), 'host')}")
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


def memory_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the container may still allocate, its page cache counted as free; None where nothing limits it."""
    try:
        left = int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return left + int(stat["file"])
    except (OSError, ValueError, KeyError):  # `max` is no number: no limit
        return None


def has_bf16_instructions() -> bool:
    """Whether the CPU computes in bf16 itself; one that does not is several times slower in it than in fp32."""
    return processor().endswith("bf16")


# --- the batch: accumulation = GLOBAL_BATCH / (per-device batch x devices) ---


@dataclass(frozen=True)
class Batch:
    """Samples of a device's micro-batch, micro-batches of a step, and the number of devices."""

    per_device: int
    accumulation: int
    devices: int

    @property
    def total(self) -> int:
        return self.per_device * self.accumulation * self.devices

    @property
    def length_group_window(self) -> int:
        """What `--length_group_window auto` means: 1, LLaVA's random batches, if a device has many samples; else 16."""
        return 1 if self.per_device * self.accumulation >= _ENOUGH_TO_BE_EVEN else 16

    def __str__(self) -> str:
        return f"{self.total} = {self.devices} x {self.per_device} x {self.accumulation}"


def resolve_batch(devices: Devices, global_batch: str, per_device: str, accumulation: str = "") -> Batch:
    """The batch; where `accumulation` is given it decides, and the global batch follows.

    `per_device` may be `auto`, a device's whole share at once. Raises Refusal where the global batch does not divide.
    """
    total = whole_number("GLOBAL_BATCH", global_batch, 1)
    if accumulation:
        steps = whole_number("--gradient_accumulation_steps", accumulation, 1)
        size = str(max(1, total // (devices.total * steps))) if per_device == "auto" else per_device
        return Batch(whole_number("PER_DEVICE_BATCH", size, 1), steps, devices.total)
    if per_device == "auto":
        per_device = str(total // devices.total if total % devices.total == 0 else 1)
    size = whole_number("PER_DEVICE_BATCH", per_device, 1)
    steps, rest = divmod(total, size * devices.total)
    if rest:
        sizes = [n for n in range(1, total + 1) if total % (n * devices.total) == 0]
        raise Refusal(
            f"GLOBAL_BATCH={total} is not a multiple of {size * devices.total} = {devices.settings} x "
            f"PER_DEVICE_BATCH={size}; change one of them (PER_DEVICE_BATCH: "
            f"{' '.join(map(str, sizes)) or f'none, {total} is not a multiple of {devices.total}'})"
        )
    return Batch(size, steps, devices.total)
