"""Whether a run's inputs are here, are on the model hub, are missing, or are something else, and what to do then."""

import json
import os
import re
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path

from llava.launch.command import Launch, deepspeed_configs, node_rank
from llava.launch.devices import Devices
from llava.launch.flags import Flags
from llava.launch.settings import Refusal

FOUND, HUB, MISSING, WRONG = "found", "hub", "MISSING", "WRONG"
NOT_SET = "not set"
PREPARED = "playground/data"  # what this tree's own commands prepare lies here
RECORDS = (".json", ".jsonl", ".parquet")
MIXTURES = (".yaml", ".yml")
ADAPTER_FILE = "mm_projector.bin"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


GATED = ("meta-llama/", "google/gemma-")
"""How hub names of models begin that are downloaded only by users who accepted their licence."""


@dataclass(frozen=True)
class Input:
    """One input and its state; `hint` says what to do where it is missing or gated, and what a wrong one should be.

    States: `found`, `hub`, `MISSING`, or `WRONG` for a path that exists and is something else.
    """

    state: str
    what: str
    value: str
    hint: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether the run cannot start with it."""
        return self.state in (MISSING, WRONG)

    @property
    def is_relative(self) -> bool:
        """Whether it is a missing file with a relative path, which may exist below another folder."""
        return self.state == MISSING and not self.what.isupper() and not Path(self.value).is_absolute()


def check_inputs(environment: Mapping[str, str], flags: Flags, devices: Devices, launch: Launch) -> list[Input]:
    """Everything that the run reads, in the order in which it is shown. Paths are relative to the working directory."""
    return [*_check_paths(environment, flags), *_check_meeting(environment, devices, launch)]


def _check_paths(environment: Mapping[str, str], flags: Flags) -> Iterator[Input]:
    caller = environment.get("CALLED_FROM", "")

    def hint(path: str, otherwise: str, source: str = "") -> str:
        """How a path of ours is prepared, or what to do about one that the user chose."""
        prepared = environment.get("INPUT_HINT") or (source and f"{source}, or {otherwise}")
        return prepared if prepared and Path(path).absolute().is_relative_to(Path(PREPARED).absolute()) else otherwise

    source = environment.get("DATA_SOURCE", "")
    models = (("model", "model_name_or_path", "MODEL_PATH"), ("vision tower", "vision_tower", "VISION_TOWER"))
    for what, flag, name in models:
        path = flags.value(flag)
        yield from check_model(what, path, hint(path, f"set {name} to a model folder or a hub name"), caller)
    for part in flags.value("data_path").split(","):
        advice = hint(part, "set DATA_PATH to records that are there (docs/data.md)", source)
        yield from _check_records("data", part.strip(), advice, caller)
    path = flags.value("image_folder")
    advice = hint(path, "set IMAGE_FOLDER to a folder or zip file that is there", source)
    yield from check_file("images", path, advice, caller, images_fault)
    for part in flags.value("eval_data_path").split(","):
        yield from _check_records("held-out data", part.strip(), "set EVAL_DATA_PATH to records that are there", caller)
    advice = "set EVAL_IMAGE_FOLDER to a folder or zip file that is there"
    yield from check_file("its images", flags.value("eval_image_folder"), advice, caller, images_fault)
    advice = "run scripts/pretrain.sh with the same PRESET and NORM first, or set PRETRAIN_ADAPTER"
    fault = partial(adapter_fault, norm=flags.value("mm_projector_norm"))
    yield from check_file("adapter", flags.value("pretrain_mm_mlp_adapter"), advice, caller, fault)
    advice = f"set DEEPSPEED_CONFIG to auto or one of: {deepspeed_configs()}"
    if flags.value("deepspeed") != "auto":
        yield from check_file("deepspeed", flags.value("deepspeed"), advice, caller, deepspeed_fault)
    hosts = environment.get("HOSTFILE", "")
    yield from check_file("hostfile", hosts, "write lines 'host slots=8'", caller, hostfile_fault)
    if fault_of_output := output_fault(Path(flags.value("output_dir"))):
        yield Input(WRONG, "output", flags.value("output_dir"), f"{fault_of_output}; set OUTPUT_DIR to another folder")


def _check_records(what: str, part: str, hint: str, caller: str) -> Iterator[Input]:
    if part.startswith("hf:"):
        name = re.split(r"[:\[]", part.removeprefix("hf:"))[0]
        yield from check_model(what, name, "expected hf:OWNER/NAME[SPLIT] or hf:FOLDER[SPLIT]", caller, _no_fault)
        return
    if part and not Path(part).exists() and glob(part, recursive=True):
        yield Input(FOUND, what, part)
        return
    yield from check_file(what, part, hint, caller, records_fault)


def _no_fault(path: Path) -> str:
    return ""


def _check_meeting(environment: Mapping[str, str], devices: Devices, launch: Launch) -> Iterator[Input]:
    if launch.launcher != "torchrun" or devices.nodes == 1:
        return
    if not environment.get("MASTER_ADDR"):
        hint = "set it to the first node's address, the same on every node"
        yield Input(MISSING, "MASTER_ADDR", NOT_SET, hint)
    if not node_rank(environment) and "--max_restarts" not in launch.words:
        yield Input(MISSING, "NODE_RANK", NOT_SET, "set it to 0 on the first node, 1 on the next, ...")


def check_master(address: str, first_node: bool) -> None:
    """Prints a note if `address` is not one of the first node's own: something may still forward it to that node.

    Raises:
        Refusal: this node cannot resolve the address.
    """
    try:
        resolved = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Refusal(
            f"MASTER_ADDR={address}: {socket.gethostname()} cannot resolve it ({error.strerror}); "
            "give a name that every node knows, or the first node's IP address"
        ) from None
    addresses = {(int(info[0]), str(info[4][0])) for info in resolved}
    if first_node and not any(map(_is_own, addresses)):
        print(
            f"note: MASTER_ADDR={address} is not an address of {socket.gethostname()}, the first node (NODE_RANK=0); "
            "unless something forwards it, the nodes will hang",
            file=sys.stderr,
            flush=True,
        )


def _is_own(address: tuple[int, str]) -> bool:
    with socket.socket(address[0], socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[1], 0))
        except OSError:
            return False
    return True


# What is wrong with a path that exists, or an empty text. Contents are the trainer's to check; here only what a glance
# at a folder or at a file's first bytes tells.


def model_fault(path: Path) -> str:
    """Of a model's or vision tower's folder."""
    if not path.is_dir():
        return "expected a model's folder, found a file"
    if not (path / "config.json").is_file():
        return "expected a model's folder, found no config.json in it"
    return _json_fault(path / "config.json")


def records_fault(path: Path) -> str:
    """Of a file of records, a folder of them, or a mixture, whose entries the trainer checks."""
    if path.is_dir():
        if any(next(path.rglob(f"*{suffix}"), None) for suffix in RECORDS):
            return ""
        return f"expected records, found a folder without {', '.join(RECORDS)}"
    if path.suffix not in RECORDS + MIXTURES:
        return f"expected a file that ends in {', '.join(RECORDS + MIXTURES)}, found {path.suffix or 'no ending'}"
    return ""


def images_fault(path: Path) -> str:
    """Of a folder or zip file of pictures."""
    return "" if path.is_dir() or zipfile.is_zipfile(path) else "expected a folder or a zip file, found another file"


def adapter_fault(path: Path, norm: str) -> str:
    """Of stage 1's adapter, or of its folder, for a run of the arm `norm`."""
    file = path / ADAPTER_FILE if path.is_dir() else path
    if not file.is_file():
        return f"expected {ADAPTER_FILE}, found a folder without it"
    with file.open("rb") as opened:
        head = opened.read(2)
    if head not in (b"PK", b"\x80\x02"):  # what torch.save writes: a zip file, and before PyTorch 1.6 a pickle
        return f"expected the {ADAPTER_FILE} that stage 1 writes, found a file without tensors"
    config = file.parent / "config.json"
    if not config.is_file():
        return ""
    if fault := _json_fault(config):
        return fault
    arm = json.loads(config.read_text()).get("mm_projector_norm", norm)  # LLaVA's own folders do not say
    return "" if arm == (norm or "none") else f"expected an adapter of NORM={norm or 'none'}, found one of NORM={arm}"


