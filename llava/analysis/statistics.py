"""Statistics of a stream of values in bounded memory: moments by Welford's update, quantiles by a histogram.

A value falls into the bucket `ceil(log(|x|) / log(gamma))`, gamma = (1 + a) / (1 - a), whose middle is within a
relative error of a = 0.1 % of every value in it (the DDSketch of Masson et al., 2019). Buckets are counts: quantiles
depend neither on the order of the values nor on how they were split into batches or machines.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

RELATIVE_ERROR = 1e-3
"""Bound of the relative error of every quantile; count, min and max are exact, mean and std are fp64."""
TINY = 1e-12
"""Smaller magnitudes count as zero, which bounds the number of buckets."""
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))


class Stream:
    """Count, mean, standard deviation, extremes and quantiles of all values that were added."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.sum_squares = 0.0  # of the deviations from the mean
        self.min = math.inf
        self.max = -math.inf
        # Keys: the bucket of |x| for a positive value, and its mirror image for a negative one; zero has its own.
        self._positive: Counter[int] = Counter()
        self._negative: Counter[int] = Counter()
        self._zeros = 0

    def add(self, values: Any) -> None:
        """Adds values of any shape: array, tensor on any device, list or number.

        Raises:
            ValueError: a value is NaN or infinite.
        """
        if hasattr(values, "detach"):
            values = values.detach().double().cpu().numpy()
        values = np.asarray(values, dtype=np.float64).ravel()
        if not len(values):
            return
        if not np.isfinite(values).all():
            bad = len(values) - int(np.isfinite(values).sum())
            raise ValueError(f"{bad} of {len(values)} measured values are NaN or infinite")
        mean = float(values.mean())
        self._add_moments(len(values), mean, float(((values - mean) ** 2).sum()), values.min(), values.max())
        magnitude = np.abs(values)
        large = magnitude >= TINY
        buckets = np.ceil(np.log(magnitude[large]) / _LOG_GAMMA).astype(np.int64)
        for counts, chosen in ((self._positive, values[large] > 0), (self._negative, values[large] < 0)):
            keys, amounts = np.unique(buckets[chosen], return_counts=True)
            counts.update(dict(zip(keys.tolist(), amounts.tolist(), strict=True)))
        self._zeros += int((~large).sum())

    def merge(self, other: "Stream") -> None:
        """Adds everything that `other` has seen."""
        if other.count:
            self._add_moments(other.count, other.mean, other.sum_squares, other.min, other.max)
            self._positive.update(other._positive)
            self._negative.update(other._negative)
            self._zeros += other._zeros

    @property
    def std(self) -> float:
        """Standard deviation over the values themselves (divided by n); NaN where there are none."""
        return math.sqrt(self.sum_squares / self.count) if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """The value below which `percent` of all values lie, interpolated as NumPy does; NaN if there are none.

        Each of the two values that it lies between is within `RELATIVE_ERROR`.
        """
        if not self.count:
            return math.nan
        values, counts = self._table()
        rank = percent / 100 * (self.count - 1)
        below = math.floor(rank)
        ends = np.searchsorted(np.cumsum(counts), [below, min(below + 1, self.count - 1)], side="right")
        low, high = np.clip(values[ends], self.min, self.max)
        return float(low + (rank - below) * (high - low))

    @property
    def median(self) -> float:
        return self.percentile(50)

    def histogram(self, edges: ArrayLike) -> np.ndarray:
        """Counts between consecutive `edges`, as `numpy.histogram`; each value counts where its bucket's middle is."""
        values, counts = self._table()
        return np.histogram(np.clip(values, self.min, self.max), bins=edges, weights=counts)[0]

    def summary(self) -> dict[str, float | int]:
        """What a table shows: count, mean, std, min, max and `p1` to `p99`. NaN where there are no values."""
        if not self.count:
            names = ["mean", "std", "min", "max", *(f"p{p}" for p in PERCENTILES)]
            return {"count": 0} | dict.fromkeys(names, math.nan)
        moments = {"count": self.count, "mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        return moments | {f"p{p}": self.percentile(p) for p in PERCENTILES}

    def _add_moments(self, count: int, mean: float, sum_squares: float, low: float, high: float) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.sum_squares += sum_squares + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total
        self.min, self.max = min(self.min, float(low)), max(self.max, float(high))

    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        # Middles of the filled buckets in ascending order, and their counts.
        middle = 2 / (math.exp(_LOG_GAMMA) + 1)
        rows = [(-middle * math.exp(k * _LOG_GAMMA), n) for k, n in sorted(self._negative.items(), reverse=True)]
        rows += [(0.0, self._zeros)] if self._zeros else []
        rows += [(middle * math.exp(k * _LOG_GAMMA), n) for k, n in sorted(self._positive.items())]
        values, counts = zip(*rows, strict=True) if rows else ((), ())
        return np.array(values), np.array(counts)
