"""What a study may say: simulated studies of equal, better and blanked arms, the plan, samples to an accuracy."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from llava.compare import study_record
from llava.compare.learning import first_reached, samples_to_reach
from llava.compare.plan import (
    FEWEST_STEPS,
    POWER,
    SEED_DEVIATION,
    Pilot,
    Plan,
    check_same,
    fitting,
    predicted_hours,
    read_plan,
    smallest_differences,
)
from llava.eval.paired import IMPROVED, UNCHANGED, WORSE, compare_arms, score_benchmarks, score_intervals
from llava.eval.results import Answered, Results, TaskResult
from llava.utils.intervals import share_interval

TASKS, QUESTIONS = 4, 72
PILOT = Pilot(60.0, {"pretrain": 0.5, "finetune": 1.0}, {"a": 0.5, "b": 0.8}, {"a": 72, "b": 72})
FULL = {"pretrain": 68, "finetune": 140}


def simulated(rng, shifts, seeds=3, deviation=SEED_DEVIATION, right=0.7, spread=0.0, blanked=()):
    """Differences by arm: every run answers by itself, and has its own luck.

    Args:
        shifts: what each arm adds to the share of right answers.
        spread: how unlike the questions are.
        blanked: arms that answer at chance, a quarter.
    """
    hard = np.clip(right + spread * (rng.random((TASKS, QUESTIONS)) - 0.5), 0, 1)

    def answers(shift, at_chance=False):
        luck = rng.normal(0, deviation, size=(seeds, 1, 1))
        share = np.full_like(hard, 0.25) if at_chance else np.clip(hard + shift + luck, 0, 1)
        return (rng.random((seeds, TASKS, QUESTIONS)) < share).astype(float)

    base = answers(0)
    return {arm: list((answers(shift, arm in blanked) - base).transpose(1, 0, 2)) for arm, shift in enumerate(shifts)}


def verdicts(differences):
    compared = compare_arms(differences, [None] * TASKS, resamples=2000)
    return {arm: mean.verdict for arm, (_, mean) in compared.items()}, {
        arm: [benchmark.verdict for benchmark in each] for arm, (each, _) in compared.items()
    }


def test_only_an_arm_that_never_sees_its_pictures_is_called_worse():
    rng = np.random.default_rng(1)
    for _ in range(10):
        overall, single = verdicts(simulated(rng, [0, 0, 0], spread=0.5, blanked=[1]))
        assert overall == {0: UNCHANGED, 1: WORSE, 2: UNCHANGED}
        assert single[1] == [WORSE] * TASKS


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.0, 0.02, 0.06])
def test_equal_arms_of_other_seeds_are_unchanged_in_19_of_20_studies(deviation):
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(20):
        overall, single = verdicts(simulated(rng, [0] * 6, deviation=deviation, spread=0.6))
        wrong += {*overall.values(), *(verdict for each in single.values() for verdict in each)} != {UNCHANGED}
    assert wrong <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "arms", "right"), [(3, 3, 0.5), (3, 6, 0.7), (6, 3, 0.7)])
def test_the_planned_smallest_difference_is_shown_in_80_percent_of_studies(seeds, arms, right):
    tasks = {str(task): right for task in range(TASKS)}
    smallest = smallest_differences(tasks, dict.fromkeys(tasks, QUESTIONS), arms, seeds)["mean"] / 100
    rng = np.random.default_rng(3)
    studies = 40
    # The effect is set around the share, so that the answers vary as the plan assumes.
    improved = sum(
        verdicts(simulated(rng, [smallest] + [0] * (arms - 1), seeds=seeds, right=right - smallest / 2))[0][0]
        == IMPROVED
        for _ in range(studies)
    )
    assert improved / studies == pytest.approx(POWER, abs=3 * math.sqrt(POWER * (1 - POWER) / studies))


def test_more_seeds_questions_and_fewer_arms_show_smaller_differences():
    def mean(questions=72, arms=8, seeds=3):
        return smallest_differences({"a": 0.6, "b": 0.6}, {"a": questions, "b": questions}, arms, seeds)["mean"]

    assert mean(questions=288) < mean() and mean(seeds=6) < mean() and mean(arms=2) < mean()
    ends = [smallest_differences({"a": right}, {"a": 72}, 8, 3)["a"] for right in (0.0, 0.5, 1.0)]
    assert ends[0] == ends[1] > ends[2] > 100 * SEED_DEVIATION  # nothing is certain
    alone = smallest_differences({"a": 0.6}, {"a": 72}, 8, 3)
    assert alone["a"] == alone["mean"]


@pytest.mark.parametrize(("arms", "seeds", "deviation"), [(4, 3, 0.0), (4, 3, 0.06), (12, 3, 0.06), (2, 2, 0.06)])
def test_intervals_of_scores_hold_the_truth_in_95_percent_of_studies(arms, seeds, deviation):
    rng = np.random.default_rng(6)
    inside = []
    for _ in range(600 // arms):
        hard = rng.beta(0.7, 0.7, size=144)  # mean 0.5; the answers of several seeds to a question are much alike
        luck = rng.normal(0, deviation, size=(arms, seeds, 1))
        scores = (rng.random((arms, seeds, 144)) < np.clip(hard + luck, 0, 1)).astype(float)
        intervals = score_intervals(dict(enumerate(scores)), resamples=1000)
        inside += [low <= 50 <= high for _, low, high in intervals.values()]
    assert 0.92 < np.mean(inside) < 0.999


def test_the_same_answers_from_more_seeds_are_no_more_evidence():
    answers = np.repeat([1.0, 0.0], 40)[None]
    (alone,), (thrice,) = (score_intervals({0: np.tile(answers, (n, 1))}).values() for n in (1, 3))
    assert thrice == pytest.approx(alone, abs=0.01) and alone[0] == 50
    assert alone[1:] == pytest.approx([100 * end for end in share_interval(40, 80)], abs=1)


def test_the_mean_of_benchmarks_varies_as_the_mean_of_independent_ones():
    plain, grouped = np.repeat([1.0, 0.0], 400), np.concatenate([np.ones(100), np.repeat([1.0, 0.0], 150)])
    kinds = np.repeat(["few", "many"], [100, 300])
    (((first, second), mean),) = score_benchmarks({"none": [plain[None], grouped[None]]}, [None, kinds]).values()
    assert (first[0], second[0], mean[0]) == (50, 75, 62.5)  # kinds count alike, however many questions they have
    added_few, added_many = 101 / 102, 151 / 302  # shares with the two added questions
    of_second = (added_few * (1 - added_few) / 102 + added_many * (1 - added_many) / 302) / 4
    deviation = np.sqrt((0.25 / 802 + of_second) / 4)
    assert (mean[2] - mean[1]) / 2 == pytest.approx(100 * 1.96 * deviation, rel=0.03)
    ((_, shared),) = score_benchmarks({"none": [plain[None], plain[None]]}, [None, None]).values()
    assert (shared[2] - shared[1]) / (first[2] - first[1]) == pytest.approx(np.sqrt(0.5), rel=0.03)


@dataclass(frozen=True)
class AnsweredRun:
    """A run whose answers are the same under every control: to the given ids right, to the others wrong."""

    arm: str
    seed: int
    right: str

    def tasks(self):
        samples = [Answered(name, float(name in self.right), "", "") for name in sorted("abcd", reverse=self.seed == 2)]
        return Results("", "", "", {}, {}, "", {"t": TaskResult("accuracy", 0, samples, None, 0)})


def test_controls_pair_the_seeds_answers_by_question(monkeypatch):
    monkeypatch.setattr(study_record, "answers_of", lambda run, control: run.tasks())
    runs = [AnsweredRun(arm, seed, "ab") for seed in (1, 2) for arm in ("none", "clip")]
    (_, low, high) = score_intervals({"none": np.array([[1.0, 1, 0, 0]])})["none"]
    for by_arm in study_record.controls(runs).values():
        assert by_arm["none"] == pytest.approx({"score": 50, "low": low, "high": high})


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hours", "seeds"), [(0.6, 3), (1.5, 3), (6.0, 8), (60.0, 8)])
def test_hours_are_filled_with_the_recipes_steps_first_and_then_with_seeds(hours, seeds):
    steps, count = fitting(hours, PILOT, FULL, arms=4, at_once=2, seeds=None)
    assert count == seeds or 3 <= count <= 8
    assert predicted_hours(PILOT, steps, 4 * count, 2) <= hours
    assert steps == FULL or count == 3
    assert all(FEWEST_STEPS <= steps[stage] <= FULL[stage] for stage in FULL)


def test_hours_that_are_too_few_are_refused_with_how_many_it_takes():
    with pytest.raises(ValueError, match=r"--hours 0.01: 4 arms with 3 seeds need at least 0\.\d+") as refused:
        fitting(0.01, PILOT, FULL, 4, 2, None)
    needed = float(str(refused.value).split("at least ")[1].split()[0])
    assert fitting(1.1 * needed, PILOT, FULL, 4, 2, None)[1] == 3


def test_a_plan_is_kept_and_other_flags_are_refused(tmp_path):
    assert read_plan(tmp_path) is None
    plan = Plan("demo", ["none", "clip"], [1, 2], FULL, 0, 2.0, 1.5, {"mean": 3.0}, PILOT)
    plan.write(tmp_path)
    assert read_plan(tmp_path) == plan
    check_same(plan, {"hours": None, "arms": ["none", "clip"]}, tmp_path)
    with pytest.raises(ValueError, match=r"--hours 3.*plan.json has 2\.0"):
        check_same(plan, {"hours": 3}, tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="not a study's plan"):
        read_plan(tmp_path)


# --- samples to reach an accuracy -------------------------------------------------------------------------------------


def test_an_accuracy_is_reached_between_two_points_by_a_straight_line():
    samples, curve = [0, 100, 200], np.array([0.2, 0.4, 0.8])
    assert first_reached(0.6, samples, curve[None]) == pytest.approx([150])
    assert first_reached(0.1, samples, curve[None]) == [0]
    assert first_reached(0.9, samples, curve[None]) == [math.inf]


def test_the_interval_of_samples_to_reach_an_accuracy_holds_the_truth():
    rng = np.random.default_rng(4)
    samples, truth = [0, 100, 200, 300, 400], np.array([0.25, 0.4, 0.55, 0.7, 0.85])
    right, inside = first_reached(0.6, samples, truth[None])[0], 0
    for trial in range(20):
        needed, low, high = samples_to_reach(0.6, samples, rng.binomial(96, truth, size=(3, 5)) / 96, 96, seed=trial)
        inside += low <= right <= high
        assert low <= needed <= high
    assert inside >= 17
    assert samples_to_reach(0.99, samples, np.tile(truth, (3, 1)), 96) == (None, None, None)


def test_more_seeds_of_equal_answers_do_not_narrow_the_samples_to_reach():
    curve = np.linspace(0.25, 0.85, 5)
    alone, thrice = (samples_to_reach(0.6, [0, 100, 200, 300, 400], np.tile(curve, (n, 1)), 64) for n in (1, 3))
    assert thrice == pytest.approx(alone, abs=10)
