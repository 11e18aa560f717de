"""The analysis' statistics, command line and files, against NumPy and what the files must hold."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from llava.analysis import __main__ as command_line
from llava.analysis import embedding_norms, interventions, measure, output
from llava.analysis.commands import NamedModel, named_model, required_models
from llava.analysis.curves import draw_gap
from llava.analysis.embedding_norms import EmbeddingNorms
from llava.analysis.measure import Measurement
from llava.analysis.probe import TEXT_AFTER, VISUAL
from llava.utils import commands
from llava.utils.digests import fingerprint


def test_models_on_the_command_line(tmp_path):
    assert named_model("aligned=a/b/c") == NamedModel("aligned", "a/b/c")
    assert named_model("Qwen/Qwen2-7B") == NamedModel("Qwen/Qwen2-7B", "Qwen/Qwen2-7B")
    folder = tmp_path / "arm" / "finetune"
    folder.mkdir(parents=True)
    assert named_model(str(folder)).name == "arm/finetune"
    with pytest.raises(ValueError, match="a names two models"):
        required_models([NamedModel("a", "x"), NamedModel("a", "y")])
    with pytest.raises(ValueError, match="--model: give at least 1"):
        required_models([])


def test_a_summary_holds_numpys_moments_and_quantiles_and_nan_where_there_are_no_values():
    values = np.random.default_rng(0).lognormal(3, 2, 500)
    summary = measure.summary(values)
    assert (summary["count"], summary["mean"], summary["std"]) == (500, values.mean(), values.std())
    assert (summary["min"], summary["p50"], summary["max"]) == (values.min(), np.median(values), values.max())
    assert summary["p99"] == np.percentile(values, 99)
    empty = measure.summary(np.empty(0))
    assert empty.pop("count") == 0 and np.isnan(list(empty.values())).all() and empty.keys() < summary.keys()


def arguments(folder, **others):
    defaults = {"command": "demo", "argv": ["demo", "--seed", "3"], "output_dir": folder, "models": [], "seed": 3}
    return SimpleNamespace(**(defaults | {"data": None} | others))


def test_a_result_is_written_with_its_provenance_and_the_papers_numbers(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    rows = [
        output.with_paper({"model": "ours", "mean": 3.2, "n": 7}, {"mean": 1.5}),
        {"model": "other", "mean": float("nan"), "n": 1},
    ]
    args = arguments(tmp_path / "out", models=[NamedModel("ours", str(model))])
    output.write_result(args, rows, {"curve": [1.0, float("inf")]})
    document = json.loads((tmp_path / "out/demo.json").read_text())
    assert document["rows"][0] == {"model": "ours", "mean": 3.2, "mean (paper)": 1.5, "n": 7}
    assert document["rows"][1]["mean"] is None and document["details"] == {"curve": [1.0, None]}
    origin = document["provenance"]
    assert origin["command"] == "python -m llava.analysis demo --seed 3" and origin["seed"] == 3
    assert origin["models"] == [{"name": "ours", "path": str(model), "revision": fingerprint(model)}]
    assert origin["versions"]["torch"].startswith("2.")
    lines = (tmp_path / "out/demo.csv").read_text().splitlines()
    assert f"# command: {origin['command']}" in lines
    table = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert list(table[0]) == ["model", "mean", "mean (paper)", "n"]
    assert table[1]["mean"] == table[1]["mean (paper)"] == ""
    printed = capsys.readouterr().out
    assert "mean (paper)" in printed and "1.5000" in printed


def test_a_figure_is_written_twice_and_the_same_each_time(tmp_path):
    for folder in ("one", "two"):
        with output.figure(arguments(tmp_path / folder), 1, 2) as (_, axes):
            axes[0].plot([1, 2], label="visual")
    for kind in ("png", "svg"):
        assert (tmp_path / f"one/demo.{kind}").read_bytes() == (tmp_path / f"two/demo.{kind}").read_bytes()


def test_without_matplotlib_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"llava\[analysis\]"):
        output.import_pyplot()


def test_commands_return_their_status_and_refuse_in_one_line(monkeypatch, capsys):
    def run(args):
        if args.seed == 0:
            raise ValueError("--seed 0: not today")
        return args.seed

    module = SimpleNamespace(__doc__="Demo.", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(commands, "module_of", lambda package, command: module)
    assert command_line.main(["theory", "--seed", "1"]) == 1
    assert command_line.main(["theory", "--seed", "0"]) == 2
    assert capsys.readouterr().err == "llava.analysis theory: --seed 0: not today\n"
    for wrong in ([], ["nothing"], ["theory", "--sed"], ["theory", "--model", "=x"]):
        with pytest.raises(SystemExit) as stop:
            command_line.main(wrong)
        assert stop.value.code == 2


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    module = SimpleNamespace(__doc__="Demo.", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(commands, "module_of", lambda package, command: module)
    assert command_line.main(["theory"]) == 130
    line = "llava.analysis theory: interrupted; rerun the same command to resume\n"
    assert capsys.readouterr().err == line


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """The figures that a command has written, in order."""
    pyplot = output.import_pyplot()
    figures = []
    monkeypatch.setitem(output.STYLE, "savefig.dpi", 30)
    monkeypatch.setattr(pyplot, "close", figures.append)
    yield figures
    monkeypatch.undo()
    for figure in figures:
        pyplot.close(figure)


def covered_points(figure) -> int:
    """How many points of a figure's curves lie under one of its legends or labels."""
    figure.canvas.draw()
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes if axis.get_legend())]
    assert legends
    labels = [text for axis in figure.axes for text in axis.texts]
    boxes = [drawn.get_window_extent() for drawn in (*legends, *labels)]
    count = 0
    for axis in figure.axes:
        paths = [line.get_transform().transform(line.get_xydata()) for line in axis.lines if len(line.get_xdata()) > 2]
        paths += [patch.get_transform().transform(patch.get_path().vertices) for patch in axis.patches]
        count += sum(box.count_contains(path) for box in boxes for path in paths)
    return count


