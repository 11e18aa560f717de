"""Whether an arm beats the baseline on the same questions: paired intervals, questions won and lost, verdicts.

An arm and the baseline answer the same N questions after training with the same S seeds; `d[s, i]` is the difference
of their scores for seed s and question i.

From `FEWEST_SEEDS` seeds on the interval is Student's t over the seeds' differences (`compare_seeds`): trainings are
what varies, and the questions are those asked. With fewer seeds how trainings vary is not known. There the bootstrap
draws the questions alone (`compare_benchmarks`), B times:

    D* = sum_i w*_i mean_s d[s, i]        w* the shares of N questions drawn with replacement

To each set of questions, one won and one lost by the full score are added (Bonett and Price, 2012).
Without them four questions won and none lost of 400 would be an interval above zero, while a sign test gives p = 0.125.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llava.utils.intervals import CONFIDENCE, student_cdf, student_quantile

RESAMPLES = 10_000
FEWEST_SEEDS = 3  # whose differences give an interval
MEAN = "mean"  # the name of the result over all benchmarks
IMPROVED, WORSE = "improved", "worse"  # verdicts


@dataclass(frozen=True)
class Difference:
    """An arm minus the baseline in points (percent), over other questions like these, with a 95 % interval."""

    delta: float
    low: float
    high: float
    by_seed: tuple[float, ...]  # points of each seed
    won: int  # questions that the arm answers better on average over the seeds
    lost: int
    p: float  # of the exact two-sided sign test on both; with one seed and right-or-wrong answers McNemar's


@dataclass(frozen=True)
class SeedDifference:
    """An arm minus the baseline, by Student's t over their paired seeds: mean, bounds, standard deviation, p."""

    delta: float
    low: float
    high: float
    deviation: float
    p: float
    by_seed: tuple[float, ...]


def compare_benchmarks(
    differences: Sequence[np.ndarray], strata: Sequence[np.ndarray | None], seed: int = 0, resamples: int = RESAMPLES
) -> tuple[list[Difference], Difference]:
    """One result for every benchmark, and one for their mean.

    Args:
        differences: for every benchmark, arm minus baseline [S, N], each from -1 to 1; seeds in the same order.
        strata: for every benchmark, the kind of each question [N] where the score is the mean over kinds, else None.
        seed: seed of the resampling.
    """
    rng = np.random.default_rng(seed)
    results, centres, drawn = [], [], []
    for d, kinds in zip(differences, strata, strict=True):
        centres.append(score_by_seed(d, kinds))
        members = [group.mean(axis=0) for group in members_of(d, kinds)]
        drawn.append(np.mean([resampled_mean(values, rng, resamples) for values in members], axis=0))  # [B]
        won, lost = int((d.mean(axis=0) > 0).sum()), int((d.mean(axis=0) < 0).sum())
        results.append(_difference(centres[-1], drawn[-1], won, lost))
    won, lost = sum(r.won for r in results), sum(r.lost for r in results)
    return results, _difference(np.mean(centres, axis=0), np.mean(drawn, axis=0), won, lost)


def _difference(by_seed: np.ndarray, drawn: np.ndarray, won: int, lost: int) -> Difference:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    delta, low, high = (100 * float(value) for value in (by_seed.mean(), low, high))
    return Difference(delta, low, high, tuple(100 * float(value) for value in by_seed), won, lost, sign_test(won, lost))


def compare_seeds(by_seed: Sequence[float], confidence: float = CONFIDENCE) -> SeedDifference:
    """The mean of paired differences with its interval and two-sided test; the questions are those asked.

    Raises ValueError: fewer than two seeds, whose variance is unknown.
    """
    values = np.asarray(by_seed, dtype=float)
    if (count := len(values)) < 2:
        raise ValueError(f"expected the differences of at least two seeds, found {count}")
    delta, deviation = float(values.mean()), float(values.std(ddof=1))
    error = deviation / math.sqrt(count)
    half = student_quantile((1 + confidence) / 2, count - 1) * error
    # Seeds without any variance: certain, whatever the difference.
    p = 2 * student_cdf(-abs(delta) / error, count - 1) if error else float(delta == 0)
    return SeedDifference(delta, delta - half, delta + half, deviation, p, tuple(values.tolist()))


def confidence_of(verdicts: int) -> float:
    """The confidence that each of this many intervals needs so that all together have `CONFIDENCE` (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / verdicts


def members_of(d: np.ndarray, kinds: np.ndarray | None) -> list[np.ndarray]:
    """The questions of `d` [S, N] by kind; all in one where there are no kinds."""
    return [d] if kinds is None else [d[:, kinds == kind] for kind in np.unique(kinds)]


def score_by_seed(scores: np.ndarray, kinds: np.ndarray | None) -> np.ndarray:
    """The mean over the questions, or over their kinds, for each seed [S] of `scores` [S, N]."""
    return np.mean([group.mean(axis=1) for group in members_of(scores, kinds)], axis=0)


def resampled_mean(values: np.ndarray, rng: np.random.Generator, resamples: int) -> np.ndarray:
    """Means [B] of N + 2 values drawn with replacement from `values` [N] and the two added ones, 1 and -1.

    Drawing how often each distinct value occurs is the same as drawing the values, and much faster.
    """
    distinct, counts = np.unique(np.append(values, (1.0, -1.0)), return_counts=True)
    total = int(counts.sum())
    return rng.multinomial(total, counts / total, size=resamples) @ distinct / total


def sign_test(won: int, lost: int) -> float:
    """Exact probability of a split at least as uneven if a fair coin decided each of the `won + lost` questions."""
    total, fewer = won + lost, min(won, lost)
    term = tail = 1
    for k in range(fewer):
        term = term * (total - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**total)
