"""What a run writes, when a folder of it counts, and how a run starts in its output folder.

The final folder of both stages holds the whole model, tokenizer and image processor; stage 1 adds LLaVA's
`mm_projector.bin`. A `checkpoint-N` of stage 1 holds `mm_projector.bin` and `config.json` beside the optimizer's state,
since nothing else changes.

`complete.json` is written last: into a checkpoint once the files of all ranks are on the disk, and into the output
folder once the run is finished. It lists the files with their sizes, small ones with SHA-256. A folder without it is
not a checkpoint.
"""

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import wait_for_everyone
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import has_lora, load_adapters, load_non_lora, read_non_lora
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, adapter_state_dict, load_adapter
from llava.model.zero3 import full_shape
from llava.train.arguments import CHANGEABLE, TrainingArguments
from llava.train.distributed import on_first
from llava.train.optim import ADAPTER, moment_bytes, part_of
from llava.train.run_record import SETTINGS_FILE, Settings, write_settings
from llava.train.telemetry import LOG_FILE
from llava.utils.digests import bytes_digest
from llava.utils.files import sync, write_json
from llava.utils.locks import training_lock
from llava.utils.provenance import COMPLETE, differences

logger = logging.getLogger(__name__)

MODEL = ("*.safetensors", "*.safetensors.index.json", "*.bin", "adapter_config.json")
_SMALL = 2**20  # bytes of a file whose content is compared too
_REST = (16 << 10, 32 << 10)  # bytes of a rank's random states, and of a checkpoint's settings, schedule and log


# --- weights ----------------------------------------------------------------------------------------------------------


def trains_adapter_only(model: nn.Module) -> bool:
    """Whether only projector, norm and newline are trained (stage 1)."""
    return {part_of(name) for name, p in model.named_parameters() if p.requires_grad} == {ADAPTER}


def save_adapter(model: LlavaMetaForCausalLM, output_dir: str, is_main_process: bool) -> None:
    """Writes `mm_projector.bin` and `config.json`. Every rank must call."""
    decoder = model.get_model()
    state_dict = adapter_state_dict(decoder.mm_projector, decoder.image_newline)
    if is_main_process:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(state_dict, Path(output_dir, ADAPTER_FILE))
        model.config.save_pretrained(output_dir)


def load_weights(folder: Path, model: LlavaMetaForCausalLM) -> None:
    """Loads what a checkpoint holds: adapter of stage 1, LoRA, or the whole model; without DeepSpeed."""
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
            raise ValueError(f"{folder} does not hold this model's weights: {len(different)} differ, {different[0]}")


# --- the marker -------------------------------------------------------------------------------------------------------


class CheckpointMarker(TrainerCallback):
    """Marks each checkpoint that the library has written, and only then removes those that are not kept."""

    def __init__(self, args: TrainingArguments, settings: Settings):
        self.limit, self.settings = args.save_total_limit, settings

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        wait_for_everyone()  # all ranks' files exist
        if args.should_save:
            write_settings(folder, self.settings)
            _mark(folder, (f for f in folder.rglob("*") if f.is_file()))
            sync(folder.parent)
            for other in folder.parent.glob("checkpoint-*"):  # one may have a time in the future, of another clock
                if other.stat().st_mtime > folder.stat().st_mtime:
                    os.utime(other, (0, 0))
            rotate_checkpoints(args.output_dir, self.limit, use_mtime=True)


def clear_place(folder: Path, is_main_process: bool) -> None:
    """Removes what is where a checkpoint is about to be written, its marker first. Every rank must call."""
    if is_main_process and folder.exists():
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    wait_for_everyone()


def finish_run(output_dir: Path, step: int) -> None:
    """Marks the run as finished after `step` steps; its model is in the folder."""
    _mark(output_dir, [output_dir / "config.json", *_model_files(output_dir)], step=step)


def _mark(folder: Path, files: Iterable[Path], **more: int) -> None:
    """Brings the files to the disk itself, and then writes the marker that lists them."""
    entries = {}
    for file in sorted(files):
        sync(file)
        entries[str(file.relative_to(folder))] = _entry(file)
    write_json(folder / COMPLETE, {"files": entries} | more, synced=True)


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"size": size, "sha256": bytes_digest(file)} if size <= _SMALL else {"size": size}


def _marker(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / COMPLETE).read_text())
    return {}


