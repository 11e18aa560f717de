"""Two CPU ranks under DeepSpeed, through the real entry point."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import train_in_turn
from paths import ROOT
from safetensors.torch import load_file

TRAIN = ROOT / "llava/train/train_mem.py"
# Adam divides by the gradient's size; where that is pure rounding noise a larger epsilon keeps runs comparable.
COMPARABLE = {"adam_epsilon": 1e-4, "max_steps": 5, "mm_vision_tower_lr": 5e-4}


def launch(
    argv: list[str], deepspeed: dict | str | None, tmp_path: Path, timeout: int = 900, script: Path = TRAIN
) -> str:
    """Trains on two ranks by `script`, which takes the flags; returns their output. Without DeepSpeed if it is None."""
    zero = [] if deepspeed is None else ["--deepspeed", str(zero_file(deepspeed, tmp_path))]
    return run_on_two_ranks(script, [*argv, *zero], timeout)


def launch_in_turn(runs: list[tuple[list[str], dict | str]], tmp_path: Path, timeout: int = 900) -> str:
    """Trains several runs, each with its own ZeRO configuration, one after the other in one process group."""
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([[*argv, "--deepspeed", str(zero_file(config, tmp_path))] for argv, config in runs]))
    return run_on_two_ranks(Path(train_in_turn.__file__), [str(file)], timeout)


def run_on_two_ranks(script: Path, argv: list[str], timeout: int) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    done = subprocess.run([*command, str(script), *argv], capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


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
