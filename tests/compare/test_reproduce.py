"""`scripts/reproduce.sh`: what an item fetches from a hub, refuses, measures and writes, with tiny models."""

import re
import subprocess
import sys
from pathlib import Path

import hub_server
import pytest
from paths import ROOT
from shell import only

from llava.analysis.commands import COMMANDS
from llava.compare.reproduce import ITEMS, MODELS
from llava.compare.reproduce_page import init_rows, number, page_of, paper_rows, score_rows
from llava.compare.tables import Statistics
from llava.eval.tasks import PAPER_COLUMNS
from llava.model.multimodal_projector.norm import PAPER_ARMS

LLMS = {"Qwen2-7B": "qwen", "Qwen2.5-7B": "qwen_tied", "Qwen2-VL": "llama", "Qwen2.5-VL": "llama_tied"}


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tiny):
    """A hub with tiny models under their published names; Qwen2.5-7B is gated."""
    with hub_server.serve() as hub:
        for name, source in LLMS.items():
            repository = MODELS[name]
            files = files_in(tiny / source) | {"pytorch_model.bin": b"not needed"}
            gated = name == "Qwen2.5-7B"
            hub.models[repository] = hub_server.Repository(repository, files, gated)
        yield hub


@pytest.fixture
def reproduce(hub, tmp_path):
    """A function that runs the script."""

    def run(*words, **extra):
        env = {"LLAVA_PYTHON": sys.executable, "PYTHONPATH": ROOT, "HF_ENDPOINT": hub.endpoint, "HOME": tmp_path}
        env |= {"HF_HUB_OFFLINE": 0, "HF_HUB_DISABLE_XET": 1, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
        command = ["bash", "scripts/reproduce.sh", *map(str, words), "--output-dir", str(tmp_path / "out")]
        return subprocess.run(command, cwd=ROOT, env=only(**env | extra), capture_output=True, text=True, timeout=240)

    run.out = tmp_path / "out"
    return run


def test_every_table_and_figure_of_the_paper_has_an_item_of_known_commands_models_and_arms():
    tables, figures = [f"table{number}" for number in range(1, 7)], [f"fig{number}" for number in range(2, 6)]
    assert list(ITEMS) == [*tables, *figures, "appendix-g", "theory"]
    for item in ITEMS.values():
        assert {*item.commands} <= {*COMMANDS} and {*item.models} <= {*MODELS} and bool(item.models) != bool(item.arms)
    assert ITEMS["table4"].arms == tuple(PAPER_ARMS)


@pytest.mark.slow
def test_an_item_is_fetched_measured_compared_and_pinned_and_a_rerun_downloads_nothing(hub, reproduce):
    done = reproduce("table6", HF_TOKEN=hub_server.READER)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (reproduce.out / "table6/index.md").read_text().replace("\\", "")
    assert "| measured | paper | ours | difference |" in page
    assert re.search(r"\| Qwen2-7B, .*: mean \| 0.6908 \| [\d.]+ \| [-\d.]+ \|", page)
    assert "![embedding-norms](embedding-norms.png)" in page
    assert f"| Qwen/Qwen2-7B-Instruct | {1:040x} |" in page
    assert "GET pytorch_model.bin" not in hub.received
    hub.received.clear()
    for repository in hub.models.values():
        repository.commits = 2  # newer revisions are not taken
    again = reproduce("table6", HF_TOKEN=hub_server.READER)
    assert again.returncode == 0 and not [line for line in hub.received if line.startswith("GET")], again.stderr
    assert f"{1:040x}" in (reproduce.out / "table6/index.md").read_text().replace("\\", "")


def test_rows_have_the_papers_number_ours_and_the_difference(tmp_path):
    rows = [{"model": "m", "norms of": "text", "mean": 2.0, "mean (paper)": 1.5, "std": 3.0}]
    assert paper_rows(rows) == [number("m, text: mean", 1.5, 2.0)]
    page = page_of("t", [number("x", 1.5, 2.0), number("y", None, 2.0)], tmp_path, [], [])
    assert "| x | 1.5 | 2 | 0.5 |\n| y |  | 2 |  |\n" in page
    (gain, *_) = init_rows([{"model": "layernorm", "gain L2": 9.0}, {"model": "layernorm", "gain L2": 2.5}])
    assert gain == number("layernorm: gain L2", 2.2812, 2.5)  # of the last checkpoint


def scores_of(model, tasks):
    """The rows of Table 4 for one arm that answers 9 of 10 questions of each task."""
    entry = {"seed": 42, "arm": "none", "scores": dict.fromkeys(tasks, [1.0] * 9 + [0.0])}
    configuration = {"pretrain.model.model_name_or_path": model}
    record = {"configuration": configuration, "questions": dict.fromkeys(tasks, [*"abcdefghij"]), "runs": [entry]}
    record["tasks"] = dict.fromkeys(tasks, {"kinds": ["a"] * 10})
    return score_rows("mine", Statistics(record))


def test_scores_are_compared_for_the_papers_models_and_shown_for_others():
    assert scores_of("Qwen/Qwen2.5-7B-Instruct", ["pope"]) == [
        number("mine, none: POPE", 87.51, 90.0),
        number("mine, none: mean", None, 90.0),
    ]
    assert scores_of("smollm2", ["pope"])[0] == number("mine, none: POPE", None, 90.0)
    nine = scores_of("Qwen/Qwen2.5-7B-Instruct", PAPER_COLUMNS.values())
    assert nine[-1] == number("mine, none: mean", 68.49, 90.0) and len(nine) == 10
