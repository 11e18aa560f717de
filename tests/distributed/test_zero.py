"""What ZeRO keeps, against what the memory estimate says."""

import json
from pathlib import Path

import kept_under_zero
import pytest
import train_by_auto
from training import flags
from two_ranks import COMPARABLE, assert_same, launch_in_turn, run_on_ranks

from llava.train.train import train
from llava.utils.provenance import RUN_FILE, read_starts

pytestmark = pytest.mark.slow


def printed(output: str, word: str):
    return json.loads(next(line for line in output.splitlines() if line.startswith(word)).removeprefix(word))


def test_frozen_linear_layers_keep_no_input_under_zero3(tiny):
    """DeepSpeed's own linear layers keep it, which the estimate does not count."""
    output = run_on_ranks(1, kept_under_zero.__file__, [str(tiny)], timeout=600)
    for case, kept in printed(output, "KEPT").items():
        assert kept["ours"] == pytest.approx(kept["estimate"], rel=0.1), case
        assert kept["same"], case
        assert case == "stage 2" or kept["deepspeed"] > 1.15 * kept["estimate"], case


def test_auto_takes_zero2_if_weights_fit_on_every_rank_and_else_zero3(tiny, tmp_path):
    folders = {stage: tmp_path / f"zero{stage}" for stage in (2, 3)}
    runs = [flags(tiny, folder, 2, deepspeed="auto", **COMPARABLE) for folder in folders.values()]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps(runs))
    before = set(Path("/dev/shm").glob("deepspeed_*"))
    output = run_on_ranks(2, train_by_auto.__file__, [str(file), json.dumps([[1e12, 1e12], [1e12, 0]])], timeout=900)
    assert set(Path("/dev/shm").glob("deepspeed_*")) == before  # DeepSpeed's buffers of CPU ranks stay for ever
    for stage, folder in folders.items():
        config = json.loads((folder / "run.json").read_text())["starts"][0]["configuration"]["deepspeed_config"]
        assert config["zero_optimization"]["stage"] == stage
        chosen = f"--deepspeed auto: --deepspeed deepspeed_configs/zero{stage}.json, which takes "
        assert output.count(chosen) == 1
    assert_same(folders[2], folders[3])


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_the_projector_starts_from_the_same_weights_under_every_stage(tiny, tmp_path, tower):
    """CLIP draws random numbers where ZeRO-3 builds it, without which nothing is drawn."""
    run = {name: flags(tiny, tmp_path / name, 1, tower=tower, max_steps=1) for name in ("zero2", "zero3", "none")}
    launch_in_turn([(run["zero2"], "zero2"), (run["zero3"], "zero3")], tmp_path)
    train(run["none"])
    starts = [read_starts(tmp_path / name / RUN_FILE)[0]["configuration"]["initial_weights"] for name in run]
    assert len({start["mm_mlp_adapter"] for start in starts}) == 1
