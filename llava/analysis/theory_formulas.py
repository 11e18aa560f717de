"""The formulas of the paper's sections 3 and B, as functions of plain numbers and NumPy arrays. Angles are radians."""

import numpy as np

Numbers = float | np.ndarray


def angular_velocity(norm: Numbers, update: Numbers, phi: Numbers) -> np.ndarray:
    """Angle by which an update turns a hidden state: `tan(w) = C sin(phi) / (|h| + C cos(phi))` (paper eq. 8, 13).

    Args:
        norm: |h|.
        update: C, the length of the update.
        phi: angle between update and hidden state.

    Returns:
        w in [0, pi]; above pi/2 where the update more than undoes the state, C cos(phi) < -|h|.
    """
    return np.arctan2(update * np.sin(phi), norm + update * np.cos(phi))


def norm_after(norm: Numbers, update: Numbers, phi: Numbers) -> np.ndarray:
    """|h + update|, by the law of cosines."""
    return np.sqrt(np.square(norm) + 2 * norm * update * np.cos(phi) + np.square(update))


def retention(w_v: Numbers, w_t: Numbers) -> np.ndarray:
    """`rho = cos(w_v) cos(w_t)`: what a layer leaves of the expected cosine of two tokens (paper eq. 16)."""
    return np.cos(w_v) * np.cos(w_t)


def angles_over_layers(
    norm_v: float, norm_t: float, update: float, phi: float, theta: float, layers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Theta between a visual and a text token after each layer (Theorem 1), and its balanced counterpart.

    The counterpart turns both tokens by the same angle in each layer, with the same product of tangents (Lemma 1).

    Returns:
        imbalanced and balanced angle [layers + 1], from the input's `theta` on (paper eq. 17 is their difference).
    """
    imbalanced, balanced = [np.cos(theta)], [np.cos(theta)]
    for _ in range(layers):
        w_v, w_t = angular_velocity(norm_v, update, phi), angular_velocity(norm_t, update, phi)
        same = np.arctan(np.sqrt(np.tan(w_v) * np.tan(w_t)))
        imbalanced.append(imbalanced[-1] * retention(w_v, w_t))
        balanced.append(balanced[-1] * retention(same, same))
        norm_v, norm_t = norm_after(norm_v, update, phi), norm_after(norm_t, update, phi)
    return np.arccos(imbalanced), np.arccos(balanced)


def damping(delta: Numbers) -> np.ndarray:
    """`cos(delta)`: what a lag angle leaves of the cross-covariance's singular values (paper eq. 19)."""
    return np.cos(delta)


def score_bound(covariance: np.ndarray, radius: float) -> float:
    """`R sum_i sigma_i`: bound of `tr(M^T Sigma)` over matrices of spectral norm up to R (paper eq. 20)."""
    return radius * float(np.linalg.svd(covariance, compute_uv=False).sum())


def softmax_entropy(scores: np.ndarray) -> np.ndarray:
    """Entropy in nats of the softmax over the last dimension."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=-1)
    return np.log(total) - (weights * shifted).sum(axis=-1) / total


def angle_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Angle between vectors [..., D], exact also for tiny angles, where the arc cosine loses half of the digits."""
    a = a / np.linalg.norm(a, axis=-1, keepdims=True)
    b = b / np.linalg.norm(b, axis=-1, keepdims=True)
    return 2 * np.arctan2(np.linalg.norm(a - b, axis=-1), np.linalg.norm(a + b, axis=-1))
