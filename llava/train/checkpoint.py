"""What a training run writes, and which checkpoint it continues from.

The final folder of both stages holds the whole model, tokenizer and image processor; stage 1 adds LLaVA's
`mm_projector.bin`. A `checkpoint-N` of stage 1 holds `mm_projector.bin` and `config.json` beside the optimizer's state,
since nothing else changes.

Both are written below `.saving` in the output folder. A checkpoint is renamed into place once every rank's files
are on disk and listed in `manifest.json` with size and SHA-256; it is never loaded if it does not match. The final
folder's `manifest.json` is written last and says that the run is finished, and after how many steps.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import has_lora, load_adapters, load_non_lora, read_non_lora
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, adapter_state_dict, load_adapter
from llava.train.optim import ADAPTER, part_of
from llava.train.ranks import barrier, from_all, from_first
from llava.utils.digests import bytes_digest
from llava.utils.files import replace_folder, sync, write_json

logger = logging.getLogger(__name__)

STAGING = ".saving"
MANIFEST = "manifest.json"
_OWNER = re.compile(r"(?:zero_pp_rank|rng_state)_(\d+)")  # the rank that wrote a file; other files are rank 0's
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # a full disk as Python, torch.save and safetensors report it
_FULL = (errno.ENOSPC, errno.EDQUOT)


class SaveError(RuntimeError):
    """A checkpoint could not be written; the ones before it are untouched."""


def trains_adapter_only(model: nn.Module) -> bool:
    """Whether only projector, norm and newline are trained (stage 1)."""
    return {part_of(name) for name, p in model.named_parameters() if p.requires_grad} == {ADAPTER}


def save_adapter(model: LlavaMetaForCausalLM, output_dir: str, is_main_process: bool) -> None:
    """Writes `mm_projector.bin` and `config.json`. Every rank must call."""
    decoder = model.get_model()
    state_dict = adapter_state_dict(decoder.mm_projector, decoder.image_newline)
    if is_main_process:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(state_dict, os.path.join(output_dir, ADAPTER_FILE))
        model.config.save_pretrained(output_dir)


def load_weights(folder: Path, model: LlavaMetaForCausalLM) -> None:
    """Loads what a checkpoint holds: adapter of stage 1, LoRA, or the whole model; without DeepSpeed.

    Raises:
        ValueError: the names of the weights are not the model's.
    """
    if has_lora(model):
        load_non_lora(model, read_non_lora(str(folder)), str(folder))
        load_adapters(model, str(folder))
    elif trains_adapter_only(model):
        decoder = model.get_model()
        load_adapter(decoder.mm_projector, folder, model.config, decoder.image_newline)
    else:
        tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        missing, unknown = model.load_state_dict(tensors, strict=False)
        if different := sorted({*missing, *unknown} - set(model.all_tied_weights_keys or ())):
            raise ValueError(f"{folder} has the weights of another model: {len(different)} names, {different[0]}")


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def named_save_errors(output_dir: Path, target: Path | None = None) -> Iterator[None]:
    """A context that turns a full disk into a SaveError that says which checkpoint is left.

    Args:
        output_dir: where the run's checkpoints are.
        target: what is written; then every error in writing it counts.

    Raises:
        SaveError: replaces the original error and quotes it.
    """
    try:
        yield
    except _WRITE_ERRORS as error:
        if target is None and not (isinstance(error, OSError) and error.errno in _FULL):
            raise
        path = target or Path(getattr(error, "filename", None) or output_dir)
        raise SaveError(
            f"{path} could not be written: {error} ({free_gib(path):.2f} GiB are free there). "
            f"{what_is_left(output_dir)}. Make room and rerun the same command to resume"
        ) from error


def what_is_left(output_dir: Path) -> str:
    """The newest finished checkpoint, in words."""
    newest = next((f for f in checkpoints(output_dir) if (f / MANIFEST).is_file()), None)
    return f"{newest} is complete and untouched" if newest else "No earlier checkpoint exists"


def free_gib(folder: Path) -> float:
    """Free GiB on the file system of `folder`, or of its first existing parent."""
    existing = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
    return shutil.disk_usage(existing).free / 2**30


def commit(staged: Path, target: Path, rank: int = 0, world_size: int = 1) -> None:
    """Writes the manifest of a checkpoint that is complete, and renames it into place. Every rank must call.

    Each rank reads back what it wrote itself, so that the time does not grow with the number of ranks.

    Raises:
        SaveError: the checkpoint cannot be read back or renamed.
    """
    start = time.perf_counter()
    barrier()  # all ranks' files exist
    with named_save_errors(target.parent, target), ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter
        written = _own_files(staged, rank, world_size)
        own = {str(f.relative_to(staged)): e for f, e in zip(written, pool.map(_measure, written), strict=True)}
    files = {name: entry for part in from_all(own) for name, entry in part.items()}
    if rank == 0:
        with named_save_errors(target.parent, target):
            write_json(staged / MANIFEST, {"files": files}, synced=True)
            replace_folder(staged, target, staged.with_name(f"replaced-{target.name}"))
            sync(target.parent)
        size = sum(entry["size"] for entry in files.values()) / 2**30
        logger.info("%s: %d files, %.2f GiB, checked in %.1f s", target, len(files), size, time.perf_counter() - start)
    barrier()


def commit_final(staged: Path, target: Path, step: int) -> None:
    """Moves the final folder's files into place, each in one atomic step, and writes the manifest last."""
    files = sorted(staged.iterdir())
    with ThreadPoolExecutor(4) as pool:
        entries = {file.name: entry for file, entry in zip(files, pool.map(_measure, files), strict=True)}
    for file in files:
        os.replace(file, target / file.name)
    write_json(target / MANIFEST, {"files": entries, "step": step}, synced=True)
    staged.rmdir()


