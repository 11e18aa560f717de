"""The run of `tests/nightly/chaos/two_nodes.sh`, in the first host's network namespace."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tiny_models import write_tiny

from chaos.faults import COMMON, ROOT, WORK, Run, same_weights, settings

BOUND = 90.0  # seconds from a lost link to the end of both hosts: the limit without progress, and then some


def start(folder: Path, chaos: dict | None = None, **more: Any) -> list[Run]:
    """The same command on both hosts, one rank each."""
    processes, outputs = [], [WORK / f"node{node}.txt" for node in (0, 1)]
    for node, enter in enumerate(([], ["nsenter", "--target", os.environ["OTHER_HOST"], "--net", "--uts"])):
        nodes = {"NNODES": 2, "NODE_RANK": node, "MASTER_ADDR": "node0", "MASTER_PORT": 29611}
        env = settings(folder, 1, True, **nodes, **more, GLOO_SOCKET_IFNAME=f"link{node}")
        if chaos:
            (WORK / "struck").unlink(missing_ok=True)
            env["CHAOS"] = json.dumps({"struck": str(WORK / "struck")} | chaos)
        with outputs[node].open("w") as output:
            words = [*enter, "bash", "scripts/finetune.sh", *COMMON]
            processes.append(subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=1800) for process in processes]
    return [Run(code, file.read_text()) for code, file in zip(codes, outputs, strict=True)]


def expect(holds: object, what: str, runs: list[Run]) -> None:
    """Prints what holds; ends with both hosts' output if it does not."""
    print(f"  {'ok  ' if holds else 'FAIL'} {what}", flush=True)
    if not holds:
        sys.exit("\n".join(f"--- node {i}\n{run.output[-4000:]}" for i, run in enumerate(runs)))


def main() -> None:
    """A rank is killed and the run goes on by itself; the link is cut, both hosts end, and the same command goes on."""
    write_tiny(WORK / "tiny")
    elastic = start(WORK / "elastic", {"what": "kill", "step": 7, "ranks": [1], "once": True}, MAX_RESTARTS=1)
    expect(
        all(run.code == 0 for run in elastic), "kill -9 of a rank, MAX_RESTARTS=1: both go on by themselves", elastic
    )
    expect("2 ranks on 2 hosts have the same" in elastic[0].output, "nodes are compared", elastic)
    cut = start(WORK / "cut", {"what": "cut_link", "link": "link0", "step": 5, "ranks": [0]})
    ended = time.time() - float((WORK / "struck").read_text())
    expect(all(run.code not in (0, 85) for run in cut), f"link cut: both ended, codes {[r.code for r in cut]}", cut)
    expect(ended < BOUND, f"{ended:.0f} s after the cut", cut)
    expect(all("no progress for" in run.output or "Connection" in run.output for run in cut), "and said why", cut)
    subprocess.run(["ip", "link", "set", "link0", "up"], check=True)
    again = start(WORK / "cut")
    steps = [re.search(r"resuming from \S*checkpoint-(\d+)", run[0].output) for run in (again, elastic)]
    expect(all(run.code == 0 for run in again) and all(steps), "link back: the same command goes on", again)
    expect(steps[0][1] != steps[1][1], "the two runs went on from different checkpoints", again)
    reference = load_file(WORK / "elastic/model.safetensors")
    expect(same_weights(WORK / "cut", reference), "and end with the same weights, bit for bit", again)


if __name__ == "__main__":
    main()
