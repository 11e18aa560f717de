"""Vision towers: a Hugging Face vision encoder whose hidden state at one layer is the image's visual tokens.

Shapes: N images, V visual tokens per image, E vision hidden size.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PretrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def _without_loading_report() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


class VisionTower(nn.Module):
    """Runs a vision encoder up to the selected layer and returns its tokens [N, V, E].

    The encoder hangs at `vision_tower.vision_model`, so that parameters keep the names of LLaVA's checkpoints.

    Args:
        config: the encoder's own config, at its full depth.
        select_layer: index into the encoder's hidden states (0 is the embedding output, -1 the last layer's, -2 the
            input of the last layer), as `mm_vision_select_layer`.
        select_feature: `patch` (image patches only) or `cls_patch` (with the class token in front).

    Raises:
        ValueError: the layer does not exist, or the feature is not one this encoder has.
    """

    config_class: type[PretrainedConfig]
    model_class: type[PreTrainedModel]
    image_processor_class: type
    select_features: tuple[str, ...]

    def __init__(self, config: PretrainedConfig, select_layer: int = -2, select_feature: str = "patch"):
        super().__init__()
        if select_feature not in self.select_features:
            raise ValueError(
                f"--mm_vision_select_feature: a {config.model_type} tower offers {', '.join(self.select_features)}; "
                f"found {select_feature!r}"
            )
        depth = config.num_hidden_layers
        if not -depth - 1 <= select_layer <= depth:
            raise ValueError(
                f"--mm_vision_select_layer {select_layer}: the tower has {depth} layers, so expected "
                f"{-depth - 1} to {depth}"
            )
        self.select_feature = select_feature
        self.num_layers_used = select_layer if select_layer >= 0 else depth + 1 + select_layer
        self.config = self._architecture(config)
        self.vision_tower = nn.ModuleDict({"vision_model": self.model_class(self.config)})

    def _architecture(self, config: PretrainedConfig) -> PretrainedConfig:
        """The config of the part of the encoder that is kept."""
        return config

    @property
    def vision_model(self) -> PreTrainedModel:
        return self.vision_tower["vision_model"]

    @property
    def layers(self) -> nn.ModuleList:
        """The encoder's layers that run."""
        return self.vision_model.encoder.layers[: self.num_layers_used]

    def load_pretrained(self, name_or_path: str, dtype: torch.dtype | None = None) -> None:
        """Replaces the encoder by the pretrained one (local folder or hub id), by default in the old one's dtype.

        Raises:
            ValueError: nothing readable there, or weights of the encoder are missing.
        """
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        options = {"config": self.config, "dtype": dtype or self.dtype, "output_loading_info": True}
        try:
            with _without_loading_report():  # the layers and heads that the tower leaves out would fill a screen
                model, info = self.model_class.from_pretrained(name_or_path, **options)
        except OSError as error:
            first = str(error).partition("\n")[0]
            raise ValueError(
                f"vision tower {name_or_path} cannot be loaded ({first}); name a folder or hub id by --vision_tower in "
                "training, by mm_vision_tower in the config.json of a folder that is to be loaded"
            ) from error
        if info["missing_keys"]:
            raise ValueError(f"--vision_tower {name_or_path}: lacks {', '.join(sorted(info['missing_keys']))}")
        self.vision_tower["vision_model"] = model.to(device)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Parameters that never see a gradient: the layers behind the selected one, and what follows the encoder."""
        model = self.vision_model
        modules = [*model.encoder.layers[self.num_layers_used :], model.post_layernorm]
        return [p for module in modules for p in module.parameters()]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Visual features [N, V, E] of `images` [N, 3, H, W], in the tower's dtype."""
        hidden_states = self._embed(images.to(device=self.device, dtype=self.dtype))
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask=None)
        return self._select(hidden_states)

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        return self.vision_model.embeddings(images)

    def _select(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def default_image_processor(self) -> Any:
        """The encoder family's image processor at this tower's image size."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        return next(self.vision_model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.vision_model.parameters()).device

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.config.hidden_size

    @property
    def num_patches_per_side(self) -> int:
        return self.config.image_size // self.config.patch_size

    @property
    def num_tokens(self) -> int:
        """V, the visual tokens of one image."""
        return self.num_patches_per_side**2 + (self.select_feature == "cls_patch")


class SiglipVisionTower(VisionTower):
    """SigLIP as LLaVA-NeXT uses it: layers behind the selected one and the pooling head are never built."""

    config_class = SiglipVisionConfig
    model_class = SiglipVisionModel
    image_processor_class = SiglipImageProcessorPil
    select_features = ("patch",)

    def _architecture(self, config: SiglipVisionConfig) -> SiglipVisionConfig:
        return SiglipVisionConfig.from_dict(
            config.to_dict() | {"num_hidden_layers": self.num_layers_used, "vision_use_head": False}
        )

    def default_image_processor(self) -> SiglipImageProcessorPil:
        side = self.config.image_size
        return SiglipImageProcessorPil(size={"height": side, "width": side})


class CLIPVisionTower(VisionTower):
    """CLIP as LLaVA uses it: the full encoder is kept in the checkpoint, only the selected layers run."""

    config_class = CLIPVisionConfig
    model_class = CLIPVisionModel
    image_processor_class = CLIPImageProcessorPil
    select_features = ("patch", "cls_patch")

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        return self.vision_model.pre_layrnorm(self.vision_model.embeddings(images))

    def _select(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self.select_feature == "cls_patch" else hidden_states[:, 1:]

    def default_image_processor(self) -> CLIPImageProcessorPil:
        side = self.config.image_size
        return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