def deepspeed_fault(path: Path) -> str:
    """Of a configuration of DeepSpeed."""
    return _json_fault(path) if path.is_file() else "expected a file, found a folder"


def hostfile_fault(path: Path) -> str:
    """Of a list of hosts."""
    return "" if path.is_file() else "expected a file, found a folder"


def output_fault(path: Path) -> str:
    """Of the folder where everything goes, which need not exist yet."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        return f"expected a folder, found the file {nearest}"
    return "" if os.access(nearest, os.W_OK) else f"expected a folder that can be written, which {nearest} cannot"


def _json_fault(file: Path) -> str:
    try:
        return "" if isinstance(json.loads(file.read_text()), dict) else f"expected a JSON object in {file}"
    except (OSError, ValueError) as error:
        return f"expected JSON in {file}, found something else ({error})"


def cache_of(name: str) -> Path:
    """Where the hub's library keeps a model."""
    return Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub") / f"models--{name.replace('/', '--')}"


def is_cached(name: str) -> bool:
    """Whether a model of the hub was downloaded."""
    return (cache_of(name) / "snapshots").is_dir()


def _hub_home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")


def gated_hint(name: str) -> str:
    """What a gated model of the hub needs before it can be downloaded; empty for others and where it is downloaded."""
    if not name.startswith(GATED) or is_cached(name):
        return ""
    accept = f"gated: accept its licence at https://huggingface.co/{name}"
    token = Path(os.environ.get("HF_TOKEN_PATH") or _hub_home() / "token")
    if os.environ.get("HF_TOKEN") or token.is_file():
        return f"{accept} with the account whose token is used here, if that is not done yet"
    return f"{accept}, then log in: hf auth login (or set HF_TOKEN)"


def check_file(
    what: str, path: str, hint: str, caller: str = "", fault: Callable[[Path], str] = _no_fault
) -> Iterator[Input]:
    """Yields the state of a file or folder; nothing where `path` is empty.

    Args:
        what: the input's name in the list of inputs.
        path: where the file or folder should be.
        hint: what to do where it is missing.
        caller: the folder that the script was called from.
        fault: returns what is wrong with a path that exists, or an empty text.
    """
    if not path:
        return
    if Path(path).exists():
        wrong = fault(Path(path))
        yield Input(WRONG if wrong else FOUND, what, path, wrong)
        return
    if caller and not Path(path).is_absolute() and Path(caller, path).exists():
        hint = f"give {Path(caller, path)}: relative paths start at {Path.cwd()}"
    yield Input(MISSING, what, path, hint)


def check_model(
    what: str, name: str, hint: str, caller: str = "", fault: Callable[[Path], str] = model_fault
) -> Iterator[Input]:
    """As `check_file`; `owner/model` is a name on the model hub if neither it nor a folder `owner` is here."""
    if not Path(name).exists() and not Path(name.split("/")[0]).is_dir() and _HUB_NAME.fullmatch(name):
        yield Input(HUB, what, name, gated_hint(name))
    else:
        yield from check_file(what, name, hint, caller, fault)
