"""Two CPU ranks under DeepSpeed, through the real entry point."""

import json
import os
import socket
import tempfile
from pathlib import Path

import psutil
import torch
import train_in_turn
from paths import ROOT
from safetensors.torch import load_file
from warm_python import warm_python

TRAIN = ROOT / "llava/train/train_mem.py"
SECONDS_TO_END = 30  # time for a rank to end after SIGTERM
# Adam divides by the gradient's size; where that is pure rounding noise a larger epsilon keeps runs comparable.
COMPARABLE = {"adam_epsilon": 1e-4, "max_steps": 3, "mm_vision_tower_lr": 5e-4}


def launch(
    argv: list[str],
    deepspeed: dict | str | None,
    tmp_path: Path,
    timeout: int = 900,
    script: Path = TRAIN,
    count: int = 2,
) -> str:
    """Trains on `count` ranks by `script`, which takes the flags, without DeepSpeed if it is None; what they print."""
    zero = [] if deepspeed is None else ["--deepspeed", str(zero_file(deepspeed, tmp_path))]
    return run_on_ranks(count, script, [*argv, *zero], timeout)


def launch_in_turn(runs: list[tuple[list[str], dict | str]], tmp_path: Path, timeout: int = 900) -> str:
    """Trains several runs, each with its own ZeRO configuration, one after the other in one process group."""
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([[*argv, "--deepspeed", str(zero_file(config, tmp_path))] for argv, config in runs]))
    return run_on_ranks(2, Path(train_in_turn.__file__), [str(file)], timeout)


def run_on_ranks(count: int, script: Path, argv: list[str], timeout: int) -> str:
    """Runs `script` on the ranks; returns what they print. A rank that fails ends the others, as under a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    group |= {"LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}"}
    command = [warm_python(), script, *argv]
    with tempfile.NamedTemporaryFile("r", errors="replace") as output, open(output.name, "a") as file:
        ranks = []
        for rank in map(str, range(count)):
            env = os.environ | group | {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(psutil.Popen(command, env=env, stdout=file, stderr=file))
        psutil.wait_procs(ranks, timeout, callback=lambda rank: rank.returncode and end(ranks))
        if None in [rank.returncode for rank in ranks]:
            end(ranks)
            raise TimeoutError(f"{count} ranks took more than {timeout} s: {script} {' '.join(argv)}")
        text = output.read()
    statuses = [rank.returncode for rank in ranks]
    assert not any(statuses), f"exit statuses {statuses}\n{text[-9000:]}"
    return text


def end(ranks: list[psutil.Popen]) -> None:
    for rank in ranks:
        if rank.is_running():
            rank.terminate()
    for rank in psutil.wait_procs(ranks, SECONDS_TO_END)[1]:
        rank.kill()
        rank.wait()


def zero_file(config: dict | str, folder: Path) -> Path:
    """The recipes' own file of this name, or one in `folder` with this content."""
    if isinstance(config, str):
        return ROOT / "deepspeed_configs" / f"{config}.json"
    file = folder / "deepspeed.json"
    file.write_text(json.dumps(config))
    return file


def zero_1() -> dict:
    """The recipes' zero2.json with stage 1."""
    config = json.loads((ROOT / "deepspeed_configs/zero2.json").read_text())
    config["zero_optimization"]["stage"] = 1
    return config


def assert_same(folder: Path, other: Path, atol: float = 1e-5) -> None:
    """Both folders hold the same weights under the same names."""
    ours, theirs = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
