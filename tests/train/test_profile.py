"""`--profile_steps` writes where the time of some steps goes, and changes nothing else."""

import gzip
import json

import pytest
from training import flags, losses

from llava.train import train as train_module
from llava.train.arguments import steps_to_profile


def test_profiled_steps_leave_a_trace_a_table_and_the_same_losses(tiny, tmp_path):
    options = {"max_steps": 4, "gradient_accumulation_steps": 2}
    train_module.train(flags(tiny, tmp_path / "plain", 2, **options))
    train_module.train(flags(tiny, tmp_path / "run", 2, **options, profile_steps="2:3"))
    assert losses(tmp_path / "run/train_log.jsonl") == losses(tmp_path / "plain/train_log.jsonl")
    folder = tmp_path / "run/profile"
    with gzip.open(folder / "steps_2-3.trace.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2
    assert "aten::addmm" in (folder / "steps_2-3.kernels.txt").read_text()


@pytest.mark.parametrize("text", ["8:5", "0:3", "five", "5", "5:", "-1:3", "1:2:3", ""])
def test_steps_that_are_not_first_to_last_are_refused(text):
    with pytest.raises(ValueError, match=r"--profile_steps: expected FIRST:LAST with 1 <= FIRST <= LAST.*found"):
        steps_to_profile(text)
