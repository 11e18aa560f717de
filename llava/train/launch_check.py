"""Checks that the nodes of a launch fit together, and shows in a table which node is at fault.

It runs before any model is loaded. Several ranks first try their connections over gloo, by which they later agree to
stop. Training over several nodes then makes the table by itself; `CHECK=1 bash scripts/pretrain.sh` runs only the
check, on any number of ranks. One report covers all ranks of a node. What most nodes have counts as right; a node that
differs is at fault. `nccl-tests` measures how fast the links are.
"""

import argparse
import logging
import os
import platform
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from llava.train.ranks import barrier, from_all, from_first, joined
from llava.utils.versions import PACKAGES, git_commit, version_of

logger = logging.getLogger(__name__)

_CONNECT = timedelta(minutes=2)  # for hundreds of ranks, each of which connects to every other


@dataclass
class NodeFacts:
    """What one node reports about itself; gathered from its first rank."""

    node: str
    ranks: int
    versions: dict[str, str]
    commit: str
    paths: dict[str, str]  # "found" or what is wrong
    faults: list[str] = field(default_factory=list)


def node_name() -> str:
    """The launcher's number of this node, and its host name."""
    number = os.environ.get("GROUP_RANK", os.environ.get("CROSS_RANK", "0"))
    return f"{number}:{platform.node()}"


def versions() -> dict[str, str]:
    """The versions of Python, packages, CUDA and NCCL, and the GPUs' name and number."""
    installed = {"python": platform.python_version()} | {
        name: version_of(name) or "none" for name in (*PACKAGES, "safetensors")
    }
    if torch.cuda.is_available():
        installed |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        installed |= {"device": torch.cuda.get_device_name(), "devices": str(torch.cuda.device_count())}
    return installed


