"""Vision towers: a Hugging Face vision encoder whose hidden state at one layer is the visual tokens.

`VisionTower` is what all kinds of encoders share; each kind is a subclass with its differences, and a row of `TOWERS`.

Shapes: N images, V visual tokens per image, P tokens inside the encoder, E vision hidden size.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    BaseImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    PretrainedConfig,
    PreTrainedModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, SizeDict
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.utils import logging as transformers_logging

from llava.model.zero3 import beside_another_model, is_partitioned

# Fields of a backbone's config that list its layers; they fit only the full depth.
_STAGES = ("stage_names", "out_features", "out_indices")


@contextlib.contextmanager
def _without_loading_report() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


@functools.cache
def _without_mask(layer: type[nn.Module]) -> dict[str, None]:
    """`attention_mask=None`, which most encoders' layers need, and which DINOv2's of transformers 5.17 do not take."""
    return {"attention_mask": None} if "attention_mask" in inspect.signature(layer.forward).parameters else {}


class VisionTower(nn.Module):
    """Runs a vision encoder up to the selected layer and returns its tokens [N, V, E].

    The encoder is `vision_tower.vision_model`, so that parameters keep the names of LLaVA's checkpoints.

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
    image_processor_class: type[BaseImageProcessor]  # one on Pillow, so that pixels are the same everywhere
    select_features: tuple[str, ...] = ("patch",)
    num_prefix_tokens = 0  # tokens that come before the patches inside the encoder
    # Paths inside the encoder.
    layers_at = "encoder.layers"
    patch_embedding_at = "embeddings.patch_embedding"  # the convolution or linear layer that makes tokens of patches
    final_norm_at = "post_layernorm"  # after the last layer; visual tokens do not pass through it

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
        """The config of the part of the encoder that is kept: layers after the selected one are never built."""
        fields = {k: v for k, v in config.to_dict().items() if k not in _STAGES}
        return self.config_class.from_dict(fields | {"num_hidden_layers": self.num_layers_used})

    @property
    def vision_model(self) -> Any:  # of `model_class`, which nothing but the subclass knows
        return self.vision_tower["vision_model"]

    @property
    def layers(self) -> nn.ModuleList:
        """The encoder's layers that run."""
        return self.vision_model.get_submodule(self.layers_at)[: self.num_layers_used]

    def patch_embedding(self) -> nn.Module:
        return self.vision_model.get_submodule(self.patch_embedding_at)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """The first layer's input [N, P, E] for `images` [N, 3, H, W]."""
        return self.vision_model.embeddings(images)

    def fit_image_processor(self, processor: Any) -> BaseImageProcessor:
        """A processor stored with an encoder, set to this tower's image size if the kind has several."""
        return processor

    def default_image_processor(self) -> BaseImageProcessor:
        """The image processor of this kind at this tower's image size."""
        raise NotImplementedError

    def load_pretrained(self, name_or_path: str, dtype: torch.dtype | None = None) -> None:
        """Replaces the encoder by a pretrained one, a folder or hub id, by default in its dtype; ValueError without."""
        device = self.device
        options = {"config": self.config, "dtype": dtype or self.dtype, "output_loading_info": True}
        try:
            # The report would list the layers that are not built. Under ZeRO-3 building CLIP or DINOv2 draws random
            # numbers, on which the projector's must not depend.
            with torch.random.fork_rng(devices=[]), beside_another_model(), _without_loading_report():
                loaded: Any = self.model_class.from_pretrained(name_or_path, **options)
                model, info = loaded
        except OSError as error:
            first = str(error).partition("\n")[0]
            raise ValueError(
                f"vision tower {name_or_path} cannot be loaded ({first}); name a folder or hub id by --vision_tower in "
                "training, by mm_vision_tower in the config.json of a folder that is to be loaded"
            ) from error
        if info["missing_keys"]:
            raise ValueError(f"--vision_tower {name_or_path}: lacks {', '.join(sorted(info['missing_keys']))}")
        # ZeRO-3 has placed it on each rank's GPU, where its buffers must stay; otherwise it replaces the old one there.
        stays = is_partitioned(model) or device.type == "meta"
        self.vision_tower["vision_model"] = model if stays else model.to(device)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Parameters that never get a gradient: of unused layers, the final norm, and the token for masked patches."""
        built, norm = map(self.vision_model.get_submodule, (self.layers_at, self.final_norm_at))
        modules = [*built[self.num_layers_used :], norm]
        mask = getattr(self.vision_model.embeddings, "mask_token", None)
        return [p for module in modules for p in module.parameters()] + ([] if mask is None else [mask])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Visual features [N, V, E] of `images` [N, 3, H, W], in the tower's dtype."""
        if images.shape[2:] != (self.image_size, self.image_size):
            side = self.image_size
            raise ValueError(f"expected pictures of {side} x {side} pixels, found {list(images.shape)}")
        hidden_states = self.embed(images.to(device=self.device, dtype=self.dtype))  # [N, P, E]
        for layer in self.layers:
            hidden_states = layer(hidden_states, **_without_mask(type(layer)))
        patches = hidden_states[:, self.num_prefix_tokens :]  # [N, patches, E]
        if self.select_feature == "patch":
            return patches
        return torch.cat([hidden_states[:, :1], patches], dim=1)  # [N, 1 + patches, E]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.vision_model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.vision_model.parameters()).device

    @property
    def hidden_size(self) -> int:
        """E, the vision hidden size."""
        return self.config.hidden_size

    @property
    def image_size(self) -> int:
        """Pixels along a side of the square that the tower takes."""
        return self.config.image_size

    @property
    def num_patches_per_side(self) -> int:
        return self.image_size // self.config.patch_size

    @property
    def num_inner_tokens(self) -> int:
        """P, the tokens inside the encoder."""
        return self.num_patches_per_side**2 + self.num_prefix_tokens

    @property
    def num_tokens(self) -> int:
        """V, the features of one image, from which the projector makes visual tokens."""
        return self.num_patches_per_side**2 + (self.select_feature == "cls_patch")

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP is gated: it multiplies two projections of its input with each other."""
        return getattr(self.config, "use_swiglu_ffn", False)

    @property
    def mlp_width(self) -> int:
        """Width of the hidden layer of an MLP, in elements per token."""
        mlp: Any = self.layers[0].mlp
        return [part for part in mlp.modules() if isinstance(part, nn.Linear)][-1].in_features


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

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        embeddings, side = self.vision_model.embeddings, self.config.patch_size
        patches = images.unfold(2, side, side).unfold(3, side, side)  # [N, 3, rows, columns, side, side]
        patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # [N, P, side * side * 3]
        return embeddings.patch_embedding(patches) + embeddings.position_embedding.weight  # [N, P, E]

    @property
    def image_size(self) -> int:
        return math.isqrt(self.config.num_patches) * self.config.patch_size


class _ClassTokenTower(VisionTower):
    """An encoder with a class token, whose processor resizes the shorter side and cuts a square from the middle."""

    select_features = ("patch", "cls_patch")
    num_prefix_tokens = 1
    pixel_statistics: dict[str, Any] = {}

    def default_image_processor(self) -> BaseImageProcessor:
        return self._cropping(self.image_processor_class(**self.pixel_statistics))

    def _cropping(self, processor: Any) -> Any:
        """`processor` at this tower's image size."""
        processor.size = SizeDict(shortest_edge=self.image_size)
        processor.crop_size = SizeDict(height=self.image_size, width=self.image_size)
        return processor


