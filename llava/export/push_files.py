"""Which files of a model's folder go to the hub, and whether the folder is whole and holds no secret."""

import json
import posixpath
import re
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from llava.eval.results import RESULTS_FILE
from llava.export.card import CARD_FILE
from llava.export.folder import EXPORT_FILE
from llava.model.lora import NON_LORA_FILE
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.train.checkpoint import MANIFEST, checkpoint_faults
from llava.train.telemetry import LOG_FILE
from llava.utils.provenance import RUN_FILE

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", ADAPTER_FILE, NON_LORA_FILE, "*.gguf")
SENT = (
    *(*WEIGHTS, "*.safetensors.index.json", "pytorch_model*.bin.index.json"),
    *("config.json", "generation_config.json", "adapter_config.json", "*processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.json*", "*.jinja"),
    *("modeling_*.py", "configuration_*.py", "processing_*.py", "image_processing_*.py", "tokenization_*.py"),
    *(CARD_FILE, "LICENSE*", "NOTICE*", RUN_FILE, LOG_FILE, RESULTS_FILE, EXPORT_FILE),
)
"""Names of the files that make a model: weights, configuration, tokenizer, code, card and records."""
_FIGURE = re.compile(r"""(?:\]\(|src=["'])([^\s"')#?]+\.(?:png|jpe?g|svg|gif|webp))(?=[\s"')])""")
_SECRET = re.compile(
    rb"\b(?:hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[A-Z0-9]{16}|gh[opsur]_[A-Za-z0-9]{30,}"
    rb"|github_pat_[A-Za-z0-9_]{30,})\b"
)
_PASSWORD = re.compile(rb"""://[^\s/:@"'<>]+:[^\s/:@"'<>]+@""")  # of a user, in an address
_MOST_TEXT = 16 << 20  # bytes; larger files are not searched for secrets


def sort_out(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The files to send, and what else lies in the folder with the reason why it stays.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"--model-path {folder}: no such folder")
    figures = _figures(folder)
    files, left_out = [], {}
    for path in sorted(folder.iterdir()):
        below = [name for name in figures if name.startswith(f"{path.name}/")]
        if path.is_symlink():
            left_out[path.name] = "a link"
        elif path.is_dir():
            files += below
            left_out[f"{path.name}/"] = "except what the card shows" if below else "not part of a model"
        elif path.name in figures or any(fnmatchcase(path.name, form) for form in SENT):
            files.append(path.name)
        else:
            left_out[path.name] = "not part of a model"
    return files, left_out


def _figures(folder: Path) -> list[str]:
    """The pictures in and below `folder` that its card shows."""
    card, root = folder / CARD_FILE, folder.resolve()
    if card.is_symlink() or not card.is_file():
        return []
    found = {posixpath.normpath(name) for name in _FIGURE.findall(card.read_text(encoding="utf-8", errors="replace"))}
    # A file that is reached by a link has its real place elsewhere.
    return sorted(
        name
        for name in found
        if (folder / name).is_file()
        and (folder / name).resolve() == root / name
        and not any(part.startswith(".") for part in name.split("/"))
        and not name.startswith("/")
    )


def tells_paths(file: Path) -> bool:
    """Whether a JSON file holds an absolute path."""
    return file.suffix in (".json", ".jsonl") and re.search(rb'"(?:/[\w.-]+){2,}', _text(file)) is not None


def _text(file: Path) -> bytes:
    """A file's content; nothing of a large or binary file."""
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
        text = _text(folder / name)
        if found := _SECRET.search(text):
            raise ValueError(
                f"{folder / name} holds what looks like an access token ({found[0][:6].decode()}...); take it out"
            )
        if _PASSWORD.search(text):
            raise ValueError(f"{folder / name} holds an address with a password (user:password@); take it out")
    if CARD_FILE not in files:
        raise ValueError(f"{folder} has no card; write one: python -m llava.export card --model-path {folder}")
    try:
        ModelCard((folder / CARD_FILE).read_text(encoding="utf-8")).data.to_dict()
    except Exception as error:  # YAML's own errors, and whatever the fields' classes raise
        raise ValueError(
            f"{folder / CARD_FILE}: its metadata cannot be read ({' '.join(str(error).split())})"
        ) from error


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name, form) for form in WEIGHTS)


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
