"""The families of vision encoders: each a class with its differences from `VisionTower`, and a row of `TOWERS`.

Shapes: N images, P tokens inside the encoder, E vision hidden size.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import (
    Aimv2VisionConfig,
    Aimv2VisionModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    PretrainedConfig,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from llava.model.multimodal_encoder.vision_tower import VisionTower

# The pattern by which transformers 5.23 renames DINOv3's weights also matches `layer_scale1`, as its dot matches any
# character.
register_checkpoint_conversion_mapping(
    DINOv3ViTConfig.model_type, [WeightRenaming(r"(?<!model\.)layer\.", "model.layer.")], overwrite=True
)


def _cropping_to(side: int, processor: Any) -> Any:
    """`processor`, which resizes the shorter side and cuts a square from the middle, set to that square's side."""
    processor.size = {"shortest_edge": side}
    processor.crop_size = {"height": side, "width": side}
    return processor


class SiglipVisionTower(VisionTower):
    """SigLIP and the fixed resolutions of SigLIP 2, as LLaVA-NeXT uses them; the pooling head is never built."""

    config_class = SiglipVisionConfig
    model_class = SiglipVisionModel
    image_processor_class = SiglipImageProcessorPil

    def _architecture(self, config: PretrainedConfig) -> PretrainedConfig:
        architecture = super()._architecture(config)
        architecture.vision_use_head = False
        return architecture

    def default_image_processor(self) -> SiglipImageProcessorPil:
        return SiglipImageProcessorPil(size={"height": self.image_size, "width": self.image_size})