class CLIPVisionTower(_ClassTokenTower):
    """CLIP as LLaVA uses it: the checkpoint keeps the full encoder, of which only the selected layers run."""

    config_class = CLIPVisionConfig
    model_class = CLIPVisionModel
    image_processor_class = CLIPImageProcessorPil

    def _architecture(self, config: PretrainedConfig) -> PretrainedConfig:
        return config

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        return self.vision_model.pre_layrnorm(self.vision_model.embeddings(images))


class Dinov2VisionTower(_ClassTokenTower):
    """DINOv2 at the resolution of its position embeddings, which its own image processor does not use (224)."""

    config_class = Dinov2Config
    model_class = Dinov2Model
    image_processor_class = BitImageProcessorPil
    layers_at = "encoder.layer"
    patch_embedding_at = "embeddings.patch_embeddings.projection"
    final_norm_at = "layernorm"
    pixel_statistics = {"image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD}

    def fit_image_processor(self, processor: Any) -> Any:
        return self._cropping(processor)


TOWERS: dict[str, type[VisionTower]] = {
    tower.config_class.model_type: tower
    for tower in (SiglipVisionTower, Siglip2VisionTower, CLIPVisionTower, Dinov2VisionTower)
}
"""The kinds of towers, by the `model_type` of the encoder's config."""
