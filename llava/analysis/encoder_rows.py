"""Whether wide rows are several of the encoder's tokens side by side: they are if its modules gave those tokens.

A width that is a multiple of the encoder's proves nothing: the output of a merger can have it by chance.

Shapes: N rows, E vision hidden size, k tokens in a row.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

EQUAL = 1e-5
"""Relative difference of two sums of the same numbers in another order."""


class EncoderRows:
    """The norms of all rows [E] that any module gives while it is watched, sorted, one tensor per module.

    Args:
        width: E.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._norms: list[torch.Tensor] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block every module is watched."""
        handle = register_module_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()

    def _see(self, _: nn.Module, args: tuple, output: Any) -> None:
        parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
        for part in parts:
            if isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1:] == (self.width,):
                self._norms.append(self._norms_of(part).sort().values)

    def _norms_of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.detach().reshape(-1, self.width).float().norm(dim=-1).cpu()

    def hold(self, rows: torch.Tensor) -> bool:
        """Whether one module gave every piece [E] of `rows` [N, k * E]."""
        pieces = self._norms_of(rows)
        return any(_all_in(pieces, norms) for norms in self._norms if len(norms))


def _all_in(values: torch.Tensor, there: torch.Tensor) -> bool:
    after = torch.searchsorted(there, values).clamp(max=len(there) - 1)
    nearest = torch.minimum((there[after] - values).abs(), (there[(after - 1).clamp(min=0)] - values).abs())
    return bool((nearest <= EQUAL * values).all())
