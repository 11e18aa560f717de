"""The notebooks: every cell runs, on tiny models; the first hour's leaves a quickstart's folder."""

import json
import re
import sys

import nbformat
import pytest
from paths import ROOT
from training import losses
from vision_language_models import our_checkpoint
from warm_python import warm_python

from llava.compare.record import read_record
from playground import scenes, smollm2, tower
from playground.store import build, read_manifest

NOTEBOOKS = ROOT / "notebooks"


@pytest.fixture
def inputs(tiny, tmp_path):
    """A folder of inputs that count as complete: a few scenes, and the tiny models in place of the real ones."""
    root = tmp_path / "inputs"
    scenes.prepare(scenes.Settings(num_train=24, num_crowded=0, num_heldout=12, num_text=4), root)
    made = json.loads(json.dumps(vars(scenes.Settings()) | {"format": scenes.FORMAT}))
    manifest = root / "scenes/manifest.json"
    manifest.write_text(json.dumps(read_manifest(root / "scenes") | {"settings": made}))

    def copied(source):
        def write(folder):
            for file in source.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            return {}

        return write

    build(
        root / smollm2.FOLDER, "smollm2", vars(smollm2.Settings()) | {"format": smollm2.FORMAT}, copied(tiny / "llama")
    )
    described = vars(tower.Settings()) | {"seconds": 0.0, "format": tower.FORMAT, "data_settings": made}
    build(root / "siglip-scenes", "tower", described, copied(tiny / "siglip"))
    return root


@pytest.mark.slow
def test_every_cell_runs_and_the_page_stands_alone(inputs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    for name, value in {"NUM_GPUS": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "BF16": "False"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LLAVA_PYTHON", "MAX_STEPS"):
        monkeypatch.setenv(name, "")  # restored after the test, whatever the cells set
    monkeypatch.setattr(sys, "executable", str(warm_python()))  # in which the cells start the stages
    run_here("first_hour", monkeypatch, STEPS=2, INPUTS=str(inputs), OUTPUT=str(out))
    said = capsys.readouterr().out
    assert "GlobalWeightCompensatedLayerNorm" in said and said.count(" (expected: ") == 3
    stages = [out / arm / stage for arm in ("none", "gwc_layernorm") for stage in ("pretrain", "finetune")]
    assert [len(losses(folder)) for folder in stages] == [2] * 4
    record = read_record(out)
    assert [run["arm"] for run in record["runs"]] == ["none", "gwc_layernorm"]
    assert sum(map(len, record["questions"].values())) == 12
    page = (out / "report.html").read_text()
    assert not re.findall(r"""src=["'](?!data:)""", page) and page.count("data:image") >= 5
    assert all((out / path).exists() for path in re.findall(r'href="([^"]*)"', page))


@pytest.mark.slow
def test_trl_trains_an_attached_model_that_loads_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl", reason="EXTRAS=trl bash scripts/setup.sh")
    run_here("attach_and_train", monkeypatch, OUTPUT=str(tmp_path / "out"))
    said = capsys.readouterr().out
    assert "steps 2 | the gain moved True" in said and "the same logits: True" in said


@pytest.mark.slow
def test_a_local_checkpoint_is_measured(tiny, tmp_path, monkeypatch):
    checkpoint, out = our_checkpoint(tiny, tmp_path / "checkpoint", norm="gwc_layernorm"), tmp_path / "out"
    settings = {"MODEL": checkpoint, "DATA": str(tiny / "data/finetune.json"), "SAMPLES": 4, "OUTPUT": str(out)}
    run_here("measure_your_model", monkeypatch, **settings)
    for name in ("embedding-norms", "interface-norms", "update-rates"):
        (row, *_) = json.loads((out / f"{name}.json").read_text())["rows"]
        assert row["model"] == "mine"


def run_here(name, monkeypatch, **settings):
    """Runs a notebook's cells in this process, with other values in its first cell; it must hold no outputs."""
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    cells = [cell for cell in nbformat.read(f"{name}.ipynb", as_version=4).cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]
    names = {}
    exec(cells[0].source, names)
    names |= settings
    for cell in cells[1:]:
        exec(cell.source, names)
