"""Benchmarks of published tables: unmodified tasks of stock lmms-eval on a model with known scores.

The data sets come from a stand-in for the hub, by its own library.
"""

import importlib.util
import subprocess
import sys

import hub_server
import pytest
import table_benchmarks
from benchmark_data import KINDS, PLAN, by_group
from paths import ROOT
from shell import only

from llava.eval.harness import collect
from llava.eval.tasks import TASKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("lmms_eval"),
        reason="the harness is not installed: EXTRAS=eval bash scripts/setup.sh",
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the data sets."""
    folder = tmp_path_factory.mktemp("tables")
    table_benchmarks.write_all(folder)
    return folder


def scored(folder, **env):
    """Lets stock lmms-eval score the model; the process."""
    variables = {"HF_HOME": folder / "cache", "HF_HUB_DISABLE_XET": 1, "HOME": folder, "CUDA_VISIBLE_DEVICES": ""}
    variables |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}", **env}
    command = [sys.executable, table_benchmarks.__file__, str(folder / "output")]
    return subprocess.run(command, cwd=folder, env=only(**variables), capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def hub(data):
    """A hub with the data sets."""
    with hub_server.serve() as hub:
        for readme in data.rglob("README.md"):
            name = readme.parent.relative_to(data).as_posix()
            files = {str(f.relative_to(readme.parent)): f.read_bytes() for f in readme.parent.rglob("*") if f.is_file()}
            hub.models[name] = hub_server.Repository(name, files)
        yield hub


@pytest.fixture(scope="module")
def output(hub, tmp_path_factory):
    """A folder for each task with what lmms-eval leaves."""
    folder = tmp_path_factory.mktemp("hub")
    done = scored(folder, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE=0, HF_TOKEN=hub_server.READER)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "output"


@pytest.mark.parametrize("name", table_benchmarks.TASKS)
def test_every_unmodified_task_gives_the_known_score(output, name):
    """`collect` refuses a score that the samples do not give."""
    result = collect(TASKS[name], output / name, seconds=1)
    if name == "mme":  # of two pictures with two questions each, one is half right; those of cognition are not counted
        assert result.score == pytest.approx(100 * (50 + 200) / 2 / 200, abs=1e-3)
        assert [sample.score for sample in result.samples] == [0.25, 1] and by_group(result) == {"color": 62.5}
        return
    assert result.score == pytest.approx(100 * 5 / 7, abs=1e-3)
    said = [table_benchmarks.says(name, colour) for colour, _ in PLAN]
    assert [sample.answer for sample in result.samples] == said
    expected = [{"A": said[0], "B": said[2]}[target] for _, target in PLAN]
    assert all(target.lower() in sample.target.lower() for target, sample in zip(expected, result.samples, strict=True))


def test_kinds_of_questions_are_scored_apart(output):
    assert sorted(by_group(collect(TASKS["seedbench"], output / "seedbench", seconds=1)).values()) == pytest.approx(
        [60, 100]
    )
    assert KINDS.count("one") == 5
