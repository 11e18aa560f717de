"""The notebook: every cell runs, on tiny models, and what it leaves is a quickstart's folder."""

import json
import os
import re

import nbformat
import pytest
from nbclient import NotebookClient
from paths import ROOT
from warm_python import warm_python

from playground import scenes, smollm2, tower
from playground.store import build, read_manifest

NOTEBOOK = ROOT / "notebooks/first_hour.ipynb"


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
    described = vars(tower.Settings()) | {"format": tower.FORMAT, "data_settings": made}
    build(root / "siglip-scenes", "tower", described, copied(tiny / "siglip"))
    return root


@pytest.mark.slow
def test_every_cell_runs_and_the_page_stands_alone(inputs, tmp_path, monkeypatch):
    notebook, out = nbformat.read(NOTEBOOK, as_version=4), tmp_path / "out"
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source += f"\nSTEPS, INPUTS, OUTPUT = 2, {str(inputs)!r}, {str(out)!r}"
    for name, value in {"NUM_GPUS": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "BF16": "False"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_PATH", str(own_kernel(tmp_path)))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()

    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "none, stage 2" in said and "GlobalWeightCompensatedLayerNorm" in said
    results = json.loads((out / "results.json").read_text())
    assert [len(record) for record in results["records"]] == [5] * 12
    page = (out / "index.html").read_text()
    assert not re.findall(r"""src=["'](?!data:)""", page) and page.count("data:image") >= 5
    for path in re.findall(r'href="([^"]*)"', page):
        assert (out / path).exists(), path
    assert "How fast tokens turn" in page and "cannot rank the arms" in page and "gwc_layernorm, stage 1" in page


def own_kernel(folder):
    """A Jupyter folder whose Python is the one that runs the tests."""
    kernel = folder / "jupyter/kernels/python3"
    kernel.mkdir(parents=True)
    argv = [str(warm_python()), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    spec = {"argv": argv, "display_name": "Python 3", "language": "python", "env": env}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    return folder / "jupyter"


def test_an_empty_address_of_the_repository_is_named_where_it_is_needed(tmp_path, monkeypatch):
    cells = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="^CLONE is empty: set it in the first cell"):
        exec("\n".join(cells[:2]), {})


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
