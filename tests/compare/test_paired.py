"""The statistics of a comparison against closed forms and plain resampling."""

import itertools
import math

import numpy as np
import pytest

from llava.eval.paired import compare_benchmarks, sign_test
from llava.utils.intervals import share_interval

RNG = np.random.default_rng(1)


def difference_of(differences, kinds=None, **options):
    """The result for one benchmark, from a list per seed."""
    return compare_benchmarks([np.atleast_2d(differences).astype(float)], [kinds], **options)[0][0]


def answers(won, lost, total):
    return [1] * won + [-1] * lost + [0] * (total - won - lost)


def test_sign_test_equals_the_sum_over_all_outcomes():
    for won, lost in itertools.product(range(7), repeat=2):
        total = won + lost
        sides = [sum(outcome) for outcome in itertools.product((0, 1), repeat=total)]
        as_uneven = sum(abs(2 * heads - total) >= abs(won - lost) for heads in sides)
        assert sign_test(won, lost) == pytest.approx(as_uneven / 2**total)
    assert 0 < sign_test(5200, 4800) < 1e-4  # exact whole numbers, where floats would overflow


def test_interval_is_the_normal_one_where_that_holds():
    d = RNG.choice([-1, 0, 1], p=[0.1, 0.6, 0.3], size=5000)
    result = difference_of(d)
    error = 100 * d.std() / math.sqrt(len(d))
    assert result.delta == pytest.approx(100 * d.mean())
    assert (result.low, result.high) == pytest.approx(
        (result.delta - 1.96 * error, result.delta + 1.96 * error), abs=0.1
    )


def test_questions_are_drawn_with_the_mean_of_their_seeds():
    up, same = answers(30, 10, 400), answers(10, 10, 400)
    result = difference_of([up, same])
    alone = difference_of(np.mean([up, same], axis=0))
    assert (result.delta, result.low, result.high) == (alone.delta, alone.low, alone.high)
    assert result.by_seed == (5.0, 0.0)


def test_the_interval_on_few_decided_questions_agrees_with_the_sign_test():
    for lost in range(4):
        for won in range(lost, lost + 16):
            p, result = sign_test(won, lost), difference_of(answers(won, lost, 400))
            if p > 0.12:
                assert result.low <= 0 <= result.high, (won, lost, p)
            if p < 0.02:
                assert result.low > 0, (won, lost, p)


def test_between_equal_arms_an_interval_without_zero_is_as_rare_as_promised():
    rng, wrong = np.random.default_rng(5), 0
    for trial in range(300):
        d = rng.choice([-1, 0, 1], p=[0.15, 0.7, 0.15], size=240)
        result = difference_of(d, seed=trial, resamples=2000)
        wrong += not result.low <= 0 <= result.high
    assert wrong / 300 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)


def test_mean_over_kinds_weighs_kinds_and_not_questions():
    kinds = np.array(["a"] * 90 + ["b"] * 10)
    d = np.array([0] * 90 + [1] * 10)
    assert difference_of(d).delta == pytest.approx(10) and difference_of(d, kinds).delta == pytest.approx(50)


def test_mean_over_benchmarks_draws_the_questions_of_each():
    rng = np.random.default_rng(6)
    d = [rng.choice([-1, 0, 1], size=(1, 1000)) for _ in range(4)]
    each, mean = compare_benchmarks(d, [None] * 4)
    assert mean.delta == pytest.approx(np.mean([r.delta for r in each]))
    assert mean.high - mean.low == pytest.approx((each[0].high - each[0].low) / 2, rel=0.1)


@pytest.mark.parametrize(("right", "total"), [(0, 80), (1, 80), (44, 80), (80, 80), (143, 240)])
def test_bounds_of_a_shares_interval_are_1_96_standard_errors_away(right, total):
    """Wilson's definition: the standard error is that of the end, not of the estimate."""
    low, high = share_interval(right, total)
    assert low >= 0 and high <= 1 and -1e-12 < low < right / total + 1e-12 and right / total - 1e-12 < high < 1 + 1e-12
    for end in (low, high):
        distance = abs(right / total - end)
        assert distance == pytest.approx(1.959964 * math.sqrt(max(0.0, end * (1 - end)) / total), abs=1e-6)
