"""The Hugging Face Trainer with LLaVA's optimizer groups, steps of several micro-batches, and checkpoint layout.

Everything that depends on the inside of the library's Trainer is in this file. It was read from transformers 5.17 and
5.23.
"""

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device
from torch import nn
from transformers import BaseImageProcessor, PreTrainedTokenizerBase, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, TRAINING_ARGS_NAME

from llava.data.dataset import DataCollatorForSupervisedDataset, LazySupervisedDataset
from llava.data.records import RecordTable
from llava.layout import Layout
from llava.mm_utils import save_tokenizer
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import has_lora, lora_state_dict, save_non_lora
from llava.model.multimodal_projector.norm import ProjectorNorm
from llava.model.rotary import rebuild_rotary
from llava.train.arguments import TrainingArguments, steps_to_profile
from llava.train.batches import sample_order, step_loader
from llava.train.checkpoint import (
    CheckpointMarker,
    check_disk,
    clear_place,
    finish_run,
    load_weights,
    save_adapter,
    trains_adapter_only,
)
from llava.train.heldout import HeldOut
from llava.train.optim import (
    MasterWeights,
    keeps_masters,
    load_masters,
    optimizer_groups,
    restore_groups,
    updated_parameters,
)
from llava.train.run_record import Settings
from llava.train.stop import StopSignal
from llava.train.telemetry import JsonlCallback, NormProbe, StepProfiler, Throughput, TrainingProgress, read
from llava.utils.failures import Watchdog

logger = logging.getLogger(__name__)
MAX_NONFINITE_STEPS = 10
"""Steps in a row with an infinite loss or gradient, or none that is a number, that end a run."""


class Step(list[Any]):
    """The micro-batches of a rank's optimizer step; a name gives that tensor of them all, which the library counts."""

    def __contains__(self, name: object) -> bool:
        return any(name in batch for batch in self)

    def __getitem__(self, key: Any) -> Any:
        return torch.cat([b[key].flatten() for b in self]) if isinstance(key, str) else super().__getitem__(key)


