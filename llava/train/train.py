"""Trains a LLaVA: stage 1 (projector and norm) or stage 2 (instruction tuning), as the flags say.

Runs as `python -m llava.train.train`, or under `deepspeed`, `torchrun` and SLURM through scripts/pretrain.sh and
scripts/finetune.sh. `--help` documents every flag.
"""

import logging
import os
import sys
import traceback
from pathlib import Path

import torch
import transformers
from transformers import set_seed

from llava.model.lora import has_lora
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.building import build_model, build_trainer, training_tokenizer
from llava.train.checkpoint import named_save_errors
from llava.train.closing import print_next_steps
from llava.train.flags import parse_flags
from llava.train.launch_check import check_launch, spans_nodes
from llava.train.ranks import joined, leave_process_group
from llava.train.resume import use_universal_checkpoint
from llava.train.run_checks import (
    EVAL_QUARANTINE,
    QUARANTINE,
    check_flags,
    checked_eval_records,
    checked_records,
    report_left_out,
)
from llava.train.run_folder import begin_run, choose_start, held_folder
from llava.train.run_identity import run_identity
from llava.train.run_record import write_run_record
from llava.train.stop_signal import StoppedEarly, StopSignal
from llava.utils.failures import Watchdog, of_flag, refusal
from llava.utils.locks import InUse
from llava.utils.network import interface_fault

logger = logging.getLogger("llava.train.train")  # the same name where the module runs as a program


def run_in_folder(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    watchdog: Watchdog,
    stop_signal: StopSignal,
) -> None:
    """Trains from the newest complete checkpoint, or from the start, and writes the final folder, unless stopped."""
    output_dir, is_first = Path(training_args.output_dir), training_args.process_index == 0
    records, write_left_out = checked_records(model_args, data_args, training_args)
    eval_records, write_eval_left_out = checked_eval_records(model_args, data_args, training_args, records)
    tokenizer = training_tokenizer(model_args, training_args)
    identity = run_identity(model_args, data_args, training_args, records, tokenizer, eval_records)
    start = choose_start(training_args, identity)
    if start.finished is not None:
        logger.info(
            "%s: this run is finished, after %d steps; nothing is written (--overwrite_output_dir True retrains from "
            "scratch)", output_dir, start.finished,
        )  # fmt: skip
        return
    use_universal_checkpoint(start.checkpoint, start.resumed, training_args)

    set_seed(training_args.seed)
    model = build_model(model_args, data_args, training_args)
    trainer = build_trainer(
        model,
        records,
        model_args,
        data_args,
        training_args,
        tokenizer=tokenizer,
        eval_records=eval_records,
        identity=identity,
        resumed=start.resumed,
        watchdog=watchdog,
        stop_signal=stop_signal,
    )
    begin_run(training_args, start, identity, len(records))
    if is_first and records.left_out:
        write_left_out(output_dir / QUARANTINE)
    if is_first and eval_records is not None and write_eval_left_out and eval_records.left_out:
        write_eval_left_out(output_dir / EVAL_QUARANTINE)
    resumed = start.checkpoint is not None
    write_run_record(model, trainer.train_dataset, model_args, data_args, training_args, resumed)
    watchdog.start()
    trainer.train(resume_from_checkpoint=start.checkpoint)
    if stop_signal.stopped:
        return
    trainer.load_best()
    trainer.save_state()
    model.config.use_cache = True
    trainer.save_final()
    report_left_out(records, str(output_dir))
    report_left_out(eval_records, str(output_dir), EVAL_QUARANTINE)
    print_next_steps(model_args, data_args, str(output_dir), trainer.adapter_only, has_lora(model))


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    watchdog: Watchdog,
    stop_signal: StopSignal,
) -> None:
    """Checks flags and launch, and trains while it holds the output folder."""
    check_flags(model_args, data_args, training_args)
    if spans_nodes():
        inputs = (model_args.model_name_or_path, model_args.vision_tower, data_args.image_folder)
        inputs += (*(data_args.data_path or "").split(","), model_args.pretrain_mm_mlp_adapter)
        inputs += (*(data_args.eval_data_path or "").split(","), data_args.eval_image_folder)
        check_launch(inputs, training_args.output_dir, training_args.device)
    with held_folder(training_args), named_save_errors(Path(training_args.output_dir)):
        run_in_folder(model_args, data_args, training_args, watchdog, stop_signal)


