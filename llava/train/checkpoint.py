"""What a run writes, when a folder of it counts, and how a run starts in its output folder.

The final folder of both stages holds the whole model, tokenizer and image processor; stage 1 adds LLaVA's
`mm_projector.bin`. A `checkpoint-N` of stage 1 holds `mm_projector.bin` and `config.json` beside the optimizer's state,
since nothing else changes.

`complete.json` is written last: into a checkpoint once the files of all ranks are on the disk, and into the output
folder once the run is finished. It lists the files with their sizes, small ones with SHA-256. A folder without it is
not a checkpoint.
"""

import contextlib
import errno
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, gather_object, wait_for_everyone
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import has_lora, load_adapters, load_non_lora, read_non_lora
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, adapter_state_dict, load_adapter
from llava.model.zero3 import full_shape
from llava.train.arguments import CHANGEABLE, TrainingArguments
from llava.train.distributed import on_first
from llava.train.optim import ADAPTER, part_of
from llava.train.run_record import SETTINGS_FILE, Settings, write_settings
from llava.train.telemetry import LOG_FILE, PROFILE
from llava.utils.digests import bytes_digest
from llava.utils.failures import FOLDER
from llava.utils.files import sync, write_json
from llava.utils.locks import training_lock
from llava.utils.provenance import COMPLETE, RUN_FILE, differences

logger = logging.getLogger(__name__)

OLDER = "manifest.json"  # what commits up to 382b45f wrote in its place
MODEL = ("*.safetensors", "*.safetensors.index.json", "*.bin", "adapter_config.json")
FROM_SCRATCH = ("False", "false", False)  # values of --resume_from_checkpoint
_SMALL = 2**20  # bytes of a file whose content is compared as well
_OWNER = re.compile(r"(?:zero_pp_rank|rng_state)_(\d+)")  # the rank that wrote a file; other files are rank 0's
# A full disk, as Python, and then as torch.save, safetensors and DeepSpeed report it.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WRITE_FAILED = re.compile("PytorchStreamWriter|unexpected pos|No space left|Disk quota")


class SaveError(RuntimeError):
    """A checkpoint cannot be written; the ones before it are untouched."""


class ResumeError(ValueError):
    """The checkpoint or the output folder belongs to another run, or cannot be continued."""


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


# --- the marker -------------------------------------------------------------------------------------------------------


class CheckpointMarker(TrainerCallback):
    """Marks each checkpoint that the library has written, and then removes those that are not kept.

    The library would remove them before the marker is there; a kill in between would leave no checkpoint.

    Args:
        args: the flags, with `save_total_limit`.
        settings: what `resume.json` holds.
    """

    def __init__(self, args: TrainingArguments, settings: Settings):
        self.limit, self.settings = args.save_total_limit, settings
        self.step = -1  # of the newest checkpoint

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:  # a signal or --save_steps has saved it already
            control.should_save = False

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if args.should_save:
            write_settings(folder, self.settings)
        wait_for_everyone()  # all ranks' files exist
        files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
        own = [f for f in files if _owner(f) % args.world_size == args.process_index]
        entries = gather_object([_entries(folder, own)])
        if args.should_save:
            write_json(folder / COMPLETE, {"files": {k: v for part in entries for k, v in part.items()}}, synced=True)
            sync(folder.parent)
            rotate_checkpoints(args.output_dir, self.limit, state.best_model_checkpoint, use_mtime=True)
        self.step = state.global_step


def clear_place(folder: Path, is_main_process: bool) -> None:
    """Removes what is where a checkpoint is about to be written, its marker first. Every rank must call."""
    if is_main_process and folder.exists():
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    wait_for_everyone()


def finish_run(output_dir: Path, step: int) -> None:
    """Marks the run as finished after `step` steps; its model is in the folder."""
    entries = _entries(output_dir, [output_dir / "config.json", *_model_files(output_dir)])
    write_json(output_dir / COMPLETE, {"files": entries, "step": step}, synced=True)


def _owner(file: Path) -> int:
    match = _OWNER.search(file.name)
    return int(match[1]) if match else 0


def _entries(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """What the marker says of files, which afterwards are on the disk itself."""
    for file in files:
        sync(file)
    return {str(file.relative_to(folder)): _entry(file) for file in files}


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"size": size, "sha256": bytes_digest(file)} if size <= _SMALL else {"size": size}


