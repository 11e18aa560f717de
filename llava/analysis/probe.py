"""One look into a vision-language model: runs a batch of pictures and prompts and shows what passes between the parts.

Shapes: B samples, S sequence with visual tokens, D LLM hidden size, E vision hidden size, L decoder layers, C
vocabulary, N tokens of all samples.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from llava.analysis.samples import PicturePrompt
from llava.families import Parts, first_tensors, is_floating, output_rows

# What a position of the LLM's input holds.
PADDING, VISUAL, TEXT_BEFORE, TEXT_AFTER, SPECIAL = range(5)
GROUPS = {VISUAL: "visual", TEXT_BEFORE: "text before", TEXT_AFTER: "text after", SPECIAL: "special"}

SAME = 0.999
"""Two vectors of at least this cosine are taken to be the same, whatever the rounding of the dtype."""
COMPARED = 256
"""Number of visual positions whose values are looked up among the projector's rows."""


@dataclass
class Batch:
    """Prepared inputs, padded on the right.

    Attributes:
        inputs: keyword arguments of the model's forward.
        input_ids: [B, S] as the LLM sees them, with the image token's id at every visual position.
        mask: [B, S] bool, False at padding.
    """

    inputs: dict[str, Any]
    input_ids: torch.Tensor
    mask: torch.Tensor


