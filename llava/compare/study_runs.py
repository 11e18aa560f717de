"""The recorded runs of a study by a written plan, next to the plan: of `study-plan.json` in `study-runs.json`.

Of every run the score and the expected answer's log-probability for each question, losses over stage 2, machine,
commit, hours, and the plan's digest. A seed is recorded once all its arms are done, and is not trained again, on
whatever machine: the file alone resumes the study.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava.compare.registered import Registered
from llava.compare.report_tables import batch_of, in_digits, seconds_of_steps
from llava.compare.runs import ABSENT, ARM_FIELDS, OWN_STAGE_1, SEED_FIELDS, Run, evaluation_settings, listed
from llava.compare.study_record import answers_of
from llava.eval.results import CONTROLS
from llava.launch.recipe import STAGES
from llava.utils.digests import revision
from llava.utils.files import write_text
from llava.utils.machine import machine
from llava.utils.provenance import differences

FORMAT = 1
TOWER, LANGUAGE_MODEL = "mm_vision_tower", "mm_language_model"
"""Whose digests every run records: names in the configuration's `initial_weights`."""
BF16 = "training.bf16"
PRECISION = (BF16, ".dtype", ".torch_dtype", f"initial_weights.{LANGUAGE_MODEL}")
"""Ends of the names of what follows from the precision, which a CPU has instructions for or not."""
Record = dict[str, Any]
"""The content of the file: `configuration` and `questions`, the same for all, and `runs`."""


def changed_plan(plan: Registered, where: Path, before: str) -> str:
    """The refusal of a plan that is not the one of the runs in `where`."""
    return (
        f"{where}: runs follow a plan of digest {before[:12]}, {plan.file} has {plan.digest[:12]}; a plan may not "
        "change after its first run: restore it, or write a new one with new seeds into another folder"
    )


def runs_file(plan: Registered) -> Path:
    return plan.file.with_name(f"{plan.file.stem.removesuffix('-plan')}-runs.json")


def missing_seeds(plan: Registered, record: Record) -> list[int]:
    present = {entry["seed"] for entry in record["runs"]}
    return [seed for seed in plan.seeds if seed not in present]


def read_runs(plan: Registered) -> Record:
    """The recorded runs of complete seeds; none without a file.

    Raises:
        ValueError: not such a file; its runs follow another plan, or are not the plan's arms for some seed.
    """
    path = runs_file(plan)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"format": FORMAT, "configuration": {}, "questions": {}, "runs": []}
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); restore it from the repository") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path}: not the runs of a study, format {FORMAT}; restore it from the repository")
    arms: dict[int, list[str]] = {}
    for entry in record["runs"]:
        if entry["plan"] != plan.digest:
            raise ValueError(changed_plan(plan, path, entry["plan"]))
        arms.setdefault(entry["seed"], []).append(entry["arm"])
    for seed, present in arms.items():
        if present != plan.arms or seed not in plan.seeds:
            raise ValueError(f"{path}: seed {seed} has runs of {present}; expected {plan.arms} for seeds {plan.seeds}")
    return record


def with_runs(plan: Registered, record: Record, runs: Sequence[Run]) -> Record:
    """The record, to which these runs of complete seeds were added.

    Raises:
        ValueError: they differ from the recorded ones in more than arm and seed.
    """
    for run in runs:
        shared = shared_configuration(run)
        tasks = answers_of(run, CONTROLS[0]).tasks
        asked = {name: sorted(sample.id for sample in tasks[name].samples) for name in sorted(tasks)}
        before = record["configuration"] or shared
        if changed := differences(before, shared, ABSENT):
            raise ValueError(
                f"{run.name} differs from the recorded runs{listed(changed, ('recorded', 'now'))}\n"
                f"Continue at commit {record['runs'][-1]['commit'] if record['runs'] else run.name}, on a clean tree."
            )
        if asked != (record["questions"] or asked):
            raise ValueError(f"{run.name} answered other questions than the recorded runs; prepare the inputs again")
        entry = entry_of(run, plan)
        for other in record["runs"]:
            if other["precision"] == entry["precision"] and other["language_model"] != entry["language_model"]:
                raise ValueError(
                    f"{run.name} started from a language model of digest {entry['language_model']}, the recorded runs "
                    f"in {entry['precision']} from {other['language_model']}; prepare the inputs again"
                )
        record |= {"configuration": shared, "questions": asked}
        record["runs"].append(entry)
    record["runs"].sort(key=lambda entry: plan.seeds.index(entry["seed"]))
    return record


