"""Waits of the host for the device in a step under DeepSpeed are counted, each for the code that waits."""

import json
from collections import Counter
from pathlib import Path

import host_sync
import pytest
from training import flags
from two_ranks import run_on_ranks, zero_1, zero_file

STEPS = 3  # the last is counted: DeepSpeed records modules' order in the first, and its timer starts in the third

# With `overlap_comm`, which a rank that is alone does without, ZeRO-1 would synchronize for gradients once per step and
# ZeRO-2 in every micro-batch. ZeRO-3 does so for its stream's events, as often as there are modules.
PARTITIONING = "deepspeed.runtime.zero.stage_1_and_2"
CASES = {"zero1": zero_1(), "zero2": "zero2", "zero3": "zero3"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_libraries_wait_in_a_step_under_deepspeed_and_this_tree_never(tiny, tmp_path, case):
    steps = {"max_steps": STEPS, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    argv = flags(tiny, tmp_path / "run", 2, deepspeed=zero_file(CASES[case], tmp_path), **steps)
    output = run_on_ranks(1, Path(host_sync.__file__), argv, timeout=600)
    lines = json.loads(next(line for line in output.splitlines() if line.startswith('[{"package"')))
    waits = {}
    for row in lines:
        micro_batch, step = waits.get(module := row["line"].partition(":")[0], (0, 0))
        waits[module] = micro_batch + row["in_a_micro_batch"], step + row["in_a_step"]
    assert waits["accelerate.utils.deepspeed"] == (0, 1) and PARTITIONING not in waits, waits  # the gradient norm
    assert "deepspeed.utils.timer" not in waits  # the shipped files turn the throughput timer off
    packages = Counter()
    for row in lines:
        packages[row["package"]] += row["in_a_step"]
    assert packages.keys() == {"deepspeed", "accelerate"} and packages["accelerate"] == 1
    if case == "zero3":
        events = waits["deepspeed.runtime.zero.partitioned_param_coordinator"]
        assert events[0] > 5 and events[1] == 3 * events[0]
