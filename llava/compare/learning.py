"""Accuracy over training: how many samples an arm needs to reach a given accuracy, with an interval.

The trainer evaluates held-out questions at intervals (`--eval_generate`) and logs the share of right answers. An
arm's curve is the mean over its seeds, with straight lines between the points; it reaches an accuracy where it first
gets there. The interval draws seeds with replacement, and the right answers at each point from a binomial of as many
questions as a seed has: all seeds have the same questions, so more seeds are not more questions.
"""

from collections.abc import Sequence

import numpy as np

from llava.utils.intervals import CONFIDENCE

LEVELS = (0.5, 0.8)
"""Accuracies for which samples are counted, as shares of the way from chance to the baseline's last accuracy."""
RESAMPLES = 2000


def samples_to_reach(
    accuracy: float, samples: Sequence[float], shares: np.ndarray, questions: int, seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """Samples that the mean curve needs to reach `accuracy`, and the bounds of the interval; None means more
    than were seen.

    Args:
        samples: number of samples seen at each point [K], the first one 0.
        shares: share of right answers of each seed at each point [S, K].
        questions: number of questions that each share is taken over.
    """
    rng = np.random.default_rng(seed)
    shares = np.asarray(shares)
    chosen = shares[rng.integers(len(shares), size=(RESAMPLES, len(shares)))]  # [B, S, K]
    drawn = first_reached(accuracy, samples, rng.binomial(questions, chosen.mean(axis=1)) / questions)
    ends = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="nearest")
    values = (*first_reached(accuracy, samples, shares.mean(axis=0)[None]), *ends)
    whole, low, high = (float(value) if np.isfinite(value) else None for value in values)
    return whole, low, high


def first_reached(accuracy: float, samples: Sequence[float], curves: np.ndarray) -> np.ndarray:
    """The samples [B] at which each curve [B, K] over `samples` [K] first has `accuracy`; infinity if it never does."""
    seen, rows = np.asarray(samples, dtype=float), np.arange(len(curves))
    above = curves >= accuracy
    at = above.argmax(axis=1)
    before = np.maximum(at - 1, 0)
    low, high = curves[rows, before], curves[rows, at]
    part = np.where(at > 0, (accuracy - low) / np.where(high > low, high - low, 1), 0)
    reached = seen[before] + part * (seen[at] - seen[before])
    return np.where(above.any(axis=1), reached, np.inf)
