"""Trains a LLaVA: stage 1 (projector and norm) or stage 2 (instruction tuning), as the flags say.

Runs as `python -m llava.train.train`, or under `deepspeed`, `torchrun` and SLURM through scripts/pretrain.sh and
scripts/finetune.sh. `--help` documents every flag.
"""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase, set_seed

from llava.anyres import Picture, is_anyres, parse_pinpoints
from llava.data.collate import DataCollatorForSupervisedDataset
from llava.data.dataset import LazySupervisedDataset
from llava.data.records import RecordTable
from llava.mm_utils import load_tokenizer
from llava.model.attention import packed_attention
from llava.model.builder import load_language_model, read_config
from llava.model.context import context_length
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import TOWER, has_lora
from llava.model.multimodal_encoder.builder import load_image_processor
from llava.model.rotary import rebuild_rotary
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.batches import largest_micro_batch, log_micro_batches, most_crops
from llava.train.checkpoint import named_full_disk
from llava.train.closing import say_what_comes_next
from llava.train.compilation import compile_layers
from llava.train.first_tokens import fit_norm_to_first_images
from llava.train.flags import parse_flags
from llava.train.heldout import HeldOut, eval_data_arguments, sources_of
from llava.train.launch_check import check_launch, spans_nodes
from llava.train.liger import set_up_liger
from llava.train.llava_trainer import LLaVATrainer
from llava.train.lora import add_lora_by_flags, lora_modules, prepare_quantized, quantized_loading
from llava.train.masters import keeps_masters
from llava.train.memory import set_up_checkpointing
from llava.train.optim import LANGUAGE_MODEL, PARTS, VISION_TOWER, set_trainable, tunable_parts
from llava.train.ranks import joined
from llava.train.resume import use_universal_checkpoint
from llava.train.run_checks import (
    EVAL_IMAGES,
    EVAL_QUARANTINE,
    QUARANTINE,
    check_flags,
    checked_eval_records,
    checked_records,
    image_store,
    report_left_out,
)
from llava.train.run_folder import begin_run, choose_start, held_folder
from llava.train.run_identity import run_identity
from llava.train.run_record import write_run_record
from llava.train.stop_signal import StoppedEarly, StopSignal
from llava.train.zero import fit_zero
from llava.utils.failures import Watchdog, of_flag, refusal
from llava.utils.locks import InUse
from llava.utils.network import interface_fault

logger = logging.getLogger("llava.train.train")  # the same name where the module runs as a program

# Model flags that LLaVA keeps in the config under their own names, besides those of the projector.
CONFIG_FLAGS = (
    "tune_mm_mlp_adapter",
    "freeze_mm_mlp_adapter",
    "mm_use_im_start_end",
    "mm_use_im_patch_token",
)


def main(attn_implementation: str | None = None) -> None:
    """Trains as the process's flags say; ends it with one line and status 2 if the user can mend what is wrong."""
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


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    watchdog: Watchdog,
    stop_signal: StopSignal,
) -> None:
    """Trains from the newest complete checkpoint, or anew, and writes the final folder unless a signal ended it."""
    check_flags(model_args, data_args, training_args)
    if spans_nodes():
        inputs = (model_args.model_name_or_path, model_args.vision_tower, data_args.image_folder)
        inputs += (*(data_args.data_path or "").split(","), model_args.pretrain_mm_mlp_adapter)
        inputs += (*(data_args.eval_data_path or "").split(","), data_args.eval_image_folder)
        check_launch(inputs, training_args.output_dir, training_args.device)
    with held_folder(training_args), named_full_disk(Path(training_args.output_dir)):
        run_in_folder(model_args, data_args, training_args, watchdog, stop_signal)


