"""A tiny MoonViT: module names and the way it is called are its repository's, the computation is plainer.

Like the published code it imports a name that later releases of transformers rename, and never calls `post_init`.

Shapes: P patches of all pictures, E hidden size, G groups of 2 x 2 patches of one picture.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import PytorchGELUTanh
from transformers.modeling_utils import PreTrainedModel

from .configuration_moonvit import MoonViTConfig


class PositionEmbedding(nn.Module):
    def __init__(self, height: int, width: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, dim))
        nn.init.normal_(self.weight)

    def forward(self, x: torch.Tensor, grid_hws: torch.Tensor) -> torch.Tensor:
        grid = self.weight.permute(2, 0, 1)[None]
        sized = [F.interpolate(grid, size=(h, w), mode="bicubic") for h, w in grid_hws.tolist()]
        return x + torch.cat([one[0].flatten(1).T for one in sized])


class PatchEmbedding(nn.Module):
    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.pos_emb = PositionEmbedding(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)

    def forward(self, x: torch.Tensor, grid_hws: torch.Tensor) -> torch.Tensor:
        return self.pos_emb(self.proj(x).flatten(1), grid_hws)


class Mlp(nn.Module):
    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = PytorchGELUTanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(self.activation(self.fc0(x)))


class Block(nn.Module):
    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.norm0, self.norm1 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = Mlp(config)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wqkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        x = x + torch.cat([self.attend(picture) for picture in self.norm0(x).split(lengths)])
        return x + self.mlp(self.norm1(x))


class Encoder(nn.Module):
    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: torch.Tensor, grid_hws: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, grid_hws.prod(-1).tolist())
        return self.final_layernorm(x)


class MoonVitPretrainedModel(PreTrainedModel):
    config_class = MoonViTConfig
    model_type = "moonvit"
    _supports_sdpa = True

    def __init__(self, config: MoonViTConfig, *inputs, **kwargs):
        super().__init__(config, *inputs, **kwargs)
        self.merge_kernel_size = config.merge_kernel_size
        self.patch_embed = PatchEmbedding(config)
        self.encoder = Encoder(config)

    def forward(self, pixel_values: torch.Tensor, grid_hws: torch.Tensor) -> list[torch.Tensor]:
        """From patches [P, 3, patch, patch] to a tensor [G, 4, E] for each picture."""
        states = self.encoder(self.patch_embed(pixel_values, grid_hws), grid_hws)
        tall, wide = self.merge_kernel_size
        merged = []
        for picture, (h, w) in zip(states.split(grid_hws.prod(-1).tolist()), grid_hws.tolist(), strict=True):
            squares = picture.view(h // tall, tall, w // wide, wide, -1).transpose(1, 2)
            merged.append(squares.reshape(h * w // (tall * wide), tall * wide, -1))
        return merged
