"""Fits ZeRO to the model: the modules that ZeRO-3 gathers as one, and the sizes of DeepSpeed's buckets.

Both follow from the model, whatever its family, so that no configuration file has to name classes or numbers.
"""

import functools
import logging
import os
import sysconfig
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.zero3 import full_shape
from llava.train.arguments import TrainingArguments
from llava.train.optim import is_trained

logger = logging.getLogger(__name__)

# ZeRO++'s kernels take every number for fp16; `fit_zero` marks the modules that are gathered as one.
_REFUSED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_REFUSED += ("stage3_module_granularity_threshold", "leaf_module")


def check_zero(args: TrainingArguments) -> None:
    """The part of `check_flags` about the file that `--deepspeed` names."""
    if not args.deepspeed:
        return
    config, fault = args.hf_deepspeed_config.config, ""
    zero = config.get("zero_optimization", {})
    if own := [name for name in ("optimizer", "scheduler") if name in config]:
        fault = f"{', '.join(own)}: flags decide this (--optim, a rate for each part, ...); take it out of the file"
    elif zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        fault = "stage3_gather_16bit_weights_on_model_save must be true, or the final folder would hold no weights"
    elif options := [name for name in _REFUSED if zero.get(name)]:
        fault = f"{', '.join(options)}: this trainer does not take it (docs/clusters.md); take it out of the file"
    if fault:
        raise ValueError(f"--deepspeed {args.deepspeed}: {fault}")


def let_ninja_be_found() -> None:
    """Appends the environment's programs to PATH: DeepSpeed builds its ops by `ninja`, which pip installs there."""
    os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), sysconfig.get_path("scripts"))))


def fit_zero(model: LlavaMetaForCausalLM, args: TrainingArguments) -> None:
    """Marks the modules that ZeRO-3 gathers as one, and fills in bucket sizes that the configuration leaves at `auto`.

    A bucket holds the largest layer: the library's own `auto`, D x D elements, is less than one matrix of an MLP. Call
    this when `requires_grad` is set and before the Trainer is made, which passes the configuration to DeepSpeed.
    """
    if not args.deepspeed:
        return
    import deepspeed
    from deepspeed.utils import set_z3_leaf_module

    deepspeed.utils.nvtx.enable_nvtx = False  # marks for a profiler, around thousands of calls per micro-batch
    zero = args.hf_deepspeed_config.config.get("zero_optimization", {})
    fill_bucket_sizes(model, zero)
    if args.world_size == 1:  # nothing to overlap with, and ZeRO-2 would wait for the device after every backward pass
        zero["overlap_comm"] = False
    if zero.get("stage") == 3:
        keep_no_input_of_frozen_weights()
        units = list(gathered_units(model))
        for unit in units:
            set_z3_leaf_module(unit, True)
        logger.info("ZeRO-3 gathers the weights of each of %d layers at once", len(units))
        newline = model.get_model().image_newline
        if newline is not None:  # the model uses it outside the module that holds it
            deepspeed.zero.register_external_parameter(model, newline)


def fill_bucket_sizes(model: LlavaMetaForCausalLM, zero: dict[str, Any]) -> None:
    """Fills in the bucket sizes that `zero`, the section `zero_optimization`, leaves at `auto`."""
    layer = max(sum(full_shape(p).numel() for p in unit.parameters()) for units, _ in _stacks(model) for unit in units)
    trained = sum(full_shape(p).numel() for p in model.parameters() if p.requires_grad)
    sizes = {"reduce_bucket_size": min(layer, trained)}
    if zero.get("stage") == 3:
        sizes["stage3_prefetch_bucket_size"] = layer
    for name, size in sizes.items():
        if zero.get(name) == "auto":
            zero[name] = size


@functools.cache
def keep_no_input_of_frozen_weights() -> None:
    """Lets ZeRO-3's linear layers keep their input for the backward pass only where the weight's gradient needs it.

    `zero.Init` puts a function of DeepSpeed in the place of `F.linear` (`memory_efficient_linear`), which does not keep
    gathered weights, but every input: in stage 1 of the 7B recipe 16.7 GiB for nothing. No number changes.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3 as Linear

    keep_all = Linear.setup_context

    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        keep_all(ctx, inputs if ctx.needs_input_grad[1] else (None, *inputs[1:]), output)

    Linear.setup_context = staticmethod(setup_context)


def gathered_units(model: LlavaMetaForCausalLM) -> Iterator[nn.Module]:
    """The decoder's and the tower's layers that ZeRO-3 may gather as one.

    DeepSpeed reduces a unit's gradients when the gradient of its input is known. A trained layer whose input may need
    no gradient (the first one above frozen embeddings, as under LoRA) would be reduced before its weights have
    gradients, so it is left out.
    """
    for layers, before in _stacks(model):
        for number, layer in enumerate(layers):
            if number > 0 or not is_trained(layer) or is_trained(before):
                yield layer


def _stacks(model: LlavaMetaForCausalLM) -> Iterator[tuple[nn.ModuleList, nn.Module]]:
    """The layers of decoder and tower, each with the module that makes the first layer's input."""
    decoder, tower = model.get_model(), model.get_model().vision_tower
    yield decoder.layers, decoder.embed_tokens
    yield tower.layers, tower.patch_embedding()
