"""The known name that a misspelt one must mean."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` must mean, or None; variables of other programs must never look like ours.

    A name is near if nine tenths of its letters agree or if it has the same letters in another order. Case, `-`, `_`
    and a final `s` do not count.
    """
    plain = {_plain(candidate): candidate for candidate in sorted(known)}
    letters = sorted(_plain(name))
    near = get_close_matches(_plain(name), plain, 1, 0.9) or [other for other in plain if sorted(other) == letters]
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower().removesuffix("s")
