"""The files of a result: what they must hold."""

import csv
import json
from types import SimpleNamespace

from llava.analysis import output
from llava.analysis.commands import NamedModel
from llava.utils.digests import fingerprint, revision


def test_a_result_is_written_with_its_provenance_and_the_papers_numbers(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (pictures := tmp_path / "pictures").mkdir()
    (pictures / "a.png").write_text("a picture")
    rows = [
        output.with_paper({"model": "ours", "mean": 3.2, "n": 7}, {"mean": 1.5}),
        {"model": "other", "mean": float("nan"), "n": 1},
    ]
    args = {"command": "demo", "argv": ["demo", "--seed", "3"], "output_dir": tmp_path / "out", "seed": 3}
    args["data"] = str(pictures)
    output.write_result(SimpleNamespace(**args, models=[NamedModel("ours", str(model))]), rows)
    document = json.loads((tmp_path / "out/demo.json").read_text())
    assert document["rows"][0] == {"model": "ours", "mean": 3.2, "mean (paper)": 1.5, "n": 7}
    assert document["rows"][1]["mean"] is None
    origin = document["provenance"]
    assert origin["command"] == "python -m llava.analysis demo --seed 3" and origin["seed"] == 3
    assert origin["models"] == [{"name": "ours", "path": str(model), "revision": revision(str(model))}]
    assert origin["data"]["revision"] == fingerprint(pictures)
    assert origin["versions"]["torch"].startswith("2.")
    lines = (tmp_path / "out/demo.csv").read_text().splitlines()
    assert f"# command: {origin['command']}" in lines
    table = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert list(table[0]) == ["model", "mean", "mean (paper)", "n"]
    assert table[1]["mean"] == table[1]["mean (paper)"] == ""
    printed = capsys.readouterr().out
    assert "mean (paper)" in printed and "1.5000" in printed
