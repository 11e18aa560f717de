"""Pictures as packed patches, for a tiny MoonViT and a tiny Kimi-VL: arguments and results as in their repositories."""

import numpy as np
import torch
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.image_utils import make_list_of_images


class KimiVLImageProcessor(BaseImageProcessor):
    model_type = "kimi_vl"
    model_input_names = ["pixel_values", "image_grid_hws"]

    def __init__(self, patch_size: int = 4, merge_kernel_size=(2, 2), **kwargs):
        super().__init__(**kwargs)
        self.patch_size, self.merge_kernel_size = patch_size, merge_kernel_size

    def _patches(self, picture) -> tuple[torch.Tensor, tuple[int, int]]:
        side, square = self.patch_size, self.patch_size * self.merge_kernel_size[0]
        width, height = (max(length // square, 1) * square for length in picture.size)
        pixels = torch.tensor(np.array(picture.convert("RGB").resize((width, height)))).permute(2, 0, 1) / 127.5 - 1
        patches = pixels.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)
        return patches.flatten(0, 1), tuple(patches.shape[:2])

    def preprocess(self, images, return_tensors=None, **kwargs) -> BatchFeature:
        packed, grids = zip(*map(self._patches, make_list_of_images(images)), strict=True)
        data = {"pixel_values": torch.cat(packed), "image_grid_hws": np.array(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)
