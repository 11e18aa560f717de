"""A tiny MoonViT and a tiny Kimi-VL: module names and the way they are called are their repositories'.

The vision transformer is one layer without attention, the decoder transformers' DeepSeek-V3. As the published code this
imports names that transformers 5 has no more, has a `tie_weights` without arguments, asks its language model whether it
has fused attention, and changes the texts that its processor is given. The projector takes a list, not a tensor.

Shapes: P patches of all pictures, E hidden size, G groups of 2 x 2 patches of one picture.
"""

import numpy as np
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.configuration_utils import PretrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_utils import make_list_of_images
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import ProcessorMixin, _validate_images_text_input_order
from transformers.utils.import_utils import is_torch_fx_available

if is_torch_fx_available():
    import torch.fx

MERGED = 2  # patches along a side of what becomes one visual token


class MoonViTConfig(PretrainedConfig):
    model_type = "moonvit"

    def __init__(self, hidden_size: int = 24, patch_size: int = 4, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.patch_size = hidden_size, patch_size


class Encoder(nn.Module):
    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(config.hidden_size, config.hidden_size)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.final_layernorm(x + self.blocks[0](x))


class MoonVitPretrainedModel(PreTrainedModel):
    """Like the published code it never calls `post_init`."""

    config_class = MoonViTConfig
    _supports_sdpa = True

    def __init__(self, config: MoonViTConfig):
        super().__init__(config)
        self.patch_embed = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.encoder = Encoder(config)

    def forward(self, pixel_values: torch.Tensor, grid_hws: torch.Tensor) -> list[torch.Tensor]:
        """From patches [P, 3, patch, patch] to a tensor [G, 4, E] for each picture."""
        states = self.encoder(self.patch_embed(pixel_values).flatten(1))
        merged = []
        for picture, (h, w) in zip(states.split(grid_hws.prod(-1).tolist()), grid_hws.tolist(), strict=True):
            squares = picture.view(h // MERGED, MERGED, w // MERGED, MERGED, -1).transpose(1, 2)
            merged.append(squares.reshape(-1, MERGED**2, picture.shape[-1]))
        return merged


class KimiVLConfig(PretrainedConfig):
    model_type = "kimi_vl"

    def __init__(self, vision_config=None, text_config=None, media_placeholder_token_id: int = 300, **kwargs):
        self.vision_config = MoonViTConfig(**vision_config) if isinstance(vision_config, dict) else vision_config
        self.text_config = DeepseekV3Config(**text_config) if isinstance(text_config, dict) else text_config
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**kwargs)


class KimiVLMultiModalProjector(nn.Module):
    def __init__(self, config: KimiVLConfig):
        super().__init__()
        self.hidden_size = config.vision_config.hidden_size * MERGED**2
        self.pre_norm = nn.LayerNorm(config.vision_config.hidden_size)
        self.linear_2 = nn.Linear(self.hidden_size, config.text_config.hidden_size)

    def forward(self, image_features: list[torch.Tensor]) -> torch.Tensor:
        """From a tensor [G, 4, E] for each picture to the visual tokens [N, D] of all."""
        return self.linear_2(self.pre_norm(torch.cat(image_features)).view(-1, self.hidden_size))


class KimiVLPreTrainedModel(PreTrainedModel, GenerationMixin):
    config_class = KimiVLConfig
    base_model_prefix = "model"

    @property
    def _supports_sdpa(self):
        return self.language_model._supports_sdpa


class KimiVLForConditionalGeneration(KimiVLPreTrainedModel):
    def __init__(self, config: KimiVLConfig):
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def tie_weights(self):
        return self.language_model.tie_weights()

    def forward(self, input_ids=None, attention_mask=None, pixel_values=None, image_grid_hws=None, **options):
        inputs_embeds = self.get_input_embeddings()(input_ids).clone()
        if pixel_values is not None:
            visual = self.multi_modal_projector(self.vision_tower(pixel_values, image_grid_hws))
            inputs_embeds[input_ids == self.config.media_placeholder_token_id] = visual.to(inputs_embeds.dtype)
        return self.language_model(attention_mask=attention_mask, inputs_embeds=inputs_embeds, **options)


class KimiVLImageProcessor(BaseImageProcessor):
    model_type = "kimi_vl"
    model_input_names = ["pixel_values", "image_grid_hws"]
    patch_size = 4

    def _patches(self, picture) -> tuple[torch.Tensor, tuple[int, int]]:
        side, square = self.patch_size, self.patch_size * MERGED
        width, height = (max(length // square, 1) * square for length in picture.size)
        pixels = torch.tensor(np.array(picture.convert("RGB").resize((width, height)))).permute(2, 0, 1) / 127.5 - 1
        patches = pixels.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)
        return patches.flatten(0, 1), tuple(patches.shape[:2])

    def preprocess(self, images, return_tensors=None, **kwargs) -> BatchFeature:
        packed, grids = zip(*map(self._patches, make_list_of_images(images)), strict=True)
        data = {"pixel_values": torch.cat(packed), "image_grid_hws": np.array(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)


class KimiVLProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    valid_kwargs = ["chat_template"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    image_token = "<|media_pad|>"

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, return_tensors=None, **kwargs) -> BatchFeature:
        images, text = _validate_images_text_input_order(images, text)
        pictures = self.image_processor(images, return_tensors=return_tensors) if images is not None else {}
        text = [text] if isinstance(text, str) else text
        counts = iter([int(grid.prod()) // MERGED**2 for grid in pictures.get("image_grid_hws", ())])
        for index, one in enumerate(text):
            head, *rest = one.split(self.image_token)
            text[index] = head + "".join(self.image_token * next(counts) + part for part in rest)
        return BatchFeature(data={**self.tokenizer(text, return_tensors=return_tensors), **pictures})

    @property
    def model_input_names(self):
        return [*dict.fromkeys(self.tokenizer.model_input_names + self.image_processor.model_input_names)]
