"""Where a model looked while it answered, and how large visual and text tokens were where they entered it.

Shapes: S sequence with visual tokens and the answer.
"""

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from llava.analysis.attention import attention_of
from llava.analysis.measure import TEXT_GROUPS
from llava.analysis.models import our_batch, special_ids
from llava.analysis.probe import VISUAL, Probe
from llava.analysis.seen_area import WHOLE, Area
from llava.asking import Assistant
from llava.constants import IMAGE_TOKEN_INDEX
from llava.families import Family, find_parts


class Look(NamedTuple):
    """What is shown next to an answer.

    Attributes:
        heatmap: the answer's attention over the places of the picture [rows, columns], the mean over layers and
            heads, summing to 1; None where the places of the visual tokens are unknown.
        no_map: why there is no heatmap; empty where there is one.
        area: of the picture, which the heatmap covers.
        visual_norm, text_norm: medians over the tokens that enter the language model.
    """

    heatmap: np.ndarray | None
    visual_norm: float
    text_norm: float
    no_map: str = ""
    area: Area = WHOLE


def probe_of(assistant: Assistant) -> Probe:
    """The probe that shows what passes between the parts of an assistant's model."""
    parts = find_parts(assistant.model, Family(), IMAGE_TOKEN_INDEX)
    return Probe(assistant.name, assistant.model, parts, special_ids=special_ids(assistant.tokenizer))


def look_of(assistant: Assistant, probe: Probe, turns: list[dict[str, str]], picture: Image.Image, answer: str) -> Look:
    """Runs a question and its answer through the model once more, with the probe.

    Args:
        probe: the assistant's, see `probe_of`.
        turns: the question's, with one placeholder.

    Raises:
        ValueError: the attention cannot be measured.
    """
    picture = assistant.upright(picture)
    prompt = assistant.prompt_ids(turns, [picture])
    answer_ids = assistant.tokenizer(answer, add_special_tokens=False, return_tensors="pt")["input_ids"][0].long()
    batch = our_batch(assistant.model, [torch.cat([prompt, answer_ids])], [picture], assistant.image_processor)
    asking = torch.zeros(batch.input_ids.shape[1], dtype=torch.bool)
    start = assistant.prompt_length(turns, [picture.size]) - 1  # what a token looks at decides the next one
    asking[start : max(start + 1, len(asking) - 1)] = True
    attention, seen = attention_of(probe, batch, asking, f"{assistant.name}: no layer lets the answer")
    norms, groups = seen.hidden_states[0][0].float().norm(dim=-1).cpu(), seen.groups[0].cpu()
    is_text = torch.isin(groups, torch.tensor(TEXT_GROUPS, dtype=groups.dtype))
    visual_norm, text_norm = norms[groups == VISUAL].median().item(), norms[is_text].median().item()
    heatmap = attention["map"] if attention["map"].size else None
    return Look(heatmap, visual_norm, text_norm, str(attention["no map"]), tuple(attention["area"].tolist()))