def run_in_folder(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    watchdog: Watchdog,
    stop_signal: StopSignal,
) -> None:
    """The part of `run` that needs the output folder for itself."""
    records, write_left_out = checked_records(model_args, data_args, training_args)
    eval_records, write_eval_left_out = checked_eval_records(model_args, data_args, training_args, records)
    tokenizer = training_tokenizer(model_args, training_args)
    identity = run_identity(model_args, data_args, training_args, records, tokenizer, eval_records)
    start = choose_start(training_args, identity)
    if start.finished is not None:
        logger.info(
            "%s: this run is finished, after %d steps; nothing is written (--overwrite_output_dir True trains it anew)",
            training_args.output_dir, start.finished,
        )  # fmt: skip
        return
    if (
        training_args.deepspeed
        and start.checkpoint
        and start.resumed
        and start.resumed["settings"]["world_size"] != identity["world_size"]
    ):
        if training_args.load_best_model_at_end:  # DeepSpeed would look for the best one's converted states as well
            raise ValueError(
                "--load_best_model_at_end True: not in a DeepSpeed run that continues on another number of ranks; "
                "leave the flag out and take the best checkpoint's folder"
            )
        is_main = training_args.process_index == 0
        use_universal_checkpoint(Path(start.checkpoint), training_args.hf_deepspeed_config.config, is_main)

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
    begin_run(trainer, start)
    if records.left_out and training_args.process_index == 0:
        write_left_out(Path(training_args.output_dir, QUARANTINE))
    if eval_records is not None and write_eval_left_out and eval_records.left_out and training_args.process_index == 0:
        write_eval_left_out(Path(training_args.output_dir, EVAL_QUARANTINE))
    write_run_record(trainer, model_args, data_args, training_args, resumed=start.checkpoint is not None)
    watchdog.start()
    trainer.train(resume_from_checkpoint=start.checkpoint)
    if stop_signal.stopped:
        return
    trainer.save_state()
    model.config.use_cache = True
    trainer.save_final()
    report_left_out(records, training_args.output_dir)
    report_left_out(eval_records, training_args.output_dir, EVAL_QUARANTINE)
    say_what_comes_next(model_args, data_args, training_args.output_dir, trainer.adapter_only, has_lora(model))