def check_paths(inputs: Sequence[str], output_dir: str) -> dict[str, str]:
    """Whether this rank sees the inputs that rank 0 sees, and a file that rank 0 writes to the output folder.

    Every rank must call.

    Returns:
        For each path "found", or what is wrong.
    """
    sizes = {name: Path(name).stat().st_size if Path(name).is_file() else -1 for name in inputs if Path(name).exists()}
    expected = from_first(sizes)
    seen = {name: "found" if name in sizes else "missing here" for name in expected}
    for name in sizes.keys() & expected.keys():
        if sizes[name] != expected[name]:
            seen[name] = f"{sizes[name]} bytes, rank 0 has {expected[name]}"
    token = from_first(secrets.token_hex(8))
    file = Path(output_dir, f".launch-check-{token}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    barrier()
    seen[output_dir] = "found" if file.is_file() and file.read_text() == token else "is not shared with rank 0"
    barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        file.unlink()
    return seen


def gather_facts(inputs: Sequence[str], output_dir: str) -> list[NodeFacts]:
    """Every node's facts, in the order of their ranks. Every rank must call."""
    name, names = node_name(), from_all(node_name())
    paths = check_paths(inputs, output_dir)
    facts = from_all(NodeFacts(name, names.count(name), versions(), git_commit() or "unknown", paths))
    return [facts[names.index(name)] for name in dict.fromkeys(names)]


def judge(nodes: list[NodeFacts]) -> list[NodeFacts]:
    """Adds to every node's `faults` how it differs from most nodes; returns the nodes."""

    def usual(values: Sequence) -> object:
        return Counter(values).most_common(1)[0][0]

    for node in nodes:
        for name in nodes[0].versions:
            value, right = node.versions.get(name), usual([n.versions.get(name) for n in nodes])
            if value != right:
                node.faults.append(f"{name} {value}, others have {right}")
        if node.commit != (right := usual([n.commit for n in nodes])):
            node.faults.append(f"commit {node.commit}, others have {right}")
        if node.ranks != (right := usual([n.ranks for n in nodes])):
            node.faults.append(f"{node.ranks} ranks, others have {right}")
        node.faults += [f"{path}: {seen}" for path, seen in node.paths.items() if seen != "found"]
    return nodes


def facts_table(nodes: list[NodeFacts]) -> str:
    """The table: one line per node, and its faults below it."""
    lines = [f"{'node':<24} {'ranks':>5} {'commit':<20}  verdict"]
    for n in nodes:
        lines.append(f"{n.node:<24} {n.ranks:>5} {n.commit:<20}  {'AT FAULT' if n.faults else 'ok'}")
        lines += [f"    {fault}" for fault in n.faults]
    return "\n".join(lines)


def chosen_interface(backend: str) -> str:
    """The variable by which a backend chooses this host's network interface, with its value."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    return f"{variable}={os.environ.get(variable, '')}"


def names_over_gloo(timeout: timedelta = _CONNECT) -> list[str]:
    """Every rank's node, gathered over gloo, which the ranks use besides NCCL. Every rank must call.

    Raises:
        RuntimeError: this rank cannot reach the others; the message names host, interface and variable.
    """
    if not joined():
        return [node_name()]
    names, ranks = [""] * dist.get_world_size(), torch.ones(())
    try:
        group = dist.new_group(backend="gloo", timeout=timeout)
        dist.all_reduce(ranks, group=group)
        dist.all_gather_object(names, node_name(), group=group)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(
            f"launch check: host {platform.node()}, rank {dist.get_rank()}: no connection to all {len(names)} ranks "
            f"over gloo within {timeout.total_seconds():g} s ({reason}); interface: {chosen_interface('GLOO')}"
        ) from error
    assert isinstance(group, dist.ProcessGroup)  # of all ranks, so this one is in it
    dist.destroy_process_group(group)
    return names


def spans_nodes() -> bool:
    """Whether this run has more than one node. Every rank must call.

    Raises:
        RuntimeError: the ranks cannot reach each other.
    """
    return len(set(names_over_gloo())) > 1


def check_launch(inputs: Sequence[str | None], output_dir: str, device: torch.device) -> None:
    """Checks the nodes and logs the table on rank 0. Every rank must call.

    Args:
        inputs: paths that every node should see; None and empty ones are left out.
        output_dir: the folder that the nodes must share.
        device: this rank's device, on which all ranks meet in one all-reduce.

    Raises:
        RuntimeError: a node is at fault; raised on every rank, with the table.
    """
    try:
        nodes = judge(gather_facts([name for name in inputs if name], output_dir))
        ranks = torch.ones((), device=device)
        if joined():
            dist.all_reduce(ranks)
        met = int(ranks.item())  # waits for the others
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(
            f"launch check: host {platform.node()}: the ranks do not reach each other over {dist.get_backend()} "
            f"({reason}); interface: {chosen_interface(dist.get_backend())}; NCCL_DEBUG=INFO shows what NCCL does"
        ) from error
    table = facts_table(nodes)
    if bad := [n.node for n in nodes if n.faults]:
        raise RuntimeError(f"launch check: {', '.join(bad)} at fault\n{table}")
    logger.info("launch check: all-reduce over %d ranks\n%s", met, table)


def main() -> int:
    """Runs only the check, under any launcher; reads the paths from the trainer's flags and ignores the other flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    paths = ("--model_name_or_path", "--vision_tower", "--data_path", "--image_folder", "--pretrain_mm_mlp_adapter")
    for name in paths:
        parser.add_argument(name, default="")
    parser.add_argument("--output_dir", default=".")
    args, _ = parser.parse_known_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if int(os.environ.get("RANK", 0)) != 0:
        logger.setLevel(logging.WARNING)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else None
    if device:
        torch.cuda.set_device(device)
    try:
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if device else "gloo")
        names_over_gloo()
        inputs = [path for name in paths for path in getattr(args, name[2:]).split(",")]
        check_launch(inputs, args.output_dir, device or torch.device("cpu"))
    except RuntimeError as error:
        # A table is the same on every rank; a message about a connection concerns one rank alone.
        if int(os.environ.get("RANK", 0)) == 0 or "\n" not in str(error):
            print(error, file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
