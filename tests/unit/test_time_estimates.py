"""The dry run's estimate of how long training and measuring take."""

import re

import pytest
from paths import ROOT

from llava.compare.time_estimates import CPU_PEAK, hours, parameters_named, parameters_of, peak, training_hours
from llava.launch.recipe import STAGES, resolved_run


def test_hours_are_the_work_over_a_tenth_of_the_peak():
    # 2 x 7e9 x 1500 x 1000 = 2.1e16 operations, at 98.9 TFLOP/s
    assert hours(7e9, 1000, 989.0) == pytest.approx(2.1e16 / 98.9e12 / 3600)


def test_parameters_are_half_the_bytes_of_the_weights():
    assert parameters_of({"a.safetensors": 10, "b.safetensors": 4, "tokenizer.json": 99}) == 7


def test_a_name_says_how_many_parameters_a_model_has():
    assert parameters_named("meta-llama/Llama-3.2-3B-Instruct") == 3e9
    assert parameters_named("playground/data/models/smollm2-135m") == 135e6
    assert parameters_named("Qwen/Qwen2.5-0.5B") == 0.5e9 and parameters_named("/models/mine") is None


def test_a_processor_has_a_peak_per_core(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert peak() == 4 * CPU_PEAK


@pytest.mark.parametrize("preset", ["llama-3.2-3b", "qwen2.5-7b"])
def test_training_takes_about_as_long_as_docs_scale_md_estimates(preset):
    """Samples per second on eight H100, there from the operations of every part of the model."""
    page = (ROOT / "docs/scale.md").read_text()
    records = {"pretrain": 558_128, "finetune": 779_289}
    for number, stage in enumerate(STAGES, 1):
        table = page.partition(f"\nStage {number}, global batch ")[2]
        rate = float(re.search(rf"\| {re.escape(preset)} \| zero2 \| (\d+) \|", table)[1])
        ours = training_hours(stage, resolved_run(stage, PRESET=preset, NUM_GPUS=8), 989.0)
        assert ours == pytest.approx(records[stage] / rate / 3600, rel=0.2), stage


def test_a_training_of_unknown_size_is_not_estimated():
    run = resolved_run("finetune", PRESET="nano", NUM_GPUS=0, DATA_PATH="/mine/data.json", MAX_STEPS=10)
    assert training_hours("finetune", run, 1.0) == pytest.approx(6 * 0.6e9 * 1029 * 1280 / 0.4e12 / 3600)
    assert training_hours("finetune", run | {"flags": run["flags"] | {"max_steps": "-1"}}, 1.0) is None
    assert training_hours("finetune", run | {"flags": run["flags"] | {"model_name_or_path": "/mine"}}, 1.0) is None