def leave_process_group() -> None:
    """Waits for the rank that saves, then ends the group: over gloo, ranks that exit without that sometimes abort."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


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


def training_tokenizer(model_args: ModelArguments, training_args: TrainingArguments) -> PreTrainedTokenizerBase:
    """The language model's tokenizer.

    Raises:
        ValueError: there is none; the message names the flag.
    """
    path = model_args.model_name_or_path
    try:
        return load_tokenizer(
            path,
            cache_dir=training_args.cache_dir,
            model_max_length=training_args.model_max_length,
            padding_side="right",
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--model_name_or_path {path}: no tokenizer found ({reason}); expected a model folder or hub id"
        ) from error


def arithmetic_dtype(training_args: TrainingArguments) -> torch.dtype:
    """The type in which the model computes, by `--bf16` and `--fp16`."""
    return torch.bfloat16 if training_args.bf16 else torch.float16 if training_args.fp16 else torch.float32


def build_model(
    model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments
) -> LlavaMetaForCausalLM:
    """The model with tower, projector and norm, `requires_grad` set, and every choice recorded in its config."""
    parts = tunable_parts(model_args)
    frozen_dtype = arithmetic_dtype(training_args)
    # DeepSpeed keeps fp32 masters itself. Elsewhere trained weights are fp32 and autocast lowers the arithmetic; only
    # the large parts, language model and tower, are in 16 bits if they have masters.
    trained_dtype = frozen_dtype if training_args.deepspeed else torch.float32
    large_dtype = frozen_dtype if keeps_masters(training_args) else trained_dtype
    attention = model_args.attn_implementation
    if training_args.padding_free:
        attention = packed_attention(
            attention, training_args.device, frozen_dtype, compiled=training_args.compile_layers
        )
    model = load_language_model(
        model_args.model_name_or_path,
        read_config(model_args.model_name_or_path, cache_dir=training_args.cache_dir),
        dtype=large_dtype if LANGUAGE_MODEL in parts and not training_args.lora_enable else frozen_dtype,
        attn_implementation=attention,
        cache_dir=training_args.cache_dir,
        **quantized_loading(training_args, frozen_dtype),
    )
    prepare_quantized(model, training_args, frozen_dtype)
    if model.get_vision_tower() is None and not model_args.vision_tower:
        raise ValueError("--vision_tower is missing: --model_name_or_path is a plain language model")
    decoder = model.get_model()
    adapted_tower = training_args.lora_enable and TOWER in lora_modules(training_args)
    tower_dtype = large_dtype if VISION_TOWER in parts and not adapted_tower else frozen_dtype
    decoder.initialize_vision_modules(model_args, dtype=tower_dtype)
    decoder.vision_tower.to(tower_dtype)  # one that came with the checkpoint had the language model's
    decoder.mm_projector.to(trained_dtype)
    if decoder.image_newline is not None:
        decoder.image_newline.data = decoder.image_newline.data.to(trained_dtype)
    if training_args.deepspeed:
        rebuild_rotary(model)  # `zero.Init`, under which ZeRO-3 loads, makes them in the type of the weights
    add_lora_by_flags(model, training_args, trained_dtype)
    set_trainable(model, parts)
    set_up_liger(model, training_args)
    if training_args.compile_layers:
        compile_layers(model)
    model.padding_free = training_args.padding_free
    model.lm_head.loss_head = training_args.loss_head
    model.config.use_cache = False
    model.config.mm_conv_version = model_args.version
    model.config.mm_tunable_parts = ",".join(part for part in PARTS if part in parts)
    for field in CONFIG_FLAGS:
        setattr(model.config, field, getattr(model_args, field))
    for field in ("mm_projector_lr", "mm_vision_tower_lr"):
        setattr(model.config, field, getattr(training_args, field))
    model.config.image_aspect_ratio = data_args.image_aspect_ratio
    model.config.image_orientation = data_args.image_orientation
    model.config.image_grid_pinpoints = None
    if is_anyres(data_args.image_aspect_ratio):
        model.config.image_grid_pinpoints = [
            list(grid)
            for grid in parse_pinpoints(data_args.image_grid_pinpoints or "", decoder.vision_tower.image_size)
        ]
    model.crop_rules()  # raises now, before the data is read, if settings do not fit together
    model.config.tokenizer_padding_side = "right"
    model.config.tokenizer_model_max_length = training_args.model_max_length
    if training_args.model_max_length > (context := context_length(model.config)):
        logger.warning(
            "--model_max_length %d is longer than the model's context of %d tokens (config.json): samples are trained "
            "beyond it, and inference refuses such prompts",
            training_args.model_max_length,
            context,
        )
    return model


def build_trainer(
    model: LlavaMetaForCausalLM,
    records: RecordTable,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_records: RecordTable | None = None,
    **options: Any,
) -> LLaVATrainer:
    """The trainer on `records`, which measures the loss on `eval_records`; `options` are those of `LLaVATrainer`."""
    tokenizer = tokenizer or training_tokenizer(model_args, training_args)
    identity = run_identity(model_args, data_args, training_args, records, tokenizer, eval_records)
    options.setdefault("identity", identity)
    tower, crop_rules = model.get_model().vision_tower, model.crop_rules()
    num_visual_tokens = crop_rules.visual_tokens(Picture())
    image_processor = load_image_processor(model_args.vision_tower or model_args.model_name_or_path, tower)
    dataset = LazySupervisedDataset(
        records,
        tokenizer,
        version=model_args.version,
        image_processor=image_processor,
        image_folder=image_store(data_args, records),
        image_aspect_ratio=data_args.image_aspect_ratio,
        num_visual_tokens=num_visual_tokens,
        model_max_length=training_args.model_max_length,
        label_masking=data_args.label_masking,
        show_progress=training_args.process_index == 0,
        pixel_dtype=arithmetic_dtype(training_args),
        crop_rules=crop_rules,
    )
    fit_norm_to_first_images(model, dataset, training_args.device)
    log_micro_batches(dataset, training_args)
    fit_zero(model, training_args)
    largest = largest_micro_batch(dataset, training_args)
    set_up_checkpointing(model, training_args, largest, most_crops(dataset))
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    collator = DataCollatorForSupervisedDataset(
        pad_token_id or 0, num_visual_tokens, training_args.model_max_length, training_args.padding_free, crop_rules
    )
    if eval_records is not None:
        sources = sources_of(eval_records, data_args.eval_data_path or "", data_args.data_cache_dir)
        images = image_store(eval_data_arguments(data_args), eval_records, EVAL_IMAGES)
        heldout = dataset.over(eval_records, images)
        options["heldout"] = HeldOut(heldout, sources, collator, training_args, largest, context_length(model.config))
    return LLaVATrainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        data_collator=collator,
        processing_class=tokenizer,
        image_processor=image_processor,
        **options,
    )


if __name__ == "__main__":
    main()
