"""Which parameters are trained, with which learning rate and weight decay, and fp32 masters of those in 16 bits."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.lora import add_lora, has_lora
from llava.model.multimodal_projector.norm import freeze_fixed_norm
from llava.model.zero3 import full_shape
from llava.train.arguments import ModelArguments, TrainingArguments

logger = logging.getLogger(__name__)

LANGUAGE_MODEL, ADAPTER, VISION_TOWER = "mm_language_model", "mm_mlp_adapter", "mm_vision_tower"
PARTS = (VISION_TOWER, ADAPTER, LANGUAGE_MODEL)


def tunable_parts(model_args: ModelArguments) -> frozenset[str]:
    """The parts that the flags ask to train, out of `PARTS`.

    If `--mm_tunable_parts` (LLaVA-NeXT) is given, it decides alone. Otherwise LLaVA's flags decide: everything but the
    tower, except what `--freeze_backbone`, `--freeze_mm_mlp_adapter` or `--tune_mm_mlp_adapter` exclude.
    """
    flags = ("tune_mm_mlp_adapter", "freeze_backbone", "freeze_mm_mlp_adapter", "unfreeze_mm_vision_tower")
    if model_args.mm_tunable_parts is not None:
        parts = frozenset(part.strip() for part in model_args.mm_tunable_parts.split(",") if part.strip())
        if unknown := parts - set(PARTS):
            raise ValueError(
                f"--mm_tunable_parts: unknown {', '.join(sorted(unknown))}; expected any of {', '.join(PARTS)}"
            )
        if clash := [f"--{flag}" for flag in flags if getattr(model_args, flag)]:
            raise ValueError(f"--mm_tunable_parts decides alone what is trained; leave out {', '.join(clash)}")
    else:
        parts = {LANGUAGE_MODEL, ADAPTER}
        if model_args.freeze_backbone or model_args.tune_mm_mlp_adapter:
            parts.discard(LANGUAGE_MODEL)
        if model_args.freeze_mm_mlp_adapter:
            if model_args.tune_mm_mlp_adapter:
                raise ValueError("--tune_mm_mlp_adapter and --freeze_mm_mlp_adapter contradict each other; pass one")
            parts.discard(ADAPTER)
        if model_args.unfreeze_mm_vision_tower:
            parts.add(VISION_TOWER)
    if not parts:
        raise ValueError("the flags leave nothing to train; see --mm_tunable_parts")
    return frozenset(parts)


def is_trained(module: nn.Module) -> bool:
    """Whether any parameter inside `module` is trained."""
    return any(p.requires_grad for p in module.parameters())


def part_of(parameter_name: str) -> str:
    """The part that a parameter of the causal LM belongs to, by its name."""
    if ".vision_tower." in parameter_name:
        return VISION_TOWER
    is_adapter = ".mm_projector." in parameter_name or parameter_name.endswith(".image_newline")
    return ADAPTER if is_adapter else LANGUAGE_MODEL


def weight_dtypes(args: TrainingArguments) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The types of frozen weights, of trained ones, and of the trained weights of language model and tower.

    DeepSpeed keeps fp32 masters itself. Elsewhere trained weights are fp32 and autocast lowers the arithmetic; only the
    large parts are in 16 bits if they have masters.
    """
    frozen = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    trained = frozen if args.deepspeed else torch.float32
    return frozen, trained, frozen if keeps_masters(args) else trained


def moment_bytes(args: TrainingArguments) -> int:
    """Bytes that the optimizer keeps per element: two moments, in one byte each or in fp32."""
    return 2 if "8bit" in args.optim else 8


def set_up_parts(model: LlavaMetaForCausalLM, parts: frozenset[str], args: TrainingArguments) -> None:
    """Gives tower, projector and newline their types, adds LoRA's adapters, and sets `requires_grad`."""
    frozen, trained, large = weight_dtypes(args)
    decoder = model.get_model()
    decoder.vision_tower.to(large if VISION_TOWER in parts else frozen)
    decoder.mm_projector.to(trained)
    if decoder.image_newline is not None:
        decoder.image_newline.data = decoder.image_newline.data.to(trained)
    if args.lora_enable:
        add_lora(model, args.lora_r, args.lora_alpha, args.lora_dropout, trained)
    set_trainable(model, parts)


def set_trainable(model: LlavaMetaForCausalLM, parts: frozenset[str]) -> None:
    """Sets `requires_grad` of every parameter, except in a language model with LoRA, which trains its adapters alone.

    A fixed norm and the tower's layers that never get a gradient stay frozen. Raises ValueError if nothing is trained.
    """
    lora = has_lora(model)
    for name, parameter in model.named_parameters():
        if (part := part_of(name)) != LANGUAGE_MODEL or not lora:
            parameter.requires_grad_(part in parts)
    for parameter in model.get_model().vision_tower.unused_parameters():
        parameter.requires_grad_(False)
    freeze_fixed_norm(model.get_model().mm_projector)
    if not is_trained(model):
        raise ValueError(f"training {', '.join(sorted(parts))} leaves no trainable parameter")


