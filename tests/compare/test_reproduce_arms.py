"""`scripts/reproduce.sh`: what every item's dry run says, and the items whose arms are trained, to their pages."""

import io
import json
import re
import shlex
import subprocess
import sys

import hub_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import study_stub
from paths import ROOT
from PIL import Image
from run_inputs import inputs_in
from shell import new_lines, only
from warm_python import warm_python

from llava.compare import reproduce as reproduce_module
from llava.compare.__main__ import PACKAGE, SUMMARIES, main
from llava.compare.published import missing_data
from llava.compare.reproduce import BENCHMARKS, ITEMS, MODELS, OWN_CODE, Reproduction
from llava.data.prepare import SOURCES
from llava.launch.settings import NAMES
from llava.utils.commands import command_parser

GB = 10**9
OF_PRESETS = ("meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "google/siglip-so400m-patch14-384")
DATA = {"llava-558k": "images.zip", "llava-next": "data/train-00000-of-00001.parquet"}


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
    names = [*DATA]
    monkeypatch.setattr(
        reproduce_module, "missing_data", lambda recipes: {n: SOURCES[n] for n in names[: len(recipes)]}
    )
    with hub_server.serve() as hub:
        weights = {"model.safetensors": Large()}
        for name in {*MODELS.values(), *OF_PRESETS}:
            hub.models[name] = hub_server.Repository(name, dict(weights))
        files = ("en/dev-0.parquet", "data/a.parquet", "a.parquet")
        data = dict(zip(BENCHMARKS, files, strict=True))
        data |= {SOURCES[name].repository: file for name, file in DATA.items()}
        for name, file in data.items():
            hub.models[name] = hub_server.Repository(name, {file: Large()})
        hub_server.use(hub, monkeypatch)
        yield hub


def task_of(*words: str) -> Reproduction:
    return Reproduction(command_parser(PACKAGE, None, SUMMARIES, "reproduce").parse_args(["reproduce", *words]))


# --- dry runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("item", ["table1", "table3", "table4", "fig5"])
def test_every_dry_run_says_sizes_and_what_would_run(hub, tmp_path, capsys, item):
    assert main(["reproduce", item, "--dry-run", "--output-dir", str(tmp_path / "out/reproduce")]) == 0
    shown, of = capsys.readouterr().out, ITEMS[item]
    rows = {line.split()[1]: line.split() for line in shown.splitlines() if " 000000000000 " in line}
    expected = [MODELS[name] for name in of.models] + ([*BENCHMARKS] if of.on_samples else [])
    if of.arms:
        models = [OF_PRESETS[0], OF_PRESETS[2], *([OF_PRESETS[1]] if item == "table4" else [])]
        stages = 1 if of.stage != "finetune" else 2
        expected += models + [SOURCES[name].repository for name in [*DATA][:stages]]
        assert shown.count("trains in ") == len(of.presets)
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
def test_a_gated_model_of_an_arm_is_refused_before_anything_is_downloaded_or_trained(
    hub, tmp_path, monkeypatch, capsys
):
    hub.models[OF_PRESETS[0]].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert main(["reproduce", "fig5", "--output-dir", str(tmp_path / "out/reproduce")]) == 2
    assert re.search(rf"{OF_PRESETS[0]}: .*gated repo.*; ask for access .*run: hf auth login", capsys.readouterr().err)
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


def test_a_model_in_the_cache_is_not_asked_for(hub, tmp_path):
    task = task_of("table5", "--output-dir", str(tmp_path / "out/reproduce"))
    for name in OF_PRESETS:
        folder = tmp_path / f"home/hub/models--{name.replace('/', '--')}"
        for file, content in (("refs/main", "1"), ("snapshots/1/config.json", "{}")):
            (folder / file).parent.mkdir(parents=True)
            (folder / file).write_text(content)
    assert task.ask_hub() == []
    assert [each.repository for each in task.files] == [SOURCES["llava-558k"].repository]


def test_data_that_are_missing_are_fetched_before_the_arms_are_trained(hub, tmp_path):
    task = task_of("fig4", "--output-dir", str(tmp_path / "out/reproduce"))
    (comparison,) = task.trained
    assert comparison.folder == tmp_path / "out/compare-llama-3.2-3b"
    commands = [shlex.join(step.command[1:]) for step in task.inputs(comparison)]
    assert commands == ["-m llava.data.prepare llava-558k", "-m llava.data.prepare llava-next"]


def test_the_data_sets_that_are_missing_are_those_of_the_recipes_folders():
    inputs = [("data", "playground/data/LLaVA-NeXT-Data/data", "MISSING"), ("images", "/mine/images", "MISSING")]
    inputs += [("data", "playground/data/LLaVA-Pretrain/blip_laion_cc_sbu_558k.json", "found")]
    inputs += [("adapter", "out/mm_projector.bin", "MISSING"), ("model", "mine", "WRONG")]
    recipe = {"preset": "nano", "inputs": [{"what": w, "value": v, "state": s, "hint": "do"} for w, v, s in inputs]}
    assert [*missing_data([recipe])] == ["llava-next"]


def test_the_demo_is_trained_as_scripts_compare_sh_trains_it(hub, tmp_path):
    task = task_of("table4", "--preset", "demo", "--output-dir", str(tmp_path / "out/reproduce"))
    (comparison,) = task.trained
    flags = [recipe["flags"] for recipe in task.recipes["demo"]]
    assert [each["data_path"] for each in flags] == [f"playground/data/scenes/{stage}.json" for stage in task.stages]
    made = [step.title.removeprefix("inputs, ") for step in task.inputs(comparison)]
    assert made == comparison.prepared() and {"scenes", "tower", "heldout"} <= {*made}
    assert "--tasks scenes" in shlex.join(comparison.evaluation(comparison.runs[0]).command)


# --- to the page ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reproduce(tiny, tmp_path_factory):
    """A function from an item to its page and folder; its arms are tiny, and items share them."""
    root = tmp_path_factory.mktemp("arms")
    rows = []
    for colour in ("red", "green", "blue", "white"):
        stream = io.BytesIO()
        Image.new("RGB", (16, 16), colour).save(stream, "PNG")
        rows.append({"image": {"bytes": stream.getvalue(), "path": None}, "question": "Is it?", "answer": "A"})
    pq.write_table(pa.Table.from_pylist(rows), root / "samples.parquet")
    env = {"LLAVA_PYTHON": warm_python(), "PYTHONPATH": ROOT, "HOME": root, "NUM_GPUS": 0, "CUDA_VISIBLE_DEVICES": ""}
    env |= {"MODEL_PATH": tiny / "qwen", "VISION_TOWER": tiny / "siglip", "IMAGE_FOLDER": tiny / "data/images"}
    env |= {"DATA_PATH": tiny / "data/finetune.json", "PROMPT_VERSION": "chatml", "LABEL_MASKING": "assistant"}
    env |= {"GLOBAL_BATCH": 8, "PER_DEVICE_BATCH": 8, "MAX_STEPS": 2, "MAX_TOKENS_PER_MICRO_BATCH": ""}
    env |= {"DEEPSPEED_CONFIG": "", "BF16": "False", "MODEL_MAX_LENGTH": 256}
    env |= {"NUM_WORKERS": 0, "REPORT_TO": "none", "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}

    def run(item):
        words = ["-m", "llava.compare", "reproduce", item, "--preset", "nano", "--output-dir", root / "out/reproduce"]
        words += ["--samples", "9", "--data", root / "samples.parquet"] if ITEMS[item].on_samples else []
        command = [warm_python(), *map(str, words)]
        ran = subprocess.run(command, cwd=ROOT, env=only(**env), capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
        folder = root / "out/reproduce" / item
        return (folder / "index.md").read_text().replace("\\", ""), folder

    run.trained = root / "out/compare-nano/seed-42"
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item", "part", "files"),
    [
        ("fig4", "finetune", ("layer-norms", "update-rates")),
        ("fig5", "checkpoints", ("update-rates",)),
        ("table5", "pretrain", ("norm-params",)),
    ],
)
def test_an_item_trains_its_arms_measures_them_and_writes_its_page(reproduce, item, part, files):
    page, folder = reproduce(item)
    for arm in ITEMS[item].arms:
        assert (reproduce.trained / arm / part / "config.json").is_file()
        assert f"| {arm}, nano | " in page and f"{arm}/{part} |" in page
    for name in files:
        rows = json.loads((folder / f"{name}.json").read_text())["rows"]
        measured = {str(row["model"]).removesuffix(", step 2").removesuffix("/checkpoints") for row in rows}
        assert {*ITEMS[item].arms} <= {name.rpartition("/")[2] for name in measured}
        figures = [file.stem for file in folder.glob(f"{name}*.png")]
        assert figures and all(f"![{figure}]({figure}.png)" in page for figure in figures)
    if item == "table5":
        gain = next(row["gain L2"] for row in rows if row["model"] == "layernorm@default")
        assert f"| layernorm@default: gain L2 | 53.25 | {gain:.4g} | {gain - 53.25:.4g} |" in page
    else:
        assert "- 4 samples of 9 requested.\n" in page
        assert "The paper prints no numbers here; compare the figures." in page


@pytest.mark.slow
def test_the_scores_of_table_4_are_trained_and_evaluated_to_their_page(tmp_path):
    """The trainings and evaluations are stand-ins, which leave the files of real ones."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {study_stub.__file__} "$@"\n')
    python.chmod(0o755)
    env = {"LLAVA_PYTHON": python, "CALLS": calls, "HOME": tmp_path, "PYTHONPATH": ROOT, "BF16": "False"}
    env |= {"NUM_GPUS": 0, "CUDA_VISIBLE_DEVICES": "", "DEEPSPEED_CONFIG": "", "HF_TOKEN": "hf_x"} | inputs_in(tmp_path)
    words = ["table4", "--preset", "qwen2.5-7b", "--output-dir", tmp_path / "out/reproduce"]
    command = [warm_python(), "-m", "llava.compare", "reproduce", *map(str, words)]
    ran = subprocess.run(command, cwd=ROOT, env=only(**env), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    arms = ITEMS["table4"].arms
    done = [[f"train 42 {arm} pretrain", f"train 42 {arm} finetune", f"evaluate {arm}"] for arm in arms]
    assert new_lines(calls)() == [line for lines in done for line in lines]
    page = (tmp_path / "out/reproduce/table4/index.md").read_text().replace("\\", "")
    for arm in arms:
        scores = json.loads((tmp_path / f"out/compare-qwen2.5-7b/seed-42/{arm}/eval/results.json").read_text())
        assert f"| qwen2.5-7b, {arm}: color |  | {float(scores['tasks']['color']['score']):.4g} |  |" in page
