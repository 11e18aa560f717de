"""The paper's statements (sections 3 and B), each computed without its formula, and the conditions it leaves out.

`docs/analysis.md` quotes the conditions. The command `theory`, which measures models, has its tests in
test_analysis_attention.py.
"""

import itertools

import numpy as np
import pytest

from llava.analysis.theory import angular_velocity

DRAWS = 4000
ERRORS = 5  # standard errors: chance alone exceeds the bound in one of 1.7 million comparisons
PHIS = (0.3, 1.0, np.pi / 2, 2.0, 2.8)


@pytest.fixture(params=[0, 1, 42])
def random(request):
    return np.random.default_rng(request.param)


def angle(a, b):
    a, b = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    return 2 * np.arctan2(np.linalg.norm(a - b, axis=-1), np.linalg.norm(a + b, axis=-1))


def moved(states, update, phi, random, together=False):
    """States [..., D] after updates of that length at the angle phi, in symmetric directions."""
    units = states / np.linalg.norm(states, axis=-1, keepdims=True)
    turns = random.standard_normal(states.shape[1:] if together else states.shape)
    turns = turns - (turns * units).sum(axis=-1, keepdims=True) * units
    turns /= np.linalg.norm(turns, axis=-1, keepdims=True)
    return states + update * (np.cos(phi) * units + np.sin(phi) * turns)


def pair(norm_v, norm_t, theta, size, draws=DRAWS):
    """States [2, draws, size] of a visual and a text token at the angle theta."""
    states = np.zeros((2, draws, size))
    states[0, :, 0] = norm_v
    states[1, :, :2] = norm_t * np.cos(theta), norm_t * np.sin(theta)
    return states


def retention(*angles):
    return np.cos(angles).prod(axis=0)


def assert_mean(values, expected):
    error = values.std(axis=0) / np.sqrt(len(values))
    assert np.all(np.abs(values.mean(axis=0) - expected) <= ERRORS * error)


def test_an_update_ignores_the_norm_in_a_sub_layer_but_not_in_a_block(random):
    weights = random.standard_normal((2, 64, 64)) / 8
    update = lambda state, weight: weight @ np.tanh(state / np.sqrt(np.mean(state**2)))  # noqa: E731
    state = random.standard_normal(64)
    for scale in (0.01, 30.0, 1000.0):
        assert update(scale * state, weights[0]) == pytest.approx(update(state, weights[0]), rel=1e-9)

    def block(state):  # two sub-layers, as attention and MLP
        middle = state + update(state, weights[0])
        return middle + update(middle, weights[1]) - state

    assert angle(block(state), block(30 * state)) > np.radians(10)


def test_angular_velocity_is_the_angle_of_the_moved_vector(random):
    for size, norm, update, phi in itertools.product((2, 64, 2048), (0.8, 3.0, 60.0), (0.1, 1.0, 5.0), PHIS):
        state = random.standard_normal(size)
        state *= norm / np.linalg.norm(state)
        measured = angle(state, moved(state, update, phi, random))
        assert angular_velocity(norm, update, phi) == pytest.approx(measured, abs=1e-9)


def test_the_larger_norm_turns_more_slowly_for_equal_updates_alone():
    for update, phi in itertools.product((0.1, 1.0, 10.0), PHIS):
        assert np.all(np.diff(angular_velocity(np.geomspace(0.01, 1000, 200), update, phi)) <= 0)
    assert angular_velocity(20.0, 25.0, np.pi / 2) > angular_velocity(1.0, 1.0, np.pi / 2)


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("norms", [(20.0, 1.0), (3.0, 3.0)])
@pytest.mark.parametrize("phi", [1.0, np.pi / 2, 2.2])
def test_theorem_1_predicts_the_cosine_of_uncorrelated_updates(size, norms, phi, random):
    rho = retention(*(angular_velocity(norm, 1.0, phi) for norm in norms))
    for theta in (0.2, 0.8):
        assert_mean(np.cos(angle(*moved(pair(*norms, theta, size), 1.0, phi, random))), rho * np.cos(theta))


def test_a_common_update_lets_the_cosine_fall_less_than_theorem_1(random):
    cosines = np.cos(angle(*moved(pair(20.0, 1.0, 0.8, 64), 1.0, np.pi / 2, random, together=True)))
    w_v, w_t = (angular_velocity(norm, 1.0, np.pi / 2) for norm in (20.0, 1.0))
    assert cosines.mean() > retention(w_v, w_t) * np.cos(0.8) + 0.01


