"""Vision encoders on their own, of every family that a tower may have: the tokens that an LLM would get (Table 1)."""

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from transformers import AutoImageProcessor, AutoModel

from llava.analysis.commands import NamedModel
from llava.analysis.models import config_fields, placement
from llava.analysis.processors import load_processor
from llava.analysis.remote_code import load_remote, requires_trust
from llava.analysis.samples import PicturePrompt
from llava.families import output_rows
from llava.model.multimodal_encoder.builder import build_vision_tower, load_image_processor
from llava.model.multimodal_encoder.towers import TOWERS, VisionTower

MOONVIT = "moonvit"
"""Not a tower of this tree: its repository has its code."""
# Also the types that have a text encoder beside the tower, such as `clip`.
MODEL_TYPES = {MOONVIT, *TOWERS, *(model_type.removesuffix("_vision_model") for model_type in TOWERS)}


def load_encoder(named: NamedModel, args: argparse.Namespace) -> Callable[[Sequence[PicturePrompt]], torch.Tensor]:
    """A function from samples to the encoder's patch tokens [N, E] after layer `--vision-layer`.

    Raises ValueError: there is no such encoder, or it has no such layer; its own code may not run.
    """
    if config_fields(named.path)["model_type"] == MOONVIT:
        return load_moonvit(named.path, args)
    tower = load_tower(named.path, args)
    processor = load_image_processor(named.path, tower)

    @torch.no_grad()
    def encode(samples: Sequence[PicturePrompt]) -> torch.Tensor:
        inputs = processor(images=[sample.image for sample in samples], return_tensors="pt")
        return tower(inputs["pixel_values"].to(tower.device, tower.dtype)).flatten(0, 1)

    return encode


def load_moonvit(path: str, args: argparse.Namespace) -> Callable[[Sequence[PicturePrompt]], torch.Tensor]:
    """A function from samples to MoonViT's result [N, E], after its last norm, which Kimi-VL's projector takes."""
    requires_trust(path, args.trust_remote_code)
    where = placement(args)
    model = load_remote(path, AutoModel, where["device_map"][""], where["dtype"])
    processor = load_processor(path, trust=True, auto=AutoImageProcessor)

    @torch.no_grad()
    def encode(samples: Sequence[PicturePrompt]) -> torch.Tensor:
        inputs = processor([sample.image for sample in samples], return_tensors="pt")
        pixels, grids = (inputs[name].to(model.device) for name in ("pixel_values", "image_grid_hws"))
        return output_rows(model(pixels.to(model.dtype), grids))

    return encode


def load_tower(path: str, args: argparse.Namespace) -> VisionTower:
    """The encoder as a tower that ends after layer `--vision-layer`."""
    where = placement(args)
    try:
        with torch.device("meta"):
            tower = build_vision_tower(SimpleNamespace(mm_vision_tower=path, mm_vision_select_layer=args.vision_layer))
        tower.load_pretrained(path, where["dtype"])
    except ValueError as error:
        words = str(error).replace("--mm_vision_select_layer", "--vision-layer").replace("--vision_tower", "--model")
        raise ValueError(words) from error
    return tower.to(where["device_map"][""]).eval()
