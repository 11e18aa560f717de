"""Where a model looked while it answered. Shapes: S sequence with visual tokens and the answer."""

import torch
from PIL import Image, ImageOps

from llava.analysis.attention import attention_of, overlaid
from llava.analysis.measure import Values
from llava.analysis.models import our_batch, special_ids
from llava.analysis.probe import Probe
from llava.asking import Assistant
from llava.constants import IMAGE_TOKEN_INDEX
from llava.families import Family, find_parts


def look_of(assistant: Assistant, turns: list[dict[str, str]], picture: Image.Image, answer: str) -> Values:
    """Runs a question and its answer through the model once more.

    Returns:
        the attention of the tokens that decided the answer, see `attention_of`.

    Raises:
        ValueError: the attention cannot be measured.
    """
    parts = find_parts(assistant.model, Family(), IMAGE_TOKEN_INDEX)
    probe = Probe(assistant.name, assistant.model, parts, special_ids=special_ids(assistant.tokenizer))
    prompt = assistant.prompt_ids(turns, [picture])
    answer_ids = assistant.tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"][0].long()
    batch = our_batch(assistant.model, [torch.cat([prompt, answer_ids])], [picture], assistant.image_processor)
    asking = torch.zeros(batch.input_ids.shape[1], dtype=torch.bool)
    start = assistant.prompt_length(turns, [picture.size]) - 1  # what a token looks at decides the next one
    asking[start : max(start + 1, len(asking) - 1)] = True
    return attention_of(probe, batch, asking, picture, f"{assistant.name}: no layer lets the answer")


def heat_map(attention: Values, most: float) -> Image.Image | None:
    """The attention over the picture, brightest where a place has the share `most`; None where there is no map."""
    heat = attention["map"]
    return ImageOps.contain(overlaid(attention["picture"], heat, most), (512, 512)) if heat.size else None
