"""A plan that was written down before its runs: one committed JSON file, from which its study may not depart.

    preset      what is trained
    arms        none first
    primary     the arms whose differences from none the study decides; none in an exploratory study
    seeds       every arm is trained with every seed; a fixed number, whatever comes out
    steps       optimizer steps of each stage
    tasks       the outcome is the mean over these; others are recorded only
    margin      points: an interval within it on both sides of zero means no relevant difference
    settings    variables of an arm's stages, of `RATES` alone, by arm and stage; an arm may be left out
    points      of a tuning: such variables by stage, with which every arm is tried (`planned.Tuning`)
    pictures    numbers of pictures, of `python -m playground probes`; may be left out
    trials      trainings that were looked at before, each with its `seed`; may be left out
    pilot       a JSON file with the `seeds` of an earlier study, relative to the plan; may be left out. If it is a
                tuning's, it also has the arms' `choice`, which must be this plan's settings

Seeds of trials and pilot have been seen, and are refused. The file's digest is in the record of every run.
"""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llava.compare.arms import parse_arms
from llava.compare.record import Record
from llava.eval.paired import FEWEST_SEEDS, confidence_of
from llava.launch.recipe import STAGES

DIGEST = "plan.sha256"
"""In the output folder: the digest of the plan that its runs follow, and the kind of device that they train on."""
RATES = ("LEARNING_RATE", "PROJECTOR_LR", "MAX_GRAD_NORM")
"""Variables that may differ between a plan's arms."""
Settings = dict[str, dict[str, float]]
"""Variables by stage."""


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
    settings: dict[str, Settings] = field(default_factory=dict)
    points: list[Settings] = field(default_factory=list)
    pictures: dict[str, int] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)  # of older plans, whose questions were asked without pictures too
    trials: list[dict[str, Any]] = field(default_factory=list)
    pilot: str = ""

    @property
    def confidence(self) -> float:
        """That of each primary interval, so that all together have 95 % (Bonferroni)."""
        return confidence_of(max(1, len(self.primary)))

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
    from playground.probes import ANSWERS  # not in the wheel, whose `report` needs none

    where = f"--plan {plan.file}"
    parse_arms(",".join(plan.arms), parse=str)  # some may be removed since: a run of the plan names them
    if not set(plan.primary) <= set(plan.arms[1:]):
        raise ValueError(f"{where}: primary {plan.primary}: expected arms of {plan.arms[1:]}")
    fewest = 1 if plan.points else FEWEST_SEEDS
    numbers = isinstance(plan.seeds, list) and all(type(seed) is int for seed in plan.seeds)
    if not numbers or len(set(plan.seeds)) < max(fewest, len(plan.seeds)):
        raise ValueError(f"{where}: seeds {plan.seeds}: expected at least {fewest} numbers, none twice")
    if plan.points and plan.settings:
        raise ValueError(f"{where}: points beside settings; a tuning tries every arm at its points alone")
    for settings in [*plan.settings.values(), *plan.points]:
        if "PROJECTOR_LR" in settings.get(STAGES[0], {}):
            raise ValueError(f"{where}: {settings}: {STAGES[0]} trains the projector alone, at its LEARNING_RATE")
        values = {name: value for stage in settings.values() for name, value in stage.items()}
        known = settings.keys() <= set(STAGES) and values.keys() <= {*RATES} and plan.settings.keys() <= {*plan.arms}
        if not known or not all(isinstance(value, int | float) for value in values.values()):
            raise ValueError(
                f"{where}: {settings}: expected, by stage, numbers for {', '.join(RATES)} of the plan's arms"
            )
    if not plan.tasks or not {*plan.tasks} <= {*ANSWERS} or len({*plan.tasks}) < len(plan.tasks):
        raise ValueError(f"{where}: tasks {plan.tasks}: expected some of {', '.join(ANSWERS)}, none twice")
    if plan.points and not plan.pictures.get("num_validation"):
        raise ValueError(f"{where}: a tuning needs pictures.num_validation, whose questions decide")
    earlier = json.loads((plan.file.parent / plan.pilot).read_text()) if plan.pilot else {"seeds": []}
    if "seeds" not in earlier or ("points" in earlier and "choice" not in earlier):
        raise ValueError(
            f"{where}: pilot {plan.pilot}: expected a file with seeds, or a tuning's record with its choice"
        )
    pilot, choice = earlier["seeds"], earlier.get("choice", plan.settings)
    if plan.settings != (chosen := {arm: settings for arm, settings in choice.items() if arm in plan.arms}):
        raise ValueError(f"{where}: settings {plan.settings}: the tuning {plan.pilot} chose {chosen}; copy that")
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


def hold(plan: Plan, folder: Path, kind: str = "", recorded: str = "") -> None:
    """Refuses a folder of another plan; once a kind of device is named, ties the folder to the plan and to that kind.

    Args:
        kind: of the device that runs are about to train on; runs on another would differ.
        recorded: that of the recorded runs, which may have come from another folder.

    Raises:
        ValueError: its runs were begun by another plan, or on another kind.
    """
    mark, before = folder / DIGEST, ""
    if mark.is_file():
        digest, _, before = mark.read_text().strip().partition("\n")
        check_digest(plan, digest, mark)
    before = before or recorded
    if kind and before not in ("", kind):
        raise ValueError(
            f"{mark}: runs were begun on {before}, this is {kind}; another kind of device rounds differently: continue "
            f"on {before}, or name another --output-dir"
        )
    if kind:
        mark.write_text(f"{plan.digest}\n{kind}\n")
