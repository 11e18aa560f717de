"""`--report_to trackio` and `wandb` without a network: the numbers stay on this machine."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys

import pytest
from paths import ROOT
from training import flags

LOGGED = ("train/loss", "train/norm/llm_input", "train/grad_norm/before_norm", "eval/loss")


@pytest.fixture
def train_with(tiny, tmp_path):
    """A function from a tracker's name to the folder that it wrote to, after a run of two steps with an evaluation."""

    def run(tracker):
        if importlib.util.find_spec(tracker) is None:
            pytest.skip(f"{tracker} is not installed: pip install {tracker}")
        options = {"report_to": tracker, "version": "qwen_1_5", "eval_data_path": tiny / "data/finetune.json"}
        options |= {"eval_strategy": "epoch"}
        names = ("TRACKIO_DIR", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
        places = dict.fromkeys(names, str(tmp_path)) | {"WANDB_MODE": "offline"}
        command = [sys.executable, "-m", "llava.train.train", *flags(tiny, tmp_path / "run", 2, **options)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | places, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return tmp_path

    return run


def test_trackio_keeps_numbers(train_with):
    folder = train_with("trackio")
    (database,) = folder.glob("*.db")
    logged = {}
    for (line,) in sqlite3.connect(database).execute("select metrics from metrics order by id"):
        logged |= json.loads(line)
    assert set(LOGGED) <= logged.keys() and logged["train/global_step"] == 2


def test_wandb_keeps_numbers(train_with):
    folder = train_with("wandb")
    (log,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = log.read_bytes()
    assert [name for name in LOGGED if name.encode() not in content] == []
