"""The file of vision tower and projector for llama.cpp's `mtmd` (mmproj).

Its LLaVA graph has two projectors: `W2 gelu(W0 x + b0) + b2`, and with tensors mm.0, 1, 3 and 4 that of Yi-VL, in which
a LayerNorm stands before the GELU and one at the end. The second is what our LayerNorm arms need, but for the first of
its norms, which is made to do nothing: three elements join the H of `h = W0 x + b0`, their negative sum and +-C. The
mean is then 0 and the variance `(|h|^2 + sum(h)^2 + 2 C^2) / (H + 3)`, with a large C as good as `2 C^2 / (H + 3)` for
any h; so a constant gain undoes the division, and a gain of 0 removes the three elements. The error is the share that
`(|h|^2 + sum(h)^2) / 4` has of C^2, while a C too large would take digits from h where sums are kept in float32.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from transformers.image_utils import PILImageResampling

from llava.export.gguf_file import library
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.norm import AlignedLayerNorm, projector_norm

if TYPE_CHECKING:
    from gguf import GGUFWriter

SPAN = 300.0  # C over the largest sqrt(|h|^2 + sum(h)^2) of some pictures: an error of 3e-6
PADDING = (122, 116, 104)  # the colour that llama.cpp pads LLaVA's pictures with: CLIP's mean
_ACTIVATIONS = {"gelu_pytorch_tanh": True, "quick_gelu": False}  # whether the field use_gelu stands for it


class ImageProcessor(Protocol):
    """What is read of an image processor: its filter, and the mean and deviation that it normalises with."""

    resample: int
    image_mean: Sequence[float]
    image_std: Sequence[float]


def check(model: LlavaMetaForCausalLM, image_processor: ImageProcessor) -> None:
    """Raises ValueError where the graph of `mtmd` would not compute what tower and projector do."""
    config, tower = model.config, model.get_vision_tower()
    if tower is None:
        raise ValueError("the model has no vision tower; llama.cpp's own converter takes plain language models")
    norm = projector_norm(model.get_model().mm_projector)
    if norm is not None and not isinstance(norm, AlignedLayerNorm):
        raise ValueError(
            f"the projector ends in {config.mm_projector_norm}, and llama.cpp's LLaVA graph in a linear layer or a "
            "LayerNorm: clip_graph_llava::build in tools/mtmd/models/llava.cpp would need about ten lines after mm.2, "
            "and clip.cpp three to read the gain (docs/gguf.md)"
        )
    kind = tower.config.model_type
    if kind != "siglip_vision_model":
        raise ValueError(f"the vision tower is a {kind}; llama.cpp's graph computes only SigLIP's as it was trained")
    if tower.config.hidden_act not in _ACTIVATIONS:
        raise ValueError(
            f"the tower's activation is {tower.config.hidden_act}; expected one of {', '.join(_ACTIVATIONS)}"
        )
    if config.mm_projector_type != "mlp2x_gelu":
        raise ValueError(
            f"--mm_projector_type {config.mm_projector_type}: llama.cpp's LLaVA graph has mlp2x_gelu alone"
        )
    if image_processor.resample != PILImageResampling.BICUBIC:
        raise ValueError(
            f"the image processor resizes by filter {image_processor.resample}; llama.cpp by bicubic alone"
        )


def notes(model: LlavaMetaForCausalLM, image_processor: ImageProcessor) -> list[str]:
    """In which ways llama.cpp shows pictures that are not square differently from training."""
    colour = tuple(int(255 * mean) for mean in image_processor.image_mean)
    if getattr(model.config, "image_aspect_ratio", None) != "pad":
        return [
            "llama.cpp pads pictures to squares, and this model was trained on squashed ones: make them square first"
        ]
    if colour != PADDING:
        return [f"llama.cpp pads pictures to squares with the colour {PADDING}, and training did with {colour}"]
    return []


def fields(model: LlavaMetaForCausalLM, image_processor: ImageProcessor) -> Callable[["GGUFWriter"], None]:
    """A function that writes the fields of tower and projector into a `GGUFWriter`."""
    tower = model.get_vision_tower()
    assert tower is not None  # `check` refuses models without one
    config = tower.config

    def add(writer: "GGUFWriter") -> None:
        writer.add_type("mmproj")
        writer.add_clip_has_vision_encoder(True)
        writer.add_clip_projector_type("mlp")
        writer.add_vision_projection_dim(model.config.hidden_size)
        writer.add_vision_image_size(tower.image_size)
        writer.add_vision_patch_size(config.patch_size)
        writer.add_vision_embedding_length(config.hidden_size)
        writer.add_vision_feed_forward_length(config.intermediate_size)
        writer.add_vision_block_count(len(tower.layers))
        writer.add_vision_head_count(config.num_attention_heads)
        writer.add_vision_attention_layernorm_eps(config.layer_norm_eps)
        writer.add_vision_image_mean(image_processor.image_mean)
        writer.add_vision_image_std(image_processor.image_std)
        writer.add_vision_use_gelu(_ACTIVATIONS[config.hidden_act])
        # Else llama.cpp takes the state before the last layer, and the layers after the selected one are not written.
        writer.add_array("clip.vision.feature_layer", [len(tower.layers)])

    return add


def tensors(model: LlavaMetaForCausalLM) -> dict[str, torch.Tensor]:
    """Weights of tower and projector by llama.cpp's names, without what runs after the selected layer."""
    gguf, tower = library(), model.get_vision_tower()
    assert tower is not None  # `check` refuses models without one
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, len(tower.layers))
    unused = {id(parameter) for parameter in tower.unused_parameters()}
    renamed = {}
    for name, parameter in tower.vision_model.named_parameters():
        if id(parameter) not in unused:
            known = names.get_name(f"vision_tower.vision_model.{name}", try_suffixes=(".weight", ".bias"))
            if known is None:
                raise ValueError(f"the vision tower's {name} has no place in llama.cpp's file")
            renamed[known] = parameter
    noise = torch.rand(4, 3, tower.image_size, tower.image_size, generator=torch.Generator().manual_seed(0))
    features = tower(
        2 * torch.cat([noise, noise.round(), torch.eye(2)[:, :1, None, None].expand(2, *noise[0].shape)]) - 1
    )
    return renamed | projector_tensors(model.get_model().mm_projector, features, tower.config.layer_norm_eps)