class AtTrainBegin(TrainerCallback):
    """Calls a function once model, optimizer and checkpoint are ready."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def on_train_begin(self, args, state, control, **kwargs):
        self.function()


def library_arguments(args: TrainingArguments) -> TrainingArguments:
    """A copy of `args` for the library, to which a rank's step is one batch; DeepSpeed's config is set to the same."""
    library = copy.copy(args)
    step_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    vars(library).update(
        per_device_train_batch_size=step_size,
        gradient_accumulation_steps=1,
        max_grad_norm=args.max_grad_norm if args.max_grad_norm > 0 else math.inf,  # `_clip_grad_norm` is always called
        logging_nan_inf_filter=False,  # it would wait for every loss; see `training_step`
        use_liger_kernel=False,  # the kernels are in the decoder already; the library goes by the model type
        save_total_limit=None,  # `CheckpointMarker` removes old checkpoints, when the new one is complete
    )
    if args.deepspeed:
        config = args.hf_deepspeed_config.config
        assert args.deepspeed_plugin is not None  # made with the configuration
        config["gradient_accumulation_steps"] = args.deepspeed_plugin.gradient_accumulation_steps = 1
        config["train_micro_batch_size_per_gpu"] = step_size
    return library


class NonFiniteError(RuntimeError):
    """Too many steps in a row were skipped."""


class NonFiniteGuard:
    """Counts the steps that are skipped because their loss or gradient is not finite, and names their records.

    A loss that is not finite makes its own gradient NaN (`poisoned`), so that one number shows both: the global
    gradient norm, which all ranks share. Weights, learning rate and optimizer state stay; only the data moves on.
    """

    def __init__(self, records: RecordTable):
        self.records = records
        self.in_a_row = self.total = self.without_targets = 0
        self.start_step([])

    def start_step(self, micro_batches: list[list[int]]) -> None:
        """Notes the samples that this rank computes in the coming step, by micro-batch."""
        self.micro_batches = micro_batches
        self.losses: list[torch.Tensor] = []  # on their device

    def is_applicable(self, grad_norm: float, step: int) -> bool:
        """Whether step `step` (from 1) may be applied; if not, logs its records. Every rank must call."""
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            if grad_norm == 0:
                self.without_targets += 1
                logger.warning(
                    "no target is left in step %d, by its template or --model_max_length; %s", step, self._suspects()
                )
            return True
        self.in_a_row += 1
        self.total += 1
        message = f"skipped step {step}: gradient norm {grad_norm}; {self._suspects()}"
        logger.warning("%s", message)
        if self.in_a_row >= MAX_NONFINITE_STEPS:
            raise NonFiniteError(
                f"{message}. That is {self.in_a_row} in a row; the weights in the last checkpoint are finite. Look at "
                "these records, or lower the learning rate"
            )
        return False

    def _suspects(self) -> str:
        """The records of the micro-batches whose loss is not finite, on any rank; of all if every loss is finite."""
        names = [", ".join(self.records.named(max(i, ~i)) for i in samples) for samples in self.micro_batches]
        own = list(zip(map(float, self.losses), names, strict=False))
        batches = [(*batch, rank) for rank, some in enumerate(gather_object([own])) for batch in some]
        if bad := [batch for batch in batches if not math.isfinite(batch[0])]:
            return "; ".join(f"loss {loss} on rank {rank}: {names}" for loss, names, rank in bad)
        return f"every loss is finite; records of the step: {'; '.join(names for _, names, _ in batches)}"


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, with the gradient NaN if the loss is not finite: an infinite loss may have a finite gradient."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class LLaVATrainer(Trainer):
    """Trains a LLaVA model whose `requires_grad` is already set.

    `self.flags` holds the flags as the user gave them, `self.args` as the library needs them. `settings` are those that
    a continuation of the run must share (`llava.train.run_record.run_settings`).
    """

    args: TrainingArguments
    model: LlavaMetaForCausalLM
    train_dataset: LazySupervisedDataset
    data_collator: DataCollatorForSupervisedDataset
    processing_class: PreTrainedTokenizerBase
    optimizer: Any  # as Accelerate or DeepSpeed wraps it, with the flags that say whether a step was applied
    lr_scheduler: Any  # the same

    def __init__(
        self,
        *,
        args: TrainingArguments,
        image_processor: BaseImageProcessor | None = None,
        settings: Settings | None = None,
        watchdog: Watchdog | None = None,
        stop_signal: StopSignal | None = None,
        heldout: HeldOut | None = None,
        **kwargs: Any,
    ):
        self.flags, self.heldout = args, heldout
        eval_dataset: Any = None if heldout is None else heldout.dataset
        super().__init__(args=library_arguments(args), eval_dataset=eval_dataset, **kwargs)
        self.watchdog = watchdog or Watchdog(None, self.args.process_index)
        self.stop_signal = stop_signal or StopSignal()
        self.guard = NonFiniteGuard(self.train_dataset.records)
        # First, so that trackers do not begin a run that is refused.
        profilers = [StepProfiler(steps_to_profile(args.profile_steps))] if args.profile_steps else []
        self.callback_handler.callbacks[:0] = [AtTrainBegin(self.begin), *profilers]
        self.add_callback(self.stop_signal)
        self.add_callback(CheckpointMarker(args, settings or {}))
        self.image_processor = image_processor
        self.layout: Layout | None = None  # of the micro-batch that is computed
        if self.args.loss_reduction == "micro_batch_mean":
            self.model_accepts_loss_kwargs = False  # makes the library average over micro-batches
        self.adapter_only = trains_adapter_only(self.model)
        self.tied = set(self.model.all_tied_weights_keys or ())  # not saved: they are other weights of the checkpoint
        self.probe = NormProbe(self.model)
        self.throughput = Throughput(self.model, self.args.device)
        self.last_loss = torch.zeros((), device=self.args.device)
        self.add_callback(JsonlCallback())
        if self.pop_callback(ProgressCallback):  # it prints every step's figures as a dict over several lines
            self.add_callback(TrainingProgress())

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        order = sample_order(self.train_dataset, self.flags)
        return step_loader(order, self.train_dataset, self.data_collator, self.flags)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        model = self.model if model is None else model
        if self.optimizer is None:
            groups = optimizer_groups(model, set(self.get_decay_parameter_names(model)), self.args)
            masters = None
            if keeps_masters(self.args):
                masters = MasterWeights(p for group in groups for p in group["params"])
                groups = [group | {"params": masters.of(group["params"])} for group in groups]
            self.group_settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(groups, **options)
            self.optimizer.register_load_state_dict_pre_hook(load_masters)
            if masters:
                masters.attach(self.optimizer)
        return self.optimizer

    def get_decay_parameter_names(self, model) -> list[str]:
        norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ProjectorNorm)}
        return [name for name in super().get_decay_parameter_names(model) if name not in norms]

    # --- one step ---

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The next step in a list of one (empty at an epoch's end), and the number of its targets over all ranks."""
        self.watchdog.enter("reading data", self.state.global_step)
        start = time.perf_counter()
        steps = [Step(step) for step in (next(epoch_iterator, None),) if step is not None]
        micro_batches = steps[0] if steps else []
        num_items: Any = self._get_num_items_in_batch(micro_batches, device)
        if num_items is not None:
            num_items = num_items.clamp(min=1)  # without any target the loss is 0, and so is its gradient
        self.throughput.add(micro_batches, time.perf_counter() - start)
        self.guard.start_step([batch.pop("indices").tolist() for batch in micro_batches])
        every = self.state.logging_steps if self.args.telemetry_steps is None else self.args.telemetry_steps
        measured = bool(every) and (self.state.global_step + 1) % every == 0
        self.probe.start_step(measured, self.loss_scale() if measured and self.args.fp16 else 1.0)
        return steps, num_items

    def loss_scale(self) -> float:
        """What fp16 multiplies the loss by before the coming backward pass; on a CPU nothing does."""
        engine: Any = self.model_wrapped
        scaler = self.accelerator.scaler
        if self.is_deepspeed_enabled:
            return engine.optimizer.cur_scale
        return scaler.get_scale() if scaler else 1.0

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """Runs the micro-batches `inputs` of one step forward and backward; returns the step's loss.

        Gradients add up, and ranks exchange them only with the last micro-batch, which DeepSpeed is told as well.
        """
        self.current_gradient_accumulation_steps = len(inputs)  # the library divides means of micro-batches by it
        losses = []
        for number, micro_batch in enumerate(inputs, 1):
            self.watchdog.enter("computing", self.state.global_step)
            is_last = number == len(inputs)
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            alone = not is_last and not self.is_deepspeed_enabled
            with self.accelerator.no_sync(model) if alone else contextlib.nullcontext():
                batch = self.on_device(micro_batch)
                self.layout = batch.pop("layout")  # the library cannot copy a named tuple
                losses.append(super().training_step(model, batch, num_items_in_batch))
        # In place of the library's filter, which is off: a loss that is not finite counts as the last finite one.
        # The host does not wait to see which it is.
        loss = sum(losses[1:], losses[0])
        self.last_loss = torch.where(loss.isfinite(), loss, self.last_loss)
        return self.last_loss

    def on_device(self, batch: Any) -> Any:
        """A collated batch on the device; pinned memory is copied while the device computes."""
        return send_to_device(batch, self.args.device, non_blocking=True)

    def compute_loss(self, model, inputs, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, {"layout": self.layout, **inputs}, *args, **kwargs)
        self.guard.losses.append(loss.detach())
        return poisoned(loss)

    def _clip_grad_norm(self, model):
        """Clips the gradients that the optimizer sees, and drops them if they are not finite; returns their norm."""
        grad_norm: Any = super()._clip_grad_norm(nn.ParameterList(updated_parameters(self.optimizer)))
        if not self.args.fp16:
            grad_norm = float(grad_norm)  # the only value that the host waits for between log lines
        if self.args.fp16 or self.guard.is_applicable(grad_norm, self.state.global_step + 1):
            self.optimizer._is_overflow = False
        elif not self.is_deepspeed_enabled:
            self.optimizer.zero_grad(set_to_none=True)  # an optimizer passes over parameters without a gradient
            self.optimizer._is_overflow = True  # so that the learning rate does not move either
        elif not self.optimizer.step_was_skipped:
            raise RuntimeError(
                "DeepSpeed applied a step whose gradient is not finite; it needs version 0.19.8 or later"
            )
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.state.global_step == self.first_step and "eval_seconds" not in logs:  # nothing was trained
            return
        if "loss" in logs:
            if self.args.fp16 and self.loss_scale() < 1:  # halved by each of many skipped steps; DeepSpeed itself ends
                raise NonFiniteError(
                    "step after step the gradients overflow in fp16; train in bf16, or lower the rates"
                )
            if self.guard.total:
                logs["nonfinite_steps"] = self.guard.total
            if self.guard.without_targets:
                logs["steps_without_targets"] = self.guard.without_targets
            logs |= read([self.throughput, *[self.probe] * self.probe.active], self.accelerator)
            logs = {k: float(f"{v:.6g}") if k != "loss" and isinstance(v, float) else v for k, v in logs.items()}
        super().log(logs, start_time)

    # --- held-out data ---

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Measures and logs held-out losses. Every rank must call."""
        step, heldout = self.state.global_step, self.heldout
        if heldout is None or step == self.first_step > 0:  # --eval_on_start in a run that is continued
            return {}
        if self.args.device.type != "cpu":
            torch.accelerator.synchronize(self.args.device)  # work that is still running belongs to training
        start = time.perf_counter()
        self.probe.active = False  # only training is measured
        totals = heldout.totals(self.model_wrapped, self.on_device, lambda: self.watchdog.enter("evaluating", step))
        self.throughput.start += time.perf_counter() - start  # no rate counts it
        metrics = heldout.metrics(self.accelerator.reduce(totals, reduction="sum").cpu())
        metrics["eval_seconds"] = round(time.perf_counter() - start, 3)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # --- checkpoints ---

    def begin(self) -> None:
        """What has to wait for the engine and the loaded checkpoint: repairs, and the last checks before any step."""
        if self.is_deepspeed_enabled:
            rebuild_rotary(self.model)  # its engine may have cast all buffers
            if self.args.hf_deepspeed_config.config.get("checkpoint", {}).get("load_universal"):
                restore_groups(self.optimizer, self.lr_scheduler, self.group_settings)
        check_disk(self.model, self.flags, self.state.max_steps)

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        """The number of finished epochs, and of steps of the next one; sets the step that the run starts from."""
        resume = resume_from_checkpoint
        position = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        self.state.compute_steps(self.args, max_steps)  # of these flags, where the checkpoint has those before
        self.first_step = self.state.global_step
        if self.first_step >= max_steps:  # the library would train one more step before it looks
            logger.info("all %d steps are done; only the final folder is written", max_steps)
            return num_train_epochs, 0
        return position

    def save_final(self) -> None:
        """Writes the final folder, and marks it as complete. Every rank must call."""
        self.watchdog.enter("saving", self.state.global_step)
        self.save_model()
        if self.args.should_save:
            finish_run(Path(self.args.output_dir), self.state.global_step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a self-contained folder or a LoRA folder; checkpoints of stage 1 hold only adapter and config."""
        output_dir, tensors = output_dir or self.args.output_dir, None
        if _internal_call:
            self.watchdog.enter("saving", self.state.global_step)
            clear_place(Path(output_dir), self.args.should_save)
        if has_lora(self.model):
            save_non_lora(self.model, output_dir, is_main_process=self.args.should_save)
            tensors = lora_state_dict(self.model)
        else:
            if self.adapter_only:
                save_adapter(self.model, output_dir, is_main_process=self.args.should_save)
                if _internal_call:
                    return
            if self.is_deepspeed_enabled:  # ZeRO-1 and 2 give a tied weight as two tensors
                whole = self.accelerator.get_state_dict(self.model_wrapped) or {}  # empty on other ranks under ZeRO-3
                tensors = {name: tensor for name, tensor in whole.items() if name not in self.tied}
        if not self.args.should_save:  # the library's own check came after 5.17
            return
        self._save(output_dir, tensors)
        save_tokenizer(self.processing_class, output_dir)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(output_dir)
        torch.save(self.flags, Path(output_dir, TRAINING_ARGS_NAME))  # the library wrote its own copy of them

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        if not Path(resume_from_checkpoint, OPTIMIZER_NAME).is_file():  # the library would continue with a fresh one
            raise ValueError(
                f"{resume_from_checkpoint} holds no optimizer state (--save_only_model True), so the run cannot "
                "resume from it; remove the folder to start from scratch, or take another --output_dir"
            )
        load_weights(Path(resume_from_checkpoint), self.model)
