"""The known name that a misspelt one must mean."""

from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` must mean, or None; variables of other programs must never look like ours.

    A name is near if it is one edit away (a letter more, fewer or another one, or two neighbours exchanged), two edits
    from nine letters on; if it lacks the digits (BF for BF16); or if it begins with a known one of several words
    (LORA_RANK for LORA_R). Case, `-`, `_` and a final `s` do not count.
    """
    plain = _plain(name)
    near = {}
    for candidate in sorted(known):
        other = _plain(candidate)
        if plain == other.rstrip("0123456789") or ("_" in candidate and plain.startswith(other)):
            near[candidate] = 1
        elif abs(len(plain) - len(other)) <= 2 and (count := edits(plain, other)) <= (1 if len(other) < 9 else 2):
            near[candidate] = count
    return min(near, key=near.__getitem__, default=None)


def edits(left: str, right: str) -> int:
    """The letters to add, leave out or replace, and neighbours to exchange, that make one word of the other."""
    before, last = [], list(range(len(right) + 1))
    for i, letter in enumerate(left, 1):
        row = [i]
        for j, other in enumerate(right, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (letter, left[i - 2]) == (right[j - 2], other):
                row[-1] = min(row[-1], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower().removesuffix("s")