def projector_tensors(projector: nn.Sequential, features: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    """The tensors with which llama.cpp's graph computes `projector`, a norm at its end included.

    Args:
        features: [N, V, E] of some pictures, which tell how large its activations are.
        eps: of the graph's norms, which is the tower's.
    """
    first, second = (layer for layer in projector if isinstance(layer, nn.Linear))
    norm = projector_norm(projector)
    if isinstance(norm, AlignedLayerNorm):
        hidden = first(features.to(first.weight.dtype)).float()
        size = (hidden.square().sum(-1) + hidden.sum(-1).square()).max().sqrt().item()
        return _yi_tensors(first, second, norm, eps, SPAN * size)
    named = {"mm.0.weight": first.weight, "mm.0.bias": first.bias}
    return named | {"mm.2.weight": second.weight, "mm.2.bias": second.bias}


def _yi_tensors(
    first: nn.Linear, second: nn.Linear, norm: AlignedLayerNorm, eps: float, constant: float
) -> dict[str, torch.Tensor]:
    width = first.out_features
    rows, bias = first.weight.float(), first.bias.float()
    undone = torch.zeros(width + 3)
    undone[:width] = math.sqrt(2 / (width + 3)) * constant
    scale = math.sqrt(eps / norm.eps)  # of the last norm's input: the tower's epsilon then does what the norm's own did
    return {
        "mm.0.weight": torch.cat([rows, -rows.sum(0, keepdim=True), torch.zeros(2, rows.shape[1])]),
        "mm.0.bias": torch.cat([bias, -bias.sum(0, keepdim=True), torch.tensor([constant, -constant])]),
        "mm.1.weight": undone,
        "mm.1.bias": torch.zeros(width + 3),
        "mm.3.weight": scale * nn.functional.pad(second.weight.float(), (0, 3)),
        "mm.3.bias": scale * second.bias.float(),
        "mm.4.weight": norm.weight,
        "mm.4.bias": norm.bias,
    }