def optimizer_groups(model: nn.Module, decay_names: set[str], args: TrainingArguments) -> list[dict[str, Any]]:
    """Trained parameters by part and weight decay, which applies to `decay_names`; logs each group with its size."""
    own = {ADAPTER: args.mm_projector_lr, VISION_TOWER: args.mm_vision_tower_lr}
    members: dict[tuple[str, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members.setdefault((part_of(name), name in decay_names), []).append(parameter)
    groups = []
    for (part, decays), parameters in sorted(members.items()):
        rate = args.learning_rate if own.get(part) is None else own[part]
        decay = args.weight_decay if decays else 0.0
        groups.append({"params": parameters, "lr": rate, "weight_decay": decay, "name": part})
        size = f"{len(parameters)} tensors, {sum(full_shape(p).numel() for p in parameters):,} parameters"
        logger.info("optimizer group %-17s lr %-8g weight decay %-5g %s", part, rate, decay, size)
    return groups


def restore_groups(optimizer: Any, lr_scheduler: Any, settings: list[dict[str, Any]]) -> None:
    """Restores every parameter group's own settings, which a universal checkpoint replaces by the first group's.

    Such a checkpoint also has one shared counter of steps, which each group would count up. `settings` are those of
    `optimizer_groups`, without the parameters.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(count := state.get("step")):  # fused kernels need it on the parameter's device
            state["step"] = count.to(parameter.device if fused else count.device, copy=True)
    schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)
    for group, own, rate in zip(optimizer.param_groups, settings, schedule.get_last_lr(), strict=True):
        group.update(own | {"initial_lr": own["lr"], "lr": rate})


# --- fp32 masters -----------------------------------------------------------------------------------------------------


def keeps_masters(args: TrainingArguments) -> bool:
    """Whether 16-bit weights with masters replace fp32 weights under autocast.

    Autocast over fp32 weights would convert every weight to 16 bits, and its gradient back, in every micro-batch.
    Three kinds of runs have it nevertheless. Several processes without DeepSpeed reduce the model's own gradients,
    which must then be fp32; fp16 needs a loss scaler, which takes no 16-bit gradients; with LoRA little is trained.
    """
    return args.bf16 and not args.deepspeed and not args.lora_enable and args.world_size == 1


class MasterWeights:
    """Holds the fp32 masters between a model in 16 bits and its optimizer, as DeepSpeed does.

    Gradients are added up in fp32, the optimizer updates the masters, and each step copies the rounded masters to the
    model. Parameters in fp32 need no master.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.masters = {p: nn.Parameter(p.detach().float()) for p in parameters if p.dtype != torch.float32}
        self._buffers: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self.masters:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that the optimizer updates in place of these."""
        return [self.masters.get(p, p) for p in parameters]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes every optimizer step copy the rounded masters to the model, and its state dict hold the masters."""
        optimizer.register_step_post_hook(self._copy_to_model)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._refuse_rounded)

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        """Adds a micro-batch's gradient to the master's, so that gradients are never added up in 16 bits."""
        master, gradient = self.masters[parameter], parameter.grad
        if gradient is None:
            return
        if master.grad is not None:
            master.grad += gradient
        elif parameter.device.type == "cpu":
            # Memory kept over the steps: fresh memory costs a page fault for every 4 KiB.
            buffer = self._buffers.setdefault(parameter, torch.empty_like(master))
            master.grad = buffer.copy_(gradient)
        else:
            master.grad = gradient.float()
        parameter.grad = None

    @torch.no_grad()
    def _copy_to_model(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter, master in self.masters.items():
            parameter.copy_(master)
        optimizer.zero_grad(set_to_none=True)  # the library only clears the model's own gradients

    def _save(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        ours = {id(master) for master in self.masters.values()}
        state["masters"] = {i: p.detach() for i, p in enumerate(updated_parameters(optimizer)) if id(p) in ours}

    def _refuse_rounded(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self.masters and "masters" not in state:  # the model has just rounded the checkpoint's fp32 weights
            raise ValueError(
                "the checkpoint is of several processes without DeepSpeed, whose weights are fp32; a single process "
                "would go on from their bf16 values: continue on several, or start the stage again in an empty folder"
            )


def updated_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that the optimizer updates, in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def load_masters(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Copies the masters from a state dict that is about to be loaded, even if the model itself is in fp32 now."""
    parameters = updated_parameters(optimizer)
    for index, master in state.get("masters", {}).items():
        parameters[index].copy_(master)
