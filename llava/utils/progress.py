"""Shows how far a long job is: a bar in a terminal, elsewhere (a file, CI, SLURM) a plain line every half minute."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

from tqdm import tqdm

FIRST, EVERY = 5.0, 30.0  # seconds to the first line and between lines: a short job says nothing
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f}{unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def in_terminal() -> bool:
    """Whether somebody sees what is written now, so that a line may be redrawn."""
    return sys.stderr.isatty()


class Progress:
    """Counts what is done and shows it on stderr; can be iterated over if `of` can.

    Args:
        of: the items, or their number.
        desc: the job's name.
        unit: what is counted, in the plural.
        total: number of items, where `of` is an iterable without a length.
        done: number of items that were done before.
        hidden: shows nothing, as on all ranks but the first.
        clock: seconds.
    """

    def __init__(
        self,
        of: Iterable[Any] | float,
        desc: str,
        unit: str = "",
        *,
        total: float | None = None,
        done: float = 0,
        hidden: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.items = of if isinstance(of, Iterable) else None
        if total is None:
            total = of if isinstance(of, float | int) else len(cast(Sized, of))
        self.desc, self.unit, self.total, self.done, self.before = desc, unit, total, done, done
        self.clock, self.noted, self.printed = clock, "", False
        self.started = clock()
        self.paused = 0.0  # seconds since `started` in which the job stood still; its pace leaves them out
        self.due = self.started + FIRST
        self.bar = None
        self.hidden = hidden
        if in_terminal() and not hidden:
            shown = {"desc": desc, "unit": f" {unit}", "bar_format": _BAR, "dynamic_ncols": True, "disable": False}
            self.bar = tqdm(total=total, initial=done, **shown)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        try:
            assert self.items is not None  # else there is only a number of them
            for item in self.items:
                yield item
                self.update()
        finally:
            self.close()

    def note(self, text: str) -> None:
        """Shows `text`, such as the loss, after the count from now on."""
        self.noted = text
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)

    def update(self, count: float = 1) -> None:
        """Counts `count` more items as done."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        elif not self.hidden and (now := self.clock()) >= self.due:
            self._say(now)
            self.due = now + EVERY

    def close(self) -> None:
        """Ends the bar, or prints a last line if any was printed; further calls do nothing."""
        if self.bar is not None:
            self.bar.close()
        elif self.printed:
            self._say(self.clock())
        self.hidden, self.printed = True, False

    def say(self, text: str) -> None:
        """Prints a separate line above the bar."""
        if not self.hidden:
            tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def _say(self, now: float) -> None:
        self.printed = True
        print(self.line(now - self.started), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """How far the job is after `seconds`, and the time left at the pace so far."""
        parts = [f"{self.desc}: {self.done:.0f} of {self.total:.0f} {self.unit}".rstrip()]
        parts += [self.noted] if self.noted else []
        fresh, left = self.done - self.before, self.total - self.done
        if left > 0 and fresh > 0 and seconds > 0:
            worked = max(seconds - self.paused, 1e-9)
            pace = [] if self.noted else [f"{fresh / worked:.3g}/s"]
            parts += [*pace, f"{duration(left * worked / fresh)} left"]
        else:
            parts.append(f"{duration(seconds)} total" if left <= 0 else f"after {duration(seconds)}")
        return ", ".join(parts)


progress = Progress


def duration(seconds: float) -> str:
    """`0:07`, `12:30` or `3:05:00`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
