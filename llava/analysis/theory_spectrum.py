"""The paper's statements about attention (section B.4) against computations that do not use their formulas."""

import itertools

import numpy as np

from llava.analysis import theory_formulas as formulas
from llava.analysis.theory_checks import ROUNDING, STANDARD_ERRORS, Check


def damped_spectrum(random: np.random.Generator, samples: int) -> Check:
    """The cross-covariance along the balanced singular vectors is cos(delta) times the balanced one, by sampling."""
    size, worst, cases, example = 16, 0.0, 0, ""
    basis = np.linalg.qr(random.standard_normal((size, size)))[0] * np.linspace(1, 0.2, size)
    text = random.standard_normal((samples, size)) @ basis
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    left, values, right = np.linalg.svd(text.T @ text / samples)
    turns = random.standard_normal((samples, size))
    turns -= (turns * text).sum(axis=1, keepdims=True) * text
    turns /= np.linalg.norm(turns, axis=1, keepdims=True)
    for delta in (0.2, 0.7, 1.2):
        visual = np.cos(delta) * text + np.sin(delta) * turns
        products = (visual @ left) * (text @ right.T)  # each column's mean is one singular value
        error = (products - formulas.damping(delta) * (text @ left) * (text @ right.T)).std(axis=0) / np.sqrt(samples)
        off = np.abs(products.mean(axis=0) - formulas.damping(delta) * values) / error
        worst, cases = max(worst, off.max()), cases + size
        example = (
            f"delta {delta:g}: first singular value {values[0]:.4f} -> {products.mean(axis=0)[0]:.4f}, cos(delta) "
        )
        example += f"gives {formulas.damping(delta) * values[0]:.4f}"
    return Check(
        "singular values are damped by cos(delta)",
        "18, 19",
        cases,
        worst,
        STANDARD_ERRORS,
        "standard errors",
        example,
        "delta is the same for all pairs, |h_v| is the same in both cases (or removed by the norm in front of the "
        "attention), and u_perp is uncorrelated with the text: a drift that all pairs share adds a singular value.",
    )


def spectral_bound(random: np.random.Generator, samples: int) -> Check:
    """No matrix of spectral norm R exceeds R sum sigma_i, and one attains it; damping lowers it by cos(delta)."""
    size, radius, worst, cases = 12, 2.5, -np.inf, 0
    for _ in range(40):
        covariance = random.standard_normal((size, size))
        bound = formulas.score_bound(covariance, radius)
        left, _, right = np.linalg.svd(covariance)
        trials = random.standard_normal((50, size, size)) + 5 * random.random((50, 1, 1)) * (left @ right)
        trials *= radius / np.linalg.norm(trials, ord=2, axis=(1, 2))[:, None, None]
        scores = np.einsum("nij,ij->n", trials, covariance)
        attained = np.trace((radius * left @ right).T @ covariance)
        damped = formulas.score_bound(np.cos(0.6) * covariance, radius) - formulas.damping(0.6) * bound
        worst = max(worst, scores.max() - bound, abs(attained - bound), abs(damped))
        cases += len(scores) + 2
    frobenius = radius * np.linalg.norm(covariance)
    return Check(
        "spectral bound on the score",
        "20",
        cases,
        max(worst, 0.0),
        ROUNDING,
        "score",
        f"bound {bound:.3f}, attained {attained:.3f}, best of 50 random matrices {scores.max():.3f}",
        f"|M| is the spectral norm. With |M| the Frobenius norm the bound holds but is not reached ({frobenius:.3f}).",
    )


def snr_and_entropy(random: np.random.Generator, samples: int) -> Check:
    """A damped signal over the same noise: SNR falls by cos(delta), the softmax's entropy rises."""
    keys, draws, worst, cases, example = 64, max(samples // 50, 200), -np.inf, 0, ""
    for signal, noise, delta in itertools.product((2.0, 5.0, 10.0), (0.0, 0.2, 0.5), (0.2, 0.7, 1.2)):
        scores = noise * random.standard_normal((draws, keys))
        damped = scores.copy()
        scores[:, 0] += signal
        damped[:, 0] += signal * formulas.damping(delta)
        rise = formulas.softmax_entropy(damped) - formulas.softmax_entropy(scores)
        left = (damped[:, 0] - damped[:, 1:].mean(axis=1)).mean() / (scores[:, 0] - scores[:, 1:].mean(axis=1)).mean()
        slack = STANDARD_ERRORS * noise / np.sqrt(draws) / signal * 2  # the noise's share of the two signals' means
        worst = max(worst, -(rise.mean() - STANDARD_ERRORS * rise.std() / np.sqrt(draws)))
        worst = max(worst, abs(left - np.cos(delta)) - slack - ROUNDING)
        cases += 2
        example = f"signal {signal:g}, noise {noise:g}, delta {delta:g}: SNR x {left:.3f} (cos {np.cos(delta):.3f}), "
        example += f"entropy +{rise.mean():.2f} nats"
    scores = 3 * random.standard_normal((draws, keys))
    damped = scores.copy()
    scores[:, 0], damped[:, 0] = 2, 2 * np.cos(0.7)
    rise = (formulas.softmax_entropy(damped) - formulas.softmax_entropy(scores)).mean()
    return Check(
        "SNR falls by cos(delta), softmax entropy rises",
        "21",
        cases,
        max(worst, 0.0),
        0.0,
        "nats or ratio",
        example,
        "the signal's score lies above the softmax-weighted mean of all scores, which a noise floor near 0 implies. "
        f"A signal of 2 among noise of 3 does not: damping it changes the entropy by {rise:+.4f} nats.",
    )