def folder_faults(folder: Path) -> list[str]:
    """The differences between a checkpoint or final folder and its marker; the whole content of small files counts."""
    if (files := _marker(folder).get("files")) is None:
        return [f"no readable {COMPLETE}, which is written last"]
    present = {name: _entry(folder / name) if (folder / name).is_file() else "missing" for name in files}
    return [f"{name}: {entry}, written as {files[name]}" for name, entry in present.items() if entry != files[name]]


def checkpoints(output_dir: Path) -> list[Path]:
    """The folders `checkpoint-N`, newest first."""
    numbered = [f for f in output_dir.glob("checkpoint-*") if f.name.rpartition("-")[2].isdecimal()]
    return sorted(numbered, key=lambda f: int(f.name.rpartition("-")[2]), reverse=True)


def _model_files(folder: Path) -> list[Path]:
    return sorted(f for pattern in MODEL for f in folder.glob(pattern) if f.name != "training_args.bin")


# --- room on the disk -------------------------------------------------------------------------------------------------


def free_gib(folder: Path) -> float:
    """Free GiB on the file system of `folder`, or of its first existing parent."""
    existing = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
    return shutil.disk_usage(existing).free / 2**30


def model_bytes(model: nn.Module) -> int:
    """Bytes of all weights, before any partitioning."""
    return sum(full_shape(p).numel() * p.element_size() for p in model.parameters())


def checkpoint_bytes(model: nn.Module, args: TrainingArguments) -> int:
    """Bytes of a `checkpoint-N`: weights, moments, fp32 masters, DeepSpeed's own copy of the weights, and the rest."""
    trained = [(full_shape(p).numel(), p.element_size()) for p in model.parameters() if p.requires_grad]
    elements, weights = sum(n for n, _ in trained), sum(n * size for n, size in trained)
    whole = weights if trains_adapter_only(model) or has_lora(model) else model_bytes(model)
    moments = moment_bytes(args) * elements
    of_a_rank, others = _REST
    total = whole + moments + of_a_rank * args.world_size + others
    if not args.deepspeed:
        return total + 4 * sum(n for n, size in trained if size < 4)
    copy = model_bytes(model) - (weights if args.hf_deepspeed_config.is_zero3() else 0)  # ZeRO-3: of what is frozen
    return total + copy + 4 * elements


