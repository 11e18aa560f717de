"""`theory`: every statement is confirmed as it stands, and refuted once its formula is broken."""

import json

import numpy as np
import pytest

from llava.analysis import theory, theory_formulas
from llava.analysis.__main__ import main

DRAWS = 4000


def refuted(seed=0) -> set[str]:
    return {check.equation for check in theory.run_checks(seed, DRAWS) if not check.confirmed}


def test_every_statement_is_confirmed_whatever_the_seed():
    for seed in (0, 1, 42):
        assert refuted(seed) == set()


def with_minus(norm, update, phi):
    return np.arctan2(update * np.sin(phi), norm - update * np.cos(phi))


ENTROPY = theory_formulas.softmax_entropy
BREAKS = {
    "minus before C cos(phi)": ("angular_velocity", with_minus, {"8, 13", "15, 16"}),
    "a velocity that grows with the norm": (
        "angular_velocity",
        lambda norm, update, phi: np.arctan2(norm * np.sin(phi), update + norm * np.cos(phi)),
        {"8, 13", "9, 14", "15, 16", "17"},
    ),
    "a negative retention": ("retention", lambda v, t: -np.cos(v) * np.cos(t), {"15, 16", "Lemma 1", "17"}),
    "the cosine of the sum": ("retention", lambda v, t: np.cos(v + t), {"15, 16", "Lemma 1", "17"}),
    "a state that shrinks": ("norm_after", lambda norm, update, phi: np.abs(norm - update), {"17"}),
    "a negative damping": ("damping", lambda delta: -np.cos(delta), {"18, 19", "20", "21"}),
    "a damping by the sine": ("damping", np.sin, {"18, 19", "20", "21"}),
    "a negative bound": ("score_bound", lambda sigma, radius: -radius * np.linalg.norm(sigma, "nuc"), {"20"}),
    "the largest singular value alone": (
        "score_bound",
        lambda sigma, radius: radius * np.linalg.norm(sigma, 2),
        {"20"},
    ),
    "a negative entropy": ("softmax_entropy", lambda scores: -ENTROPY(scores), {"21"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_formula_is_refuted(name, monkeypatch):
    attribute, wrong, expected = BREAKS[name]
    monkeypatch.setattr(theory_formulas, attribute, wrong)
    assert refuted() >= expected


@pytest.mark.slow
def test_the_command_writes_verdicts_and_fails_if_one_is_refuted(tmp_path, monkeypatch, capsys):
    flags = ["theory", "--draws", str(DRAWS), "--output-dir", str(tmp_path)]
    assert main(flags) == 0
    document = json.loads((tmp_path / "theory.json").read_text())
    assert len(document["rows"]) == len(theory.CHECKS)
    assert all(row["verdict"].startswith("confirmed") for row in document["rows"])
    assert (tmp_path / "theory.svg").stat().st_size > 10_000
    assert "9 of 9 statements confirmed" in capsys.readouterr().out
    monkeypatch.setattr(theory_formulas, "angular_velocity", with_minus)
    assert main(flags) == 1
    assert "REFUTED: angular velocity" in capsys.readouterr().out
    assert main([*flags, "--draws", "10"]) == 2


def test_the_same_seed_gives_the_same_numbers():
    assert theory.run_checks(3, DRAWS) == theory.run_checks(3, DRAWS)


def test_the_lag_of_the_recursion_equals_a_closed_form():
    imbalanced, balanced = theory_formulas.angles_over_layers(20.0, 1.0, 1.0, np.pi / 2, 0.3, 1)
    w_v, w_t = np.arctan(1 / 20), np.arctan(1.0)
    assert imbalanced[1] == pytest.approx(np.arccos(np.cos(w_v) * np.cos(w_t) * np.cos(0.3)))
    assert balanced[1] == pytest.approx(np.arccos(np.cos(0.3) / (1 + np.tan(w_v) * np.tan(w_t))))


def test_entropy_equals_its_definition():
    scores = np.random.default_rng(0).normal(size=(5, 9)) * 30
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    assert theory_formulas.softmax_entropy(scores) == pytest.approx(-(weights * np.log(weights + 1e-300)).sum(-1))