def curves_of(angles):
    turns, sinks = np.array(angles), np.zeros(2, dtype=bool)
    return Measurement([{"turn": turns, "cosine": turns, "group": np.array([VISUAL, TEXT_AFTER]), "sink": sinks}], 1)


@pytest.mark.slow
def test_legends_and_labels_cover_no_curve_however_long_the_names(tmp_path, drawn):
    norms = np.random.default_rng(0).normal(3, 0.6, 5000)
    names = ("gwc_layernorm/finetune", "none/finetune", "layernorm/finetune")
    embeddings = [EmbeddingNorms(name, "x", 8, norms, []) for name in names]
    embedding_norms.draw(arguments(tmp_path), embeddings)
    draw_gap(arguments(tmp_path), dict.fromkeys(names, curves_of([(1.0, 30.0), *[(2.0, 3.0)] * 20, (3.0, 1.5)])))
    kinds = (
        interventions.UNTOUCHED,
        interventions.BLANK,
        interventions.TEXT_NORM,
        *(f"alpha {10.0**i:g}" for i in range(-3, 4)),
    )
    rows = [
        {"model": name, "intervention": kind, "KL (nats)": 1.0, "cos of keys": i / 9, "cos of values": 1 - i / 9}
        for name in names
        for i, kind in enumerate(kinds)
    ]
    details = dict.fromkeys(names, {"text norm": 1.0, "visual norm": 10.0})
    interventions.draw(arguments(tmp_path), rows, details)
    assert [covered_points(figure) for figure in drawn] == [0, 0, 0]


def test_the_gaps_axis_fits_curves_of_any_height(tmp_path, drawn):
    draw_gap(arguments(tmp_path), {"x": curves_of([(1.0, 30.0), (4.0, 4.0)])})
    low, high = drawn[0].axes[0].get_ylim()
    assert 0.5 < low <= 0.7 and 30 < high < 60
