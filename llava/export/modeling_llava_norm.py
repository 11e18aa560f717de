# SPDX-License-Identifier: Apache-2.0
"""LLaVA whose projector may end in a norm aligned with the text embeddings, on the LLaVA classes of transformers.

What differs from `LlavaForConditionalGeneration`: the projector has any number of linear layers and a norm as its last
element; SigLIP 2 NaFlex is given squares; logits are divided by the language model's `logits_scaling`, if it has one.
Everything else is that class's.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, GenerationMixin, LlavaConfig, LlavaForConditionalGeneration, LlavaModel

from llava.model.multimodal_projector.norm import EPS, MIN_GAIN, NORM_TYPES, ProjectorNorm


class LlavaNormConfig(LlavaConfig):
    """LLaVA's config and that of the projector's end.

    Attributes:
        mm_projector_norm: a key of `NORM_TYPES`; its settings and where its gain started follow.
        projector_depth: linear layers of the projector, with a GELU between two.
        projector_hidden_act: says that a class without the norm cannot load this model; nothing is read from it.
    """

    model_type = "llava_norm"

    mm_projector_norm: str = "none"
    mm_projector_norm_eps: float = EPS
    mm_projector_norm_min_gain: float = MIN_GAIN
    mm_projector_norm_init_gain: float | None = None
    mm_projector_norm_learnable: bool = True
    projector_depth: int = 2


def projector_norm_of(config: LlavaNormConfig) -> ProjectorNorm | None:
    """The norm that ends the projector, its gain where training began; None where there is none."""
    norm_type = NORM_TYPES[config.mm_projector_norm]
    return norm_type and norm_type(
        config.text_config.hidden_size,
        eps=config.mm_projector_norm_eps,
        init_gain=config.mm_projector_norm_init_gain or 1.0,
        min_gain=config.mm_projector_norm_min_gain,
        learnable=config.mm_projector_norm_learnable,
    )


class LlavaNormProjector(nn.Module):
    """From vision features [N, P, E] to visual tokens [N, V, D], which the norm ends."""

    def __init__(self, config: LlavaNormConfig):
        super().__init__()
        if not isinstance(config.vision_feature_layer, int):
            raise ValueError(f"vision_feature_layer={config.vision_feature_layer}: expected one layer, not several")
        width = config.text_config.hidden_size
        widths = [config.vision_config.hidden_size] + [width] * config.projector_depth
        self.depth = config.projector_depth
        for index, (inner, outer) in enumerate(pairwise(widths), start=1):
            self.add_module(f"linear_{index}", nn.Linear(inner, outer))
        self.norm = projector_norm_of(config)

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        """Visual tokens [N, V, D]."""
        x = image_features
        for index in range(1, self.depth + 1):
            x = self.get_submodule(f"linear_{index}")(x if index == 1 else F.gelu(x))
        return x if self.norm is None else self.norm(x)


class _InitialGain:
    """Mixin: a norm that no checkpoint brings starts with its own gain, where the library would set 1."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ProjectorNorm):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class LlavaNormModel(_InitialGain, LlavaModel):
    """Vision tower, projector with norm, and decoder."""

    config: LlavaNormConfig
    config_class = LlavaNormConfig

    def __init__(self, config: LlavaNormConfig):
        super(LlavaModel, self).__init__(config)  # not LlavaModel's own, whose projector is another
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = LlavaNormProjector(config)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    def get_image_features(self, pixel_values: torch.Tensor, *args, **kwargs):
        """As the library's; SigLIP 2 NaFlex takes patches [N, P, patch * patch * 3], cut here from [N, 3, H, W]."""
        if self.config.vision_config.model_type == "siglip2_vision_model":
            side = self.config.vision_config.patch_size
            patches = pixel_values.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 4, 5, 1)
            shape, pixel_values = patches.shape[:3], patches.flatten(3).flatten(1, 2)
            device = pixel_values.device
            kwargs["spatial_shapes"] = torch.tensor([shape[1:]] * shape[0], device=device)
            kwargs["pixel_attention_mask"] = torch.ones(pixel_values.shape[:2], dtype=torch.long, device=device)
        return super().get_image_features(pixel_values, *args, **kwargs)


class _Head(nn.Linear):
    """Logits, divided by `scaling` as Granite does."""

    scaling = 1.0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden_states)
        return logits if self.scaling == 1.0 else logits / self.scaling


class LlavaNormForConditionalGeneration(_InitialGain, LlavaForConditionalGeneration, GenerationMixin):
    """`LlavaForConditionalGeneration` on `LlavaNormModel`; peft and others look for the mixin among its bases."""

    config: LlavaNormConfig
    config_class = LlavaNormConfig
    model_class = LlavaNormModel

    def __init__(self, config: LlavaNormConfig):
        super(LlavaForConditionalGeneration, self).__init__(config)  # not its own, which would build LlavaModel
        text = config.text_config
        self.model = self.model_class(config)
        self.lm_head = _Head(text.hidden_size, text.vocab_size, bias=False)
        self.lm_head.scaling = getattr(text, "logits_scaling", 1.0)
        self.post_init()