# --- the process ------------------------------------------------------------------------------------------------------


def main(attn_implementation: str | None = None) -> None:
    """Trains as the process's flags say; ends it with one line and status 2 if the user can fix it."""
    argv = sys.argv[1:]
    try:
        parsed = parse_arguments(argv, attn_implementation)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {of_flag(error, argv)}", file=sys.stderr)
        sys.exit(2)
    watchdog = watchdog_of(parsed[2])
    try:
        train_parsed(*parsed, watchdog)
    except Exception as error:
        message = refusal(error)
        if message is None:
            traceback.print_exception(type(error), error, error.__traceback__)
        else:
            rank = f"rank {watchdog.rank}: " if joined() else ""
            report = f" (traceback: {watchdog.folder})" if watchdog.reported else ""
            print(f"{rank}error: {message}{report}", file=sys.stderr)
        sys.stderr.flush()
        status = 1 if message is None else 2
        if joined():  # a normal exit could wait forever for other ranks
            os._exit(status)
        sys.exit(status)


def train(argv: list[str] | None = None, attn_implementation: str | None = None) -> None:
    """Parses the command line, trains, and writes the final folder.

    Args:
        argv: the flags; by default those of the process.
        attn_implementation: default of `--attn_implementation`.
    """
    parsed = parse_arguments(sys.argv[1:] if argv is None else argv, attn_implementation)
    train_parsed(*parsed, watchdog_of(parsed[2]))


def train_parsed(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    watchdog: Watchdog,
) -> None:
    """Trains, leaves a report of an error, and exits with `StopSignal.exit_code` if a signal ended the run."""
    set_up_logging(training_args)
    stop_signal = StopSignal().install()
    try:
        run(model_args, data_args, training_args, watchdog, stop_signal)
        stop_signal.say_where(training_args.output_dir)
    except StoppedEarly:
        stop_signal.say_where(training_args.output_dir)
    except InUse:  # no report: the folder is another training's
        raise
    except Exception as error:
        watchdog.report_exception(error)
        raise
    finally:
        watchdog.stop()
        stop_signal.remove()
    leave_process_group()
    if stop_signal.stopped:
        sys.exit(stop_signal.exit_code())


def watchdog_of(training_args: TrainingArguments) -> Watchdog:
    """The watchdog of this process, with the flags' timeout."""
    return Watchdog(training_args.output_dir, training_args.process_index, training_args.hang_timeout)


def parse_arguments(
    argv: list[str], attn_implementation: str | None = None
) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The command line as three dataclasses; on a CPU-only rank of DeepSpeed the gloo backend is set up first.

    Raises:
        ValueError: a variable chooses a network interface that this host lacks, which would end the backend.
    """
    if "RANK" in os.environ and (fault := interface_fault()):
        raise ValueError(fault)
    if not torch.accelerator.is_available() and any(arg.startswith("--deepspeed") for arg in argv):
        from llava.train.cpu_distributed import use_gloo_backend

        use_gloo_backend()
    return parse_flags(argv, attn_implementation=attn_implementation)


def set_up_logging(training_args: TrainingArguments) -> None:
    """Lets the first rank's messages and progress bars reach the console; the other ranks only warn."""
    level = logging.INFO if training_args.process_index == 0 else logging.WARNING
    if training_args.process_index != 0:
        transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("llava").setLevel(level)


if __name__ == "__main__":
    main()
