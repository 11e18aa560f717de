"""What ZeRO sends between GPUs in an optimizer step, in bytes, as DeepSpeed 0.19.8 sends it.

In a ring of n GPUs each receives (n - 1) / n of the bytes that a collective gathers or scatters, and twice as many of
those that it all-reduces. With W bytes of weights and G bytes of gradients (those of trained weights):

    ZeRO-1   2 G for the step's gradients, and G for the new weights
    ZeRO-2   2 G for every micro-batch, since whole buckets are all-reduced, and G for the new weights
    ZeRO-3   W forward, W backward where gradients pass, and G, for every micro-batch

`zero_hpz_partition_size` keeps a second copy of the weights in each node: between nodes the trained weights are then
gathered once per step, and the frozen ones only once in the run.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.zero3 import full_shape
from llava.train.optim import is_trained


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU receives in an optimizer step."""

    everywhere: float  # in rings through all GPUs
    in_node: float = 0.0  # in rings inside a node: the second copy's


def step_traffic(model: LlavaMetaForCausalLM, zero: dict[str, Any], ranks: int, micro_batches: int) -> Traffic:
    """The traffic of a step for a model whose `requires_grad` is set; an upper bound under ZeRO-3.

    DeepSpeed keeps up to `stage3_max_reuse_distance` weights (10^9) from the forward to the backward pass, which are
    then gathered once. Weights that every GPU keeps (`stage3_param_persistence_threshold`) and scalars are not counted.

    Args:
        model: the model, with its vision tower.
        zero: the section `zero_optimization` of DeepSpeed's configuration.
        ranks: n, the number of GPUs.
        micro_batches: micro-batches of the step on each GPU.
    """
    share = (ranks - 1) / ranks
    trained = _bytes(p for p in model.parameters() if p.requires_grad)
    if zero["stage"] < 3:
        all_reduced = micro_batches if zero["stage"] == 2 else 1
        return Traffic(share * (2 * all_reduced + (zero["stage"] > 0)) * trained)
    forward, backward = _used(model, [model]), _used(model, _passing_gradients(model))
    gathered = micro_batches * (_bytes(forward) + _bytes(backward))
    group = zero.get("zero_hpz_partition_size", 1)
    if group == 1:
        return Traffic(share * (gathered + micro_batches * trained))
    first = _bytes(p for p in forward if p.requires_grad)
    return Traffic(share * (first + micro_batches * trained), (group - 1) / group * (gathered - first))


def _passing_gradients(model: LlavaMetaForCausalLM) -> list[nn.Module]:
    """The parts whose weights the backward pass needs: those whose output needs a gradient."""
    decoder = model.get_model()
    parts: list[Any] = [decoder.vision_tower] * is_trained(decoder.vision_tower)
    parts += [decoder.mm_projector] * (bool(parts) or is_trained(decoder.mm_projector))
    parts += [decoder.embed_tokens] * is_trained(decoder.embed_tokens)
    if parts or is_trained(decoder.layers):
        parts += [decoder.layers, decoder.norm, model.lm_head]
    return parts


def _used(model: LlavaMetaForCausalLM, parts: list[nn.Module]) -> list[nn.Parameter]:
    """The weights of `parts`, each once, without those that the tower never uses."""
    unused = {id(p) for p in model.get_model().vision_tower.unused_parameters()}
    return list({id(p): p for part in parts for p in part.parameters() if id(p) not in unused}.values())


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(full_shape(p).numel() * p.element_size() for p in parameters)
