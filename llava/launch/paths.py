"""What is wrong with a path that exists but is not the input that it should be. Nothing but Python is needed.

Each `*_fault` returns what was expected and found, or an empty text. Contents are the trainer's to check; here only
what a glance at a folder or at the first bytes of a file tells.
"""

import json
import os
import re
import zipfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path

RECORDS = (".json", ".jsonl", ".parquet")
MIXTURES = (".yaml", ".yml")
ADAPTER_FILE = "mm_projector.bin"
_ENTRY = re.compile(r"""\b(json_path|image_folder)["']?\s*:\s*("[^"]*"|'[^']*'|\S[^\n]*)""")


def model_fault(path: Path) -> str:
    """Of a model's or vision tower's folder."""
    if not path.is_dir():
        return "expected a model's folder, found a file"
    if not (path / "config.json").is_file():
        return "expected a model's folder, found no config.json in it"
    return _json_fault(path / "config.json")


def records_fault(path: Path) -> str:
    """Of a file of records, a folder of them, or a mixture."""
    if path.is_dir():
        if any(next(path.rglob(f"*{suffix}"), None) for suffix in RECORDS):
            return ""
        return f"expected records, found a folder without {', '.join(RECORDS)}"
    if path.suffix not in RECORDS + MIXTURES:
        return f"expected a file that ends in {', '.join(RECORDS + MIXTURES)}, found {path.suffix or 'no ending'}"
    if path.suffix in MIXTURES and not mixture_paths(path):
        return "expected a mixture (docs/data.md), found no json_path in it"
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
        return f"expected the {ADAPTER_FILE} that stage 1 writes, found a file that holds no tensors"
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


def mixture_paths(mixture: Path) -> list[tuple[str, str]]:
    """The (`json_path` or `image_folder`, path) pairs of a mixture, in order, each path placed as the trainer does."""
    return [(key, _place(mixture, name)) for key, names in _entries(mixture) for name in names]


def _entries(mixture: Path) -> Iterator[tuple[str, list[str]]]:
    text = re.sub(r"(?m)(^|\s)#.*$", "", mixture.read_text(errors="replace"))
    for match in _ENTRY.finditer(text):
        key, value = match.groups()
        in_braces = "{" in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        value = re.split(r"[,}]", value)[0] if in_braces and value[0] not in "\"'" else value
        value = value.strip().strip("\"'")
        yield key, [part.strip() for part in value.split(",")] if key == "json_path" else [value]


def _place(mixture: Path, name: str) -> str:
    beside = mixture.parent / name
    is_elsewhere = not (name.startswith("hf:") or Path(name).exists() or glob(name, recursive=True))
    return str(beside) if is_elsewhere and (beside.exists() or glob(str(beside), recursive=True)) else name


def _json_fault(file: Path) -> str:
    try:
        return "" if isinstance(json.loads(file.read_text()), dict) else f"expected a JSON object in {file}"
    except (OSError, ValueError) as error:
        return f"expected JSON in {file}, found something else ({error})"
