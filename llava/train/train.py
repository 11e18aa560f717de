"""Trains a LLaVA: stage 1 (projector and norm) or stage 2 (instruction tuning), as the flags say.

Runs as `python -m llava.train.train`, or under `deepspeed`, `torchrun` and SLURM through scripts/pretrain.sh and
scripts/finetune.sh. `--help` documents every flag.
"""

import logging
import sys
from pathlib import Path

from transformers import set_seed

from llava.model.lora import has_lora
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.building import build_model, build_trainer, training_tokenizer
from llava.train.checkpoint import (
    begin_run,
    choose_start,
    held_folder,
    named_save_errors,
    use_converted_states,
)
from llava.train.closing import print_next_steps
from llava.train.compilation import decide_compilation
from llava.train.launch_check import check_launch, spans_nodes
from llava.train.run_checks import (
    EVAL_QUARANTINE,
    QUARANTINE,
    check_flags,
    checked_eval_records,
    checked_records,
    report_left_out,
)
from llava.train.run_record import run_settings, write_run_record
from llava.train.stop_signal import StopSignal
from llava.train.training_process import end_process, parse_arguments, training_process, watchdog_of
from llava.utils.failures import Watchdog, of_flag

logger = logging.getLogger("llava.train.train")  # the same name where the module runs as a program


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
        with training_process(parsed[2], watchdog) as stop_signal:
            run(*parsed, watchdog, stop_signal)
    except Exception as error:
        end_process(error, watchdog)


def train(argv: list[str] | None = None, attn_implementation: str | None = None) -> None:
    """Parses the command line, trains, and writes the final folder.

    Args:
        argv: the flags; by default those of the process.
        attn_implementation: default of `--attn_implementation`.
    """
    parsed = parse_arguments(sys.argv[1:] if argv is None else argv, attn_implementation)
    watchdog = watchdog_of(parsed[2])
    with training_process(parsed[2], watchdog) as stop_signal:
        run(*parsed, watchdog, stop_signal)


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    watchdog: Watchdog,
    stop_signal: StopSignal,
) -> None:
    """Checks flags and launch, and trains while it holds the output folder."""
    check_flags(model_args, data_args, training_args)
    decide_compilation(training_args)
    if spans_nodes():
        inputs = (model_args.model_name_or_path, model_args.vision_tower, data_args.image_folder)
        inputs += (*(data_args.data_path or "").split(","), model_args.pretrain_mm_mlp_adapter)
        inputs += (*(data_args.eval_data_path or "").split(","), data_args.eval_image_folder)
        check_launch(inputs, training_args.output_dir, training_args.device)
    with held_folder(training_args), named_save_errors(Path(training_args.output_dir)):
        run_in_folder(model_args, data_args, training_args, watchdog, stop_signal)


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
    settings = run_settings(model_args, data_args, training_args, records, tokenizer, eval_records)
    start = choose_start(training_args, settings)
    if start.finished is not None:
        logger.info(
            "%s: this run is finished, after %d steps; nothing is written (--overwrite_output_dir True retrains from "
            "scratch)", output_dir, start.finished,
        )  # fmt: skip
        return
    converted = use_converted_states(start, training_args)

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
        settings=settings,
        converted=converted,
        watchdog=watchdog,
        stop_signal=stop_signal,
    )
    begin_run(training_args, start, settings)
    if is_first and records.left_out:
        write_left_out(output_dir / QUARANTINE)
    if is_first and eval_records is not None and write_eval_left_out and eval_records.left_out:
        write_eval_left_out(output_dir / EVAL_QUARANTINE)
    resumed = start.checkpoint is not None
    write_run_record(model, trainer.train_dataset, model_args, data_args, training_args, settings, resumed)
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


if __name__ == "__main__":
    main()
