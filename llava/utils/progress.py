"""Shows how far a long job is: a bar in a terminal, elsewhere (a file, CI, SLURM) a plain line every half minute."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

EVERY = 30.0  # seconds between lines: a shorter job says nothing
_COUNT = "{n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"


def in_terminal() -> bool:
    """Whether somebody sees what is written now, so that a line may be redrawn."""
    return sys.stderr.isatty()


class _Lines:
    """A file for tqdm that gets a line of its own for every state of the bar."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Nothing is left to flush."""


class progress(tqdm):
    """tqdm over `of`, items or their number, on stderr.

    Args:
        unit: what is counted, in the plural.
        done: number of items that were done before.
        hidden: shows nothing, as on all ranks but the first.
        options: of tqdm, such as `total` where `of` is an iterable without a length.
    """

    monitor_interval = 0  # no thread that looks after it: it looks at the clock itself, at every item

    def __init__(
        self,
        of: Iterable[Any] | float,
        desc: str,
        unit: str = "items",
        *,
        done: float = 0,
        hidden: bool = False,
        **options,
    ):
        items: Any = of if isinstance(of, Iterable) else None
        if items is None:
            options["total"] = of
        shown: dict[str, Any] = {"bar_format": "{desc}: {percentage:3.0f}%|{bar}| " + _COUNT, "dynamic_ncols": True}
        if not in_terminal():
            shown = {"bar_format": "{desc}: " + _COUNT, "file": _Lines(), "mininterval": EVERY, "delay": EVERY}
        shown |= {"unit": unit, "initial": done, "disable": hidden, "miniters": 1, "smoothing": 0}
        super().__init__(items, desc, **options, **shown)
