"""Trains a LLaVA: stage 1 (projector and norm) or stage 2 (instruction tuning), as the flags say.

Runs as `python -m llava.train.train`, or under `deepspeed`, `torchrun` and SLURM through scripts/pretrain.sh and
scripts/finetune.sh. `--help` documents every flag.
"""

import contextlib
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import transformers
from transformers import set_seed

from llava.model.lora import has_lora
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments, parse_flags, read_flags
from llava.train.build import build_model, build_trainer, training_tokenizer
from llava.train.checkpoint import begin_run, choose_start, has_converted_states, held_folder
from llava.train.checks import QUARANTINE, check_flags, checked_eval_records, checked_records
from llava.train.distributed import check_nodes, joined, leave_process_group, on_first, use_gloo_backend
from llava.train.llava_trainer import LLaVATrainer
from llava.train.memory import AUTO, resolve_auto, runs_alone
from llava.train.run_record import run_settings, write_run_record
from llava.train.stop import StopSignal
from llava.train.zero import let_ninja_be_found
from llava.utils.digests import warn_of_other_base
from llava.utils.failures import REQUEUE_EXIT_CODE, Watchdog, refusal
from llava.utils.locks import InUse

logger = logging.getLogger("llava.train.train")  # the same name where the module runs as a program


def train(argv: list[str] | None = None, attn_implementation: str | None = None) -> None:
    """Parses the flags, by default those of the process, trains, and writes the final folder."""
    launched = "LOCAL_RANK" in os.environ  # `--deepspeed auto` may leave the launcher's group
    model_args, data_args, training_args = parse_arguments(sys.argv[1:] if argv is None else argv, attn_implementation)
    with training_process(training_args, launched) as (watchdog, stop_signal):
        check_flags(model_args, data_args, training_args)
        paths = [model_args.model_name_or_path, model_args.vision_tower, model_args.pretrain_mm_mlp_adapter]
        paths += [*(data_args.data_path or "").split(","), data_args.image_folder]
        paths += [*(data_args.eval_data_path or "").split(","), data_args.eval_image_folder]
        with held_folder(training_args):
            check_nodes([path for path in paths if path], training_args.output_dir)
            train_in_folder(model_args, data_args, training_args, watchdog, stop_signal)


def train_in_folder(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    watchdog: Watchdog,
    stop_signal: StopSignal,
) -> None:
    """Trains from the newest complete checkpoint, or from the start, and writes the final folder, unless stopped."""
    output_dir = Path(training_args.output_dir)
    records, write_left_out = checked_records(model_args.version, data_args, training_args)
    eval_records = checked_eval_records(model_args.version, data_args, training_args, records)
    path, max_length = model_args.model_name_or_path, training_args.model_max_length
    tokenizer = training_tokenizer(path, max_length, training_args.cache_dir)
    settings = run_settings(model_args, data_args, training_args, records, tokenizer)
    start = on_first(lambda: choose_start(training_args, settings))
    if start.finished is not None:
        logger.info(
            "%s: this run is finished, after %d steps; nothing is written (remove the folder to retrain from scratch)",
            output_dir, start.finished,
        )  # fmt: skip
        return

    if (adapter := model_args.pretrain_mm_mlp_adapter) and training_args.process_index == 0:
        warn_of_other_base(adapter, path, settings["language_model_files"])
        if tower := settings["vision_tower_files"]:
            warn_of_other_base(adapter, str(model_args.vision_tower), tower, "vision_tower_files")
    set_seed(training_args.seed)
    if training_args.deepspeed and start.checkpoint and has_converted_states(start.checkpoint, training_args):
        training_args.hf_deepspeed_config.config.setdefault("checkpoint", {})["load_universal"] = True
    model = build_model(model_args, data_args, training_args)
    process = {"settings": settings, "watchdog": watchdog, "stop_signal": stop_signal}
    trainer = build_trainer(model, records, model_args, data_args, training_args, tokenizer, eval_records, **process)

    begin_run(training_args, settings)
    if training_args.process_index == 0 and records.left_out:
        write_left_out(output_dir / QUARANTINE)
    resumed = start.checkpoint is not None
    write_run_record(model, trainer.train_dataset, model_args, data_args, training_args, settings, resumed)
    watchdog.start()
    stop_signal.install()
    trainer.train(resume_from_checkpoint=start.checkpoint)
    if stop_signal.stopped:
        logger.log(logging.WARNING if training_args.process_index == 0 else logging.DEBUG, stop_signal.stopped)
        return

    trainer.save_state()
    model.config.use_cache = True
    trainer.save_final()
    if records.left_out:
        logger.warning("%d records were left out, see %s", records.left_out, output_dir / QUARANTINE)
    log_next_step(trainer, output_dir.absolute(), model_args.mm_projector_norm)


