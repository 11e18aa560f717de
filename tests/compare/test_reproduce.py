"""`scripts/reproduce.sh`: what an item would fetch, refuses, trains, measures and writes, with tiny models."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from comparison_runs import Caller
from huggingface_hub import DryRunFileInfo
from huggingface_hub.utils import filter_repo_objects
from paths import ROOT
from shell import only
from warm_python import warm_python

from llava.compare import reproduce as reproduce_module
from llava.compare.__main__ import main
from llava.compare.reproduce import BENCHMARKS, ITEMS, MODELS, OWN_CODE, missing_data
from llava.compare.reproduce_page import number, page_of, paper_rows, score_rows
from llava.compare.tables import Statistics
from llava.eval.tasks import PAPER_COLUMNS
from llava.launch.settings import NAMES

LLMS = {"Qwen2-7B": "qwen", "Qwen2.5-7B": "qwen_tied", "Qwen2-VL": "llama", "Qwen2.5-VL": "llama_tied"}
DATA = ["llava-558k", "llava-next"]
COMMIT = f"{1:040x}"


@pytest.mark.slow
def test_an_item_of_models_in_the_hubs_cache_is_measured_and_compared_by_the_script(tiny, tmp_path):
    for name, source in LLMS.items():
        repository = tmp_path / f"hub/models--{MODELS[name].replace('/', '--')}"
        shutil.copytree(tiny / source, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(COMMIT)
    env = {"LLAVA_PYTHON": sys.executable, "PYTHONPATH": ROOT, "HF_HUB_CACHE": tmp_path / "hub", "HF_HUB_OFFLINE": 1}
    env |= {"HOME": tmp_path, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "scripts/reproduce.sh", "table6", "--output-dir", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, env=only(**env), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out/table6/index.md").read_text().replace("\\", "")
    assert "| measured | paper | ours | difference |" in page
    assert re.search(r"\| Qwen2-7B, .*: mean \| 0.6908 \| [\d.]+ \| [-\d.]+ \|", page)
    assert "![embedding-norms](embedding-norms.png)" in page
    assert f"| Qwen/Qwen2-7B-Instruct | {COMMIT} |" in page


def test_rows_have_the_papers_number_ours_and_the_difference(tmp_path):
    rows = [{"model": "m", "norms of": "text", "mean": 2.0, "mean (paper)": 1.5, "std": 3.0}]
    (tmp_path / "interface-norms.json").write_text(json.dumps({"rows": rows}))
    assert paper_rows(tmp_path) == [number("m, text: mean", 1.5, 2.0)]
    page = page_of("t", [number("x", 1.5, 2.0), number("y", None, 2.0)], tmp_path, [], [])
    assert "| x | 1.5 | 2 | 0.5 |\n| y |  | 2 |  |\n" in page


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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose repositories have a file of 14 GB that is needed and one that is not; nothing may be downloaded."""
    for name in (*NAMES, "MAX_STEPS", "IMAGE_FOLDER", "EXTRAS", "REPORT_TO", "DATA", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # restored after the test, whatever a command sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home/hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # As in a new checkout, whatever this one has below playground/data.
    monkeypatch.setattr(reproduce_module, "missing_data", lambda recipes: DATA[: len(recipes)])
    samples = dict(zip(BENCHMARKS, ("en/dev-0.parquet", "data/a.parquet", "a.parquet"), strict=True))

    def listed(repository, *, dry_run, allow_patterns, repo_type="model"):
        assert dry_run and repo_type == ("dataset" if repository in samples else "model")
        names = (samples.get(repository, "model.safetensors"), "pytorch_model.bin")
        facts = {"commit_hash": COMMIT, "is_cached": False, "will_download": True, "local_path": ""}
        needed = filter_repo_objects(names, allow_patterns=allow_patterns)
        return [DryRunFileInfo(filename=name, file_size=14 * 10**9, **facts) for name in needed]

    monkeypatch.setattr("huggingface_hub.snapshot_download", listed)


# --- dry runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("item", ["table3", "table4"])
def test_every_dry_run_says_sizes_and_what_would_run(hub, tmp_path, capsys, item):
    assert main(["reproduce", item, "--dry-run", "--output-dir", str(tmp_path / "out/reproduce")]) == 0
    shown, of = capsys.readouterr().out, ITEMS[item]
    rows = {line.split()[1]: line for line in shown.splitlines() if line.split()[-2:] == ["14.00", "14.00"]}
    expected = [MODELS[name] for name in of.models] + ([*BENCHMARKS] if of.on_samples else [])
    if of.arms:
        assert shown.count("trains in ") == len(of.presets)
        assert "from the hub: meta-llama/Llama-3.2-3B-Instruct gated: accept its licence" in shown
        assert shown.count("first: python -m llava.data.prepare llava-558k") == len(of.presets)
    assert rows.keys() == {*expected}
    for command in of.commands:
        assert f"python -m llava.analysis {command} " in shown
    for name in {*of.models} & {*OWN_CODE}:
        assert f"note: {name}: code of its own repository" in shown
    assert ("llava.eval.evaluate " in shown) == (item == "table4")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_scores_that_need_a_token_are_refused_before_anything_is_trained(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no"))
    words = ["reproduce", "table4", "--preset", "qwen2.5-7b", "--output-dir", str(tmp_path / "out/reproduce")]
    assert main(words) == 2
    assert "mmbench_en_dev_static, mmstar, pope, " in (error := capsys.readouterr().err)
    assert "run: hf auth login, or set HF_TOKEN" in error and not (tmp_path / "out").exists()
    monkeypatch.setenv("EVALUATE_FLAGS", "--data-dir /mine")
    assert main([*words, "--dry-run"]) == 0


def test_the_data_sets_that_are_missing_are_those_of_the_recipes_folders():
    inputs = [("playground/data/LLaVA-NeXT-Data/data", "MISSING"), ("/mine/images", "MISSING"), ("mine", "WRONG")]
    inputs.append(("playground/data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json", "found"))
    assert missing_data([{"inputs": [{"value": v, "state": s} for v, s in inputs]}]) == ["llava-next"]


# --- to the page ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_item_trains_its_arms_measures_them_and_writes_its_page(tiny, tmp_path):
    env = {"LLAVA_PYTHON": warm_python(), "PYTHONPATH": ROOT, "NUM_GPUS": 0, "CUDA_VISIBLE_DEVICES": ""}
    env |= {"MODEL_PATH": tiny / "qwen", "VISION_TOWER": tiny / "siglip", "IMAGE_FOLDER": tiny / "data/images"}
    env |= {"DATA_PATH": tiny / "data/finetune.json", "PROMPT_VERSION": "chatml", "LABEL_MASKING": "assistant"}
    env |= {"GLOBAL_BATCH": 8, "PER_DEVICE_BATCH": 8, "MAX_STEPS": 2, "MAX_TOKENS_PER_MICRO_BATCH": ""}
    env |= {"DEEPSPEED_CONFIG": "", "BF16": "False", "MODEL_MAX_LENGTH": 256, "HOME": tmp_path}
    env |= {"NUM_WORKERS": 0, "REPORT_TO": "none", "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
    words = ["reproduce", "table5", "--preset", "nano", "--output-dir", tmp_path / "out/reproduce"]
    command = [warm_python(), "-m", "llava.compare", *map(str, words)]
    ran = subprocess.run(command, cwd=ROOT, env=only(**env), capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
    folder = tmp_path / "out/reproduce/table5"
    page = (folder / "index.md").read_text().replace("\\", "")
    for arm in ITEMS["table5"].arms:
        assert (tmp_path / "out/compare-nano/seed-42" / arm / "pretrain/config.json").is_file()
        assert f"| {arm}, nano | " in page and f"{arm}/pretrain |" in page
    rows = json.loads((folder / "norm-params.json").read_text())["rows"]
    assert {"layernorm@default", "paper, default init"} < {row["model"] for row in rows}
    for row in rows:
        assert re.search(rf"^\| {row['model']} \|.* {row['gain L2']:.4g} \|", page, re.MULTILINE)
    figures = [file.stem for file in folder.glob("norm-params*.png")]
    assert figures and all(f"![{figure}]({figure}.png)" in page for figure in figures)


@pytest.mark.slow
def test_scores_are_on_the_items_page_and_that_of_a_comparison_in_the_arms_folder_stays(tmp_path):
    call = Caller(tmp_path, "reproduce", EVALUATE_FLAGS="--data-dir mine", TASKS="pope", CUDA_VISIBLE_DEVICES="")
    of_comparison = tmp_path / "compare-nano/record.json"
    of_comparison.parent.mkdir()
    of_comparison.write_text("of three seeds")
    done = call("table4", "--preset", "nano")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in call.seen() if line.startswith("evaluate")] == [
        f"evaluate {arm}" for arm in ITEMS["table4"].arms
    ]
    assert "| nano, none: POPE |" in (call.out / "table4/index.md").read_text().replace("\\", "")
    assert (call.out / "table4/nano/report.html").is_file() and of_comparison.read_text() == "of three seeds"
