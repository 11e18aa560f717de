"""The Hugging Face Trainer with LLaVA's optimizer groups, sampler, telemetry and checkpoint layout."""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import BaseImageProcessor, PreTrainedTokenizerBase, ProgressCallback, Trainer
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from llava.data.collate import DataCollatorForSupervisedDataset
from llava.data.dataset import LazySupervisedDataset
from llava.mm_utils import save_tokenizer
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import has_lora, load_adapters, load_non_lora, lora_state_dict, read_non_lora, save_non_lora
from llava.model.multimodal_projector.adapter import load_adapter
from llava.model.multimodal_projector.norm import ProjectorNorm
from llava.model.rotary import rebuild_rotary
from llava.train.arguments import TrainingArguments
from llava.train.batches import SampleOrder, global_batch_size, sample_order, step_loader, whole_steps
from llava.train.checkpoint import (
    STAGING,
    commit,
    commit_final,
    faults_on_any_rank,
    named_save_errors,
    save_adapter,
    trains_adapter_only,
)
from llava.train.heldout import HeldOut, evaluating
from llava.train.masters import MasterWeights, keeps_masters, load_masters, updated_parameters
from llava.train.nonfinite import NonFiniteGuard, finite_or, poisoned
from llava.train.optim import optimizer_groups
from llava.train.questions import accuracy, show_answers
from llava.train.ranks import barrier
from llava.train.resume import ResumeError, moved_step
from llava.train.run_identity import Settings
from llava.train.run_record import Identity, write_identity
from llava.train.stop_signal import StopSignal
from llava.train.telemetry import JsonlCallback, NormProbe, SourceLosses, TelemetryCallback, Throughput, measures_step
from llava.train.training_progress import TrainingProgress
from llava.train.trial import check_disk, try_save
from llava.utils.failures import Watchdog

logger = logging.getLogger(__name__)


