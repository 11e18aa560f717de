"""The folder of an export is whole or absent, is never given to another checkpoint, and keeps what was added to it."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from llava.export.folder import EXPORT_FILE, whole_folder


def checkpoint(folder, value):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.full((4,), value)}, folder / "model.safetensors")
    return str(folder)


def export(output_dir, model_path, text="weights"):
    with whole_folder(output_dir, "hf", model_path) as folder:
        (folder / "model").write_text(text)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_same_export_again_replaces_its_files_and_keeps_what_was_added(tmp_path):
    model, output = checkpoint(tmp_path / "ckpt", 1.0), tmp_path / "out"
    export(output, model)
    (output / "README.md").write_text("card")
    (output / "figures").mkdir()
    (output / "figures/a.png").write_text("figure")
    export(output, model, "new")
    assert (output / "model").read_text() == "new" and (output / "README.md").read_text() == "card"
    assert (output / "figures/a.png").read_text() == "figure" and "README.md" not in (output / EXPORT_FILE).read_text()
    assert names(tmp_path) == ["ckpt", "out"]


def test_another_checkpoint_of_the_same_sizes_is_refused(tmp_path):
    first, second = checkpoint(tmp_path / "1/finetune", 1.0), checkpoint(tmp_path / "2/finetune", 2.0)
    export(tmp_path / "out", first)
    with pytest.raises(ValueError, match=r"--output-dir .*neither empty nor an earlier export of this checkpoint"):
        export(tmp_path / "out", second, "other")
    assert (tmp_path / "out/model").read_text() == "weights"


@pytest.mark.parametrize("content", ['{"command": "hf"', "[]", "{}"])
def test_a_folder_with_a_broken_record_is_not_touched(tmp_path, content):
    model = checkpoint(tmp_path / "ckpt", 1.0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / EXPORT_FILE).write_text(content)
    with pytest.raises(ValueError, match="neither empty nor"):
        export(tmp_path / "out", model)
    assert names(tmp_path / "out") == [EXPORT_FILE]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SafetensorError("no space left")])
def test_an_export_that_fails_leaves_the_earlier_one_and_nothing_else(tmp_path, fault):
    model = checkpoint(tmp_path / "ckpt", 1.0)
    export(tmp_path / "out", model)
    expected = OSError if isinstance(fault, SafetensorError) else KeyboardInterrupt
    with pytest.raises(expected), whole_folder(tmp_path / "out", "hf", model) as folder:
        (folder / "model").write_text("half")
        raise fault
    assert (tmp_path / "out/model").read_text() == "weights" and names(tmp_path) == ["ckpt", "out"]


def test_an_export_that_was_killed_between_two_names_is_found_again(tmp_path):
    model = checkpoint(tmp_path / "ckpt", 1.0)
    export(tmp_path / "out", model)
    (tmp_path / "out/README.md").write_text("card")
    (tmp_path / "out").rename(tmp_path / ".out.earlier")
    export(tmp_path / "out", model, "new")
    assert names(tmp_path / "out") == ["README.md", EXPORT_FILE, "model"] and names(tmp_path) == ["ckpt", "out"]


def test_a_link_is_followed(tmp_path):
    model = checkpoint(tmp_path / "ckpt", 1.0)
    (tmp_path / "link").symlink_to(tmp_path / "disk/out")
    for text in ("weights", "new"):
        export(tmp_path / "link", model, text)
    assert (tmp_path / "disk/out/model").read_text() == "new" and (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk") == ["out"]


def test_of_two_exports_into_one_folder_the_second_is_refused(tmp_path):
    model = checkpoint(tmp_path / "ckpt", 1.0)
    with whole_folder(tmp_path / "out", "hf", model) as folder:
        (folder / "model").write_text("weights")
        with pytest.raises(ValueError, match="another export writes it"):
            export(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / EXPORT_FILE).read_text())["files"] == ["model"]
