"""Whether an arm beats the baseline on the same questions: paired intervals, questions won and lost, verdicts.

An arm and the baseline answer the same N questions after training with the same S seeds. `d[s, i]` is the difference of
their scores for seed s and question i. Two things vary: the questions, which stand for others of their kind, and the
training run. The bootstrap draws both, B times:

    D* = sum_i w*_i mean_s d[s, i] + sqrt(S / (S - 1)) * sum_s (v*_s - 1/S) mean_i d[s, i]

with w* the shares of N questions drawn with replacement and v* those of S seeds. The root undoes that S drawn seeds
vary by (S - 1) / S of what seeds do, which for two seeds is half. With one seed the second term is left out.

To each set of questions one that is won and one that is lost by the full score is added (Bonett and Price, 2012).
Without them four questions won and none lost of 400 would be an interval above zero, while a sign test gives p = 0.125.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llava.intervals import CONFIDENCE

RESAMPLES = 10_000
IMPROVED, UNCHANGED, WORSE = "improved", "unchanged", "worse"


@dataclass(frozen=True)
class Difference:
    """An arm minus the baseline on one benchmark, or over the mean of several.

    Attributes:
        delta: points (percent) over all seeds.
        low, high: ends of the 95 % interval, in points.
        by_seed: points of each seed.
        won, lost: questions that the arm answers better, and worse, on average over the seeds.
        p: of the exact two-sided sign test on them; with one seed and right-or-wrong answers McNemar's.
    """

    delta: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    won: int
    lost: int
    p: float

    @property
    def verdict(self) -> str:
        """`improved` or `worse` where the interval leaves out zero, else `unchanged`: no difference is shown."""
        return IMPROVED if self.low > 0 else WORSE if self.high < 0 else UNCHANGED


def compare_benchmarks(
    differences: Sequence[np.ndarray], strata: Sequence[np.ndarray | None], seed: int = 0, resamples: int = RESAMPLES
) -> tuple[list[Difference], Difference]:
    """One result for every benchmark, and one for their mean.

    Args:
        differences: of every benchmark, arm minus baseline [S, N], each from -1 to 1; seeds in the same order.
        strata: of every benchmark the kind of each question [N] where the score is the mean over kinds, else None.
        seed: of the resampling.
    """
    rng = np.random.default_rng(seed)
    num_seeds = differences[0].shape[0]
    shares = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=resamples) / num_seeds  # [B, S]
    results, centres, drawn = [], [], []
    for d, kinds in zip(differences, strata, strict=True):
        members = [d] if kinds is None else [d[:, kinds == kind] for kind in np.unique(kinds)]
        by_seed = np.mean([group.mean(axis=1) for group in members], axis=0)  # [S]
        sample_part = np.mean([resampled_mean(group.mean(axis=0), rng, resamples) for group in members], axis=0)  # [B]
        centres.append(by_seed)
        drawn.append(sample_part + seed_part(by_seed, shares))
        won, lost = int((d.mean(axis=0) > 0).sum()), int((d.mean(axis=0) < 0).sum())
        results.append(_difference(by_seed, drawn[-1], won, lost))
    won, lost = sum(r.won for r in results), sum(r.lost for r in results)
    return results, _difference(np.mean(centres, axis=0), np.mean(drawn, axis=0), won, lost)


def resampled_mean(values: np.ndarray, rng: np.random.Generator, resamples: int) -> np.ndarray:
    """Means [B] of as many values drawn with replacement from `values` [N] and the two added ones.

    Drawing how often each distinct value comes is the same as drawing the values, and much faster.
    """
    distinct, counts = np.unique(np.append(values, (1.0, -1.0)), return_counts=True)
    total = int(counts.sum())
    return rng.multinomial(total, counts / total, size=resamples) @ distinct / total


def seed_part(by_seed: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """What drawing seeds adds [B], from each seed's difference [S] and the drawn shares [B, S]."""
    num_seeds = len(by_seed)
    if num_seeds == 1:
        return np.zeros(len(shares))
    return math.sqrt(num_seeds / (num_seeds - 1)) * (shares - 1 / num_seeds) @ by_seed


def _difference(by_seed: np.ndarray, drawn: np.ndarray, won: int, lost: int) -> Difference:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    points = tuple(100 * float(value) for value in by_seed)
    return Difference(
        100 * float(by_seed.mean()), 100 * float(low), 100 * float(high), points, won, lost, sign_test(won, lost)
    )


def sign_test(won: int, lost: int) -> float:
    """Probability of a split at least as uneven if each of the `won + lost` were decided by a fair coin, exactly."""
    total, fewer = won + lost, min(won, lost)
    term = tail = 1
    for k in range(fewer):
        term = term * (total - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**total)