def folder_faults(folder: Path) -> list[str]:
    """The differences between a checkpoint or final folder and its marker; the whole content of small files counts."""
    try:
        files = json.loads((folder / COMPLETE).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return [f"no readable {COMPLETE}, which is written last"]
    faults = []
    for name, expected in files.items():
        if not (folder / name).is_file():
            faults.append(f"{name}: missing")
        elif (size := (folder / name).stat().st_size) != expected["size"]:
            faults.append(f"{name}: {size} bytes, {expected['size']} were written")
        elif _entry(folder / name) != expected:
            faults.append(f"{name}: its content is not what was written (SHA-256 differs)")
    return faults


def checkpoints(output_dir: Path) -> list[Path]:
    """The folders `checkpoint-N`, newest first."""
    numbered = [f for f in output_dir.glob("checkpoint-*") if f.name.rpartition("-")[2].isdecimal()]
    return sorted(numbered, key=lambda f: int(f.name.rpartition("-")[2]), reverse=True)


def finished_step(output_dir: Path) -> int | None:
    """The step after which the run in the folder was finished, or None."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads((output_dir / COMPLETE).read_text())["step"]
    return None


def _model_files(folder: Path) -> list[Path]:
    return sorted(f for pattern in MODEL for f in folder.glob(pattern) if f.name != "training_args.bin")


@contextlib.contextmanager
def named_save_errors(output_dir: Path) -> Iterator[None]:
    """A context that turns a full disk into a SaveError, which quotes it and says which checkpoint is left."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if getattr(error, "errno", None) not in _FULL and not _WRITE_FAILED.search(str(error)):
            raise
        folders = checkpoints(output_dir)
        target = next((f for f in folders if not (f / COMPLETE).is_file()), output_dir)
        newest = next((f for f in folders if (f / COMPLETE).is_file()), None)
        left = f"{newest} is complete and untouched" if newest else "No earlier checkpoint exists"
        raise SaveError(
            f"{target} could not be written: {error} ({free_gib(output_dir):.2f} GiB are free there). {left}. Make "
            "room and rerun the same command to resume"
        ) from error


# --- room on the disk -------------------------------------------------------------------------------------------------


def free_gib(folder: Path) -> float:
    """Free GiB on the file system of `folder`, or of its first existing parent."""
    existing = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
    return shutil.disk_usage(existing).free / 2**30


def model_bytes(model: nn.Module) -> int:
    """Bytes of all weights, before any partitioning."""
    return sum(full_shape(p).numel() * p.element_size() for p in model.parameters())


def checkpoint_bytes(model: nn.Module, args: TrainingArguments) -> int:
    """Bytes of a `checkpoint-N`: weights, moments, fp32 masters, and DeepSpeed's own copy of the weights."""
    trained = [(full_shape(p).numel(), p.element_size()) for p in model.parameters() if p.requires_grad]
    elements, weights = sum(n for n, _ in trained), sum(n * size for n, size in trained)
    whole = weights if trains_adapter_only(model) or has_lora(model) else model_bytes(model)
    moments = (2 if "8bit" in str(args.optim) else 8) * elements
    if not args.deepspeed:
        return whole + moments + 4 * sum(n for n, size in trained if size < 4)
    copy = model_bytes(model) - (weights if args.hf_deepspeed_config.is_zero3() else 0)  # ZeRO-3: of what is frozen
    return whole + copy + moments + 4 * elements


def check_disk(model: nn.Module, args: TrainingArguments, max_steps: int) -> None:
    """Raises SaveError if the disk is too small for checkpoints, one more during a save, and the final folder.

    Every rank must call.
    """
    output_dir, each = Path(args.output_dir), checkpoint_bytes(model, args)
    strategy: Any = args.save_strategy  # the library has made an enum of it
    every = args.save_steps if strategy.value == "steps" else max_steps
    saves = 0 if strategy.value == "no" else max(1, int(max_steps // max(1, every)))
    limit = max(args.save_total_limit or saves, 2 if args.metric_for_best_model else 1)  # the newest and the best
    needed = (min(saves, limit + 1) * each + model_bytes(model)) / 2**30
    present = sum(f.stat().st_size for f in output_dir.rglob("*") if f.is_file()) / 2**30
    free, present = broadcast_object_list([(free_gib(output_dir), present)])[0]
    if needed > free + present:
        raise SaveError(
            f"--output_dir {output_dir}: the run will write about {needed:.2f} GiB ({each / 2**30:.2f} per checkpoint)"
            f", and {free:.2f} are free; make room, lower --save_total_limit (one more is kept while a new one is "
            "written), or choose another disk"
        )


# --- how a run starts -------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """How a run begins: from a checkpoint, or from the beginning, or not at all."""

    checkpoint: str | None = None
    ranks: int = 0  # that wrote the checkpoint
    finished: int | None = None  # the step after which this same run was finished
    replaces: bool = False  # whether what an earlier run wrote is removed


@contextlib.contextmanager
def held_folder(args: TrainingArguments) -> Iterator[None]:
    """A context in which rank 0 holds the output folder, so that no other training writes there. Every rank must call.

    Raises:
        InUse: another training holds it; raised on every rank.
    """
    with contextlib.ExitStack() as stack:
        on_first(lambda: stack.enter_context(training_lock(Path(args.output_dir))))
        yield


def choose_start(args: TrainingArguments, settings: Settings) -> Start:
    """The start that `--output_dir` and the flags ask for, decided before anything is built. Every rank must call.

    Raises:
        ResumeError: the folder holds another run, or one that cannot be continued.
        FileNotFoundError: the requested checkpoint does not exist or is damaged.
    """
    return on_first(lambda: _start(args, settings))


def _start(args: TrainingArguments, settings: Settings) -> Start:
    requested, overwrites = args.resume_from_checkpoint, args.overwrite_output_dir
    if overwrites and requested not in (None, *FROM_SCRATCH):
        raise ResumeError(
            f"--overwrite_output_dir True starts from scratch and --resume_from_checkpoint {requested} resumes; pass "
            "one of them"
        )
    try:
        start = _without_loss(args, settings)
    except ResumeError:
        if not overwrites:
            raise
        start = Start(replaces=True)
    if start.finished is not None and overwrites:
        start = Start(replaces=True)
    if start.finished is None:
        shutil.rmtree(Path(args.output_dir, FOLDER), ignore_errors=True)  # reports of an earlier start
    return start


def _without_loss(args: TrainingArguments, settings: Settings) -> Start:
    """A start that replaces only what this same run wrote; raises ResumeError if there is none."""
    folder, left = Path(args.output_dir), what_is_there(Path(args.output_dir))
    if args.resume_from_checkpoint in FROM_SCRATCH:
        if left:
            raise ResumeError(
                f"--resume_from_checkpoint False starts from scratch, and {folder} holds {left} of an earlier run; "
                "remove it by --overwrite_output_dir True, or choose another --output_dir"
            )
        return Start()
    unmarked = [f for f in (folder, *checkpoints(folder)) if not (f / COMPLETE).is_file()]
    if older := next((f for f in unmarked if (f / OLDER).is_file()), None):
        raise ResumeError(
            f"{older} was written by an earlier version of this code ({OLDER} in place of {COMPLETE}): a "
            "finished model there can be used, but no training resumes; finish it with the version that wrote it, take "
            "another --output_dir, or remove it by --overwrite_output_dir True"
        )
    if (step := finished_step(folder)) is not None:
        check_settings(folder, settings)
        if not (faults := folder_faults(folder)):
            return Start(finished=step)
        logger.warning("%s was finished and is damaged: %s", folder, "; ".join(faults[:3]))
    checkpoint = find_checkpoint(args)
    if left and (checkpoint is None or checkpoint.resolve().parent != folder.resolve()):
        check_settings(folder, settings)
    if checkpoint is not None:
        ranks = check_settings(checkpoint, settings)["world_size"]
        best = json.loads((checkpoint / TRAINER_STATE_NAME).read_text())["best_global_step"]
        if best and not (folder / f"checkpoint-{best}" / COMPLETE).is_file():
            raise ResumeError(
                f"{checkpoint}: {folder / f'checkpoint-{best}'} had the best --metric_for_best_model so far and is "
                "missing; put it back, or start from scratch with --resume_from_checkpoint False"
            )
        logger.info("resuming from %s", checkpoint)
        return Start(str(checkpoint), int(ranks or 1))
    if left:
        logger.warning("%s: no checkpoint to resume from; this run starts from scratch", folder)
    return Start()


def find_checkpoint(args: TrainingArguments) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` names, or the newest complete one in `--output_dir`.

    Raises:
        FileNotFoundError: the requested checkpoint does not exist or is damaged.
    """
    requested, output_dir = args.resume_from_checkpoint, Path(args.output_dir)
    if requested not in (None, "True", "true", True):
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


def check_settings(folder: Path, settings: Settings) -> Settings:
    """The settings that a checkpoint or output folder was written with, compared with this run's.

    Raises:
        ResumeError: they differ in more than `CHANGEABLE`; the message lists all differences with both values.
    """
    try:
        saved: Settings = json.loads((folder / SETTINGS_FILE).read_text())["settings"]
    except OSError:
        raise ResumeError(
            f"{folder} holds {what_is_there(folder)}, but no {SETTINGS_FILE} that says with which settings they were "
            "made; choose another --output_dir, or remove them with --overwrite_output_dir True"
        ) from None
    different = differences(saved, settings)
    side = "checkpoint" if folder.name.startswith("checkpoint-") else "there"
    lines = {name: f"{name}: {side} {before!r}, now {now!r}" for name, (before, now) in different.items()}
    if refused := [name for name in different if name not in CHANGEABLE.split()]:
        raise ResumeError(
            f"{folder} was written by a run with other settings:\n  " + "\n  ".join(lines.values()) + "\n"
            f"{', '.join(refused)} would make it another run: set them back, take another --output_dir, or replace "
            "that run by --overwrite_output_dir True"
        )
    for line in lines.values():
        logger.warning("changed within the run: %s", line)
    return saved


def what_is_there(folder: Path) -> str:
    """What a folder holds that a new run would replace, in words; empty if nothing would be lost."""
    log = folder / LOG_FILE
    lines = len(log.read_text().splitlines()) if log.is_file() else 0
    whole = [f.name for f in checkpoints(folder) if (f / COMPLETE).is_file() or (f / OLDER).is_file()]
    return ", ".join([*whole, *[f"a log of {lines} lines"] * bool(lines), *(f.name for f in _model_files(folder))])


def begin_run(args: TrainingArguments, start: Start, settings: Settings) -> None:
    """Makes the output folder this run's own. Every rank must call, after all checks."""
    wait_for_everyone()  # every rank has read what is there
    if args.process_index != 0:
        return
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    removed = [f for f in checkpoints(folder) if not (f / COMPLETE).is_file()]
    if start.replaces:
        logger.warning("--overwrite_output_dir True: removing %s from %s", what_is_there(folder) or "nothing", folder)
        removed = [folder / PROFILE, *checkpoints(folder), *_model_files(folder)]
        removed += [folder / name for name in (SETTINGS_FILE, LOG_FILE, RUN_FILE, TRAINER_STATE_NAME)]
    elif removed:
        logger.warning("%s: removing what an interrupted run left half written", removed[0])
    for path in [folder / COMPLETE, folder / OLDER, *removed]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    write_settings(folder, settings)


def use_converted_states(start: Start, args: TrainingArguments) -> bool:
    """Whether DeepSpeed must load states that another number of ranks wrote; if so, its configuration says so.

    Raises:
        ResumeError: they are not converted; the message has the command.
    """
    if not args.deepspeed or not start.checkpoint or start.ranks == args.world_size:
        return False
    folder = Path(start.checkpoint)
    if not (folder / "latest_universal").is_file():
        states = folder / (folder / "latest").read_text().strip()
        raise ResumeError(
            f"{folder} was written by {start.ranks} ranks, and now there are {args.world_size}; convert DeepSpeed's "
            f"states by python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {states} "
            f"--output_folder {states}_universal (it takes the same room on the disk again), and rerun the command"
        )
    if args.load_best_model_at_end:
        raise ResumeError(
            "--load_best_model_at_end True: not in a DeepSpeed run that resumes on another number of ranks; leave the "
            "flag out and take the best checkpoint's folder"
        )
    config = args.hf_deepspeed_config.config
    config["checkpoint"] = config.get("checkpoint", {}) | {"load_universal": True}
    return True