class Siglip2VisionTower(SiglipVisionTower):
    """SigLIP 2 NaFlex on squares with as many patches as it has positions, so that no position is interpolated."""

    config_class = Siglip2VisionConfig
    model_class = Siglip2VisionModel

    def fit_image_processor(self, processor: Any) -> Any:
        # NaFlex's own processor keeps each picture's shape; only its mean, standard deviation and resampling are kept.
        return SiglipImageProcessorPil(
            size={"height": self.image_size, "width": self.image_size},
            image_mean=processor.image_mean,
            image_std=processor.image_std,
            resample=processor.resample,
        )

    def embed(self, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        embeddings, side = self.vision_model.embeddings, self.config.patch_size
        patches = images.unfold(2, side, side).unfold(3, side, side)  # [N, 3, rows, columns, side, side]
        patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        return embeddings.patch_embedding(patches) + embeddings.position_embedding.weight, {}

    @property
    def image_size(self) -> int:
        return math.isqrt(self.config.num_patches) * self.config.patch_size


class CLIPVisionTower(VisionTower):
    """CLIP as LLaVA uses it: the checkpoint keeps the full encoder, of which only the selected layers run."""

    config_class = CLIPVisionConfig
    model_class = CLIPVisionModel
    image_processor_class = CLIPImageProcessorPil
    select_features = ("patch", "cls_patch")

    def _architecture(self, config: PretrainedConfig) -> PretrainedConfig:
        return config

    def embed(self, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.vision_model.pre_layrnorm(self.vision_model.embeddings(images)), {}

    def default_image_processor(self) -> CLIPImageProcessorPil:
        return _cropping_to(self.image_size, CLIPImageProcessorPil())

    @property
    def num_prefix_tokens(self) -> int:
        return 1


class Dinov2VisionTower(VisionTower):
    """DINOv2 at the resolution of its position embeddings, which its own image processor does not use (224)."""

    config_class = Dinov2Config
    model_class = Dinov2Model
    image_processor_class = BitImageProcessorPil
    select_features = ("patch", "cls_patch")

    def encoder_layers(self) -> nn.ModuleList:
        return self.vision_model.encoder.layer

    def patch_embedding(self) -> nn.Module:
        return self.vision_model.embeddings.patch_embeddings.projection

    def final_norm(self) -> nn.Module:
        return self.vision_model.layernorm

    def fit_image_processor(self, processor: Any) -> Any:
        return _cropping_to(self.image_size, processor)

    def default_image_processor(self) -> BitImageProcessorPil:
        return self.fit_image_processor(
            BitImageProcessorPil(image_mean=IMAGENET_DEFAULT_MEAN, image_std=IMAGENET_DEFAULT_STD)
        )

    @property
    def num_prefix_tokens(self) -> int:
        return 1

    @property
    def gated_mlp(self) -> bool:
        return self.config.use_swiglu_ffn

    @property
    def mlp_width(self) -> int:
        mlp: Any = self.encoder_layers()[0].mlp
        # transformers 5.17 calls the gated one's `weights_out`.
        last = getattr(mlp, "down_proj", None) or getattr(mlp, "weights_out", None)
        return (last if last is not None else mlp.fc2).in_features


class Dinov2WithRegistersVisionTower(Dinov2VisionTower):
    """DINOv2 with registers, which absorb what otherwise gives some patches outlying norms."""

    config_class = Dinov2WithRegistersConfig
    model_class = Dinov2WithRegistersModel

    @property
    def num_prefix_tokens(self) -> int:
        return 1 + self.config.num_register_tokens


class DINOv3VisionTower(VisionTower):
    """DINOv3 ViT: rotary positions, class token and registers."""

    config_class = DINOv3ViTConfig
    model_class = DINOv3ViTModel
    # Its own processor needs torchvision. PIL's resizes the 8-bit levels before they are scaled, and so rounds them.
    image_processor_class = ViTImageProcessorPil
    select_features = ("patch", "cls_patch")

    def encoder_layers(self) -> nn.ModuleList:
        return self.vision_model.model.layer

    def patch_embedding(self) -> nn.Module:
        return self.vision_model.embeddings.patch_embeddings

    def final_norm(self) -> nn.Module:
        return self.vision_model.norm

    @property
    def gated_mlp(self) -> bool:
        return self.config.use_gated_mlp

    def embed(self, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        positions = self.vision_model.rope_embeddings(images)
        return self.vision_model.embeddings(images), {"position_embeddings": positions}

    def train(self, mode: bool = True) -> "DINOv3VisionTower":
        super().train(mode)
        # In training mode positions are jittered at random, as in DINOv3's own training. That would happen in a frozen
        # tower too, and recomputed activations would differ from those of the forward pass.
        self.vision_model.rope_embeddings.eval()
        return self

    def fit_image_processor(self, processor: Any) -> Any:
        processor.size = {"height": self.image_size, "width": self.image_size}
        return processor

    def default_image_processor(self) -> ViTImageProcessorPil:
        return self.fit_image_processor(
            ViTImageProcessorPil(
                image_mean=IMAGENET_DEFAULT_MEAN,
                image_std=IMAGENET_DEFAULT_STD,
                resample=PILImageResampling.BILINEAR,
            )
        )

    @property
    def num_prefix_tokens(self) -> int:
        return 1 + self.config.num_register_tokens


class Aimv2VisionTower(VisionTower):
    """AIMv2: patches alone, RMSNorm, gated MLP; the pooling head is never built."""

    config_class = Aimv2VisionConfig
    model_class = Aimv2VisionModel
    image_processor_class = CLIPImageProcessorPil

    def _architecture(self, config: PretrainedConfig) -> PretrainedConfig:
        architecture = super()._architecture(config)
        architecture.use_head = False
        return architecture

    @property
    def gated_mlp(self) -> bool:
        return True

    def patch_embedding(self) -> nn.Module:
        return self.vision_model.embeddings.patch_embed

    def final_norm(self) -> nn.Module:
        return self.vision_model.rms_norm

    def fit_image_processor(self, processor: Any) -> Any:
        return _cropping_to(self.image_size, processor)

    def default_image_processor(self) -> CLIPImageProcessorPil:
        return self.fit_image_processor(CLIPImageProcessorPil())


TOWERS: dict[str, type[VisionTower]] = {
    tower.config_class.model_type: tower
    for tower in (
        SiglipVisionTower,
        Siglip2VisionTower,
        CLIPVisionTower,
        Dinov2VisionTower,
        Dinov2WithRegistersVisionTower,
        DINOv3VisionTower,
        Aimv2VisionTower,
    )
}
"""The families' classes, by the `model_type` of the encoder's config."""
