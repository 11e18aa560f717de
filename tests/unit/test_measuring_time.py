"""The dry run's estimate of how long measuring takes."""

import pytest

from llava.experiment.measuring_time import CPU_PEAK, hours, parameters_named, parameters_of, peak


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