def check_disk(model: nn.Module, args: TrainingArguments, max_steps: int) -> None:
    """Raises ValueError if the disk is too small for checkpoints, one more during a save, and the final folder."""
    output_dir, each = Path(args.output_dir), checkpoint_bytes(model, args)
    strategy: Any = args.save_strategy  # the library has made an enum of it
    every = args.save_steps * (max_steps if args.save_steps < 1 else 1)
    by_strategy = {"no": 0, "epoch": math.ceil(args.num_train_epochs), "steps": max(1, int(max_steps // every))}
    saves = by_strategy[strategy.value]
    needed = (min(saves, (args.save_total_limit or saves) + 1) * each + model_bytes(model)) / 2**30

    def free() -> float:  # what an earlier part of the run has written counts
        return free_gib(output_dir) + sum(f.stat().st_size for f in output_dir.rglob("*") if f.is_file()) / 2**30

    if needed > (room := on_first(free)):
        raise ValueError(
            f"--output_dir {output_dir}: the run will write about {needed:.2f} GiB ({each / 2**30:.2f} per checkpoint)"
            f", and there is room for {room:.2f}; make room, lower --save_total_limit (one more is kept while a new "
            "one is written), or choose another disk"
        )


# --- how a run starts -------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """How a run begins: from a checkpoint, or from the beginning, or not at all."""

    checkpoint: str | None = None
    finished: int | None = None  # the step after which this same run was finished


@contextlib.contextmanager
def held_folder(args: TrainingArguments) -> Iterator[None]:
    """A context in which rank 0 holds the output folder; every rank raises InUse if another training has it."""
    with contextlib.ExitStack() as stack:
        on_first(lambda: stack.enter_context(training_lock(Path(args.output_dir))))
        yield


def choose_start(args: TrainingArguments, settings: Settings) -> Start:
    """The start that `--output_dir` and the flags ask for, decided on rank 0 before anything is built.

    Raises ValueError if the folder holds another run, or one that cannot be continued: only what this same run wrote is
    ever replaced.
    """
    folder, left = Path(args.output_dir), what_is_there(Path(args.output_dir))
    if (step := _marker(folder).get("step")) is not None:
        check_settings(folder, settings)
        if not (faults := folder_faults(folder)):
            return Start(finished=step)
        logger.warning("%s was finished and is damaged: %s", folder, "; ".join(faults[:3]))
    checkpoint = find_checkpoint(args)
    if left and (checkpoint is None or checkpoint.resolve().parent != folder.resolve()):
        check_settings(folder, settings)
    if checkpoint is None:
        if left:
            logger.warning("%s: no checkpoint to resume from; this run starts from scratch", folder)
        return Start()
    check_settings(checkpoint, settings)
    logger.info("resuming from %s", checkpoint)
    return Start(str(checkpoint))


def find_checkpoint(args: TrainingArguments) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` names, or the newest complete one in `--output_dir`."""
    requested, output_dir = args.resume_from_checkpoint, Path(args.output_dir)
    if requested not in (None, "True", "true"):
        if faults := folder_faults(Path(requested)):
            raise FileNotFoundError(f"--resume_from_checkpoint {requested}: no complete checkpoint: {faults[0]}")
        return Path(requested)
    for folder in checkpoints(output_dir):
        if not (faults := folder_faults(folder)):
            return folder
        logger.warning("%s is incomplete or damaged and is skipped: %s", folder, "; ".join(faults[:3]))
    if requested is not None:
        raise FileNotFoundError(f"--resume_from_checkpoint {requested}: no complete checkpoint in {output_dir}")
    return None


def check_settings(folder: Path, settings: Settings) -> None:
    """Raises ValueError if a checkpoint's or folder's settings differ from this run's in more than `CHANGEABLE`."""
    try:
        saved = json.loads((folder / SETTINGS_FILE).read_text())["settings"]
    except OSError:
        raise ValueError(
            f"{folder} holds {what_is_there(folder)}, but no {SETTINGS_FILE} that says with which settings they were "
            "made; choose another --output_dir, or remove the folder"
        ) from None
    different = differences(saved, settings)
    side = "checkpoint" if folder.name.startswith("checkpoint-") else "there"
    lines = {name: f"{name}: {side} {before!r}, now {now!r}" for name, (before, now) in different.items()}
    changeable = set(CHANGEABLE.split())
    if settings.get("loss_reduction") == "micro_batch_mean":  # whose means are over this many samples
        changeable.discard("per_device_train_batch_size")
    if refused := [name for name in different if name not in changeable]:
        raise ValueError(
            f"{folder} was written by a run with other settings:\n  " + "\n  ".join(lines.values()) + "\n"
            f"{', '.join(refused)} would make it another run: set them back, take another --output_dir, or remove that "
            "run's folder"
        )
    for line in lines.values():
        logger.warning("changed within the run: %s", line)


def what_is_there(folder: Path) -> str:
    """What a folder holds that a new run would replace, in words; empty if nothing would be lost."""
    log = folder / LOG_FILE
    lines = len(log.read_text().splitlines()) if log.is_file() else 0
    foreign = not (folder / SETTINGS_FILE).is_file()  # this trainer writes that before a checkpoint
    whole = [f.name for f in checkpoints(folder) if foreign or (f / COMPLETE).is_file()]
    return ", ".join([*whole, *[f"a log of {lines} lines"] * bool(lines), *(f.name for f in _model_files(folder))])


def begin_run(args: TrainingArguments, settings: Settings) -> None:
    """Makes the output folder this run's own. Every rank must call, after all checks."""
    wait_for_everyone()  # every rank has read what is there
    if args.process_index != 0:
        return
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPLETE).unlink(missing_ok=True)
    for checkpoint in checkpoints(folder):
        if not (checkpoint / COMPLETE).is_file():
            logger.warning("%s: removing what an interrupted run left half written", checkpoint)
            shutil.rmtree(checkpoint)
    write_settings(folder, settings)


def has_converted_states(checkpoint: str | Path, args: TrainingArguments) -> bool:
    """Whether DeepSpeed's states in a checkpoint were written by another number of ranks, and converted for any.

    Raises ValueError if they were not converted.
    """
    ranks = json.loads(Path(checkpoint, SETTINGS_FILE).read_text())["settings"]["world_size"]
    if ranks != args.world_size and not Path(checkpoint, "latest_universal").is_file():
        raise ValueError(
            f"{checkpoint} was written by {ranks} ranks, and now there are {args.world_size}; convert its "
            "states by DeepSpeed's ds_to_universal (docs/clusters.md, Another number of GPUs), and rerun the command"
        )
    return ranks != args.world_size
