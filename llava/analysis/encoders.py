"""Vision encoders on their own, of every family that a tower may have: the tokens that an LLM would get (Table 1)."""

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from transformers import AutoImageProcessor, AutoModel

from llava.analysis.commands import NamedModel
from llava.analysis.models import config_fields, placement
from llava.analysis.remote_code import load_remote, requires_trust
from llava.analysis.samples import PicturePrompt
from llava.families import output_rows
from llava.model.multimodal_encoder.builder import build_vision_tower, load_image_processor
from llava.model.multimodal_encoder.towers import TOWERS

MOONVIT = "moonvit"
"""Not a tower of this tree: its repository has its code."""
# Also the types that have a text encoder beside the tower, such as `clip`.
MODEL_TYPES = {MOONVIT, *TOWERS, *(model_type.removesuffix("_vision_model") for model_type in TOWERS)}


def load_encoder(named: NamedModel, args: argparse.Namespace) -> Callable[[Sequence[PicturePrompt]], torch.Tensor]:
    """A function from samples to tokens [N, E]: patches after layer `--vision-layer`; of MoonViT its result.

    Raises ValueError: there is no such encoder, or it has no such layer; its own code may not run.
    """
    where = placement(args)
    device, dtype = where["device_map"][""], where["dtype"]
    if config_fields(named.path)["model_type"] == MOONVIT:
        requires_trust(named.path, args.trust_remote_code)
        model = load_remote(named.path, AutoModel, device, dtype)
        processor = AutoImageProcessor.from_pretrained(named.path, trust_remote_code=True)

        def encode(inputs: dict) -> torch.Tensor:
            pixels, grids = (inputs[name].to(model.device) for name in ("pixel_values", "image_grid_hws"))
            return output_rows(model(pixels.to(model.dtype), grids))
    else:
        fields = SimpleNamespace(mm_vision_tower=named.path, mm_vision_select_layer=args.vision_layer)
        try:
            with torch.device("meta"):
                tower = build_vision_tower(fields)
            tower.load_pretrained(named.path, dtype)
        except ValueError as error:
            words = str(error).replace("--mm_vision_select_layer", "--vision-layer")
            raise ValueError(words.replace("--vision_tower", "--model")) from error
        tower.to(device).eval()
        processor = load_image_processor(named.path, tower)

        def encode(inputs: dict) -> torch.Tensor:
            return tower(inputs["pixel_values"].to(tower.device, tower.dtype)).flatten(0, 1)

    @torch.no_grad()
    def tokens(samples: Sequence[PicturePrompt]) -> torch.Tensor:
        return encode(processor(images=[sample.image for sample in samples], return_tensors="pt"))

    return tokens
