"""The run of `tests/nightly/chaos/two_nodes.sh`, in the first host's network namespace, with the model's name."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tiny_models import write_tiny

from chaos.faults import COMMON, ROOT, WORK, Run, same_weights, settings, steps_finished

MARGIN = 75.0  # seconds that both hosts may need to end, beyond the limit without progress
# What each model changes: variables of the script, and the limit without progress, longer than a step or a save.
MODELS = {
    "tiny": ({}, 15),
    "demo": (dict.fromkeys(("MODEL_PATH", "VISION_TOWER", "DATA_PATH", "IMAGE_FOLDER")), 180),
}


def start(folder: Path, model: str, chaos: dict | None = None, **more: Any) -> list[Run]:
    """The same command on both hosts, one rank each."""
    variables, limit = MODELS[model]
    processes, outputs = [], [WORK / f"node{node}.txt" for node in (0, 1)]
    began = time.monotonic()
    for node, enter in enumerate(([], ["nsenter", "--target", os.environ["OTHER_HOST"], "--net", "--uts"])):
        nodes = {"NNODES": 2, "NODE_RANK": node, "MASTER_ADDR": "node0", "MASTER_PORT": 29611}
        env = settings(folder, 1, True, **nodes, **variables, **more, GLOO_SOCKET_IFNAME=f"link{node}")
        if chaos:
            (WORK / "struck").unlink(missing_ok=True)
            env["CHAOS"] = json.dumps({"struck": str(WORK / "struck")} | chaos)
        words = [*enter, "bash", "scripts/finetune.sh", *COMMON, "--hang_timeout", str(limit)]
        with outputs[node].open("w") as output:
            processes.append(subprocess.Popen(words, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=1800) for process in processes]
    return [Run(code, file.read_text(), time.monotonic() - began) for code, file in zip(codes, outputs, strict=True)]


def main(model: str) -> int:
    """Prints what happened; returns 1 if it is not as promised."""
    if model == "tiny":
        write_tiny(WORK / "tiny")
    wrong: list[str] = []

    def expect(holds: object, what: str, runs: list[Run]) -> None:
        print(f"  {'ok  ' if holds else 'FAIL'} {what}", flush=True)
        if not holds:
            wrong.append("\n".join(f"--- node {i}\n{run.output[-4000:]}" for i, run in enumerate(runs)))

    killed = {"what": "kill", "step": 7, "ranks": [1], "once": True}
    elastic = start(WORK / "elastic", model, killed, MAX_RESTARTS=1)
    expect(
        all(run.code == 0 for run in elastic),
        "two hosts train by ZeRO-3; kill -9 of a rank, MAX_RESTARTS=1: both go on by themselves",
        elastic,
    )
    expect("2 ranks on 2 hosts have the same" in elastic[0].output, "nodes are compared", elastic)
    if not wrong:
        lose_the_link(model, elastic, expect)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def lose_the_link(model: str, elastic: list[Run], expect: Callable[[object, str, list[Run]], None]) -> None:
    """Cuts the link in mid-run and starts again; the end must be that of the run that went on by itself."""
    cut = start(WORK / "cut", model, {"what": "cut_link", "link": "link0", "step": 5, "ranks": [0]})
    ended = time.time() - float((WORK / "struck").read_text())
    expect(all(run.code not in (0, 85) for run in cut), f"link cut: both ended, codes {[r.code for r in cut]}", cut)
    expect(ended < MODELS[model][1] + MARGIN, f"{ended:.0f} s after the cut", cut)
    expect(all("no progress for" in run.output or "Connection" in run.output for run in cut), "and said why", cut)
    finished = steps_finished(WORK / "cut")
    subprocess.run(["ip", "link", "set", "link0", "up"], check=True)
    again = start(WORK / "cut", model)
    steps = [re.search(r"resuming from \S*checkpoint-(\d+)", run[0].output) for run in (again, elastic)]
    went_on = all(run.code == 0 for run in again) and all(steps)
    expect(went_on, "link back: the same command goes on", again)
    if went_on:
        print(f"  lost steps by the cut: {finished - int(steps[0][1])}")
        expect(steps[0][1] != steps[1][1], "the two runs went on from different checkpoints", again)
        reference = load_file(WORK / "elastic/model.safetensors")
        expect(same_weights(WORK / "cut", reference), "and end with the same weights, bit for bit", again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
