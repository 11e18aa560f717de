"""Confidence intervals that several rooms state."""

import math
from statistics import NormalDist

CONFIDENCE = 0.95
QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def share_interval(right: float, total: float) -> tuple[float, float]:
    """Ends of the 95 % interval of the share that `right` of `total` questions estimate (Wilson's score interval)."""
    share, z2 = right / total, QUANTILE**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = QUANTILE / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)  # rounding may lead just past either end


def student_cdf(t: float, freedom: int) -> float:
    """The distribution function of Student's t with whole degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    square, even = math.cos(angle) ** 2, freedom % 2 == 0
    term = total = 1.0 if even else math.cos(angle)
    for k in range(1 if even else 2, freedom - 2, 2):
        term *= square * k / (k + 1)
        total += term
    if even:
        return (1 + math.sin(angle) * total) / 2
    return 0.5 + (angle + (math.sin(angle) * total if freedom > 1 else 0)) / math.pi


def student_quantile(share: float, freedom: int) -> float:
    """The value below which Student's t is with this probability."""
    low, high = -1e6, 1e6
    while high - low > 1e-12 * max(1.0, abs(low)):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < share else (low, middle)
    return (low + high) / 2
