"""One question about one picture, put to a model: its input with the visual positions marked, and its logits.

Shapes: S sequence, V visual tokens, D LLM hidden size, C vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from llava.analysis.models import NamedModel
from llava.constants import DEFAULT_IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava.eval.ask import Assistant, load_assistant
from llava.mm_utils import process_images
from llava.model.multimodal_projector.norm import mean_text_embedding_norm


class Prepared(NamedTuple):
    """A model's input for one sample.

    Attributes:
        arguments: of the model's forward.
        visual: True at visual tokens [S].
        after_picture: True at text after the last visual token [S]; at all text where there is no picture.
        token_texts: S strings, empty at visual tokens.
        grid: rows and columns of the visual tokens in raster order; None where they form no single grid.
    """

    arguments: dict[str, Any]
    visual: torch.Tensor
    after_picture: torch.Tensor
    token_texts: list[str]
    grid: tuple[int, int] | None


class Subject:
    """A checkpoint of this project, loaded in fp32 for measuring.

    Attributes:
        layers: the decoder layers.
        text_norm: mean L2 norm of the non-zero text embeddings (paper eq. 11).
    """

    def __init__(self, model: NamedModel, device: str | None = None) -> None:
        self.name = model.name
        self.assistant: Assistant = load_assistant(model.path, torch_dtype=torch.float32, device=device)
        self.model = self.assistant.model.eval()
        if self.model.get_vision_tower() is None:
            raise ValueError(f"{model.path}: a language model without a vision tower; expected one that sees pictures")
        self.layers: nn.ModuleList = self.model.get_model().layers
        self.text_norm = mean_text_embedding_norm(self.model.get_input_embeddings().weight)

    @torch.inference_mode()
    def prepare(self, question: str, picture: Image.Image | None) -> Prepared:
        """The input that asks `question` (without placeholder) about `picture`, or without one."""
        text = f"{DEFAULT_IMAGE_TOKEN}\n{question}" if picture is not None else question
        ids = self.assistant.prompt_ids([{"from": "human", "value": text}])
        tower = self.model.get_vision_tower()
        repeats = torch.where(ids == IMAGE_TOKEN_INDEX, tower.num_tokens, 1)
        visual = (ids == IMAGE_TOKEN_INDEX).repeat_interleave(repeats)
        images = None
        if picture is not None:
            images = process_images([picture], self.assistant.image_processor, self.model.config)
            images = images.to(self.model.device, torch.float32)
        embeds = self.model.prepare_inputs_labels_for_multimodal(
            ids[None].to(self.model.device), None, None, None, None, images
        )[4]
        texts = [
            "" if token == IMAGE_TOKEN_INDEX else self.assistant.tokenizer.decode([token])
            for token in ids.repeat_interleave(repeats).tolist()
        ]
        side = tower.num_patches_per_side
        grid = (side, side) if side * side == tower.num_tokens else None
        after = ~visual & (torch.cumsum(visual, 0) == visual.sum())
        return Prepared({"inputs_embeds": embeds}, visual, after, texts, grid)

    @torch.inference_mode()
    def logits(self, prepared: Prepared) -> torch.Tensor:
        """Logits [C] of what follows the last token, fp32."""
        return self.model(**prepared.arguments, use_cache=False, logits_to_keep=1).logits[0, -1].float()

    def visual_norm(self, prepared: Prepared) -> float:
        """Mean L2 norm of the visual tokens where they enter the first layer."""
        norms = []
        with changed_input(self, prepared, lambda hidden: norms.append(hidden.norm(dim=-1).mean().item()) or hidden):
            self.logits(prepared)
        return norms[0]


@contextlib.contextmanager
def changed_input(subject: Any, prepared: Prepared, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within the block the first layer receives `change` of its visual tokens [V, D]."""
    where = prepared.visual.nonzero().flatten()

    def replace(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        hidden = args[0] if args else kwargs["hidden_states"]
        at = where.to(hidden.device)
        hidden = hidden.clone()
        hidden[0, at] = change(hidden[0, at])
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    handle = subject.layers[0].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
