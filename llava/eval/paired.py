"""Whether an arm beats the baseline on the same questions: paired intervals, questions won and lost, verdicts.

An arm and the baseline answer the same N questions after training with the same S seeds. `d[s, i]` is the difference of
their scores for seed s and question i. Two things vary: the questions, a sample of their kind, and the
training run. The bootstrap draws both, B times:

    D* = sum_i w*_i mean_s d[s, i] + sqrt(S / (S - 1)) * sum_s (v*_s - 1/S) mean_i d[s, i]

with w* the shares of N questions drawn with replacement and v* those of S seeds. S drawn seeds vary by
only (S - 1) / S of what seeds vary by, which for two seeds is half; the root corrects this. With one seed there is no
second term.

To each set of questions, one won and one lost by the full score are added (Bonett and Price, 2012).
Without them four questions won and none lost of 400 would be an interval above zero, while a sign test gives p = 0.125.

`compare_arms` is for a study of many arms. Its intervals are wider (Bonferroni), in two families: those of the mean of
all benchmarks are corrected for the arms, those of single benchmarks for arms times benchmarks. Each family excludes
a true value in at most one study of twenty, both together in one of ten. Three seeds say little about how training runs
vary, so there v* is drawn from the deviations of every arm's seeds from that arm's mean: runs of all arms are taken to
vary alike.

`score_benchmarks` is about scores themselves. It draws questions in the same way, and seeds from Student's t.

`compare_seeds` is for a study whose comparisons were named before its runs: each has its own variance, from its own
seeds. `resampled_interval` also draws questions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llava.utils.intervals import CONFIDENCE, student_cdf, student_quantile

RESAMPLES = 10_000
RESAMPLES_OF_ARMS = 40_000  # their intervals end further out
MEAN = "mean"
"""The name of the result over all benchmarks."""
IMPROVED, UNCHANGED, WORSE = "improved", "unchanged", "worse"


@dataclass(frozen=True)
class Difference:
    """An arm minus the baseline on one benchmark, or over the mean of several.

    Attributes:
        delta: points (percent) over all seeds.
        low, high: bounds of the interval, in points; 95 % unless `compare_benchmarks` got another confidence.
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
        """`improved` or `worse` where the interval excludes zero, else `unchanged`: no difference is shown."""
        return IMPROVED if self.low > 0 else WORSE if self.high < 0 else UNCHANGED


def compare_benchmarks(
    differences: Sequence[np.ndarray],
    strata: Sequence[np.ndarray | None],
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: tuple[float, float] = (CONFIDENCE, CONFIDENCE),
    pool: Sequence[np.ndarray] | None = None,
) -> tuple[list[Difference], Difference]:
    """One result for every benchmark, and one for their mean.

    Args:
        differences: for every benchmark, arm minus baseline [S, N], each from -1 to 1; seeds in the same order.
        strata: for every benchmark, the kind of each question [N] where the score is the mean over kinds, else None.
        seed: seed of the resampling.
        confidence: that of the intervals of single benchmarks, and that of the interval of their mean.
        pool: for every benchmark, the values [P] that seeds are drawn from in place of this arm's own.
    """
    rng = np.random.default_rng(seed)
    num_seeds = differences[0].shape[0]
    size = num_seeds if pool is None else len(pool[0])
    shares = rng.multinomial(num_seeds, np.full(size, 1 / size), size=resamples) / num_seeds  # [B, S or P]
    results, centres, drawn = [], [], []
    for index, (d, kinds) in enumerate(zip(differences, strata, strict=True)):
        members = members_of(d, kinds)
        by_seed = score_by_seed(d, kinds)
        sample_part = np.mean([resampled_mean(group.mean(axis=0), rng, resamples) for group in members], axis=0)  # [B]
        centres.append(by_seed)
        drawn.append(sample_part + seed_part(by_seed if pool is None else pool[index], shares, num_seeds))
        won, lost = int((d.mean(axis=0) > 0).sum()), int((d.mean(axis=0) < 0).sum())
        results.append(_difference(by_seed, drawn[-1], won, lost, confidence[0]))
    won, lost = sum(r.won for r in results), sum(r.lost for r in results)
    return results, _difference(np.mean(centres, axis=0), np.mean(drawn, axis=0), won, lost, confidence[1])


