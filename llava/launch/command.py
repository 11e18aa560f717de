"""What starts the trainer: the launcher, its options, and the variables that are set for it."""

import os
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from llava.launch.devices import Devices
from llava.launch.settings import Refusal, one_of, whole_number
from llava.utils.paths import CODE, ROOT

LAUNCHERS = ("auto", "python", "deepspeed", "torchrun")
MEETING_PORT = 29500  # torchrun's own default
MIMALLOC = "mimalloc"
# glibc returns large blocks to the system, which must clear every page again when the next step takes it. The library's
# name, and the variables that make it keep its memory; the first library that is installed is taken. mimalloc comes as
# a wheel (pyproject.toml); the system must clear its huge pages, which takes longer than they save.
ALLOCATORS: dict[str, dict[str, str]] = {
    "tcmalloc_minimal": {},
    "tcmalloc": {},
    MIMALLOC: {"MIMALLOC_PURGE_DELAY": "10000", "MIMALLOC_ALLOW_THP": "0"},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
}


@dataclass(frozen=True)
class Launch:
    """The command up to the trainer's entry: `words` after `environment`."""

    launcher: str
    environment: dict[str, str]
    words: tuple[str, ...]

    def command(self) -> list[str]:
        """The words of a command that also sets the variables."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [*(["env", *variables] if variables else []), *self.words]


def resolve_launch(
    environment: Mapping[str, str], devices: Devices, deepspeed: str, run_name: str, python: str, cores: int
) -> Launch:
    """How `python` starts the trainer on `cores` cores; raises Refusal where variables contradict each other."""
    restarts = whole_number("MAX_RESTARTS", environment.get("MAX_RESTARTS") or "0", 0)
    launcher = choose_launcher(environment, devices, deepspeed, restarts)
    if not devices.on_gpu and devices.total > 1 and not deepspeed:
        # The Trainer joins CPU ranks only under DeepSpeed; otherwise each would quietly train a model of its own.
        raise Refusal(
            f"{devices.total} CPU ranks need DeepSpeed; set DEEPSPEED_CONFIG to one of: {deepspeed_configs()}, "
            "or CPU_RANKS=1"
        )
    if launcher == "python" and (devices.total > 1 or deepspeed):
        raise Refusal(
            f"LAUNCHER=python starts one process without DeepSpeed, not {devices.settings} with {deepspeed!r}"
        )
    words = {
        "python": list,
        "deepspeed": lambda: deepspeed_words(environment, devices),
        "torchrun": lambda: torchrun_words(environment, devices, restarts, run_name),
    }[launcher]()
    return Launch(launcher, added_environment(environment, devices, launcher, restarts, cores), (python, *words))


def choose_launcher(environment: Mapping[str, str], devices: Devices, deepspeed: str, restarts: int) -> str:
    """LAUNCHER, or the one that fits; raises Refusal where there is none such, or MAX_RESTARTS needs another one."""
    chosen = one_of("LAUNCHER", environment.get("LAUNCHER") or "auto", LAUNCHERS)
    hostfile = environment.get("HOSTFILE")
    if restarts and (hostfile or chosen not in ("auto", "torchrun")):
        raise Refusal(f"MAX_RESTARTS={restarts} needs LAUNCHER=torchrun and no HOSTFILE: others start a rank only once")
    if chosen != "auto":
        return chosen
    if restarts or (devices.nodes > 1 and not hostfile):
        return "torchrun"
    if devices.total == 1 and not (deepspeed or hostfile):
        return "python"
    if hostfile:
        return "deepspeed"
    # deepspeed --num_gpus would ignore CUDA_VISIBLE_DEVICES and take the first GPUs.
    return "torchrun" if devices.on_gpu and environment.get("CUDA_VISIBLE_DEVICES") else "deepspeed"


def added_environment(
    environment: Mapping[str, str], devices: Devices, launcher: str, restarts: int, cores: int
) -> dict[str, str]:
    """The variables that the launcher is started with."""
    added = {}
    if environment.get("LLAVA_PYTHON"):  # where the package is not installed
        added["PYTHONPATH"] = ":".join(filter(None, [str(CODE), environment.get("PYTHONPATH", "")]))
    if not devices.on_gpu:
        added |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    elif launcher == "python":  # with more in sight the Trainer would use DataParallel
        added["CUDA_VISIBLE_DEVICES"] = (environment.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    # CPU ranks compute in these threads, and so does the Adam of offload, for which torchrun would leave one.
    added["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS") or str(max(1, cores // devices.ranks))
    if restarts:  # the store that torchrun shares with its ranks has addresses of dead ones (pytorch#135712)
        added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return added


def deepspeed_words(environment: Mapping[str, str], devices: Devices) -> list[str]:
    """DeepSpeed's launcher, over the hosts of HOSTFILE or on this node."""
    words = ["-m", "deepspeed.launcher.runner"]  # what the deepspeed program runs
    port, visible = environment.get("MASTER_PORT", ""), environment.get("CUDA_VISIBLE_DEVICES", "")
    if hostfile := environment.get("HOSTFILE"):
        words += ["--hostfile", hostfile, "--num_nodes", str(devices.nodes)]
        words += ["--num_gpus", str(devices.ranks if devices.on_gpu else 0)]
        if devices.nodes > 1:  # at its default level DeepSpeed prints the command with all variables, tokens included
            words += ["--log_level", "warning"]
        if address := environment.get("MASTER_ADDR"):
            words += ["--master_addr", address]
        return words + (["--master_port", port] if port else [])
    if devices.nodes > 1:
        raise Refusal(f"LAUNCHER=deepspeed with NNODES={devices.nodes} needs HOSTFILE; or use LAUNCHER=torchrun")
    if devices.on_gpu and visible:
        raise Refusal(f"deepspeed --num_gpus ignores CUDA_VISIBLE_DEVICES={visible}; unset it or use LAUNCHER=torchrun")
    words += ["--num_gpus" if devices.on_gpu else "--num_accelerators", str(devices.ranks)]
    return [*words, "--master_port", port or str(MEETING_PORT + os.getpid() % 500)]  # jobs on a machine differ


