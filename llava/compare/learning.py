"""Accuracy over training: how many samples an arm needs to reach a given accuracy, with an interval.

The trainer asks held-out questions every so many steps (`--eval_generate`) and logs the share of right answers. An
arm's curve is the mean over its seeds; it has reached an accuracy where it first gets there, between two points by a
straight line. The interval draws seeds with replacement, and the right answers at each point from a binomial.
"""

from collections.abc import Sequence

import numpy as np

from llava.intervals import CONFIDENCE

LEVELS = (0.5, 0.8)
"""Shares of the way from chance to the baseline's last accuracy; the accuracies for which samples are counted."""
RESAMPLES = 2000


def samples_to_reach(
    accuracy: float, samples: Sequence[float], shares: np.ndarray, questions: int, seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """Samples that the mean curve needs to reach `accuracy`, and the ends of the interval; None: more than were seen.

    Args:
        samples: seen at each point [K], the first one 0.
        shares: of right answers [S, K].
        questions: that each share is of.
    """
    rng = np.random.default_rng(seed)
    shares = np.asarray(shares)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = shares[rng.integers(len(shares), size=len(shares))]
        drawn.append(first_reached(accuracy, samples, (rng.binomial(questions, chosen) / questions).mean(axis=0)))
    ends = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    values = (first_reached(accuracy, samples, shares.mean(axis=0)), *ends)
    return tuple(float(value) if np.isfinite(value) else None for value in values)


def first_reached(accuracy: float, samples: Sequence[float], curve: np.ndarray) -> float:
    """Where the curve [K] over `samples` [K] first is at `accuracy`; infinity where it never is."""
    above = np.flatnonzero(curve >= accuracy)
    if not len(above):
        return float("inf")
    at = int(above[0])
    if at == 0:
        return float(samples[0])
    low, high = curve[at - 1], curve[at]
    return float(samples[at - 1] + (accuracy - low) / (high - low) * (samples[at] - samples[at - 1]))