def compare_arms(
    differences: Mapping[str, Sequence[np.ndarray]],
    strata: Sequence[np.ndarray | None],
    resamples: int = RESAMPLES_OF_ARMS,
) -> dict[str, tuple[list[Difference], Difference]]:
    """What `compare_benchmarks` gives, for every arm of a study: corrected for their number, seeds pooled.

    Args:
        differences: for every arm and every benchmark, arm minus baseline [S, N].
        strata: see `compare_benchmarks`.
    """
    pool = []
    for index, kinds in enumerate(strata):
        by_seed = [score_by_seed(benchmarks[index], kinds) for benchmarks in differences.values()]
        pool.append(np.concatenate([seeds - seeds.mean() for seeds in by_seed]))
    confidence = confidence_of(len(differences) * len(strata)), confidence_of(len(differences))
    return {
        arm: compare_benchmarks(benchmarks, strata, resamples=resamples, confidence=confidence, pool=pool)
        for arm, benchmarks in differences.items()
    }


Interval = tuple[float, float, float]
"""A score and the bounds of its 95 % interval, in percent."""


def score_intervals(scores: Mapping[str, np.ndarray], resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Every arm's mean score with its interval; see `score_benchmarks`.

    Args:
        scores: for every arm, scores [S, N] from 0 to 1.
    """
    of_one = score_benchmarks({arm: [of_arm] for arm, of_arm in scores.items()}, [None], resamples)
    return {arm: mean for arm, (_, mean) in of_one.items()}


def score_benchmarks(
    scores: Mapping[str, Sequence[np.ndarray]], strata: Sequence[np.ndarray | None], resamples: int = RESAMPLES
) -> dict[str, tuple[list[Interval], Interval]]:
    """Every arm's score on each benchmark and on their mean, with 95 % intervals over other questions and other seeds.

    The answers of several seeds to one question are not independent: questions are drawn with all their answers. How
    training runs vary is estimated from the seeds of all arms, each about its arm's mean; these A (S - 1) degrees of
    freedom are few, hence Student's t.

    Args:
        scores: for every arm and every benchmark, scores [S, N] from 0 to 1; seeds in the same order.
        strata: see `compare_benchmarks`.
    """
    rng, parts = np.random.default_rng(0), range(len(strata))
    by_seed = {  # [S, benchmarks]
        arm: np.transpose([score_by_seed(of_arm[part], strata[part]) for part in parts])
        for arm, of_arm in scores.items()
    }
    by_seed = {arm: np.column_stack([values, values.mean(axis=1)]) for arm, values in by_seed.items()}
    deviations = np.concatenate([values - values.mean(axis=0) for values in by_seed.values()])
    freedom, of_seeds = len(deviations) - len(scores), np.zeros((resamples, len(strata) + 1))
    if freedom:
        num_seeds = len(deviations) / len(scores)
        error = np.sqrt((deviations**2).sum(axis=0) / freedom / num_seeds)
        of_seeds = rng.standard_t(freedom, size=resamples)[:, None] * error
    intervals = {}
    for arm, of_arm in scores.items():
        questions = np.transpose([_drawn_score(of_arm[part], strata[part], rng, resamples) for part in parts])
        drawn = np.column_stack([questions, questions.mean(axis=1)]) + of_seeds
        low, high = np.clip(np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0), 0, 1)
        bounds = 100 * np.array([by_seed[arm].mean(axis=0), low, high])
        *each, mean = [(float(score), float(low), float(high)) for score, low, high in bounds.T]
        intervals[arm] = (each, mean)
    return intervals


def _drawn_score(scores: np.ndarray, kinds: np.ndarray | None, rng: np.random.Generator, resamples: int) -> np.ndarray:
    """The score over drawn questions [B]; one right and one wrong answer are added."""
    groups = members_of(scores, kinds)
    return np.mean([resampled_mean(group.mean(axis=0), rng, resamples, added=(1.0, 0.0)) for group in groups], axis=0)


@dataclass(frozen=True)
class SeedDifference:
    """An arm minus the baseline, by Student's t over their paired seeds.

    Attributes:
        delta: mean over the seeds.
        low, high: bounds of the interval.
        deviation: standard deviation of the seeds' differences.
        p: of the two-sided test.
        by_seed: the difference of each seed.
    """

    delta: float
    low: float
    high: float
    deviation: float
    p: float
    by_seed: tuple[float, ...]


def compare_seeds(by_seed: Sequence[float], confidence: float = CONFIDENCE) -> SeedDifference:
    """The mean of paired differences with its interval and test; the questions are those asked.

    Raises:
        ValueError: fewer than two seeds, whose variance is unknown.
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


def resampled_interval(
    differences: Sequence[np.ndarray], confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Bounds of the interval of the mean over tasks when seeds and, in each task, questions are drawn again.

    The deviations of S drawn seeds are stretched by sqrt(S / (S - 1)), as in `compare_benchmarks`; drawing questions
    needs no such factor at their number.

    Args:
        differences: for every task, arm minus baseline [S, N].
    """
    rng, num_seeds = np.random.default_rng(0), len(differences[0])
    shares = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=resamples) / num_seeds  # [B, S]
    stretched = 1 / num_seeds + math.sqrt(num_seeds / (num_seeds - 1)) * (shares - 1 / num_seeds)
    drawn = np.zeros(resamples)
    for d in differences:
        count = d.shape[1]
        weights = rng.multinomial(count, np.full(count, 1 / count), size=resamples) / count  # [B, N]
        drawn += ((stretched @ d) * weights).sum(axis=1) / len(differences)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def confidence_of(verdicts: int) -> float:
    """The confidence that each of this many intervals needs so that all together have `CONFIDENCE` (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / verdicts


def members_of(d: np.ndarray, kinds: np.ndarray | None) -> list[np.ndarray]:
    """The questions of `d` [S, N] by kind; all in one where there are no kinds."""
    return [d] if kinds is None else [d[:, kinds == kind] for kind in np.unique(kinds)]


def score_by_seed(scores: np.ndarray, kinds: np.ndarray | None) -> np.ndarray:
    """The mean over the questions, or over their kinds, for each seed [S] of `scores` [S, N]."""
    return np.mean([group.mean(axis=1) for group in members_of(scores, kinds)], axis=0)


def resampled_mean(
    values: np.ndarray, rng: np.random.Generator, resamples: int, added: tuple[float, float] = (1.0, -1.0)
) -> np.ndarray:
    """Means [B] of N + 2 values drawn with replacement from `values` [N] and the two added ones.

    Drawing how often each distinct value occurs is the same as drawing the values, and much faster.
    """
    distinct, counts = np.unique(np.append(values, added), return_counts=True)
    total = int(counts.sum())
    return rng.multinomial(total, counts / total, size=resamples) @ distinct / total


def seed_part(values: np.ndarray, shares: np.ndarray, num_seeds: int) -> np.ndarray:
    """What drawing seeds adds to D* [B], from the values [P] that seeds are drawn from and the drawn shares [B, P]."""
    if num_seeds == 1:
        return np.zeros(len(shares))
    return math.sqrt(num_seeds / (num_seeds - 1)) * (shares - 1 / len(values)) @ values


def _difference(by_seed: np.ndarray, drawn: np.ndarray, won: int, lost: int, confidence: float) -> Difference:
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    points = tuple(100 * float(value) for value in by_seed)
    return Difference(
        100 * float(by_seed.mean()), 100 * float(low), 100 * float(high), points, won, lost, sign_test(won, lost)
    )


def sign_test(won: int, lost: int) -> float:
    """Exact probability of a split at least as uneven if a fair coin decided each of the `won + lost` questions."""
    total, fewer = won + lost, min(won, lost)
    term = tail = 1
    for k in range(fewer):
        term = term * (total - k) // (k + 1)
        tail += term
    return min(1.0, 2 * tail / 2**total)
