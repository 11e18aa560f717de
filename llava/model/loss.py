"""Language-model loss on supervised rows only.

Shapes: B batch, S sequence, D LLM hidden size, R supervised rows, C vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F

from llava.constants import IGNORE_INDEX


def supervised_loss(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    lm_head: nn.Module,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Next-token cross-entropy; only the R positions whose next token is a target are projected to the vocabulary.

    Args:
        hidden_states: [B, S, D], the decoder's normalised output.
        labels: [B, S] unshifted, IGNORE_INDEX where nothing is to be learnt.
        lm_head: projects [R, D] to [R, C]; called as a module, so that ZeRO-3 gathers its weight.
        num_items_in_batch: targets of the whole optimizer step over all ranks; None takes this batch's own number.

    Returns:
        fp32 scalar: the sum over targets divided by `num_items_in_batch`. Without any target it is 0 and still
        connected to the graph, so that every rank runs its backward pass.
    """
    targets = labels[:, 1:]
    supervised = targets != IGNORE_INDEX
    targets = targets[supervised]
    logits = lm_head(hidden_states[:, :-1][supervised]).float()
    total = F.cross_entropy(logits, targets, reduction="sum")
    if num_items_in_batch is None:
        num_items_in_batch = max(len(targets), 1)
    return total / num_items_in_batch