def test_lemma_1_holds_at_a_fixed_product_and_not_under_alignment():
    factors = np.geomspace(1, 50, 400)
    for product in np.geomspace(1e-4, 1e2, 13):  # of the tangents
        rho = retention(*np.arctan(np.sqrt(product) * np.stack([1 / factors, factors])))
        assert np.all(np.diff(rho) <= 1e-12)
    for w in (0.05, 0.3, 0.9):  # of the angles
        factors = np.geomspace(1, np.pi / 2 / w, 400)
        assert np.all(np.diff(retention(w / factors, w * factors)) <= 1e-12)
    w_v, w_t = (angular_velocity(norm, 1.0, np.pi / 2) for norm in (20.0, 1.0))
    assert (round(retention(w_v, w_t), 3), round(retention(w_t, w_t), 3)) == (0.706, 0.5)


def test_the_lag_is_positive_against_lemma_1_and_negative_against_alignment(random):
    update, phi, theta, layers = 0.25, np.pi / 2, 0.3, 12
    for ratio in (2.0, 40.0):
        imbalanced, balanced, aligned = (
            pair(ratio, 1.0, theta, 32),
            pair(1.0, 1.0, theta, 32),
            pair(1.0, 1.0, theta, 32),
        )
        norms, expected = np.array([ratio, 1.0]), np.cos([theta, theta])
        for _ in range(layers):
            w = angular_velocity(norms, update, phi)
            same = np.arctan(np.sqrt(np.tan(w).prod()))
            expected = expected * [retention(*w), retention(same, same)]
            norms = np.hypot(norms, update)
            imbalanced, aligned = (moved(states, update, phi, random) for states in (imbalanced, aligned))
            balanced /= np.linalg.norm(balanced, axis=-1, keepdims=True)
            balanced = moved(balanced, np.tan(same), phi, random)
            assert_mean(np.cos([angle(*imbalanced), angle(*balanced)]).T, expected)
            assert expected[0] < expected[1]
        assert np.cos(angle(*imbalanced)).mean() > np.cos(angle(*aligned)).mean() + 0.01


@pytest.mark.parametrize("delta", [0.2, 0.7, 1.2])
def test_singular_values_of_the_cross_covariance_fall_by_cos_delta(delta, random):
    text = random.standard_normal((DRAWS, 16)) @ (
        np.linalg.qr(random.standard_normal((16, 16)))[0] * np.linspace(1, 0.2, 16)
    )
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    visual = moved(np.cos(delta) * text, np.sin(delta), np.pi / 2, random)
    left, values, right = np.linalg.svd(text.T @ text / DRAWS)
    products = (visual @ left) * (text @ right.T)  # each column's mean is one singular value
    assert_mean(products - np.cos(delta) * (text @ left) * (text @ right.T), 0)
    assert products.mean(axis=0) == pytest.approx(np.cos(delta) * values, abs=0.01)


def test_no_matrix_exceeds_the_spectral_bound_and_one_reaches_it(random):
    radius = 2.5
    for _ in range(40):
        covariance = random.standard_normal((12, 12))
        left, values, right = np.linalg.svd(covariance)
        trials = random.standard_normal((50, 12, 12)) + 5 * random.random((50, 1, 1)) * (left @ right)
        trials *= radius / np.linalg.norm(trials, ord=2, axis=(1, 2))[:, None, None]
        assert np.einsum("nij,ij->n", trials, covariance).max() <= radius * values.sum()
        assert np.trace((radius * left @ right).T @ covariance) == pytest.approx(radius * values.sum())


def entropy(scores):
    shifted = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=-1)
    return np.log(total) - (weights * shifted).sum(axis=-1) / total


def test_a_damped_signal_raises_the_entropy_if_it_is_above_the_noise(random):
    for signal, noise, delta in itertools.product((2.0, 5.0, 10.0), (0.0, 0.2, 0.5), (0.2, 0.7, 1.2)):
        scores = noise * random.standard_normal((1000, 64))
        damped = scores.copy()
        scores[:, 0] += signal
        damped[:, 0] += signal * np.cos(delta)
        assert (entropy(damped) - entropy(scores)).mean() > 0
    assert entropy(np.array([2 * np.cos(0.7), 5.0])) < entropy(np.array([2.0, 5.0]))
