"""Whether a checkpoint continues this very run: what decides its numbers is compared, and differences are refused.

A checkpoint and the output folder hold `resume.json`: flags, data, template, tokenizer, ranks and samples per step.
Some differences are sound, since they change rounding at most or the library carries them over;
`--resume_allow_changes` accepts those.
"""

import argparse
import dataclasses
import json
import logging
import math
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

from llava.conversation import get_template
from llava.train.checkpoint import replace_file
from llava.train.ranks import barrier

logger = logging.getLogger(__name__)

IDENTITY = "resume.json"

# Flags that decide where and how a run works, never what it computes.
_IRRELEVANT_PREFIXES = ("logging_", "log_", "save_", "eval_", "hub_", "push_to", "dataloader_", "resume_", "trackio_")
# fmt: off
_IRRELEVANT = frozenset({
    "output_dir", "run_name", "project", "report_to", "local_rank", "deepspeed_plugin", "disable_tqdm", "ddp_timeout",
    "hang_timeout", "max_nonfinite_steps", "telemetry_steps", "peak_tflops", "cache_dir", "data_cache_dir",
    "data_path", "image_folder", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "lazy_preprocess", "is_multimodal",
    "evaluation_strategy", "do_train", "do_eval", "do_predict", "skip_memory_metrics",
    "include_num_input_tokens_seen", "use_cache", "per_device_eval_batch_size", "batch_eval_metrics",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "torch_empty_cache_steps", "trial_save",
    "ignore_data_skip", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint", "ddp_backend",
    "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "debug", "use_cpu", "on_bad_record",
    "recheck_data",
    "overwrite_output_dir",
})
# fmt: on
# Differences that a run can be continued with, and why.
ALLOWED = {
    "world_size": "samples stay in order; DeepSpeed's states are converted to a universal checkpoint",
    "per_device_train_batch_size": "the position in the data is kept by samples",
    "gradient_accumulation_steps": "the position in the data is kept by samples",
    "max_steps": "the schedule's length changes from here on",
    "num_train_epochs": "the schedule's length changes from here on",
    "model_name_or_path": "for a moved folder: what is frozen comes from there",
    "vision_tower": "for a moved folder: what is frozen comes from there",
    "pretrain_mm_mlp_adapter": "the checkpoint's own projector is loaded over it",
    "max_grad_norm": "applies from here on",
    "attn_implementation": "changes rounding only",
    "padding_free": "changes rounding only",
    "max_tokens_per_micro_batch": "changes rounding only",
    "loss_head": "changes rounding only",
    "use_liger_kernel": "changes rounding only",
    "compile_layers": "changes rounding only",
    "tf32": "changes rounding only",
}


class ResumeError(ValueError):
    """The checkpoint or the output folder belongs to another run."""


def run_identity(model_args: Any, data_args: Any, training_args: Any, records: Any, tokenizer: Any) -> dict[str, Any]:
    """What decides the numbers of a run, as JSON values."""
    flags = {f.name: getattr(args, f.name) for args in (model_args, data_args, training_args) for f in _fields(args)}
    flags = {k: v for k, v in flags.items() if _decides(k)}
    flags["deepspeed"] = _deepspeed_settings(training_args)
    settings = {k: v if isinstance(v, bool | int | float | None) else str(v) for k, v in flags.items()}
    settings["world_size"] = training_args.world_size
    settings["data"] = f"{len(records)} records, SHA-256 {records.key}"
    settings["template"] = _digest(repr(get_template(model_args.version)))
    settings["tokenizer"] = _digest(json.dumps(sorted(tokenizer.get_vocab().items())))
    return settings


def _decides(flag: str) -> bool:
    """Whether a flag can change the numbers."""
    if flag in _IRRELEVANT or flag.startswith(_IRRELEVANT_PREFIXES):
        return flag == "dataloader_drop_last"
    return True


def _fields(args: Any) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(args) if f.init and not f.name.startswith("_")]


def _deepspeed_settings(args: Any) -> str:
    """The part of the DeepSpeed configuration that decides which states a checkpoint holds."""
    if not args.deepspeed:
        return "none"
    config = args.hf_deepspeed_config.config
    return f"ZeRO-{config.get('zero_optimization', {}).get('stage', 0)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def write_identity(folder: Path, settings: dict[str, Any], step_size: int, num_samples: int) -> None:
    """Writes `resume.json` of a checkpoint or of the output folder.

    Args:
        step_size: samples of an optimizer step over all ranks.
        num_samples: of an epoch.
    """
    content = {"settings": settings, "step_size": step_size, "num_samples": num_samples}
    replace_file(folder / IDENTITY, json.dumps(content, indent=1, sort_keys=True))


def accepted_changes(allowed: str) -> set[str]:
    """The names in `--resume_allow_changes`, separated by commas.

    Raises:
        ResumeError: one of them can never be accepted.
    """
    accepted = {name.strip() for name in allowed.split(",") if name.strip()}
    if unknown := accepted - ALLOWED.keys():
        raise ResumeError(
            f"--resume_allow_changes: {', '.join(sorted(unknown))} cannot change within a run; "
            f"what can: {', '.join(sorted(ALLOWED))}"
        )
    return accepted


def check_identity(folder: Path, settings: dict[str, Any], accepted: set[str], step_size: int) -> dict[str, Any]:
    """Compares the run of a checkpoint or output folder with this one; returns the content of `resume.json`.

    Args:
        accepted: settings that may differ.
        step_size: samples of an optimizer step of this run.

    Raises:
        ResumeError: other settings differ; all differences are listed with both sides.
    """
    saved = json.loads((folder / IDENTITY).read_text())
    different = differences(saved, settings)
    if refused := [k for k in different if k not in accepted]:
        side = "checkpoint" if folder.name.startswith("checkpoint-") else "there"
        lines = [f"  {k}: {side} {before!r}, now {now!r}" for k, (before, now) in different.items()]
        hint = (
            f"accept with --resume_allow_changes {','.join(different)}, or " if set(different) <= ALLOWED.keys() else ""
        )
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


def differences(saved: dict[str, Any], settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings in which a `resume.json` differs from this run's, with both sides."""
    before = saved["settings"]
    pairs = {k: (before.get(k), settings.get(k)) for k in sorted(before.keys() | settings.keys())}
    return {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}


def moved_step(step: int, saved: dict[str, Any], step_size: int) -> int:
    """The step of this run that stands where `step` of the checkpoint's run stood in the data.

    Where a step now has more samples, up to a step's worth of samples is seen again.
    """
    if step_size == saved["step_size"]:
        return step
    samples = saved["num_samples"]
    epoch, inside = divmod(step, math.ceil(samples / saved["step_size"]))
    return epoch * math.ceil(samples / step_size) + min(inside * saved["step_size"], samples) // step_size


def use_universal_checkpoint(checkpoint: Path, deepspeed_config: dict[str, Any], is_main_process: bool) -> None:
    """Lets DeepSpeed load its states for another number of ranks. Every rank must call, before the engine is made.

    The converted states are kept beside the others, in `global_stepN_universal`; they take as much room again.
    """
    deepspeed_config["checkpoint"] = deepspeed_config.get("checkpoint", {}) | {"load_universal": True}
    if is_main_process:
        tag = (checkpoint / "latest").read_text().strip()
        target = checkpoint / f"{tag}_universal"
        if not target.exists():
            _convert(checkpoint / tag, target)
        (checkpoint / "latest_universal").write_text(target.name)
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
