"""fp32 masters of trained parameters that the model keeps in 16 bits; used without DeepSpeed, which has its own.

Autocast over fp32 weights would convert every weight to 16 bits, and its gradient back, in every micro-batch. Here the
model's weights have 16 bits already, as under DeepSpeed: gradients are added up in fp32, the optimizer updates fp32
masters, and each step copies the rounded masters to the model.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from llava.train.arguments import TrainingArguments

KEY = "masters"  # in the optimizer's state dict


def keeps_masters(args: TrainingArguments) -> bool:
    """Whether 16-bit weights with masters replace fp32 weights under autocast.

    They do not in three cases. Several processes without DeepSpeed reduce the model's own gradients, which must then be
    fp32; fp16 needs a loss scaler, which takes no 16-bit gradients; and with LoRA little is trained.
    """
    return args.bf16 and not args.deepspeed and not args.lora_enable and args.world_size == 1


class MasterWeights:
    """Holds the fp32 masters between a model in 16 bits and its optimizer.

    Args:
        parameters: the trained parameters; those in fp32 need no master.
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
        state[KEY] = {i: p.detach() for i, p in enumerate(updated_parameters(optimizer)) if id(p) in ours}


def updated_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that the optimizer updates, in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def load_masters(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Copies the masters from a state dict that is about to be loaded, even if the model itself is in fp32 now."""
    parameters = updated_parameters(optimizer)
    for index, master in state.get(KEY, {}).items():
        parameters[index].copy_(master)
