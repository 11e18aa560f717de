"""What a dry run says of each input: what is there but is not what it should be is named as what it is."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from shell import bash

from llava.launch.inputs import PREPARED
from llava.launch.plan import resolve
from llava.launch.recipe import resolved_run


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


def dry_run(variables, stage="finetune", **more):
    return bash(f"scripts/{stage}.sh", LLAVA_PYTHON="false", NUM_GPUS=1, **{"DRY_RUN": 1} | variables | more)


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


def make_wrong(folder: Path, name: str) -> str:
    """Makes what a user may give by mistake for the variable `name`; returns its path."""
    path = folder / "wrong"
    if name in ("MODEL_PATH", "VISION_TOWER", "PRETRAIN_ADAPTER"):
        path.mkdir()
        (path / "a.png").touch()
    else:
        path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("name", "what", "problem"),
    [
        ("MODEL_PATH", "model", "expected a model's folder, found no config.json in it"),
        ("VISION_TOWER", "vision tower", "expected a model's folder, found no config.json in it"),
        ("DATA_PATH", "data", "expected a file that ends in .json, .jsonl, .parquet"),
        ("IMAGE_FOLDER", "images", "expected a folder or a zip file, found another file"),
        ("PRETRAIN_ADAPTER", "adapter", "expected mm_projector.bin, found a folder without it"),
    ],
)
def test_a_path_that_is_something_else_is_named_as_what_it_is(inputs, tmp_path, name, what, problem):
    inputs[name] = make_wrong(tmp_path, name)
    state, hint = states(inputs)[what]
    assert state == "WRONG" and hint.startswith(problem)
    assert sum(state == "WRONG" for state, _ in states(inputs).values()) == 1


@pytest.mark.parametrize(("path", "problem"), [("data.csv", "found .csv"), ("data", "found no ending")])
def test_a_file_of_another_kind_is_not_taken_for_records(inputs, tmp_path, path, problem):
    (tmp_path / path).touch()
    state, hint = states(inputs | {"DATA_PATH": tmp_path / path})["data"]
    assert state == "WRONG" and problem in hint and ".jsonl, .parquet, .yaml" in hint


def test_a_mixture_is_an_input_whose_entries_are_left_to_the_trainer(inputs, tmp_path):
    (tmp_path / "mixture.yaml").write_text("datasets:\n  - json_path: gone.json\n")
    assert states(inputs | {"DATA_PATH": tmp_path / "mixture.yaml"})["data"] == ("found", "")


def test_a_dry_run_with_an_input_missing_has_status_2_and_lists_it_as_json(inputs):
    assert dry_run(inputs).returncode == 0
    inputs["DATA_PATH"] = Path("/no/such.json")
    assert dry_run(inputs).returncode == 2
    run = dry_run(inputs, DRY_RUN="json")
    (problem,) = json.loads(run.stdout)["problems"]
    assert run.returncode == 2 and problem.startswith("data /no/such.json: MISSING, set DATA_PATH ")
    assert run.stderr.endswith("1 input(s) are MISSING or WRONG, see the list above\n")
    assert resolved_run("pretrain", DATA_PATH="/no/such.json", NUM_GPUS=1)["problems"]  # a plan all the same


@pytest.mark.parametrize(
    ("path", "preset", "advice"),
    [
        (f"{PREPARED}/no/such.json", "run: python -m playground", "run: python -m playground"),
        (f"{PREPARED}/no/such.json", "", "run python -m llava.data.prepare, or set DATA_PATH"),
        ("/mine.json", "run: python -m playground", "set DATA_PATH"),
        ("/mine.json", "", "set DATA_PATH"),
    ],
)
def test_only_missing_paths_of_ours_name_the_command_that_prepares_them(path, preset, advice):
    variables = {"INPUT_HINT": preset, "DATA_SOURCE": "run python -m llava.data.prepare"}
    variables |= {"GLOBAL_BATCH": "1", "NUM_GPUS": "1"}
    words = ["--data_path", path, "--per_device_train_batch_size", "1", "--output_dir", "out"]
    (hint,) = [each.hint for each in resolve(variables, "train.py", words).inputs if each.what == "data"]
    assert hint.startswith(advice)
