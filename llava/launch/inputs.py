"""Whether a run's inputs are here, are on the model hub, are missing, or are something else, and what to do then."""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from llava.launch.command import Launch, deepspeed_configs, node_rank
from llava.launch.devices import Devices
from llava.launch.settings import Flags
from llava.utils.paths import IS_CHECKOUT

FOUND, HUB, MISSING, WRONG = "found", "hub", "MISSING", "WRONG"
NOT_SET = "not set"
PREPARED = "playground/data"  # what this tree's own commands prepare lies here
RECORDS = (".json", ".jsonl", ".parquet", ".yaml", ".yml")
ADAPTER_FILE = "mm_projector.bin"
GATED = ("meta-llama/", "google/gemma-")
"""How hub names of models begin that are downloaded only by users who accepted their licence."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


@dataclass(frozen=True)
class Input:
    """One input and its state; `hint` says what to do where it is missing or gated, and what a wrong one should be."""

    state: str
    what: str
    value: str
    hint: str = ""


def check_inputs(environment: Mapping[str, str], flags: Flags, devices: Devices, launch: Launch) -> list[Input]:
    """Everything that the run reads, in the order in which it is shown. Paths are relative to the working directory."""
    return [*_check_paths(environment, flags), *_check_meeting(environment, devices, launch)]


def _check_paths(environment: Mapping[str, str], flags: Flags) -> Iterator[Input]:
    value, prepared, source = flags.value, environment.get("INPUT_HINT", ""), environment.get("DATA_SOURCE", "")

    def check(what: str, path: str, advice: str, fault: Callable[[Path], str], made_by: str = "") -> Iterator[Input]:
        if path and Path(path).absolute().is_relative_to(Path(PREPARED).absolute()):
            advice = prepared or (f"{made_by}, or {advice}" if made_by else advice)
            if not IS_CHECKOUT and "-m playground" in prepared:
                advice = f"in a clone of the repository {prepared}, and give the folder that it makes"
        if path:
            yield _state(what, path, advice, environment.get("CALLED_FROM", ""), fault)

    models = (("model", "model_name_or_path", "MODEL_PATH"), ("vision tower", "vision_tower", "VISION_TOWER"))
    for what, flag, name in models:
        yield from check(what, value(flag), f"set {name} to a model folder or a hub name", model_fault)
    for part in map(str.strip, value("data_path").split(",")):
        advice = "set DATA_PATH to records that are there (docs/data.md)"
        yield from check("data", part, advice, records_fault, source)
    pictures = "set {} to a folder or zip file that is there"
    yield from check("images", value("image_folder"), pictures.format("IMAGE_FOLDER"), images_fault, source)
    for part in map(str.strip, value("eval_data_path").split(",")):
        yield from check("held-out data", part, "set EVAL_DATA_PATH to records that are there", records_fault)
    yield from check("its images", value("eval_image_folder"), pictures.format("EVAL_IMAGE_FOLDER"), images_fault)
    advice = "run scripts/pretrain.sh with the same PRESET and NORM first, or set PRETRAIN_ADAPTER"
    yield from check("adapter", value("pretrain_mm_mlp_adapter"), advice, adapter_fault)
    if value("deepspeed") != "auto":
        advice = f"set DEEPSPEED_CONFIG to auto or one of: {deepspeed_configs()}"
        yield from check("deepspeed", value("deepspeed"), advice, file_fault)
    yield from check("hostfile", environment.get("HOSTFILE", ""), "write lines 'host slots=8'", file_fault)


def _check_meeting(environment: Mapping[str, str], devices: Devices, launch: Launch) -> Iterator[Input]:
    if launch.launcher != "torchrun" or devices.nodes == 1:
        return
    if not environment.get("MASTER_ADDR"):
        hint = "set it to the first node's address, the same on every node"
        yield Input(MISSING, "MASTER_ADDR", NOT_SET, hint)
    if not node_rank(environment) and "--max_restarts" not in launch.words:
        yield Input(MISSING, "NODE_RANK", NOT_SET, "set it to 0 on the first node, 1 on the next, ...")


def _state(what: str, path: str, hint: str, caller: str, fault: Callable[[Path], str] | None) -> Input:
    """The state of a path, a pattern, or a name on the hub; `fault` says what is wrong with a path that exists."""
    may_be_on_hub = fault is model_fault
    if Path(path).exists():
        wrong = fault(Path(path)) if fault else ""
        return Input(WRONG if wrong else FOUND, what, path, wrong)
    if fault is records_fault and glob(path, recursive=True):
        return Input(FOUND, what, path)
    # `owner/model` is a name on the hub if no folder `owner` is here.
    if may_be_on_hub and not Path(path.split("/")[0]).is_dir() and _HUB_NAME.fullmatch(path):
        gated = (
            f"gated: accept its licence at https://huggingface.co/{path}, then log in: hf auth login (or set HF_TOKEN)"
        )
        return Input(HUB, what, path, gated if path.startswith(GATED) else "")
    if caller and not Path(path).is_absolute() and Path(caller, path).exists():
        hint = f"give {Path(caller, path)}: relative paths start at {Path.cwd()}"
    return Input(MISSING, what, path, hint)


# What is wrong with a path that exists, or an empty text: what a glance tells. Contents are the trainer's to check.


def model_fault(path: Path) -> str:
    """Of a model's or vision tower's folder."""
    if not path.is_dir():
        return "expected a model's folder, found a file"
    return "" if (path / "config.json").is_file() else "expected a model's folder, found no config.json in it"


def records_fault(path: Path) -> str:
    """Of a file or folder of records, or a mixture, whose entries the trainer checks."""
    is_known = path.is_dir() or path.suffix in RECORDS
    return "" if is_known else f"expected a file that ends in {', '.join(RECORDS)}, found {path.suffix or 'no ending'}"


def images_fault(path: Path) -> str:
    """Of a folder or zip file of pictures."""
    return "" if path.is_dir() or zipfile.is_zipfile(path) else "expected a folder or a zip file, found another file"


def adapter_fault(path: Path) -> str:
    """Of stage 1's adapter, or of its folder."""
    has_file = path.is_file() or (path / ADAPTER_FILE).is_file()
    return "" if has_file else f"expected {ADAPTER_FILE}, found a folder without it"


def file_fault(path: Path) -> str:
    """Of a configuration of DeepSpeed, or a list of hosts."""
    return "" if path.is_file() else "expected a file, found a folder"
