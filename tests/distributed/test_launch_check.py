"""The launch check names the node that differs, every DeepSpeed configuration loads, two hosts outlive a lost link."""

import json
import os
import subprocess
import sys

import pytest
import torch
from paths import ROOT

from llava.train.launch_check import NodeFacts, check_launch, facts_table, judge

CONFIGS = sorted((ROOT / "deepspeed_configs").glob("*.json"))


def node(number: int, **changes) -> NodeFacts:
    fields = {"node": f"{number}:host", "ranks": 8, "versions": {"torch": "2.13"}, "commit": "abc"}
    fields |= {"paths": {"/data": "found"}, "clock": 100.0, "free_gib": 50.0, "gib_per_second": 10.0}
    return NodeFacts(**(fields | changes))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"torch": "2.12"}}, "torch 2.12, others have 2.13"),
        ({"commit": "abc-dirty"}, "commit abc-dirty, others have abc"),
        ({"ranks": 4}, "4 ranks, others have 8"),
        ({"paths": {"/data": "missing here"}}, "/data: missing here"),
        ({"clock": 105.0}, "clock is +5.0 s off"),
        ({"free_gib": 0.1}, "only 0.10 GiB free"),
        ({"gib_per_second": 2.0}, "link 2.00 GiB/s, the median is 10.00"),
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
    assert config.zero_hpz_partition_size == (8 if path.stem in ("zero3_hpz", "zeropp") else 1)
    assert config.zero_quantized_weights == config.zero_quantized_gradients == (path.stem == "zeropp")


@pytest.mark.slow
def test_two_hosts_train_lose_the_link_and_go_on():
    env = os.environ | {"LLAVA_PYTHON": sys.executable}
    command = ["bash", "tests/chaos/two_nodes.sh"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    if "skipped:" in done.stdout:
        pytest.skip(done.stdout.split("skipped:")[1].strip())
    assert done.returncode == 0, done.stdout + done.stderr