def shared_configuration(run: Run) -> dict[str, Any]:
    """What must be the same in all runs of the study, by dotted name.

    Left out are arm and seed; precision and tower, which are the same for all arms of a seed but not on all machines,
    and the language model's digest, which follows from the precision: every run records the three; and where files
    are, since what they hold has its digest.
    """
    own = (*ARM_FIELDS, *SEED_FIELDS, *OWN_STAGE_1, f"initial_weights.{TOWER}")
    shared = {
        f"{stage}.{name}": value
        for stage in STAGES
        for name, value in run.configuration(stage).items()
        if not name.startswith(own) and not (isinstance(value, str) and Path(value).is_absolute())
    }
    shared |= {f"answers.{name}": value for name, value in evaluation_settings(answers_of(run, CONTROLS[0])).items()}
    shared = {name: value for name, value in shared.items() if not name.endswith(PRECISION)}
    return json.loads(json.dumps(shared))  # as it is read back


def entry_of(run: Run, plan: Registered) -> Record:
    """What is recorded of a run."""
    tasks = {control: answers_of(run, control).tasks for control in CONTROLS}
    samples = {
        name: sorted(task.samples, key=lambda sample: sample.id) for name, task in sorted(tasks[CONTROLS[0]].items())
    }
    start = run.starts(STAGES[0])[0]
    lines = [line for line in run.evaluations(STAGES[-1]) if "eval/accuracy" in line]
    digests = start["configuration"].get("initial_weights", {})
    answering = sum(task.seconds for by_task in tasks.values() for task in by_task.values())
    return {
        "seed": run.seed,
        "arm": run.arm,
        "plan": plan.digest,
        "commit": start["configuration"]["code"]["commit"],
        "started": start["provenance"]["started"],
        "machine": machine(),
        "precision": "bf16" if run.configuration(STAGES[0])[BF16] else "fp32",
        "hours": in_digits((sum(sum(seconds_of_steps(run, stage)) for stage in STAGES) + answering) / 3600, 4),
        "tower": str(digests.get(TOWER))[:12],
        "language_model": str(digests.get(LANGUAGE_MODEL))[:12],
        "weights": revision(str(run.folder(STAGES[-1]))),
        "scores": {name: [in_digits(sample.score, 4) for sample in own] for name, own in samples.items()},
        "log_probabilities": {
            name: [in_digits(sample.log_probability, 5) for sample in own] for name, own in samples.items()
        },
        "controls": {
            control: {name: in_digits(task.score, 4) for name, task in sorted(tasks[control].items())}
            for control in CONTROLS[1:]
        },
        "training": {
            "samples": [line["step"] * batch_of(run, STAGES[-1]) for line in lines],
            "loss": [in_digits(line["eval/loss"], 5) for line in lines],
            "accuracy": [in_digits(line["eval/accuracy"], 4) for line in lines],
        },
    }


def write_runs(plan: Registered, record: Record) -> None:
    """Writes the record, a line for each run."""
    dense = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    parts = [f"{dense(name)}: {dense(part)}" for name, part in record.items() if name != "runs"]
    runs = ",\n".join(map(dense, record["runs"]))
    write_text(runs_file(plan), '{{\n{},\n"runs": [\n{}\n]\n}}\n'.format(",\n".join(parts), runs))
