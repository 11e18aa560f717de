"""The known name that a misspelt one must mean."""

from collections.abc import Iterable
from difflib import get_close_matches

_CLOSE = 0.85
"""Of `difflib`'s ratio: with it no variable of the shells, schedulers and launchers in the tests looks like ours."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` must mean, or None; case, `-`, `_` and a final `s` do not count.

    It may also lack the digits (BF for BF16), begin with a known one of several words (LORA_RANK for LORA_R), or have
    its letters after the first in another order.
    """
    own, plain = _plain(name), {_plain(candidate): candidate for candidate in sorted(known)}
    for other, candidate in plain.items():
        begins = "_" in candidate and own.startswith(other)
        mixed = own[:1] == other[:1] and sorted(own) == sorted(other)
        if begins or mixed or own == other.rstrip("0123456789"):
            return candidate
    return next((plain[other] for other in get_close_matches(own, plain, 1, _CLOSE)), None)


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower().removesuffix("s")
