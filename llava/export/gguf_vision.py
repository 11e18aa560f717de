"""The file of vision tower and projector for llama.cpp's `mtmd` (mmproj)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llava.export.gguf_file import library
from llava.model.multimodal_projector.norm import projector_norm

_ACTIVATIONS = {"gelu_pytorch_tanh": True, "quick_gelu": False}  # whether the field use_gelu stands for it


def check(model: Any) -> None:
    """Raises ValueError where the graph of `mtmd` would not compute what tower and projector do."""
    config, tower = model.config, model.get_vision_tower()
    if tower is None:
        raise ValueError("the model has no vision tower; llama.cpp's own converter takes plain language models")
    norm = projector_norm(model.get_model().mm_projector)
    if norm is not None:
        raise ValueError(
            f"the projector ends in the norm {config.mm_projector_norm}, and llama.cpp's LLaVA graph in a linear layer"
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
    if config.image_aspect_ratio.startswith("anyres"):
        raise ValueError(f"--image_aspect_ratio {config.image_aspect_ratio}: crops are not exported to llama.cpp")


def fields(model: Any, image_processor: Any) -> Callable[[Any], None]:
    """What writes the fields of tower and projector into a `GGUFWriter`."""
    tower, config = model.get_vision_tower(), model.get_vision_tower().config

    def add(writer: Any) -> None:
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
        # Else llama.cpp takes the state before the last layer, and the layers behind the selected one are not written.
        writer.add_array("clip.vision.feature_layer", [len(tower.layers)])

    return add


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Weights of tower and projector by llama.cpp's names, without what runs behind the selected layer."""
    gguf, tower = library(), model.get_vision_tower()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, len(tower.layers))
    unused = {id(parameter) for parameter in tower.unused_parameters()}
    found = {}
    for name, parameter in tower.vision_model.named_parameters():
        if id(parameter) not in unused:
            known = names.get_name(f"vision_tower.vision_model.{name}", try_suffixes=(".weight", ".bias"))
            if known is None:
                raise ValueError(f"the vision tower's {name} has no place in llama.cpp's file")
            found[known] = parameter
    linears = [layer for layer in model.get_model().mm_projector if isinstance(layer, nn.Linear)]
    for place, layer in zip((0, 2), linears, strict=True):
        found |= {f"mm.{place}.weight": layer.weight, f"mm.{place}.bias": layer.bias}
    return found