class LLaVATrainer(Trainer):
    """Trains a LLaVA model whose `requires_grad` is already set.

    Args:
        args: the flags. `self.flags` holds them as the user gave them, `self.args` as the library needs them.
        image_processor: saved with every checkpoint.
        identity: settings that a continuation of the run must share (`llava.train.run_identity.run_identity`).
        resumed: the content of `resume.json` in the checkpoint from which the run continues.
        watchdog: is told every phase of a step.
        stop_signal: ends the run early.
        heldout: the held-out samples, whose loss is measured during training.
        kwargs: those of the Hugging Face Trainer.
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
        identity: Settings | None = None,
        resumed: Identity | None = None,
        watchdog: Watchdog | None = None,
        stop_signal: StopSignal | None = None,
        heldout: HeldOut | None = None,
        **kwargs: Any,
    ):
        self.flags, self.heldout = args, heldout
        eval_dataset: Any = None if heldout is None else heldout.dataset
        super().__init__(args=whole_steps(args), eval_dataset=eval_dataset, **kwargs)
        self.identity, self.resumed = identity or {}, resumed
        self.watchdog = watchdog or Watchdog(None, self.args.process_index)
        self.stop_signal = stop_signal or StopSignal()
        self.guard = NonFiniteGuard(self.train_dataset.records, self.args.max_nonfinite_steps)
        self.add_callback(self.stop_signal)
        self.staging: Path | None = None
        self.saved_step = -1
        self.args.logging_nan_inf_filter = False  # it would wait for every loss; see `training_step`
        # Liger's kernels are in the decoder already; the library would look them up by the model type.
        self.args.use_liger_kernel = False  # pyrefly: ignore[bad-assignment]  # the choice, no longer the flag's text
        self.image_processor = image_processor
        if self.args.loss_reduction == "micro_batch_mean":
            self.model_accepts_loss_kwargs = False  # makes the library average over micro-batches
        self.adapter_only = trains_adapter_only(self.model)
        self.probe = NormProbe(self.model)
        self.throughput = Throughput(self.model, self.args.device, self.args.peak_tflops)
        self.source_losses = SourceLosses(self.train_dataset.records, self.model.lm_head, self.args.device)
        self.add_callback(TelemetryCallback(self.probe))
        self.add_callback(JsonlCallback())
        if self.pop_callback(ProgressCallback):  # it prints every step's figures as a dict over several lines
            self.add_callback(TrainingProgress(global_batch_size(args), lambda: self.throughput.paused_seconds))

    def _get_train_sampler(self, train_dataset=None) -> SampleOrder:
        return sample_order(self.train_dataset if train_dataset is None else train_dataset, self.args)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        return step_loader(self._get_train_sampler(), self.train_dataset, self.data_collator, self.flags)

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
        steps = [step for step in (next(epoch_iterator, None),) if step is not None]
        micro_batches = steps[0] if steps else []
        num_items = self._get_num_items_in_batch(micro_batches, device)
        self.throughput.add(micro_batches, time.perf_counter() - start)
        samples = [batch.pop("indices").tolist() for batch in micro_batches]
        self.guard.start_step(samples)
        self.source_losses.start_step(samples, micro_batches)
        return steps, num_items

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
            unsynced = self.accelerator.no_sync(model) if alone else contextlib.nullcontext()
            with unsynced, self.source_losses.of_micro_batch(number - 1):
                losses.append(super().training_step(model, micro_batch, num_items_in_batch))
        # In place of the library's filter, which is off: a loss that is not finite counts as the mean of earlier ones.
        return finite_or(
            sum(losses[1:], losses[0]), self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # The library would wait for every copy; pinned memory is copied while the device computes.
        moved: Any = send_to_device(inputs, self.args.device, non_blocking=True)
        return moved

    # pyrefly: ignore[bad-override]  # what the library takes for a batch is a step here
    def floating_point_ops(self, inputs: list[dict[str, Any]]) -> int:
        return sum(super(LLaVATrainer, self).floating_point_ops(micro_batch) for micro_batch in inputs)

    def _track_num_input_tokens(self, inputs: list[dict[str, Any]]) -> None:
        for micro_batch in inputs:
            super()._track_num_input_tokens(micro_batch)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if isinstance(loss, torch.Tensor) and torch.is_grad_enabled():
            self.guard.add_loss(loss.detach())
            loss = poisoned(loss)
        return loss

    def _clip_grad_norm(self, model):
        return super()._clip_grad_norm(nn.ParameterList(updated_parameters(self.optimizer)))

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(nn.ParameterList(updated_parameters(self.optimizer)), grad_norm)
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
        if self.state.global_step == self.first_step and "eval_loss" not in logs:  # nothing was trained
            return
        if "loss" in logs:
            if self.guard.total:
                logs["nonfinite_steps"] = self.guard.total
            logs |= self.throughput.metrics(self.accelerator)
            logs |= self.source_losses.metrics(self.accelerator)
            if measures_step(self.args, self.state, self.state.global_step):
                logs |= self.probe.metrics(self.accelerator)
            logs = {k: float(f"{v:.6g}") if k != "loss" and isinstance(v, float) else v for k, v in logs.items()}
        super().log(logs, start_time)

    # --- held-out data ---

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Measures and logs the held-out losses; returns nothing if a signal cut it short. Every rank must call."""
        heldout, step = self.heldout, self.state.global_step
        assert heldout is not None  # --eval_strategy is refused without --eval_data_path
        if step == self.first_step > 0:  # --eval_on_start in a run that is continued
            return {}
        start = time.perf_counter()

        def at_batch() -> bool:
            self.watchdog.enter("evaluating", step)
            return self.stop_signal.agreed()

        with self.throughput.paused(), evaluating(self.model_wrapped):
            totals = heldout.totals(self.model_wrapped, self._prepare_inputs, at_batch)
            questions = heldout.questions if totals is not None else None
            answers = questions.ask(self.model, at_batch) if questions else []
            if totals is None or answers is None:
                logger.warning("the evaluation after step %d is left out: a signal came", step)
                self.control.should_evaluate = False  # or the end of the epoch would ask again
                return {}
            totals = self.accelerator.reduce(totals.to(self.args.device), reduction="sum").cpu()
        metrics = heldout.metrics(totals) | (accuracy(answers) if answers else {})
        if answers and self.is_world_process_zero():
            show_answers(answers, self.callback_handler.callbacks, step)
        metrics["eval_seconds"] = round(time.perf_counter() - start, 3)
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics, trial) -> bool:
        # Only a saved step can be loaded again; the library would also remember the steps in between.
        return bool(metrics) and self.control.should_save and super()._determine_best_metric(metrics, trial)

    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best `--metric_for_best_model` so far; None if there is none."""
        step = self.state.best_global_step
        return Path(self.args.output_dir, f"checkpoint-{step}") if step else None

    def _note_best(self, best: Path | None) -> None:
        self.state.best_model_checkpoint = None if best is None else str(best)

    def _finalize_training(self, trial, num_train_samples, start_time):
        # In a run that stops early the library would load the best checkpoint too, and remove the one to resume from.
        self._note_best(None if self.stop_signal.stopped else self.best_checkpoint())
        return super()._finalize_training(trial, num_train_samples, start_time + self.throughput.paused_seconds)

    def _load_best_model(self) -> None:
        folder, metric = Path(self.state.best_model_checkpoint or ""), self.args.metric_for_best_model
        if faults := faults_on_any_rank(folder, self.args.process_index, self.args.world_size):
            raise ResumeError(f"--load_best_model_at_end True: {folder} is the best but is not whole: {faults[0]}")
        logger.info("the final folder gets %s, with the best %s: %.6g", folder, metric, self.state.best_metric)
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._load_weights(folder, self.model)
        barrier()  # all have read it

    # --- checkpoints ---

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.is_deepspeed_enabled:
            rebuild_rotary(self.model)  # its engine may have cast all buffers
        if self.resumed is not None:
            self._restore_groups(self.resumed["step_size"])
        check_disk(self, max_steps)
        if self.args.trial_save:
            try_save(self)
        return prepared

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ):
        resume = resume_from_checkpoint
        position = self._position(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        self.first_step = self.state.global_step
        return position

    def _position(self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial):
        """The number of finished epochs, and of batches of the next one; sets the step that the run starts from."""
        position = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        if self.resumed is None:
            return position
        best = self.best_checkpoint()
        if best and not best.is_dir():
            raise ResumeError(
                f"{resume}: {best} had the best --metric_for_best_model so far and is missing; put it back, or start "
                "anew with --resume_from_checkpoint False"
            )
        self._note_best(best)
        self.state.global_step = moved_step(self.state.global_step, self.resumed, global_batch_size(self.args))
        if self.state.global_step >= max_steps:  # the library would train one more step before it looks
            logger.info("all %d steps are done; only the final folder is written", max_steps)
            return num_train_epochs, 0
        epochs, steps = divmod(self.state.global_step, num_update_steps_per_epoch)
        return epochs, steps

    def _restore_groups(self, step_size: int) -> None:
        """Puts back every parameter group's own settings, and moves the schedule to the position in the data.

        A universal checkpoint gives all groups the settings of the first one, and one shared counter of steps, which
        each group would count up. If the number of samples per step has changed, the schedule moves.
        """
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for parameter, state in self.optimizer.state.items():
            if torch.is_tensor(step := state.get("step")):  # fused kernels need it on the parameter's device
                state["step"] = step.to(parameter.device if fused else step.device, copy=True)
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if global_batch_size(self.args) != step_size:
            schedule.last_epoch = self.state.global_step
            shares = [share(schedule.last_epoch) for share in schedule.lr_lambdas]
            schedule._last_lr = [rate * share for rate, share in zip(schedule.base_lrs, shares, strict=True)]
        rates = schedule.get_last_lr()
        for group, own, rate in zip(self.optimizer.param_groups, self.group_settings, rates, strict=True):
            group.update(own | {"initial_lr": own["lr"], "lr": rate})

    def _get_output_dir(self, trial) -> str:
        return super()._get_output_dir(trial) if self.staging is None else str(self.staging)

    def _save_checkpoint(self, model, trial) -> None:
        """Writes all ranks' part of `checkpoint-N` below `.saving`, and gives it its name when it is complete."""
        step = self.state.global_step
        if step == self.saved_step:  # the end of an epoch may ask again
            return
        self.watchdog.enter("saving", step)
        name = f"checkpoint-{step}"
        target = Path(self.args.output_dir, name)
        self.staging = Path(self.args.output_dir, STAGING)
        with named_save_errors(target):
            super()._save_checkpoint(model, trial)
            self._note_best(self.best_checkpoint())  # the library looked for it below `.saving`
            if self.args.should_save:
                self.state.save_to_json(str(self.staging / name / TRAINER_STATE_NAME))
                step_size, samples = global_batch_size(self.args), len(self.train_dataset)
                write_identity(self.staging / name, self.identity, step_size, samples)
        commit(self.staging / name, target, self.args.process_index, self.args.world_size)
        if self.args.should_save:
            limit = self.args.save_total_limit
            rotate_checkpoints(self.args.output_dir, limit, self.state.best_model_checkpoint, use_mtime=True)
            with contextlib.suppress(OSError):
                self.staging.rmdir()  # empty, or a file system that is slow to see it
        self.staging, self.saved_step = None, step

    def _issue_warnings_after_load(self, load_result) -> None:
        tied = self.model.all_tied_weights_keys or ()  # never saved: they are other weights of the checkpoint
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def save_final(self) -> None:
        """Writes the final folder below `.saving`, and then moves each file into place. Every rank must call."""
        self.watchdog.enter("saving", self.state.global_step)
        staged, target = Path(self.args.output_dir, STAGING, "final"), Path(self.args.output_dir)
        with named_save_errors(target):
            self.save_model(str(staged))
            if self.args.should_save:
                commit_final(staged, target, self.state.global_step)
                staged.parent.rmdir()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a self-contained folder or a LoRA folder; checkpoints of stage 1 hold only adapter and config."""
        output_dir = output_dir or self.args.output_dir
        if has_lora(self.model):
            save_non_lora(self.model, output_dir, is_main_process=self.args.should_save)
            self._save(output_dir, lora_state_dict(self.model))  # the library saves only the adapters
            return
        if self.adapter_only:
            save_adapter(self.model, output_dir, is_main_process=self.args.should_save)
            if _internal_call:
                return
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if state_dict is not None:  # ZeRO-1 and 2 give a tied weight as two tensors, and both would be written
            state_dict = {n: t for n, t in state_dict.items() if n not in (self.model.all_tied_weights_keys or ())}
        super()._save(output_dir, state_dict)
        output_dir = output_dir or self.args.output_dir
        if self.args.should_save:
            save_tokenizer(self.processing_class, output_dir)
            if self.image_processor is not None:
                self.image_processor.save_pretrained(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        if not Path(resume_from_checkpoint, OPTIMIZER_NAME).is_file():  # the library would continue with a fresh one
            raise ResumeError(
                f"{resume_from_checkpoint} holds no optimizer state (--save_only_model True), so the run cannot "
                "continue from it; start anew in another --output_dir or with --overwrite_output_dir True"
            )
        self._load_weights(Path(resume_from_checkpoint), self.model if model is None else model)

    def _load_weights(self, folder: Path, model: LlavaMetaForCausalLM) -> None:
        """Loads the weights of a checkpoint into `model`, without DeepSpeed."""
        if has_lora(model):
            load_non_lora(model, read_non_lora(str(folder)), str(folder))
            load_adapters(model, str(folder))
        elif self.adapter_only:
            decoder = model.get_model()
            load_adapter(decoder.mm_projector, folder, model.config, decoder.image_newline)
        else:
            super()._load_from_checkpoint(str(folder), model)
