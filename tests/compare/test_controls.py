"""`python -m llava.compare answers`: answers without the picture, by a checkpoint that tells warm from cold colours."""

import json
import shutil

import pytest
from PIL import Image

from llava import asking
from llava.compare import answers
from llava.compare.__main__ import main
from llava.eval.results import CONTROLS, read_results


@pytest.fixture
def data(tiny, trained, tmp_path):
    """A prepared folder that asks each question about each colour, every question a kind."""
    trained("none")
    (tmp_path / "data").mkdir()
    records = json.loads((tiny / "data/colours.json").read_text())
    records = [r | {"kind": r["id"].split(" ", 1)[1], "choices": ["Yes", "No"]} for r in records]
    (tmp_path / "data/heldout.json").write_text(json.dumps(records))
    shutil.copytree(tiny / "data/images", tmp_path / "data/images")
    return tmp_path / "data"


@pytest.mark.slow
def test_without_its_picture_every_question_of_a_kind_has_one_answer(data, trained, tmp_path, monkeypatch):
    words = [
        "answers",
        "--checkpoint",
        str(trained("none")),
        "--data",
        str(data),
        "--output-dir",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--batch-size", "5"]) == 0
    found = {control: read_results(tmp_path / "out" / control).tasks for control in CONTROLS}
    assert all(task.score > 90 and task.chance == 50 for task in found["untouched"].values())
    for control in ("blank", "text-only"):
        for task in found[control].values():
            assert len({sample.answer for sample in task.samples}) == 1 and task.score < 90
    seen, blank = (
        [s.log_probability for task in found[control].values() for s in task.samples]
        for control in ("untouched", "blank")
    )
    assert min(seen) < 0 and max(seen) <= 0 and sum(seen) > sum(blank)
    ids = [sample.id for task in found["shuffled"].values() for sample in task.samples]
    assert sorted(ids) == sorted(sample.id for task in found["blank"].values() for sample in task.samples)

    def never(*_, **__):
        raise AssertionError("asked again")

    monkeypatch.setattr(asking, "load_assistant", never)
    assert main(words) == 0  # all are recorded
    for name, another in (("fastest_dtype", lambda: "float16"), ("made_by", lambda sources: {"torch": "1.0"})):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="asked again"):
            patch.setattr(answers, name, another)
            main(words)
    picture = data / "images/red.png"
    Image.new("RGB", (20, 16), "grey").save(picture)
    with pytest.raises(AssertionError, match="asked again"):
        main(words)
