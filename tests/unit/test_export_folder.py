"""The folder of an export is whole or absent, and never takes the place of what is there."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from llava.export.folder import EXPORT_FILE, whole_folder


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    return str(folder)


def export(output_dir, model_path):
    with whole_folder(output_dir, "hf", model_path) as folder:
        (folder / "model").write_text("weights")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_export_says_which_weights_it_was_made_of(tmp_path, model):
    export(tmp_path / "out", model)
    assert names(tmp_path) == ["ckpt", "out"] and names(tmp_path / "out") == [EXPORT_FILE, "model"]
    source = json.loads((tmp_path / "out" / EXPORT_FILE).read_text())
    save_file({"weight": torch.zeros(4)}, f"{model}/model.safetensors")
    export(tmp_path / "other", model)
    other = json.loads((tmp_path / "other" / EXPORT_FILE).read_text())
    assert source | {"content": None} == other | {"content": None} and source["content"] != other["content"]


def test_a_folder_or_file_that_is_there_is_refused_and_stays(tmp_path, model):
    export(tmp_path / "out", model)
    (tmp_path / "file").write_text("mine")
    for place in ("out", "file"):
        with pytest.raises(ValueError, match=f"--output-dir .*{place}: not an empty folder; remove it"):
            export(tmp_path / place, model)
    assert names(tmp_path) == ["ckpt", "file", "out"] and (tmp_path / "file").read_text() == "mine"


def test_a_link_to_an_empty_folder_is_followed(tmp_path, model):
    (tmp_path / "disk/out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk/out")
    export(tmp_path / "link", model)
    assert (tmp_path / "disk/out/model").read_text() == "weights" and (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk") == ["out"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SafetensorError("no space left")])
def test_an_export_that_fails_leaves_nothing(tmp_path, model, fault):
    expected = OSError if isinstance(fault, SafetensorError) else KeyboardInterrupt
    with pytest.raises(expected), whole_folder(tmp_path / "out", "hf", model) as folder:
        (folder / "model").write_text("half")
        raise fault
    assert names(tmp_path) == ["ckpt"]


def test_what_a_killed_export_left_is_not_in_the_next(tmp_path, model):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/half").write_text("half")
    export(tmp_path / "out", model)
    assert names(tmp_path / "out") == [EXPORT_FILE, "model"] and names(tmp_path) == ["ckpt", "out"]


def test_of_two_exports_into_one_folder_the_second_is_refused(tmp_path, model):
    with whole_folder(tmp_path / "out", "hf", model) as folder:
        (folder / "model").write_text("weights")
        with pytest.raises(ValueError, match="another export writes it"):
            export(tmp_path / "out", model)
    assert names(tmp_path / "out") == [EXPORT_FILE, "model"]
