"""The launch check names the node that differs, every DeepSpeed configuration loads, two hosts outlive a lost link."""

import json
import os
import platform
import subprocess
import sys

import pytest
import torch
from paths import ROOT
from warm_python import warm_python

from llava.train.launch_check import NodeFacts, check_launch, facts_table, judge

CONFIGS = sorted((ROOT / "deepspeed_configs").glob("*.json"))


def node(number: int, **changes) -> NodeFacts:
    fields = {"node": f"{number}:host", "ranks": 8, "versions": {"torch": "2.13"}, "commit": "abc"}
    fields |= {"paths": {"/data": "found"}}
    return NodeFacts(**(fields | changes))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"torch": "2.12"}}, "torch 2.12, others have 2.13"),
        ({"commit": "abc-dirty"}, "commit abc-dirty, others have abc"),
        ({"ranks": 4}, "4 ranks, others have 8"),
        ({"paths": {"/data": "missing here"}}, "/data: missing here"),
    ],
)
def test_the_node_that_differs_is_at_fault_and_no_other(change, said):
    nodes = judge([node(0), node(1), node(2, **change), node(3)])
    assert [bool(n.faults) for n in nodes] == [False, False, True, False]
    assert any(said in fault for fault in nodes[2].faults)
    lines = facts_table(nodes).splitlines()
    assert lines[3].startswith("2:host") and lines[3].endswith("AT FAULT") and said in lines[4]
    assert sum(line.endswith(" ok") for line in lines) == 3


def test_one_process_passes_and_leaves_nothing_in_the_output_folder(tmp_path):
    check_launch([str(tmp_path)], str(tmp_path / "out"), torch.device("cpu"))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_one_that_deepspeed_takes(path):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = json.loads(path.read_text())["zero_optimization"]
    known = DeepSpeedZeroConfig.model_fields
    names = set(known) | {field.alias for field in known.values() if field.alias}
    assert zero.keys() <= names
    config = DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    assert config.stage == zero["stage"]
    assert config.zero_hpz_partition_size == (8 if path.stem == "zero3_hpz" else 1)


ALONE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from llava.train.launch_check import names_over_gloo
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
try:
    print(names_over_gloo(timedelta(seconds=2)) if rank == 0 else time.sleep(5))
except RuntimeError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_ranks_without_a_link_name_host_and_interface_in_bounded_time(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALONE]
    ranks = [[*command, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    ranks = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for words in ranks]
    said = ranks[0].communicate(timeout=60)[0]
    ranks[1].kill()
    ranks[1].communicate()
    assert said.startswith(
        f"launch check: host {platform.node()}, rank 0: no connection to all 2 ranks over gloo within 2"
    )
    assert "GLOO_SOCKET_IFNAME" in said and said.count("\n") == 1


def check_alone(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    """`CHECK=1` on two ranks of this machine."""
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    words = [*command, str(ROOT / "llava/train/launch_check.py"), *flags]
    # The first use of DeepSpeed's ops builds them.
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_check_alone_tries_gloo_and_names_a_missing_interface(tmp_path):
    run = check_alone("--output_dir", str(tmp_path))
    assert run.returncode == 0 and "all-reduce over 2 ranks" in run.stderr, run.stderr
    run = check_alone("--output_dir", str(tmp_path), GLOO_SOCKET_IFNAME="nosuch0")
    assert run.returncode == 1
    assert "Unable to find address for: nosuch0" in run.stderr and 'launch_check.py", line' not in run.stderr


@pytest.mark.slow
def test_two_hosts_train_lose_the_link_and_go_on():
    env = os.environ | {"LLAVA_PYTHON": str(warm_python())}
    command = ["bash", "tests/chaos/two_nodes.sh"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    if "skipped:" in done.stdout:
        pytest.skip(done.stdout.split("skipped:")[1].strip())
    assert done.returncode == 0, done.stdout + done.stderr
