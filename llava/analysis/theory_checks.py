"""The paper's statements about turning tokens (sections 3, B.1 to B.3), each against drawn vectors."""

import itertools
from typing import NamedTuple

import numpy as np

from llava.analysis import theory_formulas as formulas

STANDARD_ERRORS = 5.0
"""Monte Carlo bound: chance alone exceeds it in one of 1.7 million comparisons."""
ROUNDING = 1e-9
PHIS = (0.3, 1.0, np.pi / 2, 2.0, 2.8)


class Check(NamedTuple):
    """One statement and its result. It is refuted where `deviation` exceeds `allowed`.

    Attributes:
        cases: comparisons made.
        deviation, unit: the worst difference between statement and computation, and its unit.
        example: one comparison in words.
        condition: what must hold besides what the paper says, with a counterexample; empty where nothing must.
    """

    statement: str
    equation: str
    cases: int
    deviation: float
    allowed: float
    unit: str
    example: str
    condition: str = ""

    @property
    def confirmed(self) -> bool:
        return bool(self.deviation <= self.allowed)  # NaN is no confirmation


def update_ignores_norm(random: np.random.Generator, samples: int) -> Check:
    """A sub-layer after a norm gives the same update whatever the scale of its input (paper section 1)."""
    size = 64
    weights = [random.standard_normal((size, size)) / np.sqrt(size) for _ in range(2)]

    def update(state: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight @ np.tanh(state / np.sqrt(np.mean(state**2)))

    state = random.standard_normal(size)
    scales = (0.01, 1.0, 30.0, 1000.0)
    reference = update(state, weights[0])
    worst = max(np.linalg.norm(update(s * state, weights[0]) - reference) / np.linalg.norm(reference) for s in scales)

    def block(state: np.ndarray) -> np.ndarray:  # two sub-layers, as attention and MLP
        middle = state + update(state, weights[0])
        return middle + update(middle, weights[1]) - state

    turned = np.degrees(formulas.angle_between(block(state), block(30 * state)))
    shrunk = 1 - 1 / np.sqrt(1 + 1e-5 * 3072 / 1.09**2)
    return Check(
        "the update does not depend on |h|",
        "section 1",
        len(scales),
        worst,
        ROUNDING,
        "relative",
        f"input scaled by {scales[-1]:g}: update changes by {worst:.1e}",
        "per sub-layer, not per block: the second sub-layer sees state + first update, so that scaling the input of a "
        f"random block by 30 turns its update by {turned:.0f} degrees. The norm's eps breaks it for tiny states: at "
        f"|h| = 1.09, D = 3072, eps = 1e-5 (Llama-3.2-3B's text) what leaves the norm is {100 * shrunk:.1f} % smaller.",
    )


def angular_velocity(random: np.random.Generator, samples: int) -> Check:
    """The angle between h and h + update, measured on vectors, against the formula."""
    worst, cases, example = 0.0, 0, ""
    for size, norm, update, phi in itertools.product((2, 64, 2048), (0.8, 3.0, 60.0), (0.1, 1.0, 5.0), PHIS):
        state = random.standard_normal(size)
        state *= norm / np.linalg.norm(state)
        moved = _moved(state, update, phi, random)
        measured, predicted = formulas.angle_between(state, moved), formulas.angular_velocity(norm, update, phi)
        worst, cases = max(worst, abs(measured - predicted)), cases + 1
        if (norm, update, phi) == (3.0, 1.0, 1.0):
            example = f"|h| 3, C 1, phi 1: formula {predicted:.6f}, vectors {measured:.6f} rad"
    return Check(
        "angular velocity",
        "8, 13",
        cases,
        worst,
        ROUNDING,
        "rad",
        example,
        "w is taken in (0, pi): where C cos(phi) < -|h|, w exceeds 90 degrees and its tangent is negative.",
    )


def slower_with_norm(random: np.random.Generator, samples: int) -> Check:
    """w falls with |h| at equal C and phi: differences along a grid of norms, measured on vectors."""
    norms = np.geomspace(0.01, 1000, 200)
    worst, cases = -np.inf, 0
    for update, phi in itertools.product((0.1, 1.0, 10.0), PHIS):
        direction = np.array([np.cos(phi), np.sin(phi)])
        states = norms[:, None] * np.array([1.0, 0.0])
        measured = formulas.angle_between(states, states + update * direction)
        predicted = formulas.angular_velocity(norms, update, phi)
        worst = max(worst, np.diff(measured).max(), np.diff(predicted).max())
        cases += len(norms) - 1
    w_v, w_t = (float(formulas.angular_velocity(norm, 1.0, np.pi / 2)) for norm in (20.0, 1.0))
    uneven = float(formulas.angular_velocity(20.0, 25.0, np.pi / 2))
    return Check(
        "the larger norm turns more slowly",
        "9, 14",
        cases,
        max(worst, 0.0),
        0.0,
        "rad",
        f"C 1, phi 90 degrees: w {w_v:.4f} rad at |h| 20, {w_t:.4f} at |h| 1",
        "sin(phi) > 0; and the paper's assumption of one C for all tokens decides: an update 25 times as long turns "
        f"the token of norm 20 by {uneven:.2f} rad, more than the other. --model measures C and phi in a model.",
    )


def theorem_1(random: np.random.Generator, samples: int) -> Check:
    """E[cos Theta'] = cos(w_v) cos(w_t) cos Theta, by drawing both updates as vectors."""
    worst, cases, example = 0.0, 0, ""
    grid = itertools.product((8, 64), ((20.0, 1.0), (3.0, 3.0)), (1.0, np.pi / 2, 2.2), (0.2, 0.8))
    for size, norms, phi, theta in grid:
        cosines = _cosines_after(size, norms, 1.0, phi, theta, samples, random)
        error = cosines.std() / np.sqrt(samples)
        w_v, w_t = (formulas.angular_velocity(norm, 1.0, phi) for norm in norms)
        predicted = formulas.retention(w_v, w_t) * np.cos(theta)
        off = abs(cosines.mean() - predicted) / error
        if off >= worst:
            bound = STANDARD_ERRORS * error
            example = f"worst case: predicted {predicted:.5f}, measured {cosines.mean():.5f} +- {bound:.5f}"
        worst, cases = max(worst, off), cases + 1
    same = _cosines_after(64, (20.0, 1.0), 1.0, np.pi / 2, 0.8, samples, random, together=True)
    w_v, w_t = (formulas.angular_velocity(norm, 1.0, np.pi / 2) for norm in (20.0, 1.0))
    predicted = formulas.retention(w_v, w_t) * np.cos(0.8)
    return Check(
        "Theorem 1: E[cos Theta'] = rho cos Theta",
        "15, 16",
        cases,
        worst,
        STANDARD_ERRORS,
        "standard errors",
        example,
        "the two directions are uncorrelated. Where both tokens are pushed the same way the cosine falls less: "
        f"{same.mean():.4f} instead of {predicted:.4f}.",
    )


def _cosines_after(size, norms, update, phi, theta, samples, random, together=False) -> np.ndarray:
    # Cosines [samples] of a visual and a text state that were at angle theta, after one symmetric random update each.
    units = np.zeros((2, 1, size))
    units[0, 0, 0] = 1.0
    units[1, 0, :2] = np.cos(theta), np.sin(theta)
    turns = random.standard_normal((1 if together else 2, samples, size))  # one push for both, or one for each
    turns = turns - (turns * units).sum(axis=-1, keepdims=True) * units
    turns /= np.linalg.norm(turns, axis=-1, keepdims=True)
    moved = np.array(norms)[:, None, None] * units + update * (np.cos(phi) * units + np.sin(phi) * turns)
    return (moved[0] * moved[1]).sum(axis=-1) / np.linalg.norm(moved, axis=-1).prod(axis=0)


def lemma_1(random: np.random.Generator, samples: int) -> Check:
    """Along curves of a fixed product, of tangents or of angles, rho is largest where both angles are equal."""
    factors = np.geomspace(1, 50, 400)
    worst, cases = -np.inf, 0
    for product in np.geomspace(1e-4, 1e2, 13):
        tangents = np.sqrt(product) * np.stack([1 / factors, factors])
        rho = formulas.retention(*np.arctan(tangents))
        closed = 1 / np.sqrt((1 + tangents[0] ** 2) * (1 + tangents[1] ** 2))
        worst = max(worst, np.diff(rho).max(), np.abs(rho - closed).max() - 1e-12)
        cases += 2 * len(factors)
    for angle in (0.05, 0.3, 0.9):
        rho = formulas.retention(angle / (fine := np.geomspace(1, np.pi / 2 / angle, 400)), angle * fine)
        worst, cases = max(worst, np.diff(rho).max()), cases + len(fine)
    aligned = [float(formulas.angular_velocity(norm, 1.0, np.pi / 2)) for norm in (20.0, 1.0)]
    before, after = formulas.retention(*aligned), formulas.retention(aligned[1], aligned[1])
    return Check(
        "Lemma 1: rho is largest at w_v = w_t",
        "Lemma 1",
        cases,
        max(worst, 0.0),
        1e-12,
        "rho",
        "falls along every curve of a fixed product, of tangents or of angles",
        "the product is fixed and both angles are below 90 degrees. Setting the visual norm to the text norm does not "
        f"keep the product: from norms 20 and 1 to 1 and 1 (C 1, phi 90 degrees) rho falls from {before:.3f} to "
        f"{after:.3f}, because the visual token now turns as well.",
    )


def lag_angle(random: np.random.Generator, samples: int, ratios: tuple[float, ...] = (2, 5, 15, 40)) -> Check:
    """Theta over layers, imbalanced minus balanced, is positive; both follow vectors that are drawn layer by layer."""
    layers, theta, update, phi = 12, 0.3, 0.25, np.pi / 2
    worst, cases, parts = 0.0, 0, []
    for ratio in ratios:
        paths = formulas.angles_over_layers(ratio, 1.0, update, phi, theta, layers)
        drawn = _drawn_paths(ratio, update, phi, theta, layers, max(samples // 10, 1000), random)
        for predicted, cosines in zip(paths, drawn, strict=True):
            error = cosines.std(axis=1) / np.sqrt(cosines.shape[1])
            worst = max(worst, (np.abs(cosines.mean(axis=1) - np.cos(predicted[1:])) / error).max())
        lag = (paths[0] - paths[1])[1:]
        worst = worst if lag.min() > 0 else np.inf
        cases += 3 * layers
        parts.append(f"{ratio:g}: {np.degrees(lag[-1]):.2f}")
    aligned = formulas.angles_over_layers(1.0, 1.0, update, phi, theta, layers)[0]
    difference = np.degrees(formulas.angles_over_layers(max(ratios), 1.0, update, phi, theta, layers)[0] - aligned)[-1]
    return Check(
        "the lag angle is positive",
        "17",
        cases,
        worst,
        STANDARD_ERRORS,
        "standard errors",
        f"delta in degrees after {layers} layers by norm ratio: {', '.join(parts)}",
        "Theta starts below 90 degrees, and the balanced case keeps Lemma 1's product in every layer. Against both "
        f"tokens at the text norm the lag of ratio {max(ratios):g} is {difference:.1f} degrees: the imbalanced pair "
        "stays closer. Random directions alone do not make aligned norms the better case.",
    )


def _drawn_paths(ratio, update, phi, theta, layers, samples, random) -> list[np.ndarray]:
    # Cosines [layers, samples] of two tokens moved by drawn updates: imbalanced norms, then Lemma 1's equal turns.
    size = 32
    start = np.zeros((2, samples, size))
    start[0, :, 0] = 1.0
    start[1, :, :2] = np.cos(theta), np.sin(theta)
    imbalanced, balanced = start * np.array([ratio, 1.0])[:, None, None], start.copy()
    paths = [[], []]
    for _ in range(layers):
        moved = _moved(imbalanced, update, phi, random)
        tangents = np.tan(formulas.angle_between(imbalanced, moved))
        lengths = np.linalg.norm(balanced, axis=-1, keepdims=True)
        balanced = _moved(balanced / lengths, np.sqrt(tangents.prod(axis=0))[:, None], np.pi / 2, random)
        imbalanced = moved
        for path, pair in zip(paths, (imbalanced, balanced), strict=True):
            lengths = np.linalg.norm(pair, axis=-1)
            path.append((pair[0] * pair[1]).sum(axis=-1) / lengths.prod(axis=0))
    return [np.array(path) for path in paths]


def _moved(states, update, phi, random) -> np.ndarray:
    # States [..., D] after updates of that length at the angle phi, in symmetric directions.
    units = states / np.linalg.norm(states, axis=-1, keepdims=True)
    turns = random.standard_normal(states.shape)
    turns -= (turns * units).sum(axis=-1, keepdims=True) * units
    turns /= np.linalg.norm(turns, axis=-1, keepdims=True)
    return states + update * (np.cos(phi) * units + np.sin(phi) * turns)