@dataclass
class Observation:
    """What passed through the model for one batch.

    Attributes:
        groups: [B, S] uint8, a key of `GROUPS` or PADDING.
        hidden_states: L + 1 tensors [B, S, D]: what enters each decoder layer, and what leaves the last one before the
            final norm. The first is the LLM's input.
        vision_features: [N, E] tokens of the vision encoder; None where it did not run.
        projector_output: [N, D], before a model leaves out or adds tokens (LLaVA-NeXT's line ends).
        logits: [B, S, C].
        left: L tensors [B, S, D]: what leaves each layer, before the model adds something to what enters the next one
            (DeepStack's visual features).
    """

    groups: torch.Tensor
    hidden_states: list[torch.Tensor]
    vision_features: torch.Tensor | None
    projector_output: torch.Tensor | None
    logits: torch.Tensor
    left: list[torch.Tensor]

    def steps(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What enters and what leaves each layer, L pairs of [B, S, D]."""
        return list(zip(self.hidden_states[:-1], self.left, strict=True))

    @property
    def visual(self) -> torch.Tensor:
        """[B, S] bool."""
        return self.groups == VISUAL


class Probe:
    """A loaded model with its parts.

    Args:
        name: in tables and figures.
        model: in eval mode.
        parts: see `find_parts`.
        prepare: makes a `Batch` of one sample; None where the caller makes its own.
        special_ids: ids of the tokenizer's special tokens.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        parts: Parts,
        prepare: Callable[[PicturePrompt], Batch] | None = None,
        special_ids: Collection[int] = (),
    ):
        self.name, self.model, self.parts = name, model, parts
        self.prepare = prepare
        self.special_ids = torch.tensor(sorted(special_ids), dtype=torch.long)

    @property
    def embedding_weight(self) -> torch.Tensor:
        """Text embedding matrix [rows, D]."""
        return self.parts.embedding.weight.detach()

    def groups(self, batch: Batch) -> torch.Tensor:
        """What each position of `batch` holds [B, S]."""
        visual = (batch.input_ids == self.parts.image_token_id) & batch.mask
        groups = torch.where(visual.cumsum(1) > 0, TEXT_AFTER, TEXT_BEFORE)
        groups[torch.isin(batch.input_ids, self.special_ids.to(groups.device))] = SPECIAL
        groups[batch.input_ids < 0] = SPECIAL  # a model's own markers, as Ovis 2.5's picture begin and end
        groups[visual] = VISUAL
        groups[~batch.mask] = PADDING
        return groups.to(torch.uint8)

    @torch.no_grad()
    def run(self, batch: Batch, **options: Any) -> Observation:
        """Runs the model on `batch` and returns what passed through it.

        Args:
            options: of the model's forward, such as `output_attentions=True` or `use_cache=True`.

        Raises:
            ValueError: what is at the image token's positions is not what the projector gave.
        """
        groups = self.groups(batch)
        with self.recording() as seen:
            outputs = self.model(**({"use_cache": False} | batch.inputs | options))
        states = seen["states"] = [*seen["entered"], *seen["left"][-1:]]
        self._check(seen, groups)
        if bool((groups == VISUAL).any()):
            self._check_visual_positions(states[0].float(), _rows(seen["projector_output"]), groups, batch.input_ids)
        features, wide = self.parts.features, seen["features"][0] if seen["features"] else None
        if wide is not None and features.may_join_patches(wide):
            raise ValueError(
                f"{self.name}: {type(features.module).__name__} takes rows of {wide.shape[-1]} numbers, and tokens of "
                f"the vision encoder have {features.width}; name the module whose output is the encoder's tokens by "
                "--vision-path"
            )
        tokens = (_rows(seen["features"]), _rows(seen["projector_output"]))
        return Observation(groups, states, *tokens, outputs.logits, seen["left"])

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, list[torch.Tensor]]]:
        """While the context is open, a forward pass fills the dict's lists: what enters and leaves the layers, ..."""
        seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        parts, joins = self.parts, self.parts.features.joins_patches

        def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
            seen["entered"].append(args[0] if args else kwargs["hidden_states"])

        def leave(_: nn.Module, args: tuple, output: Any) -> None:
            seen["left"].append(output if isinstance(output, torch.Tensor) else output[0])

        def project(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if is_floating(first_tensors(args, kwargs)):  # Ovis also looks its picture markers up in the table
                seen["projector_output"].append(output_rows(output))

        def features(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if is_floating(first_tensors(args, kwargs)):
                rows = parts.features.of(args, kwargs, output)
                joined = joins and parts.features.may_join_patches(rows)
                seen["features"].append(rows.reshape(-1, parts.features.width) if joined else rows)

        handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in parts.layers]
        handles += [layer.register_forward_hook(leave) for layer in parts.layers]
        handles.append(parts.projector.register_forward_hook(project, with_kwargs=True))
        handles.append(parts.features.module.register_forward_hook(features, with_kwargs=True))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _check(self, seen: dict[str, list[Any]], groups: torch.Tensor) -> None:
        """Raises ValueError where a part was not found or did not run; the message names the flag that names it."""
        states, visual = seen["states"], bool((groups == VISUAL).any())
        count, shape = len(self.parts.layers) + 1, tuple(states[0].shape[:2]) if states else ()
        token = tuple(states[0].shape[2:]) if states else ()
        width = seen["projector_output"][0].shape[-1] if seen["projector_output"] else None
        if (len(states), shape) != (count, tuple(groups.shape)):
            fault = f"expected {count} hidden states of {tuple(groups.shape)} positions, found {len(states)} of {shape}"
            remedy = "is --layers-path the list of decoder layers?"
        elif len(token) > 1 or width not in (None, token[0]):
            fault = f"between its layers a token has {' x '.join(map(str, token))} numbers, its projector gives {width}"
            remedy = "an LLM with several states per token cannot be measured; else name the one by --projector-path"
        elif visual and not (seen["projector_output"] and seen["features"]):
            part, flag = ("projector", "projector") if width is None else ("vision encoder", "vision")
            fault, remedy = f"its {part} never ran", f"name the one that does by --{flag}-path"
        elif width is not None and not visual:
            fault = f"the projector ran, but no position of the input holds the image token {self.parts.image_token_id}"
            remedy = "name its id by --image-token-id"
        else:
            return
        raise ValueError(f"{self.name} ({self.model.config.model_type}): {fault}; {remedy}")

    def _check_visual_positions(
        self, states: torch.Tensor, projected: torch.Tensor, groups: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """Raises ValueError where visual positions of the LLM's input [B, S, D] hold none of the projector's rows."""
        weight, visual = self.embedding_weight, (groups == VISUAL).to(states.device)
        known = ((ids >= 0) & (ids < len(weight))).to(states.device)
        rows = weight[ids.clamp(0, len(weight) - 1).to(weight.device)].float().to(states.device) * known[..., None]
        text = (groups != PADDING).to(states.device) & ~visual
        entering, own, projected = states[visual], rows[visual], projected.float().to(states.device)
        # A factor on the embeddings keeps their directions; where the LLM does more to them, values cannot be compared.
        same = F.cosine_similarity(states[text], rows[text], dim=-1) > SAME
        if not same.any() and len(entering) == len(projected):
            return
        some = torch.linspace(0, len(entering) - 1, min(len(entering), COMPARED)).long().to(states.device)
        factor = (states[text].norm(dim=-1) / rows[text].norm(dim=-1))[same].median() if same.any() else 1.0
        for candidate in (entering[some], entering[some] - factor * own[some]):  # Molmo 2 adds the picture to the row
            if bool((F.normalize(candidate, dim=-1) @ F.normalize(projected, dim=-1).T > SAME).any()):
                return
        if not projected.any() and not entering.any():  # a projector that nothing has trained may give zeros
            return
        fault = f"hold none of the {len(projected)} rows that the projector gave"
        if bool((F.cosine_similarity(entering, own, dim=-1) > SAME).any()):
            fault = "hold that token's own text embedding, as in a model whose pictures enter by cross-attention"
        raise ValueError(
            f"{self.name}: the {len(entering)} positions of token {self.parts.image_token_id} {fault}: name the id of "
            "the visual positions by --image-token-id, or the module whose output enters the LLM by --projector-path"
        )


def _rows(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat([tensor.flatten(0, -2) for tensor in tensors]) if tensors else None