def clear_staging(output_dir: str, is_main_process: bool) -> None:
    """Removes files that a killed run left half written."""
    folder = Path(output_dir, STAGING)
    if is_main_process and folder.exists() and any(folder.iterdir()):
        logger.warning("%s: removing what an interrupted run left half written", folder)
        shutil.rmtree(folder)


def _own_files(folder: Path, rank: int, world_size: int) -> list[Path]:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name != MANIFEST)
    return [f for f in files if _owner(f.name) % world_size == rank]


def _owner(name: str) -> int:
    match = _OWNER.search(name)
    return int(match.group(1)) if match else 0


def _measure(file: Path) -> dict[str, Any]:
    """Size and checksum of a file, which afterwards is on the disk itself."""
    entry = {"size": file.stat().st_size, "sha256": bytes_digest(file)}
    sync(file)
    return entry


# --- finding ----------------------------------------------------------------------------------------------------------


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders `checkpoint-N`, newest first."""
    return sorted((f for f in Path(output_dir).glob("checkpoint-*") if _step(f) >= 0), key=_step, reverse=True)


def find_checkpoint(output_dir: str, requested: str | None, rank: int = 0, world_size: int = 1) -> str | None:
    """The checkpoint to resume from, the same on every rank. Every rank must call.

    Args:
        output_dir: where the newest complete `checkpoint-N` is searched for if nothing is requested, as in LLaVA.
        requested: `--resume_from_checkpoint`: a folder, `True` (the newest, which must exist) or `False` (none).
        rank: this process's rank.
        world_size: number of ranks, which share the reading.

    Raises:
        FileNotFoundError: the requested checkpoint does not exist or is damaged.
    """
    if requested in ("False", "false", False):
        return None
    if requested not in (None, "True", "true", True):
        if faults := faults_on_any_rank(Path(requested), rank, world_size):
            raise FileNotFoundError(f"--resume_from_checkpoint {requested}: no complete checkpoint: {faults[0]}")
        return str(requested)
    for folder in from_first(checkpoints(output_dir)):
        faults = faults_on_any_rank(folder, rank, world_size)
        if not faults:
            logger.info("resuming from %s", folder)
            return str(folder)
        if rank == 0:
            logger.warning("%s is incomplete or damaged and is skipped: %s", folder, "; ".join(faults[:3]))
    if requested is not None:
        raise FileNotFoundError(f"--resume_from_checkpoint {requested}: no complete checkpoint in {output_dir}")
    return None


def faults_on_any_rank(folder: Path, rank: int, world_size: int) -> list[str]:
    """What is wrong with a checkpoint, on every rank; each rank reads its share of the files. Every rank must call."""
    return [fault for faults in from_all(checkpoint_faults(folder, rank, world_size)) for fault in faults]


def checkpoint_faults(folder: Path, rank: int = 0, world_size: int = 1) -> list[str]:
    """The differences between a checkpoint and its manifest in this rank's share of the files."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return [f"no readable {MANIFEST}, which is written last"] if rank == 0 else []
    own = [name for i, name in enumerate(sorted(files)) if i % world_size == rank]
    with ThreadPoolExecutor(4) as pool:
        faults = pool.map(lambda name: _file_fault(folder / name, files[name]), own)
        return [f"{name}: {fault}" for name, fault in zip(own, faults, strict=True) if fault]


def _file_fault(file: Path, expected: dict[str, Any]) -> str | None:
    if not file.is_file():
        return "missing"
    if (size := file.stat().st_size) != expected["size"]:
        return f"{size} bytes, {expected['size']} were written"
    return None if bytes_digest(file) == expected["sha256"] else "its content is not what was written (SHA-256 differs)"


def finished_step(output_dir: Path) -> int | None:
    """The step after which the run in the folder was finished, or None."""
    try:
        return json.loads((output_dir / MANIFEST).read_text())["step"]
    except (OSError, ValueError, KeyError):
        return None


def _step(folder: Path) -> int:
    suffix = folder.name.rsplit("-", 1)[1]
    return int(suffix) if suffix.isdigit() else -1
