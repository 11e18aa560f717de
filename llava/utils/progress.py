"""Shows how far a long job is: a bar in a terminal, elsewhere (a file, CI, SLURM) a plain line every half minute."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

EVERY = 30.0  # seconds between lines: a shorter job says nothing
_BAR = "{percentage:3.0f}%|{bar}| "
_COUNT = "{n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def in_terminal() -> bool:
    """Whether somebody sees what is written now, so that a line may be redrawn."""
    return sys.stderr.isatty()


class _Lines:
    """A file for tqdm that gets a line of its own for every state of the bar."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


class Progress(tqdm):
    """Counts what is done and shows it on stderr; can be iterated over if `of` can.

    Args:
        of: the items, or their number.
        desc: the job's name.
        unit: what is counted, in the plural.
        total: number of items, where `of` is an iterable without a length.
        done: number of items that were done before.
        hidden: shows nothing, as on all ranks but the first.
    """

    monitor_interval = 0  # no thread that looks after it: it looks at the clock itself, at every item

    def __init__(
        self,
        of: Iterable[Any] | float,
        desc: str,
        unit: str = "items",
        *,
        total: float | None = None,
        done: float = 0,
        hidden: bool = False,
    ):
        items: Any = of if isinstance(of, Iterable) else None
        shown: dict[str, Any] = {"bar_format": "{desc}: " + _BAR + _COUNT, "dynamic_ncols": True}
        if not in_terminal():
            shown = {"bar_format": "{desc}: " + _COUNT, "file": _Lines(), "mininterval": EVERY, "delay": EVERY}
        shown |= {"unit": unit, "initial": done, "disable": hidden, "miniters": 1, "smoothing": 0}
        super().__init__(items, desc, total if isinstance(of, Iterable) else of, **shown)

    def note(self, text: str) -> None:
        """Shows `text`, such as the loss, after the count from now on."""
        self.set_postfix_str(text, refresh=False)

    def say(self, text: str) -> None:
        """Prints a separate line above the bar."""
        if not self.disable:
            self.write(text, file=sys.stderr)
            sys.stderr.flush()


progress = Progress
