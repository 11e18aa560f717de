"""The plan of a study: the steps and seeds that fit into its hours, and the difference that it would show.

A short pilot of the baseline measures the time of a step and the share of right answers. What a study would show
is computed for the test that it makes (`paired.compare_arms`): an arm that is better by the *smallest difference*
gets an interval above zero with probability `POWER`.

Two trained models are assumed to answer a question independently, each right with the pilot's share p: a question of a
seed then varies by v = 2 p (1 - p). Real models err on the same hard questions, so v is an upper bound. A pilot is
short and its share will grow, so a share below one half counts as one half. Beyond their answers, training runs are
assumed to vary by `SEED_DEVIATION`. With N questions, S seeds and T tasks:

    D varies by       Q + 2 SEED_DEVIATION^2 / S,      Q = sum over tasks of v / (S N) / T^2
    the interval by   Q' + Q + 2 SEED_DEVIATION^2 / S,  Q' as Q with the two questions that the interval adds

since the interval draws questions, and seeds, whose means vary with their questions once more.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

from llava.eval.paired import MEAN, confidence_of
from llava.utils.files import write_json
from llava.utils.intervals import student_quantile

PLAN_FILE = "plan.json"
POWER = 0.8
SEED_DEVIATION = 0.02
FEWEST_SEEDS, MOST_SEEDS = 3, 8
FEWEST_STEPS = 8
FOR_MEASURING = 0.25  # share of the hours for pilot, measurements and page


@dataclass(frozen=True)
class Pilot:
    """What a short training of the baseline took and reached.

    Attributes:
        overhead: seconds of a run that do not grow with its steps: starting, saving, answering.
        per_step: seconds of an optimizer step in each stage.
        right: share of right answers in each task.
        questions: number of questions of each task.
    """

    overhead: float
    per_step: dict[str, float]
    right: dict[str, float]
    questions: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """What a study does.

    Attributes:
        arms, seeds: every arm is trained with every seed; the baseline is the first arm.
        steps: optimizer steps of each stage.
        questions: how many held-out questions are asked; 0: all.
        hours: value of `--hours`; None without the flag, when steps and seeds were not planned.
        predicted_hours: how long training and answering take, judged by the pilot.
        smallest: `smallest[task or mean]`, the difference in points that would be shown with probability `POWER`; None
            without a pilot.
    """

    preset: str
    arms: list[str]
    seeds: list[int]
    steps: dict[str, int]
    questions: int
    hours: float | None = None
    predicted_hours: float | None = None
    smallest: dict[str, float] | None = None
    pilot: Pilot | None = None

    def with_seeds(self, seeds: list[int]) -> "Plan":
        """The same plan with other seeds, and what these would show."""
        smallest = self.pilot and smallest_differences(
            self.pilot.right, self.pilot.questions, len(self.arms) - 1, len(seeds)
        )
        return replace(self, seeds=seeds, smallest=smallest)

    def write(self, folder: Path) -> None:
        """Writes it into `folder`, for `read_plan`."""
        write_json(folder / PLAN_FILE, asdict(self))


def read_plan(folder: Path) -> Plan | None:
    """The plan in `folder`, or None.

    Raises:
        ValueError: the file there is not a plan.
    """
    file = folder / PLAN_FILE
    try:
        content = json.loads(file.read_text())
        pilot = content.pop("pilot")
        return Plan(**content, pilot=pilot and Pilot(**pilot))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: not a study's plan ({error!r}); remove it to plan again") from error


def check_same(plan: Plan, requested: Mapping[str, object], folder: Path) -> None:
    """Raises ValueError if a flag contradicts the recorded plan."""
    for name, value in requested.items():
        if value is not None and value != getattr(plan, name):
            raise ValueError(
                f"--{name} {value}: {folder / PLAN_FILE} has {getattr(plan, name)}; omit the flag to resume that plan, "
                "or choose another --output-dir"
            )


def fitting(
    hours: float, pilot: Pilot, full_steps: Mapping[str, int], arms: int, at_once: int, seeds: int | None
) -> tuple[dict[str, int], int]:
    """Steps of each stage and number of seeds that fit into the hours: the recipe's steps first, then seeds.

    Args:
        full_steps: the recipe's steps of each stage.
        at_once: number of runs that train in parallel.
        seeds: number of seeds if it is fixed; else `FEWEST_SEEDS` to `MOST_SEEDS`.

    Raises:
        ValueError: not even the fewest steps with the fewest seeds fit.
    """
    seconds = hours * 3600 * (1 - FOR_MEASURING) * at_once / arms  # of all seeds of one arm
    whole = sum(full_steps[stage] * pilot.per_step[stage] for stage in full_steps)
    count = seeds or max(FEWEST_SEEDS, min(MOST_SEEDS, int(seconds / (pilot.overhead + whole))))
    share = min(1.0, (seconds / count - pilot.overhead) / whole)
    steps = {stage: int(share * full) for stage, full in full_steps.items()}
    if min(steps.values()) < FEWEST_STEPS:
        least = (
            (pilot.overhead + max(FEWEST_STEPS / full for full in full_steps.values()) * whole) * count * arms / at_once
        )
        raise ValueError(
            f"--hours {hours:g}: {arms} arms with {count} seeds need at least "
            f"{least / 3600 / (1 - FOR_MEASURING):.2g} by the pilot; raise it, or name fewer --arms"
        )
    return steps, count


def predicted_hours(pilot: Pilot, steps: Mapping[str, int], runs: int, at_once: int) -> float:
    """Hours that training and answering take for this many runs, `at_once` of them in parallel."""
    seconds = pilot.overhead + sum(count * pilot.per_step[stage] for stage, count in steps.items())
    return math.ceil(runs / at_once) * seconds / 3600


def smallest_differences(
    right: Mapping[str, float], questions: Mapping[str, int], arms: int, seeds: int
) -> dict[str, float]:
    """The difference in points that would be shown with probability `POWER`, for each task and for the mean over all.

    Args:
        right: share of right answers in each task.
        questions: number of questions of each task.
        arms: number of arms that are compared with the baseline.
    """
    tasks = len(right)
    single = {task: _variances(right[task], questions[task], seeds) for task in right}
    of_runs = 2 * SEED_DEVIATION**2 / seeds
    smallest = {task: _smallest(*single[task], of_runs, arms * tasks) for task in right}
    varies, drawn = (sum(pair[i] for pair in single.values()) / tasks**2 for i in (0, 1))
    return smallest | {MEAN: _smallest(varies, drawn, of_runs, arms)}


def _variances(right: float, questions: int, seeds: int) -> tuple[float, float]:
    # Variances of a task's difference by its answers alone: its own, and the interval's, with two questions more.
    share = max(0.5, (right * questions + 1) / (questions + 2))  # no pilot is so good that nothing varies
    of_question = 2 * share * (1 - share) / seeds
    return of_question / questions, (of_question * questions + 2) / (questions + 2) ** 2


def _smallest(varies: float, drawn: float, of_runs: float, verdicts: int) -> float:
    normal = NormalDist()
    outside = normal.inv_cdf((1 + confidence_of(verdicts)) / 2) * math.sqrt(drawn + varies + of_runs)
    return 100 * (outside + normal.inv_cdf(POWER) * math.sqrt(varies + of_runs))


def points_in_words(points: float) -> str:
    """A smallest difference as text; `none` above 100 points, since no difference is that large."""
    return f"{points:.1f}" if points <= 100 else "none"


# --- a test over seeds ------------------------------------------------------------------------------------------------


def shown_probability(difference: float, deviation: float, seeds: int, confidence: float) -> float:
    """How probably a true difference has an interval of `paired.compare_seeds` on its side of zero.

    Args:
        deviation: standard deviation of the seeds' differences.
    """
    spread, share, edge = _spreads(seeds, confidence)
    normal = NormalDist()
    shift = abs(difference) * math.sqrt(seeds) / deviation
    return sum(p * normal.cdf(shift - edge * x) for x, p in zip(spread, share, strict=True))


def within_probability(margin: float, deviation: float, seeds: int, confidence: float) -> float:
    """How probably that interval lies within the margin on both sides of zero where arms do not differ."""
    spread, share, edge = _spreads(seeds, confidence)
    normal = NormalDist()
    room = margin * math.sqrt(seeds) / deviation
    return sum(p * max(0.0, 2 * normal.cdf(room - edge * x) - 1) for x, p in zip(spread, share, strict=True))


def smallest_shown(deviation: float, seeds: int, confidence: float, power: float = POWER) -> float:
    """The difference that is shown with this probability."""
    low, high = 0.0, 100 * deviation
    while high - low > 1e-6 * deviation:
        middle = (low + high) / 2
        low, high = (middle, high) if shown_probability(middle, deviation, seeds, confidence) < power else (low, middle)
    return high


@cache
def _spreads(seeds: int, confidence: float) -> tuple[list[float], list[float], float]:
    """Estimated over true standard deviation, the probability of each, and the quantile of Student's t."""
    freedom, points = seeds - 1, 2000
    spread = [6 * (i + 0.5) / points for i in range(points)]
    logs = [(freedom - 1) * math.log(x) - freedom * x * x / 2 for x in spread]
    weights = [math.exp(value - max(logs)) for value in logs]
    total = sum(weights)
    return spread, [weight / total for weight in weights], student_quantile((1 + confidence) / 2, freedom)
