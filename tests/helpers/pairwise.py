"""Combinations that show every two values together at least once, where all combinations would repeat the same work."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples of one value per axis; each two values of two axes are together in one of them. Greedy and repeatable."""
    axes = [list(axis) for axis in values]
    rows = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {row: {(i, j, row[i], row[j]) for i, j in combinations(range(len(axes)), 2)} for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in sorted(chosen)]
