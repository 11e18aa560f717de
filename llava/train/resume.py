"""Continues a run: refuses a checkpoint of another run, and finds the position in the data and DeepSpeed's states.

A checkpoint and the output folder hold `resume.json`, with the run's identity (`llava.train.run_identity`) and its
samples per step. `--resume_allow_changes` accepts the differences in `ALLOWED`.
"""

import argparse
import json
import logging
import math
import shutil
from pathlib import Path

from llava.train.arguments import TrainingArguments
from llava.train.ranks import barrier
from llava.train.run_identity import ALLOWED, CONTENTS, PICTURES, Settings, default_settings
from llava.train.run_record import IDENTITY, Identity
from llava.utils.provenance import differences

logger = logging.getLogger(__name__)


class ResumeError(ValueError):
    """The checkpoint or the output folder belongs to another run."""


def accepted_changes(allowed: str) -> set[str]:
    """The names in `--resume_allow_changes`, separated by commas.

    Raises:
        ResumeError: one of them can never be accepted.
    """
    accepted = {name.strip() for name in allowed.split(",") if name.strip()}
    if unknown := accepted - ALLOWED:
        raise ResumeError(
            f"--resume_allow_changes: {', '.join(sorted(unknown))} cannot change within a run; "
            f"what can: {', '.join(sorted(ALLOWED))}"
        )
    return accepted


def check_identity(folder: Path, settings: Settings, accepted: set[str], step_size: int) -> Identity:
    """Compares the run of a checkpoint or output folder with this one; returns the content of `resume.json`.

    A run that is older than a flag had its default. What the files of an older run held is not known: a warning.

    Args:
        folder: the checkpoint or output folder.
        settings: this run's identity.
        accepted: settings that may differ.
        step_size: samples of an optimizer step of this run.

    Raises:
        ResumeError: other settings differ; the message lists all differences with both values.
    """
    saved: Identity = json.loads((folder / IDENTITY).read_text())
    saved["settings"] = default_settings() | saved["settings"]
    if PICTURES not in saved["settings"] and (unknown := {k: settings[k] for k in CONTENTS if k in settings}):
        logger.warning("%s was written without digests of %s: not compared", folder, ", ".join(unknown))
        saved["settings"] |= unknown
    different = differences(saved["settings"], settings)
    if refused := [k for k in different if k not in accepted]:
        side = "checkpoint" if folder.name.startswith("checkpoint-") else "there"
        lines = [f"  {k}: {side} {before!r}, now {now!r}" for k, (before, now) in different.items()]
        hint = f"accept with --resume_allow_changes {','.join(different)}, or " if set(different) <= ALLOWED else ""
        raise ResumeError(
            f"{folder} was written by a run with other settings:\n" + "\n".join(lines) + "\n"
            f"{', '.join(refused)} would make it another run: {hint}set them back, take another "
            "--output_dir, or replace that run by --overwrite_output_dir True"
        )
    if step_size != saved["step_size"] and settings.get("group_by_modality_length"):
        raise ResumeError(
            f"{folder}: a step had {saved['step_size']} samples and now has {step_size}; with "
            "--group_by_modality_length True that is another order of the data. Keep the global batch "
            "(--gradient_accumulation_steps)"
        )
    return saved


def moved_step(step: int, saved: Identity, step_size: int) -> int:
    """The step of this run at the position in the data where the checkpoint's run was at `step`.

    If a step now has more samples, up to one step's samples are seen again.
    """
    if step_size == saved["step_size"]:
        return step
    samples = saved["num_samples"]
    whole = math.floor if saved["settings"].get("dataloader_drop_last") else math.ceil
    epoch, inside = divmod(step, whole(samples / saved["step_size"]))
    steps = whole(samples / step_size)
    return epoch * steps + min(min(inside * saved["step_size"], samples) // step_size, steps)


def use_universal_checkpoint(checkpoint: str | None, resumed: Identity | None, args: TrainingArguments) -> None:
    """Lets DeepSpeed load its states for another number of ranks. Every rank must call, before the engine is made.

    The converted states are kept beside the original ones, in `global_stepN_universal`, and take as much room again.

    Raises:
        ValueError: `--load_best_model_at_end`, for which DeepSpeed would need the best checkpoint's converted states.
    """
    if not args.deepspeed or not checkpoint or not resumed or resumed["settings"]["world_size"] == args.world_size:
        return
    if args.load_best_model_at_end:
        raise ValueError(
            "--load_best_model_at_end True: not in a DeepSpeed run that resumes on another number of ranks; "
            "leave the flag out and take the best checkpoint's folder"
        )
    config, folder = args.hf_deepspeed_config.config, Path(checkpoint)
    config["checkpoint"] = config.get("checkpoint", {}) | {"load_universal": True}
    if args.process_index == 0:
        tag = (folder / "latest").read_text().strip()
        target = folder / f"{tag}_universal"
        if not target.exists():
            _convert(folder / tag, target)
        (folder / "latest_universal").write_text(target.name)
    barrier()


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    logger.info("%s: converting for another number of ranks", source)
    unfinished = target.with_name(f"unfinished-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(source), "output_folder": str(unfinished)}
    ds_to_universal.main(argparse.Namespace(**folders, **options, inject_missing_state=True))
    unfinished.rename(target)
