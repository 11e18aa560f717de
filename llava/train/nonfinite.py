"""Skips steps whose loss or gradient is infinite or not a number, and names the records at fault.

A loss that is not finite makes its own gradient NaN, so that one number shows both: the global gradient norm, which all
ranks share. DeepSpeed skips such a step itself; elsewhere the gradients are dropped before the optimizer sees them.
Learning rate and optimizer state stay as they are; only the data moves on. Under fp16 the loss scaler does all this.
"""

import logging
import math
from collections.abc import Sequence

import torch
from accelerate.utils import gather_object

from llava.data.records import Record
from llava.data.table import name_of

logger = logging.getLogger(__name__)
_NAMED = 16  # records per micro-batch that a message names


class NonFiniteError(RuntimeError):
    """Too many steps in a row were skipped."""


def poisoned(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, with the gradient NaN if the loss is not finite: an infinite loss may have a finite gradient."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def finite_or(loss: torch.Tensor, substitute: torch.Tensor) -> torch.Tensor:
    """`loss`, or `substitute` if it is not finite; the host does not wait to see which."""
    return torch.where(loss.isfinite(), loss, substitute)


class NonFiniteGuard:
    """Counts the steps in a row that were skipped.

    Args:
        records: the training's records, to name samples.
        limit: `--max_nonfinite_steps`.
    """

    def __init__(self, records: Sequence[Record], limit: int):
        self.records, self.limit = records, limit
        self.in_a_row = self.total = 0
        self.micro_batches: list[tuple[list[int], torch.Tensor | None]] = []

    def start_step(self, micro_batches: list[list[int]]) -> None:
        """Notes the samples that this rank computes in the coming step, by micro-batch."""
        self.micro_batches = [(samples, None) for samples in micro_batches]

    def add_loss(self, loss: torch.Tensor) -> None:
        """Notes the loss of the next micro-batch, which stays on its device."""
        position = next((i for i, (_, known) in enumerate(self.micro_batches) if known is None), None)
        if position is not None:
            self.micro_batches[position] = (self.micro_batches[position][0], loss)

    def is_applicable(self, grad_norm: torch.Tensor | float, step: int) -> bool:
        """Whether the step may be applied; if not, logs its records. Every rank must call.

        Args:
            grad_norm: the global gradient norm of the step.
            step: number of the step, from 1.

        Raises:
            NonFiniteError: it is the last of `limit` such steps in a row.
        """
        if math.isfinite(float(grad_norm)):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.total += 1
        message = f"skipped step {step}: gradient norm {float(grad_norm)}; {self._suspects()}"
        logger.warning("%s", message)
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"{message}. That is {self.in_a_row} in a row (--max_nonfinite_steps {self.limit}); the weights in the "
                "last checkpoint are finite. Look at these records, or lower the learning rate"
            )
        return False

    def _suspects(self) -> str:
        """The records of the micro-batches whose loss is not finite, on any rank; of all if every loss is finite."""
        own = [(samples, math.nan if loss is None else float(loss)) for samples, loss in self.micro_batches]
        ranks = gather_object([[(self._names(samples), loss) for samples, loss in own]])
        bad = [(rank, *batch) for rank, batches in enumerate(ranks) for batch in batches if not math.isfinite(batch[1])]
        if bad:
            return "; ".join(f"loss {loss} on rank {rank}: {names}" for rank, names, loss in bad)
        every = "; ".join(names for batches in ranks for names, _ in batches)
        return f"every loss is finite; records of the step: {every}"

    def _names(self, samples: list[int]) -> str:
        samples = [i if i >= 0 else ~i for i in samples]
        names = ", ".join(name_of(self.records, sample) for sample in samples[:_NAMED])
        return names + (f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else "")
