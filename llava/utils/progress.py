"""Shows how far a long job is: a bar in a terminal, elsewhere (a file, CI, SLURM) a plain line every half minute."""

import io
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

EVERY = 30.0  # seconds between lines: a shorter job says nothing
_COUNT = "{n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"


class _Lines(io.TextIOBase):
    """A file for tqdm that gets a line of its own for every state of the bar."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)


def progress(
    of: Iterable[Any] | float, desc: str, unit: str = "items", *, done: float = 0, hidden: bool = False, **options: Any
) -> tqdm:
    """tqdm over `of`, items or their number, on stderr.

    Args:
        unit: what is counted, in the plural.
        done: number of items that were done before.
        hidden: shows nothing, as on all ranks but the first.
        options: of tqdm, such as `total` where `of` is an iterable without a length.
    """
    options |= {"iterable": of} if isinstance(of, Iterable) else {"total": of}
    if sys.stderr.isatty():
        options |= {"bar_format": "{desc}: {percentage:3.0f}%|{bar}| " + _COUNT, "dynamic_ncols": True}
    else:
        options |= {"bar_format": "{desc}: " + _COUNT, "file": _Lines(), "mininterval": EVERY, "delay": EVERY}
    return tqdm(desc=desc, unit=unit, initial=done, disable=hidden, miniters=1, smoothing=0, **options)
