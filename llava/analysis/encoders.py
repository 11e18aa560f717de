"""Vision encoders on their own (CLIP, SigLIP, SigLIP 2): the tokens that an LLM would get (Table 1)."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModel

from llava.analysis.loading import placement
from llava.analysis.models import NamedModel

ENCODERS = ("clip", "siglip", "siglip2")
MODEL_TYPES = {*ENCODERS, *(f"{name}_vision_model" for name in ENCODERS)}


def load_encoder(named: NamedModel, args: argparse.Namespace) -> Callable[[Sequence[Any]], torch.Tensor]:
    """What turns samples into the encoder's tokens [N, E], of patches alone, after layer `--vision-layer`."""
    model = AutoModel.from_pretrained(named.path, **placement(args)).eval()
    model = getattr(model, "vision_model", model)
    processor = AutoImageProcessor.from_pretrained(named.path)

    @torch.no_grad()
    def encode(samples: Sequence[Any]) -> torch.Tensor:
        inputs = processor(images=[sample.image for sample in samples], return_tensors="pt")
        return patch_tokens(model, inputs.to(model.device, model.dtype), args.vision_layer)

    return encode


def patch_tokens(model: Any, inputs: Any, layer: int) -> torch.Tensor:
    """Patches' states [N, E] after `layer`, as an index into the hidden states; neither class token nor padding.

    Raises:
        ValueError: the encoder has no such layer.
    """
    states = model(**inputs, output_hidden_states=True).hidden_states
    if not -len(states) <= layer < len(states):
        raise ValueError(
            f"--vision-layer {layer}: the encoder has {len(states)} states, -{len(states)} to -1 or from 0"
        )
    tokens = states[layer]
    if hasattr(model.embeddings, "class_embedding"):
        tokens = tokens[:, 1:]
    mask = inputs.get("pixel_attention_mask")  # SigLIP 2 pads pictures of different shape
    return tokens.flatten(0, 1) if mask is None else tokens[mask.bool()]
