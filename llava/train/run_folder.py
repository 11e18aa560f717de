"""Decides how a run starts in its output folder: it resumes, begins, is finished, is refused, or replaces a run.

`resume.json` in the folder says from the first step on which run it belongs to; `manifest.json` appears when that run
is finished. So no model, log or checkpoint of another run is replaced without `--overwrite_output_dir True`.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llava.train.arguments import TrainingArguments
from llava.train.batches import global_batch_size
from llava.train.checkpoint import (
    MANIFEST,
    STAGING,
    checkpoints,
    clear_staging,
    faults_on_any_rank,
    find_checkpoint,
    finished_step,
)
from llava.train.profiling import PROFILE
from llava.train.ranks import barrier, from_first
from llava.train.resume import ResumeError, accepted_changes, check_identity
from llava.train.run_identity import Settings
from llava.train.run_record import IDENTITY, Identity, write_identity
from llava.train.telemetry import LOG_FILE
from llava.utils.failures import clear_reports
from llava.utils.locks import FolderLock, InUse
from llava.utils.provenance import RUN_FILE, differences

logger = logging.getLogger(__name__)

FROM_SCRATCH = ("False", "false", False)  # values of --resume_from_checkpoint
_LENGTH = {"max_steps", "num_train_epochs"}  # settings that make a finished run unfinished
MODEL = ("*.safetensors", "*.safetensors.index.json", "*.bin", "adapter_config.json")


class Start(NamedTuple):
    """How a run begins: from a checkpoint and what its `resume.json` says, or from the beginning, or not at all."""

    checkpoint: str | None = None
    resumed: Identity | None = None
    finished: int | None = None  # the step after which this same run was finished
    replaces: bool = False  # whether what an earlier run wrote is removed


@contextlib.contextmanager
def held_folder(args: TrainingArguments) -> Iterator[None]:
    """A context in which rank 0 holds the output folder, so that no other training writes there. Every rank must call.

    Raises:
        InUse: another training holds it; raised on every rank.
    """
    lock, refusal = FolderLock(Path(args.output_dir)), ""
    if args.process_index == 0:
        try:
            lock.acquire()
        except InUse as error:
            refusal = str(error)
    try:
        if refusal := from_first(refusal):
            raise InUse(refusal)
        yield
    finally:
        lock.release()


def choose_start(args: TrainingArguments, identity: Settings) -> Start:
    """The start that `--output_dir` and the flags ask for, decided before anything is built. Every rank must call.

    Raises:
        ResumeError: the folder holds another run, or a finished one that the flags would change.
        FileNotFoundError: see `find_checkpoint`.
    """
    accepted = accepted_changes(args.resume_allow_changes)
    if args.overwrite_output_dir and args.resume_from_checkpoint not in (None, *FROM_SCRATCH):
        raise ResumeError(
            f"--overwrite_output_dir True starts from scratch and --resume_from_checkpoint "
            f"{args.resume_from_checkpoint} resumes; pass one of them"
        )
    try:
        start = _without_loss(args, identity, accepted)
    except ResumeError:
        if not args.overwrite_output_dir:
            raise
        start = Start(replaces=True)
    if start.finished is not None and args.overwrite_output_dir:
        start = Start(replaces=True)
    settings = start.resumed["settings"] if start.resumed else identity
    for name, (before, now) in differences(settings, identity).items():
        logger.warning("accepted change: %s: checkpoint %r, now %r", name, before, now)
    if start.checkpoint and args.ignore_data_skip:
        logger.warning(
            "--ignore_data_skip True: the samples of the current epoch are seen again, so that the weights differ"
        )
    if start.finished is None:
        is_main = args.process_index == 0
        clear_staging(args.output_dir, is_main)
        if is_main:
            clear_reports(args.output_dir)
    return start


def _without_loss(args: TrainingArguments, identity: Settings, accepted: set[str]) -> Start:
    """A start that replaces only what this same run wrote; raises ResumeError if there is none."""
    folder, step_size = Path(args.output_dir), global_batch_size(args)
    step, left = from_first((finished_step(folder), earlier_run(folder)))
    if args.resume_from_checkpoint in FROM_SCRATCH:
        if left:
            raise ResumeError(
                f"--resume_from_checkpoint False starts from scratch, and {folder} holds {left} of an earlier run; "
                "remove it by --overwrite_output_dir True, or choose another --output_dir"
            )
        return Start()
    if step is not None:
        before = _check_earlier(folder, left, identity, accepted, step_size)
        if not _LENGTH & differences(before["settings"], identity).keys() and before["step_size"] == step_size:
            faults = faults_on_any_rank(folder, args.process_index, args.world_size)
            if not faults:
                return Start(finished=step)
            logger.warning("%s was finished and is damaged: %s", folder, "; ".join(faults[:3]))
    checkpoint = find_checkpoint(args.output_dir, args.resume_from_checkpoint, args.process_index, args.world_size)
    if left and (checkpoint is None or Path(checkpoint).resolve().parent != folder.resolve()):
        _check_earlier(folder, left, identity, accepted, step_size)
    if checkpoint is not None:
        return Start(checkpoint, check_identity(Path(checkpoint), identity, accepted, step_size))
    if step is not None:
        raise ResumeError(
            f"{folder} holds a run of {step} steps without a checkpoint to resume from; --overwrite_output_dir True "
            "retrains from scratch"
        )
    if left:
        logger.warning("%s: no checkpoint to resume from; this run starts from scratch", folder)
    return Start()


def earlier_run(folder: Path) -> str:
    """What a folder holds that a new run would replace, in words; empty if nothing would be lost."""
    log = folder / LOG_FILE
    lines = len(log.read_text().splitlines()) if log.is_file() else 0
    parts = [f.name for f in checkpoints(folder) if (f / MANIFEST).is_file()]
    parts += [f"a log of {lines} lines"] * bool(lines)
    return ", ".join(parts + sorted(f.name for f in _model_files(folder)))


def _model_files(folder: Path) -> list[Path]:
    return [f for pattern in MODEL for f in folder.glob(pattern) if f.name != "training_args.bin"]


def _check_earlier(folder: Path, left: str, identity: Settings, accepted: set[str], step_size: int) -> Identity:
    if not (folder / IDENTITY).is_file():
        raise ResumeError(
            f"{folder} holds {left}, but no {IDENTITY} that says with which settings they were made; choose another "
            "--output_dir, or remove them with --overwrite_output_dir True"
        )
    return check_identity(folder, identity, accepted, step_size)


def begin_run(args: TrainingArguments, start: Start, identity: Settings, num_samples: int) -> None:
    """Makes the output folder this run's own. Every rank must call, after all checks."""
    barrier()  # every rank has read what is there
    if args.process_index != 0:
        return
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if start.replaces:
        logger.warning("--overwrite_output_dir True: removing %s from %s", earlier_run(folder) or "nothing", folder)
        remove_run(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    write_identity(folder, identity, global_batch_size(args), num_samples)


def remove_run(folder: Path) -> None:
    """Removes what an earlier run wrote into the folder; other files there stay."""
    for path in [folder / STAGING, folder / PROFILE, *checkpoints(folder)]:
        shutil.rmtree(path, ignore_errors=True)
    named = [folder / name for name in (MANIFEST, IDENTITY, LOG_FILE, RUN_FILE, "trainer_state.json")]
    for path in named + _model_files(folder):
        path.unlink(missing_ok=True)
