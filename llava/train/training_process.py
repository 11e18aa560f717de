"""The process around a training: logging, rendezvous, signals, reports of errors, and how it ends."""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

import torch
import transformers

from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments, parse_flags
from llava.train.ranks import joined, leave_process_group
from llava.train.stop_signal import StoppedEarly, StopSignal
from llava.train.zero import let_ninja_be_found
from llava.train.zero_choice import resolve_auto
from llava.utils.code_folders import refuse_shared_variable
from llava.utils.failures import Watchdog, refusal
from llava.utils.locks import InUse


def parse_arguments(
    argv: list[str], attn_implementation: str | None = None
) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The command line as three dataclasses; on a CPU-only rank of DeepSpeed the gloo backend is set up first.

    Raises:
        ValueError: others can write where DeepSpeed's ops are loaded from.
    """
    if any(arg.startswith("--deepspeed") for arg in argv):
        let_ninja_be_found()
        refuse_shared_variable("TORCH_EXTENSIONS_DIR")
        if not torch.accelerator.is_available():
            from llava.train.cpu_distributed import use_gloo_backend

            use_gloo_backend()
    return parse_flags(resolve_auto(argv), attn_implementation=attn_implementation)


def watchdog_of(training_args: TrainingArguments) -> Watchdog:
    """The watchdog of this process, with the flags' timeout."""
    return Watchdog(training_args.output_dir, training_args.process_index, training_args.hang_timeout)


@contextlib.contextmanager
def training_process(training_args: TrainingArguments, watchdog: Watchdog) -> Iterator[StopSignal]:
    """A context to train in: signals are handled, and an error leaves a report.

    After it every rank leaves the process group, and exits with `StopSignal.exit_code` if a signal ended the run.
    """
    set_up_logging(training_args)
    stop_signal = StopSignal().install()
    try:
        yield stop_signal
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


def set_up_logging(training_args: TrainingArguments) -> None:
    """Lets the first rank's messages and progress bars reach the console; the other ranks only warn."""
    level = logging.INFO if training_args.process_index == 0 else logging.WARNING
    if training_args.process_index != 0:
        transformers.utils.logging.disable_progress_bar()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("llava").setLevel(level)


def end_process(error: Exception, watchdog: Watchdog) -> NoReturn:
    """Ends the process with one line and status 2 if the user can fix the error, else with its traceback and 1."""
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
