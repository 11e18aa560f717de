"""Equation 8 and Theorem 1, which `theory` compares a model with, each computed without its formula.

The command, which measures models, has its tests in test_analysis_attention.py.
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


def pair(norm_v, norm_t, theta, size):
    """States [2, DRAWS, size] of a visual and a text token at the angle theta."""
    states = np.zeros((2, DRAWS, size))
    states[0, :, 0] = norm_v
    states[1, :, :2] = norm_t * np.cos(theta), norm_t * np.sin(theta)
    return states


def test_angular_velocity_is_the_angle_of_the_moved_vector(random):
    for size, norm, update, phi in itertools.product((2, 64, 2048), (0.8, 3.0, 60.0), (0.1, 1.0, 5.0), PHIS):
        state = random.standard_normal(size)
        state *= norm / np.linalg.norm(state)
        measured = angle(state, moved(state, update, phi, random))
        assert angular_velocity(norm, update, phi) == pytest.approx(measured, abs=1e-9)


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("norms", [(20.0, 1.0), (3.0, 3.0)])
@pytest.mark.parametrize("phi", [1.0, np.pi / 2, 2.2])
def test_theorem_1_predicts_the_cosine_of_uncorrelated_updates(size, norms, phi, random):
    rho = np.cos([angular_velocity(norm, 1.0, phi) for norm in norms]).prod()
    for theta in (0.2, 0.8):
        cosines = np.cos(angle(*moved(pair(*norms, theta, size), 1.0, phi, random)))
        assert abs(cosines.mean() - rho * np.cos(theta)) <= ERRORS * cosines.std() / np.sqrt(DRAWS)


def test_a_common_update_lets_the_cosine_fall_less_than_theorem_1(random):
    cosines = np.cos(angle(*moved(pair(20.0, 1.0, 0.8, 64), 1.0, np.pi / 2, random, together=True)))
    rho = np.cos([angular_velocity(norm, 1.0, np.pi / 2) for norm in (20.0, 1.0)]).prod()
    assert cosines.mean() > rho * np.cos(0.8) + 0.01
