"""Runs over a mixture of data sets: their shares, and that a resumed run takes the same samples."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from training import run

from llava.train.telemetry import LOG_FILE

SAMPLES, BATCH = 40, 4


@pytest.fixture
def mixture(tiny, tmp_path):
    """A YAML file: 24 scenes in LLaVA's form with a share of 0.3; 10 stamps as messages with a zip file, and 0.7."""
    stamps = []
    with zipfile.ZipFile(tmp_path / "stamps.zip", "w") as archive:
        for number in range(10):
            archive.write(tiny / f"data/images/{number}.png", f"s/{number}.png")
            question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?" * number}]}
            messages = [question, {"role": "assistant", "content": f"stamp {number}"}]
            stamps.append({"id": f"s{number}", "images": [f"s/{number}.png"], "messages": messages})
    (tmp_path / "stamps.jsonl").write_text("\n".join(map(json.dumps, stamps)))
    entries = [
        {"json_path": str(tiny / "data/finetune.json"), "name": "scenes", "weight": 0.3},
        {"json_path": "stamps.jsonl", "image_folder": "stamps.zip", "weight": 0.7},
    ]
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump({"datasets": entries, "epoch_samples": SAMPLES}))
    return tmp_path / "mix.yaml"


def log_of(folder: Path) -> list[dict]:
    keys = ("step", "loss", "norm/llm_input")
    lines = map(json.loads, (folder / LOG_FILE).read_text().splitlines())
    return [{key: line.get(key) for key in keys} for line in lines if "loss" in line]


def test_an_epoch_has_the_shares_and_a_resumed_run_the_same_samples(tiny, tmp_path, mixture, caplog):
    options = {"data_path": mixture, "max_steps": None, "num_train_epochs": 1, "per_device_train_batch_size": BATCH}
    options |= {"save_strategy": "steps", "save_steps": 4, "seed": 7, "telemetry_steps": 0}
    with caplog.at_level("INFO"):
        whole, _ = run(tiny, tmp_path / "whole", 2, **options)
    assert "scenes: 12 of 24 records, 12 samples of an epoch (30.0%)" in caplog.text
    log = log_of(tmp_path / "whole")
    assert len(log) == SAMPLES // BATCH

    shutil.copytree(tmp_path / "whole/checkpoint-4", tmp_path / "resumed/checkpoint-4")
    lines = (tmp_path / "whole" / LOG_FILE).read_text().splitlines()
    (tmp_path / "resumed" / LOG_FILE).write_text("\n".join(lines[:4]) + "\n")
    resumed, _ = run(tiny, tmp_path / "resumed", 2, **options)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert log_of(tmp_path / "resumed") == log
