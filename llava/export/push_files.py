"""Which files of a model's folder go to the hub, and whether the folder is whole and holds no secret."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from llava.export.card import CARD_FILE
from llava.provenance import RUN_FILE
from llava.train.checkpoint import MANIFEST, STAGING, checkpoint_faults
from llava.train.run_record import IDENTITY

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# What stays here, by the reason; a pattern is met by a file's name or by a folder's on the way to it.
LEFT_OUT = {
    "a checkpoint of the training": ("checkpoint-*", "global_step*", STAGING, "latest", "zero_to_fp32.py"),
    "the optimizer's state": ("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*", "*_optim_states.pt"),
    "of use on this machine only": (IDENTITY, MANIFEST, "training_args.bin", "command.sh", "done", "errors", "wandb"),
    "a cache": (".cache", ".llava_cache", "__pycache__", "*.pyc", ".git", ".DS_Store", "*.tmp"),
    "may hold a secret": (".env*", ".netrc", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "*token", "*credentials*"),
}
_SECRET = re.compile(rb"\b(?:hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[A-Z0-9]{16})\b")
_MOST_TEXT = 16 << 20  # bytes of a file that is searched for them


def sort_out(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The files to send, and those that stay with the reason; a folder that stays as a whole is named once.

    Raises:
        ValueError: `folder` is none.
    """
    if not folder.is_dir():
        raise ValueError(f"--model-path {folder}: no such folder")
    files, left_out = [], {}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if reason := _reason(path):
            left_out[name + "/" * path.is_dir()] = reason
        elif path.is_file():
            files.append(name)
    return files, left_out


def _walk(folder: Path) -> Iterator[Path]:
    """Files and folders below `folder`, without what is in folders that stay."""
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not _reason(path):
            yield from _walk(path)


def _reason(path: Path) -> str | None:
    if path.is_symlink():
        return "a link"
    return next((why for why, forms in LEFT_OUT.items() if any(fnmatch(path.name, form) for form in forms)), None)


def tells_paths(file: Path) -> bool:
    """Whether a JSON file holds an absolute path."""
    return file.suffix in (".json", ".jsonl") and re.search(rb'"(?:/[\w.-]+){2,}', _text(file)) is not None


def _text(file: Path) -> bytes:
    """A file's content, of a large or binary one nothing."""
    if file.stat().st_size > _MOST_TEXT:
        return b""
    content = file.read_bytes()
    return b"" if b"\0" in content[:8192] else content


def check_folder(folder: Path, files: list[str]) -> None:
    """Refuses a folder without weights or card, a half-written one, and one with a secret in it.

    Raises:
        ValueError: what is wrong, and what to do.
    """
    if RUN_FILE in files and not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: its training is not finished ({MANIFEST} is written last); continue it first")
    weights = list(filter(_is_weights, files))
    faults = [fault for name in weights if (fault := _tensor_fault(folder / name))]
    faults += [f"{name}, which its index names, is missing" for name in _missing_shards(folder, files)]
    if (folder / MANIFEST).is_file():
        faults += [fault for fault in checkpoint_faults(folder) if _is_weights(fault.partition(":")[0])]
    if faults:
        raise ValueError(f"{folder} is not whole: {faults[0]}; write it again")
    if not weights:
        raise ValueError(f"{folder}: no weights to send (expected {', '.join(WEIGHTS)}); a link is not followed")
    for name in files:
        if found := _SECRET.search(_text(folder / name)):
            raise ValueError(
                f"{folder / name} holds what looks like an access token ({found[0][:6].decode()}...); take it out"
            )
    if CARD_FILE not in files:
        raise ValueError(f"{folder} has no card; write one: python -m llava.export card --model-path {folder}")
    try:
        ModelCard((folder / CARD_FILE).read_text(encoding="utf-8")).data.to_dict()
    except Exception as error:  # YAML's own errors, and whatever the fields' classes raise
        raise ValueError(
            f"{folder / CARD_FILE}: its metadata cannot be read ({' '.join(str(error).split())})"
        ) from error


def _is_weights(name: str) -> bool:
    return any(fnmatch(name, form) for form in WEIGHTS)


def _tensor_fault(file: Path) -> str | None:
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt"):
                return None
        except (SafetensorError, OSError) as error:
            return f"{file.name} ({error})"
    return None if file.stat().st_size else f"{file.name} is empty"


def _missing_shards(folder: Path, files: list[str]) -> list[str]:
    wanted: set[str] = set()
    for name in files:
        if name.endswith(".index.json"):
            wanted |= set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(wanted - set(files))
