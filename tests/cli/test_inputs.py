"""What a dry run says of each input: what is there but is not what it should be is named as what it is."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from shell import bash

from llava.launch.plan import resolve


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    """Variables of a run whose inputs are all there, as far as a glance tells."""
    for folder in ("model", "tower", "images", "stage1"):
        (tmp_path / folder).mkdir()
    for folder in ("model", "tower"):
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "data.json").write_text("[]")
    torch.save({}, tmp_path / "stage1/mm_projector.bin")
    (tmp_path / "stage1/config.json").write_text('{"mm_projector_norm": "gwc_layernorm"}')
    names = {"MODEL_PATH": "model", "VISION_TOWER": "tower", "DATA_PATH": "data.json", "IMAGE_FOLDER": "images"}
    paths = {name: tmp_path / path for name, path in names.items()}
    return paths | {"PRETRAIN_ADAPTER": tmp_path / "stage1/mm_projector.bin", "OUTPUT_DIR": tmp_path / "new/out"}


def states(variables: dict[str, Path], norm: str = "gwc_layernorm") -> dict[str, tuple[str, str]]:
    """State and hint of each input, by its name."""
    flags = {
        "model_name_or_path": "MODEL_PATH",
        "vision_tower": "VISION_TOWER",
        "data_path": "DATA_PATH",
        "image_folder": "IMAGE_FOLDER",
        "pretrain_mm_mlp_adapter": "PRETRAIN_ADAPTER",
        "output_dir": "OUTPUT_DIR",
    }
    words = [word for flag, name in flags.items() for word in (f"--{flag}", str(variables[name]))]
    words += ["--mm_projector_norm", norm, "--per_device_train_batch_size", "1"]
    plan = resolve({"GLOBAL_BATCH": "1", "NUM_GPUS": "1"}, "train.py", words)
    return {each.what: (each.state, each.hint) for each in plan.inputs}


def test_inputs_that_are_what_they_should_be_are_found(inputs):
    assert set(states(inputs).values()) == {("found", "")}
    with zipfile.ZipFile(inputs["IMAGE_FOLDER"].with_suffix(".zip"), "w") as pictures:
        pictures.writestr("a.png", b"")
    others = {"IMAGE_FOLDER": inputs["IMAGE_FOLDER"].with_suffix(".zip")}
    others["PRETRAIN_ADAPTER"] = inputs["PRETRAIN_ADAPTER"].parent
    assert set(states(inputs | others).values()) == {("found", "")}


@pytest.mark.parametrize(
    ("name", "what", "problem"),
    [
        ("MODEL_PATH", "model", "expected a model's folder, found no config.json in it"),
        ("DATA_PATH", "data", "expected a file that ends in .json, .jsonl, .parquet"),
        ("IMAGE_FOLDER", "images", "expected a folder or a zip file, found another file"),
        ("PRETRAIN_ADAPTER", "adapter", "expected mm_projector.bin, found a folder without it"),
    ],
)
def test_a_path_that_is_something_else_is_named_as_what_it_is(inputs, tmp_path, name, what, problem):
    inputs[name] = tmp_path / "wrong"
    inputs[name].mkdir() if name in ("MODEL_PATH", "PRETRAIN_ADAPTER") else inputs[name].touch()
    state, hint = states(inputs)[what]
    assert state == "WRONG" and hint.startswith(problem)
    assert sum(state == "WRONG" for state, _ in states(inputs).values()) == 1


def test_hub_names_are_not_local_paths_and_patterns_of_records_are_found(inputs):
    hub = {
        "MODEL_PATH": "owner/model",
        "VISION_TOWER": "./no/such",
        "DATA_PATH": f"{inputs['DATA_PATH'].parent}/*.json",
    }
    found = states(inputs | hub | {"PRETRAIN_ADAPTER": "llava/no-such-folder"})
    listed = [found[what][0] for what in ("model", "vision tower", "data", "adapter")]
    assert listed == ["hub", "MISSING", "found", "MISSING"]
    assert "VISION_TOWER" in found["vision tower"][1] and "PRETRAIN_ADAPTER" in found["adapter"][1]


def test_a_dry_run_with_an_input_missing_has_status_2_and_lists_it_as_json(inputs):
    variables = {"LLAVA_PYTHON": "false", "NUM_GPUS": 1}
    assert bash("scripts/finetune.sh", DRY_RUN=1, **inputs, **variables).returncode == 0
    run = bash("scripts/finetune.sh", DRY_RUN="json", **inputs | {"DATA_PATH": "/no/such.json"}, **variables)
    (problem,) = json.loads(run.stdout)["problems"]
    assert run.returncode == 2 and problem.startswith("data /no/such.json: MISSING, set DATA_PATH ")
    assert run.stderr.endswith("1 input(s) are MISSING or WRONG, see the list above\n")
