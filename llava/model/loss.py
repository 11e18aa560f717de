"""Language-model loss on supervised rows only.

Shapes: B batch, S sequence, D LLM hidden size, R supervised rows, C vocabulary.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

# Logits that exist at once. Every chunk reads the weight twice and rewrites its gradient, so a GPU takes many rows per
# chunk (1046 at a vocabulary of 128k); on a CPU larger chunks gain nothing (benchmarks/LOG.md).
_CHUNK_ELEMENTS = {"cpu": 2**25, "gpu": 2**27}


class LMHead(nn.Linear):
    """The LM head, which can also compute the loss, so that the logits [R, C] need never exist at once.

    It is called as a module in both cases, so that ZeRO-3 gathers its weight.
    """

    logits_scaling: float = 1.0  # Granite divides its logits

    # pyrefly: ignore[bad-override]  # callers pass the hidden states by position
    def forward(self, hidden_states: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [..., C] of `hidden_states` [..., D]; with `targets` [R] the fp32 sum of their cross-entropies."""
        if targets is None:
            logits = super().forward(hidden_states)
            return logits if self.logits_scaling == 1 else logits / self.logits_scaling
        if self.logits_scaling != 1:
            hidden_states = hidden_states / self.logits_scaling
        return chunked_loss(hidden_states, self.weight, targets)


def supervised_loss(
    hidden_states: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    lm_head: LMHead,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Next-token cross-entropy; only the R positions whose next token is a target are projected to the vocabulary.

    Args:
        hidden_states: [B, S, D], the decoder's normalised output.
        rows: [R] of [B * S], the positions whose next token is a target.
        targets: [R], those tokens.
        lm_head: sums the losses of [R, D] against [R].
        num_items_in_batch: number of targets of the whole optimizer step over all ranks; None takes this batch's.

    Returns:
        fp32 scalar: the sum over targets divided by `num_items_in_batch`. Without targets it is 0 but still connected
        to the graph, so that every rank runs its backward pass.
    """
    supervised = hidden_states.flatten(0, 1).index_select(0, rows)  # [R, D]
    return lm_head(supervised, targets) / (max(len(targets), 1) if num_items_in_batch is None else num_items_in_batch)


def chunked_loss(hidden_states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies in chunks of rows; gradients are computed on the way, logits are never kept."""
    device = hidden_states.device.type
    operands = [hidden_states, weight]
    if torch.is_autocast_enabled(device):  # converted once instead of for every chunk
        operands = [x.to(torch.get_autocast_dtype(device)) for x in operands]
    if not torch.is_grad_enabled():  # operands that require a gradient would otherwise get one computed here
        operands = [x.detach() for x in operands]
    return _ChunkedLoss.apply(*operands, targets)


def rows_at_a_time(rows: int, vocabulary: int, device: torch.device) -> int:
    """How many of the R supervised rows `chunked_loss` projects at once; chunks have nearly the same size."""
    most = max(1, _CHUNK_ELEMENTS["cpu" if device.type == "cpu" else "gpu"] // vocabulary)
    return max(1, math.ceil(rows / max(1, math.ceil(rows / most))))


class _ChunkedLoss(torch.autograd.Function):
    """d loss / d logits = softmax - one_hot is known in the forward pass, so that nothing of size C is saved."""

    @staticmethod
    def forward(ctx, hidden_states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        hidden_grad = torch.zeros_like(hidden_states) if wants_hidden else None  # [R, D]
        weight_grad = None  # [C, D]
        rows = rows_at_a_time(len(targets), len(weight), weight.device)
        with torch.autocast(hidden_states.device.type, enabled=False):
            for start in range(0, len(targets), rows):
                chunk, target = hidden_states[start : start + rows], targets[start : start + rows, None]
                log_probs = F.log_softmax(F.linear(chunk, weight), dim=-1, dtype=torch.float32)  # [rows, C]
                total -= log_probs.gather(1, target).sum()
                if not (wants_hidden or wants_weight):
                    continue
                gradient = log_probs.exp_()
                gradient.scatter_add_(1, target, torch.full(target.shape, -1.0, device=target.device))
                gradient = gradient.to(weight.dtype)
                if hidden_grad is not None:
                    hidden_grad[start : start + rows] = gradient @ weight
                if not wants_weight:
                    continue
                if weight_grad is None:
                    weight_grad = gradient.T @ chunk
                    if rows < len(targets):  # more will be added
                        weight_grad = weight_grad.float()
                elif weight.dtype == torch.float32:
                    weight_grad.addmm_(gradient.T, chunk)
                else:
                    weight_grad += gradient.T @ chunk
        if wants_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight)
        ctx.gradients = hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype)
        return total

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):  # pyrefly: ignore[bad-override]  # one output, one gradient
        if torch.is_grad_enabled():  # create_graph=True: the kept gradients do not depend on the inputs
            raise RuntimeError("the chunked loss has no second derivative")
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss frees its gradients in its backward pass, which can run only once")
        gradients, ctx.gradients = ctx.gradients, None
        # In place: a second copy of the weight's gradient would be the largest tensor of the step.
        return (*(None if g is None else g.mul_(grad_output.to(g.dtype)) for g in gradients), None)
