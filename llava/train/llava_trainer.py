"""The Hugging Face Trainer with LLaVA's optimizer groups, sampler, telemetry and checkpoint layout."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from llava.mm_utils import save_tokenizer
from llava.model.lora import has_lora, load_adapters, load_non_lora, lora_state_dict, read_non_lora, save_non_lora
from llava.model.multimodal_projector.adapter import load_adapter
from llava.model.multimodal_projector.norm import ProjectorNorm
from llava.train.batches import balanced_dataloader, sample_order
from llava.train.checkpoint import save_adapter, trains_adapter_only
from llava.train.optim import optimizer_groups
from llava.train.telemetry import JsonlCallback, NormProbe, TelemetryCallback, Throughput, measures_step


class LLaVATrainer(Trainer):
    """Trains a LLaVA model whose `requires_grad` is already set.

    Args:
        image_processor: saved with every checkpoint.
        kwargs: those of the Hugging Face Trainer.
    """

    def __init__(self, *args: Any, image_processor: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.args.use_liger_kernel = False  # done already, on the decoder; the library would look for the model type
        self.image_processor = image_processor
        if self.args.loss_reduction == "micro_batch_mean":
            self.model_accepts_loss_kwargs = False  # so that the library averages over micro-batches
        self.adapter_only = trains_adapter_only(self.model)
        self.probe = NormProbe(self.model)
        self.throughput = Throughput(self.model, self.args.device, self.args.peak_tflops)
        self.add_callback(TelemetryCallback(self.probe))
        self.add_callback(JsonlCallback())

    def _get_train_sampler(self, train_dataset=None) -> torch.utils.data.Sampler | None:
        return sample_order(self.train_dataset if train_dataset is None else train_dataset, self.args)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        if not self.args.padding_free:
            return super().get_train_dataloader()
        return balanced_dataloader(self._get_train_sampler(), self.train_dataset, self.data_collator, self.args)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        model = self.model if model is None else model
        if self.optimizer is None:
            groups = optimizer_groups(model, set(self.get_decay_parameter_names(model)), self.args)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def get_decay_parameter_names(self, model) -> list[str]:
        norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ProjectorNorm)}
        return [name for name in super().get_decay_parameter_names(model) if name not in norms]

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        start = time.perf_counter()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.throughput.add(batches, time.perf_counter() - start)
        return batches, num_items

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.throughput.metrics(self.accelerator)
            if measures_step(self.args, self.state, self.state.global_step):
                logs |= self.probe.metrics(self.accelerator)
            logs = {k: float(f"{v:.6g}") if k != "loss" and isinstance(v, float) else v for k, v in logs.items()}
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a self-contained folder, or a LoRA folder; intermediate stage-1 ones hold adapter and config only."""
        output_dir = output_dir or self.args.output_dir
        if has_lora(self.model):
            save_non_lora(self.model, output_dir, is_main_process=self.args.should_save)
            self._save(output_dir, lora_state_dict(self.model))  # the library saves the adapters alone
            return
        if self.adapter_only:
            save_adapter(self.model, output_dir, is_main_process=self.args.should_save)
            if _internal_call:
                return
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        output_dir = output_dir or self.args.output_dir
        if self.args.should_save:
            save_tokenizer(self.processing_class, output_dir)
            if self.image_processor is not None:
                self.image_processor.save_pretrained(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        model = self.model if model is None else model
        if has_lora(model):
            load_non_lora(model, read_non_lora(resume_from_checkpoint), resume_from_checkpoint)
            load_adapters(model, resume_from_checkpoint)
        elif self.adapter_only:
            load_adapter(model.get_model().mm_projector, Path(resume_from_checkpoint), model.config)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
