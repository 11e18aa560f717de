"""Two CPU ranks under DeepSpeed, through the real entry point."""

import functools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import rank_server
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
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        job = {"command": [str(script), *argv], "environment": environment(), "port": port, "output": output.name}
        statuses = ask_server(job, timeout)
        text = output.read()
    assert not any(statuses), f"exit statuses {statuses}\n{text[-9000:]}"
    return text


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}


@functools.cache
def server() -> subprocess.Popen:
    """Forks the ranks; it ends with this process, which closes its input."""
    command, pipe = [sys.executable, rank_server.__file__], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment())


def ask_server(job: dict, timeout: int) -> list[int]:
    """The exit statuses of both ranks; raises TimeoutError, and ends the server, after so many seconds."""
    process = server()
    print(json.dumps(job), file=process.stdin, flush=True)
    if not select.select([process.stdout], [], [], timeout)[0]:
        for started in [*psutil.Process(process.pid).children(), process]:
            started.kill()
        server.cache_clear()
        raise TimeoutError(f"two ranks took more than {timeout} s: {' '.join(job['command'])}")
    return json.loads(process.stdout.readline())


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
