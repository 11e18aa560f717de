"""A tiny Ovis 2.5: module names and the way it is called are its repository's, the vision transformer is plainer.

Like the published code it reads an attribute that transformers 5 has no more, keeps ids in a buffer that no file holds,
never calls `post_init`, and has `get_wte` instead of `get_input_embeddings`.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithNoAttention
from transformers.modeling_utils import PreTrainedModel

IMAGE_PLACEHOLDER, VISUAL_ATOM_ID = "<image>", -300
INDICATOR_IDS = [-301, -302, -303, -304]
MERGED = 2  # patches along a side of what becomes one visual token


class Siglip2NavitConfig(PretrainedConfig):
    model_type = "siglip2_navit"

    def __init__(self, hidden_size: int = 24, patch_size: int = 4, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.patch_size = hidden_size, patch_size


class Ovis2_5_Config(PretrainedConfig):
    model_type = "ovis2_5"
    sub_configs = {"llm_config": Qwen3Config, "vit_config": Siglip2NavitConfig}

    def __init__(self, llm_config=None, vit_config=None, visual_vocab_size: int = 40, hidden_size=None, **kwargs):
        self.llm_config = Qwen3Config(**llm_config) if isinstance(llm_config, dict) else llm_config
        self.vit_config = Siglip2NavitConfig(**vit_config) if isinstance(vit_config, dict) else vit_config
        self.visual_vocab_size, self.hidden_size = visual_vocab_size, hidden_size
        super().__init__(**kwargs)


class VisionTransformer(nn.Module):
    def __init__(self, config: Siglip2NavitConfig):
        super().__init__()
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.hidden_size)
        self.layers = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))
        self.post_layernorm = nn.LayerNorm(config.hidden_size)


class Siglip2NavitModel(PreTrainedModel):
    config_class = Siglip2NavitConfig
    base_model_prefix = "siglip2_navit"

    def __init__(self, config: Siglip2NavitConfig):
        super().__init__(config)
        self.vision_model = VisionTransformer(config)

    def forward(self, pixel_values, grid_thws, output_hidden_states=None, return_dict=None):
        x, states = self.vision_model.patch_embedding(pixel_values.to(self.dtype)), ()
        for layer in self.vision_model.layers:
            x = layer(x)
            states += (x,)
        return BaseModelOutputWithNoAttention(self.vision_model.post_layernorm(x), hidden_states=states)


AutoConfig.register("siglip2_navit", Siglip2NavitConfig, exist_ok=True)
AutoModel.register(Siglip2NavitConfig, Siglip2NavitModel, exist_ok=True)


class VisualEmbedding(nn.Embedding):
    def forward(self, visual_tokens: torch.Tensor) -> torch.Tensor:
        if not visual_tokens.is_floating_point():
            return super().forward(visual_tokens)
        return visual_tokens @ self.weight


class VisualTokenizer(nn.Module):
    def __init__(self, vit, visual_vocab_size: int, image_processor_name_or_path: str):
        super().__init__()
        self.vit = vit
        self.image_processor = AutoImageProcessor.from_pretrained(image_processor_name_or_path, do_center_crop=False)
        words = visual_vocab_size - len(INDICATOR_IDS)
        self.head = nn.Sequential(nn.Linear(vit.config.hidden_size * MERGED**2, words, bias=False), nn.LayerNorm(words))

    def preprocess(self, image):
        """Patches [P, 3 * patch * patch], squares of four one after the other, and the grid [1, 3]."""
        side = self.vit.config.patch_size
        width, height = (max(length // (side * MERGED), 1) * side * MERGED for length in image.convert("RGB").size)
        size = {"height": height, "width": width}
        pixels = self.image_processor.preprocess(image, size=size, return_tensors="np")["pixel_values"][0]
        rows, columns = height // side, width // side
        squares = np.array(pixels).reshape(3, rows // MERGED, MERGED, side, columns // MERGED, MERGED, side)
        patches = squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)
        return torch.tensor(patches), torch.tensor([[1, rows, columns]])

    def forward(self, pixel_values: torch.Tensor, grid_thws: torch.Tensor) -> torch.Tensor:
        features = self.vit(pixel_values, grid_thws, output_hidden_states=True, return_dict=True).hidden_states[-1]
        weights = self.head(features.reshape(len(features) // MERGED**2, -1)).softmax(-1)
        return F.pad(weights, (0, len(INDICATOR_IDS)))


class Ovis2_5(PreTrainedModel):
    config_class = Ovis2_5_Config
    base_model_prefix = "ovis2_5"

    def __init__(self, config: Ovis2_5_Config, *inputs, **kwargs):
        super().__init__(config, *inputs, **kwargs)
        self.llm = AutoModelForCausalLM.from_config(config.llm_config)
        self.text_tokenizer = AutoTokenizer.from_pretrained(config.name_or_path)
        vit = AutoModel.from_config(config.vit_config)
        self.visual_tokenizer = VisualTokenizer(vit, config.visual_vocab_size, config.name_or_path)
        self.vte = VisualEmbedding(config.visual_vocab_size, config.hidden_size, device=vit.device, dtype=vit.dtype)
        markers = torch.arange(config.visual_vocab_size - len(INDICATOR_IDS), config.visual_vocab_size)
        self.register_buffer("indicator_token_indices", markers, persistent=False)
        self.is_parallelizable = all((self.llm.is_parallelizable, vit.is_parallelizable))

    def tie_weights(self):
        self.llm.tie_weights()

    def get_wte(self):
        return self.llm.get_input_embeddings()

    def forward(self, input_ids, attention_mask, pixel_values, grid_thws, labels=None, **kwargs):
        embeds = self.get_wte()(input_ids.clamp(min=0)).clone()
        if pixel_values is not None:
            markers = self.vte(self.indicator_token_indices).to(embeds.dtype)
            embeds[input_ids == VISUAL_ATOM_ID] = self.vte(self.visual_tokenizer(pixel_values, grid_thws))
            for marker, index in zip(markers, INDICATOR_IDS, strict=True):
                embeds[input_ids == index] = marker
        return self.llm(inputs_embeds=embeds, attention_mask=attention_mask, labels=labels, **kwargs)

    def preprocess_inputs(self, messages, add_generation_prompt=True):
        text = self.text_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        parts = [
            self.text_tokenizer(part, add_special_tokens=False).input_ids for part in text.split(IMAGE_PLACEHOLDER)
        ]
        images = [item["image"] for message in messages for item in message["content"] if item.get("image") is not None]
        packed = [self.visual_tokenizer.preprocess(image) for image in images]
        ids = parts[0]
        for part, (_, grid) in zip(parts[1:], packed, strict=True):
            atoms = [VISUAL_ATOM_ID] * (int(grid.prod()) // MERGED**2)
            ids = ids + [INDICATOR_IDS[0], *atoms, INDICATOR_IDS[1]] + part
        pixels, grids = (torch.cat(list(one)) for one in zip(*packed, strict=True)) if packed else (None, None)
        return torch.tensor([ids]), pixels, grids