def log_next_step(trainer: LLaVATrainer, folder: Path, norm: str) -> None:
    """Logs where the finished model is, and the next command."""
    path, adapter = shlex.quote(str(folder)), folder / ADAPTER_FILE
    if trainer.adapter_only:
        settings = f"NORM={norm} PRETRAIN_ADAPTER={shlex.quote(str(adapter))}"
        logger.info("stage 1 is done, projector and norm are in %s", adapter)
        logger.info("next, stage 2, with your other settings: %s bash scripts/finetune.sh", settings)
    elif has_lora(trainer.model):
        merge = f"-m llava.model.merge_lora --model-path {path} --save-model-path {path}-merged"
        merge = f"{shlex.quote(sys.executable)} {merge}"
        logger.info("the adapters are in %s; next, merged with their base: %s", folder, merge)
    else:
        logger.info("the model is in %s; next, its scores: bash scripts/evaluate.sh %s", folder, path)


# --- the process around a training ------------------------------------------------------------------------------------


def main(attn_implementation: str | None = None) -> None:
    """Trains as the process's flags say; ends it with one line and status 2 if the user can fix it."""
    try:
        train(attn_implementation=attn_implementation)
    except Exception as error:
        end_process(error)


def parse_arguments(
    argv: list[str], attn_implementation: str | None = None
) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The command line as three dataclasses; on a CPU-only rank of DeepSpeed the gloo backend is set up first."""
    if any(arg.startswith("--deepspeed") for arg in argv):
        let_ninja_be_found()
        chooses_none = runs_alone() and read_flags(argv).deepspeed == AUTO  # ranks that are alone take no DeepSpeed
        if not torch.accelerator.is_available() and not chooses_none:
            use_gloo_backend()
    return parse_flags(resolve_auto(argv), attn_implementation=attn_implementation)


@contextlib.contextmanager
def training_process(training_args: TrainingArguments, launched: bool) -> Iterator[tuple[Watchdog, StopSignal]]:
    """A context to train in: the first rank logs, signals are handled, and an error leaves a report.

    After it every rank leaves the process group, and exits with the request for another start if a signal came.
    """
    rank = training_args.process_index
    if rank != 0:
        transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("llava").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    watchdog, stop_signal = Watchdog(training_args.output_dir, rank, training_args.hang_timeout), StopSignal()
    try:
        yield watchdog, stop_signal
    except InUse:  # no report: the folder is another training's
        raise
    except Exception as error:
        watchdog.report_exception(error)
        if watchdog.reported and refusal(error):
            error.add_note(f"traceback: {watchdog.folder}")
        raise
    finally:
        watchdog.stop()
        stop_signal.remove()
    leave_process_group()
    if stop_signal.stopped:
        # A launcher would start ranks with another status than 0 again; the folder shows that nothing is finished.
        sys.exit(0 if launched else REQUEUE_EXIT_CODE)


def end_process(error: Exception) -> NoReturn:
    """Ends the process with one line and status 2 if the user can fix the error, else with its traceback and 1."""
    message = refusal(error)
    if message is None:
        traceback.print_exception(error)
    else:
        rank = f"rank {torch.distributed.get_rank()}: " if joined() else ""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"{rank}error: {message}{notes}", file=sys.stderr)
    sys.stderr.flush()
    status = 1 if message is None else 2
    if joined():  # a normal exit could wait forever for other ranks
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
