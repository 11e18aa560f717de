"""Confidence intervals that several rooms state."""

import math
from statistics import NormalDist

CONFIDENCE = 0.95
QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def share_interval(right: int, total: int) -> tuple[float, float]:
    """Ends of the 95 % interval of the share that `right` of `total` questions estimate (Wilson's score interval)."""
    share, z2 = right / total, QUANTILE**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = QUANTILE / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)  # rounding may lead just past either end
