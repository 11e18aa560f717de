"""A plan that was written down before its runs: one committed JSON file, from which its study may not depart.

    preset      what is trained
    arms        none first
    primary     the arms whose differences from none the study decides; none in an exploratory study
    seeds       every arm is trained with every seed; a fixed number, whatever comes out
    steps       optimizer steps of each stage
    tasks       the outcome is the mean over these; others are recorded only
    margin      points: an interval within it on both sides of zero means no relevant difference
    trials      trainings that were looked at before: `seed`, and the held-out `loss` over stage 2, from which the
                losses follow whose samples are counted; may be left out
    pilot       a JSON file with the `seeds` of an earlier study, relative to the plan; may be left out

Seeds of trials and pilot have been seen, and are refused. The file's digest is in the record of every run.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare.arms import parse_arms
from llava.compare.record import Record
from llava.eval.paired import FEWEST_SEEDS, confidence_of
from llava.launch.recipe import STAGES

DIGEST = "plan.sha256"
"""In the output folder: the digest of the plan that its runs follow."""


@dataclass(frozen=True)
class Plan:
    """The content of the file (see the module), where it is, and its digest."""

    preset: str
    arms: list[str]
    primary: list[str]
    seeds: list[int]
    steps: dict[str, int]
    tasks: list[str]
    margin: float
    file: Path
    digest: str
    trials: list[dict[str, Any]] = field(default_factory=list)
    pilot: str = ""

    @property
    def confidence(self) -> float:
        """That of each primary interval, so that all together have 95 % (Bonferroni)."""
        return confidence_of(max(1, len(self.primary)))

    @property
    def losses(self) -> list[float]:
        """Held-out losses to reach: the trials' means after a third and two thirds of stage 2's evaluations."""
        curves = [trial["loss"] for trial in self.trials]
        parts = (1, 2) if curves else ()
        return [round(float(np.mean([curve[part * len(curve) // 3] for curve in curves])), 3) for part in parts]

    def missing(self, record: Record) -> list[int]:
        """The seeds that are not recorded yet."""
        present = {entry["seed"] for entry in record["runs"]}
        return [seed for seed in self.seeds if seed not in present]


def read_plan(file: Path) -> Plan:
    """The plan in a file.

    Raises:
        ValueError: no such file, not a plan, it contradicts itself, or it asks for seeds that were already seen.
    """
    try:
        content = file.read_bytes()
        plan = Plan(**json.loads(content), file=file, digest=hashlib.sha256(content).hexdigest())
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--plan {file}: not a plan: {error}") from error
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    where = f"--plan {plan.file}"
    parse_arms(",".join(plan.arms), parse=str)  # some may be removed since: a run of the plan names them
    if not set(plan.primary) <= set(plan.arms[1:]):
        raise ValueError(f"{where}: primary {plan.primary}: expected arms of {plan.arms[1:]}")
    if len(set(plan.seeds)) < max(FEWEST_SEEDS, len(plan.seeds)):
        raise ValueError(f"{where}: seeds {plan.seeds}: expected at least {FEWEST_SEEDS}, none twice")
    pilot = json.loads((plan.file.parent / plan.pilot).read_text())["seeds"] if plan.pilot else []
    trials = [trial["seed"] for trial in plan.trials]
    if again := sorted(set(plan.seeds) & {*pilot, *trials}):
        raise ValueError(
            f"{where}: seeds {again} were seen before the plan was made (pilot {pilot}, trials {trials}); name others"
        )
    if plan.steps.keys() != set(STAGES) or min(plan.steps.values()) < 1:
        raise ValueError(f"{where}: steps {plan.steps}: expected a positive number for each of {', '.join(STAGES)}")
    if not 0 < plan.margin < math.inf:
        raise ValueError(f"{where}: margin {plan.margin}: expected a positive number of points")


def check_record(plan: Plan, record: Record, where: Path) -> None:
    """Refuses a record that is not of complete seeds of this plan.

    Raises:
        ValueError: its runs follow another plan, or are not the plan's arms for some seed.
    """
    arms: dict[int, list[str]] = {}
    for entry in record["runs"]:
        check_digest(plan, entry["plan"], where)
        arms.setdefault(entry["seed"], []).append(entry["arm"])
    for seed, present in arms.items():
        if present != plan.arms or seed not in plan.seeds:
            raise ValueError(f"{where}: seed {seed} has runs of {present}; expected {plan.arms} for seeds {plan.seeds}")


def check_digest(plan: Plan, before: str, where: Path) -> None:
    """Raises ValueError if the runs in `where` follow a plan of another digest."""
    if before != plan.digest:
        raise ValueError(
            f"{where}: runs follow a plan of digest {before[:12]}, {plan.file} has {plan.digest[:12]}; a plan may not "
            "change after its first run: restore it, or write a new one with new seeds into another folder"
        )


def hold(plan: Plan, folder: Path) -> None:
    """Ties the output folder to the plan.

    Raises:
        ValueError: its runs were begun by another plan.
    """
    mark = folder / DIGEST
    if mark.is_file():
        check_digest(plan, mark.read_text().strip(), mark)
    mark.write_text(f"{plan.digest}\n")
