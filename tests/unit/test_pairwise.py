"""`pairwise`, by which tests choose among combinations."""

from itertools import combinations, product

import pytest
from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (7, 3, 2, 2), (3, 3, 3, 3), (1, 4)])
def test_every_two_values_stand_together_in_a_combination_that_exists(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = pairwise(*axes)
    assert set(rows) <= set(product(*axes)) and len(set(rows)) == len(rows)
    for i, j in combinations(range(len(axes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(axes[i], axes[j]))
    assert pairwise(*axes) == rows


def test_there_are_far_fewer_than_all():
    assert len(pairwise(dict.fromkeys("abcdefg"), range(3), range(2), range(2))) == 21 < 84