def torchrun_words(environment: Mapping[str, str], devices: Devices, restarts: int, run_name: str) -> list[str]:
    """PyTorch's launcher on this node, which meets the other nodes at MASTER_ADDR."""
    words = ["-m", "torch.distributed.run"]  # what the torchrun program runs
    again = ["--max_restarts", str(restarts)] if restarts else []
    if devices.nodes == 1:
        return [*words, "--standalone", "--nproc_per_node", str(devices.ranks), *again]
    node, port = node_rank(environment), environment.get("MASTER_PORT") or str(MEETING_PORT)
    if node and int(node) >= devices.nodes:
        raise Refusal(f"NODE_RANK={node}: expected 0 to {devices.nodes - 1} with NNODES={devices.nodes}")
    address = environment.get("MASTER_ADDR") or "MASTER_ADDR"
    words += ["--nnodes", str(devices.nodes), "--nproc_per_node", str(devices.ranks)]
    if not restarts:
        return [*words, "--node_rank", node or "NODE_RANK", "--master_addr", address, "--master_port", port]
    # Nodes find each other again after a restart, whatever their numbers were.
    name = environment.get("RDZV_ID") or environment.get("SLURM_JOB_ID") or run_name
    words += [*again, "--rdzv_backend", "c10d", "--rdzv_id", name, "--rdzv_endpoint", f"{address}:{port}"]
    # Without a number torchrun guesses by host name which node is the endpoint.
    return words + (["--rdzv_conf", f"is_host={int(node == '0')}"] if node else [])


def node_rank(environment: Mapping[str, str]) -> str:
    """The number of this node that NODE_RANK or SLURM gives; empty where neither does."""
    number = environment.get("NODE_RANK") or environment.get("SLURM_NODEID") or ""
    return str(whole_number("NODE_RANK", number, 0)) if number else ""


def deepspeed_configs() -> str:
    """The names of the DeepSpeed configurations that ship, separated by spaces."""
    return " ".join(sorted(f"deepspeed_configs/{path.name}" for path in (ROOT / "deepspeed_configs").glob("*.json")))


def preloads(environment: Mapping[str, str], python: str = sys.executable) -> dict[str, str]:
    """The variables that put an allocator, of the system or of `python`'s environment, in glibc's place.

    Empty without one, or where the user chose.
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
