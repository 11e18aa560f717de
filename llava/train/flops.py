"""Floating-point operations that a training step requires, for MFU (model FLOP utilisation).

A multiplication with a weight matrix of n elements costs 2n per token forward, 2n more for the gradient of its input
if anything before it is trained, and 2n more for the gradient of the weight if that is trained: 6n trained, 4n frozen
with gradients passing through, 2n frozen. Attention costs 4 H C per layer and pair of tokens that see each other (with
a sliding window only pairs inside it), three times that with gradients. Not counted: padding, recomputation, dummy
images, norms, activation functions.

Shapes: H heads, C channels per head, V visual tokens per image, P tokens inside the tower.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from llava.constants import IGNORE_INDEX
from llava.data.collate import Batch
from llava.model.llava_arch import LlavaMetaForCausalLM, LlavaMetaModel
from llava.model.zero3 import full_shape
from llava.train.optim import is_trained

Count = int | float | torch.Tensor

# The datasheets' dense bf16 TFLOP/s; the first name that the device's name contains counts.
_PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H200 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
)


@dataclass(frozen=True)
class Work:
    """The work in some batches, as numbers or scalar tensors, so that counting need not wait for a device."""

    samples: Count = 0
    tokens: Count = 0  # of the decoder
    pairs: Count = 0  # (query, key) inside samples, key not after query
    images: Count = 0  # squares that the tower sees: a picture's crops, where it has several
    targets: Count = 0  # positions whose next token is supervised
    window_pairs: Count = 0  # those of the pairs that are in a sliding window; 0 without one

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple:
        return tuple(vars(self).values())


def batch_work(batch: Batch, sliding_window: int | None = None) -> Work:
    """The work of one collated micro-batch, without waiting for a device.

    Args:
        batch: a batch with `labels` [B, S] and `layout`.
        sliding_window: see `FlopCosts`.
    """
    lengths = torch.tensor(batch["layout"].lengths)
    return Work(
        samples=len(lengths),
        tokens=lengths.sum(),
        pairs=_pairs(lengths, None).sum(),
        images=sum(picture.crops for picture in batch["layout"].pictures),
        targets=(batch["labels"][:, 1:] != IGNORE_INDEX).sum(),
        window_pairs=0 if sliding_window is None else _pairs(lengths, sliding_window).sum(),
    )


def _pairs(lengths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Pairs of each sample: every query sees its own key and those before it, at most `window` in all."""
    growing = lengths if window is None else lengths.clamp(max=window)
    return growing * (growing + 1) // 2 + (lengths - growing) * growing


@dataclass(frozen=True)
class FlopCosts:
    """Operations per unit of `Work`, forward and backward."""

    per_token: int
    per_pair: int
    per_image: int
    per_target: int
    per_window_pair: int = 0
    sliding_window: int | None = None  # keys that a query sees in layers with a window, if there are such layers


def required_flops(costs: FlopCosts, work: Work) -> float:
    """The operations that `work` takes."""
    return float(
        costs.per_token * work.tokens
        + costs.per_pair * work.pairs
        + costs.per_image * work.images
        + costs.per_target * work.targets
        + costs.per_window_pair * work.window_pairs
    )


def flop_costs(model: LlavaMetaForCausalLM) -> FlopCosts:
    """The costs of a LLaVA whose `requires_grad` is set; LoRA's matrices count like any others."""
    decoder, tower = model.get_model(), model.get_model().vision_tower
    config = decoder.config
    tower_trained, projector_trained = is_trained(tower), is_trained(decoder.mm_projector)
    into_decoder = tower_trained or projector_trained or is_trained(decoder.embed_tokens)
    through_decoder = into_decoder or is_trained(decoder.layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pair = 4 * config.num_attention_heads * head_dim * (3 if through_decoder else 1)
    windowed = _windowed_layers(config)

    patches, inside = tower.num_patches_per_side**2, tower.num_inner_tokens
    tower_flops = patches * _matmul_flops(tower.patch_embedding(), passes_gradient=False)
    tower_flops += inside * linear_flops(tower.layers, passes_gradient=tower_trained)
    tower_flops += inside**2 * 4 * tower.hidden_size * len(tower.layers) * (3 if tower_trained else 1)
    return FlopCosts(
        per_token=linear_flops(decoder.layers, passes_gradient=through_decoder),
        per_pair=pair * (len(decoder.layers) - windowed),
        per_image=tower_flops + model.crop_rules().tokens_per_crop * _projector_flops(decoder, tower_trained),
        per_target=_matmul_flops(model.lm_head, passes_gradient=through_decoder),
        per_window_pair=pair * windowed,
        sliding_window=config.sliding_window if windowed else None,
    )


def _windowed_layers(config: PretrainedConfig) -> int:
    """Number of decoder layers whose attention has a sliding window: those that the config names, or else all."""
    if getattr(config, "sliding_window", None) is None:
        return 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return kinds.count("sliding_attention")


def linear_flops(module: nn.Module, passes_gradient: bool) -> int:
    """Operations per token of every linear layer inside `module`.

    Args:
        passes_gradient: whether gradients of the layers' inputs are needed.
    """
    return sum(_matmul_flops(m, passes_gradient) for m in module.modules() if isinstance(m, nn.Linear))


def _matmul_flops(module: nn.Module, passes_gradient: bool) -> int:
    if isinstance(module, nn.Linear):  # its weight may be quantised or partitioned, and then has another shape
        elements = module.in_features * module.out_features
    else:
        elements = full_shape(module.get_parameter("weight")).numel()
    return 2 * elements * (1 + passes_gradient + module.get_parameter("weight").requires_grad)


def _projector_flops(decoder: LlavaMetaModel, tower_trained: bool) -> int:
    """As `linear_flops`, but the first layer's input needs a gradient only for a trained tower."""
    flops, passes_gradient = 0, tower_trained
    for module in decoder.mm_projector.modules():
        if isinstance(module, nn.Linear):
            flops += _matmul_flops(module, passes_gradient)
        passes_gradient = passes_gradient or any(p.requires_grad for p in module.parameters(recurse=False))
    return flops


def peak_tflops(device: torch.device) -> float | None:
    """The datasheet's dense bf16 TFLOP/s of a GPU; None for other devices and unknown ones."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS if part in name), None)
