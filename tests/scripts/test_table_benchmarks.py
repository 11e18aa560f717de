"""Benchmarks of published tables: unmodified tasks of stock lmms-eval, offline, on a model with known scores."""

import importlib.util
import os
import subprocess
import sys

import pytest
import table_benchmarks
from benchmark_data import KINDS, PLAN
from paths import ROOT

from llava.eval.collect import collect
from llava.eval.tasks import TASKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("lmms_eval"),
        reason="the harness is not installed: EXTRAS=eval bash scripts/setup.sh",
    ),
]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A folder for each task with what lmms-eval leaves."""
    folder = tmp_path_factory.mktemp("tables")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    code = f"{ROOT}:{ROOT / 'tests/support'}"
    command = [sys.executable, table_benchmarks.__file__, str(folder / "hub"), str(folder / "output")]
    done = subprocess.run(
        command, env=os.environ | offline | {"PYTHONPATH": code}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "output"


@pytest.mark.parametrize("name", table_benchmarks.TASKS)
def test_every_unmodified_task_gives_the_known_score(output, name):
    """`collect` refuses a score that the samples do not give."""
    result = collect(TASKS[name], output / name, seconds=1)
    if name == "mme":  # of two pictures with two questions each, one is half right; those of cognition are not counted
        assert result.score == pytest.approx(100 * (50 + 200) / 2 / 2000, abs=1e-3)
        assert [sample.score for sample in result.samples] == [1, 0, 1, 1] and result.by_group() == {"color": 75}
        return
    assert result.score == pytest.approx(100 * 5 / 7, abs=1e-3)
    said = [table_benchmarks.says(name, colour) for colour, _ in PLAN]
    assert [sample.answer for sample in result.samples] == said
    expected = [{"A": said[0], "B": said[2]}[target] for _, target in PLAN]
    assert all(target.lower() in sample.target.lower() for target, sample in zip(expected, result.samples, strict=True))


@pytest.mark.parametrize("name", ["chartqa", "mmmu_val", "seedbench", "cv_bench"])
def test_kinds_of_questions_are_scored_apart(output, name):
    assert sorted(collect(TASKS[name], output / name, seconds=1).by_group().values()) == pytest.approx([60, 100])
    assert KINDS.count("one") == 5
