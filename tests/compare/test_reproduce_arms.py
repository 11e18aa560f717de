"""`scripts/reproduce.sh`: what every item's dry run says, and the items whose arms are trained, to their pages."""

import json
import subprocess

import hub_server
import pytest
from paths import ROOT
from shell import only
from warm_python import warm_python

from llava.compare import reproduce as reproduce_module
from llava.compare.__main__ import main
from llava.compare.published import missing_data
from llava.compare.reproduce import BENCHMARKS, ITEMS, MODELS, OWN_CODE
from llava.launch.settings import NAMES

GB = 10**9
DATA = ["llava-558k", "llava-next"]


class Large(bytes):
    """A file of which only the size is asked."""

    def __len__(self) -> int:
        return 14 * GB


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with every repository of the items, which this process takes for the hub; nothing is downloaded yet."""
    for name in (*NAMES, "MAX_STEPS", "IMAGE_FOLDER", "EXTRAS", "REPORT_TO", "DATA", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # restored after the test, whatever a command sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home/hub"))
    monkeypatch.setenv("HF_TOKEN", hub_server.READER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # As in a new checkout, whatever this one has below playground/data.
    monkeypatch.setattr(reproduce_module, "missing_data", lambda recipes: DATA[: len(recipes)])
    with hub_server.serve() as hub:
        weights = {"model.safetensors": Large()}
        for name in MODELS.values():
            hub.models[name] = hub_server.Repository(name, dict(weights))
        files = ("en/dev-0.parquet", "data/a.parquet", "a.parquet")
        for name, file in zip(BENCHMARKS, files, strict=True):
            hub.models[name] = hub_server.Repository(name, {file: Large()})
        hub_server.use(hub, monkeypatch)
        yield hub


# --- dry runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("item", ["table1", "table3", "table4", "fig5"])
def test_every_dry_run_says_sizes_and_what_would_run(hub, tmp_path, capsys, item):
    assert main(["reproduce", item, "--dry-run", "--output-dir", str(tmp_path / "out/reproduce")]) == 0
    shown, of = capsys.readouterr().out, ITEMS[item]
    rows = {line.split()[1]: line.split() for line in shown.splitlines() if " 000000000000 " in line}
    expected = [MODELS[name] for name in of.models] + ([*BENCHMARKS] if of.on_samples else [])
    if of.arms:
        assert shown.count("trains in ") == len(of.presets)
        assert "from the hub: meta-llama/Llama-3.2-3B-Instruct gated: accept its licence" in shown
        assert shown.count("first: python -m llava.data.prepare llava-558k") == len(of.presets)
    assert rows.keys() == {*expected}
    assert all(row[3:] == ["14.00", "14.00"] for row in rows.values())
    for command in of.commands:
        assert f"python -m llava.analysis {command} " in shown
    for name in {*of.models} & {*OWN_CODE}:
        assert f"note: {name}: code of its own repository" in shown
    assert ("llava.eval.evaluate " in shown) == (item == "table4")
    assert not (tmp_path / "out").exists() and not [name for name in hub.received if name.startswith("GET")]


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
    inputs = [("data", "playground/data/LLaVA-NeXT-Data/data", "MISSING"), ("images", "/mine/images", "MISSING")]
    inputs += [("data", "playground/data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json", "found")]
    inputs += [("adapter", "out/mm_projector.bin", "MISSING"), ("model", "mine", "WRONG")]
    recipe = {"preset": "nano", "inputs": [{"what": w, "value": v, "state": s, "hint": "do"} for w, v, s in inputs]}
    assert missing_data([recipe]) == ["llava-next"]


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
    gain = next(row["gain L2"] for row in rows if row["model"] == "layernorm@default")
    assert f"| layernorm@default: gain L2 | 53.25 | {gain:.4g} | {gain - 53.25:.4g} |" in page
    figures = [file.stem for file in folder.glob("norm-params*.png")]
    assert figures and all(f"![{figure}]({figure}.png)" in page for figure in figures)
