"""The record of trained arms: what a quickstart, a comparison and a planned study write, and all that a page reads.

`record.json` in the experiment's folder:

    {"format": 1,
     "configuration": {name: value},      what all runs share
     "questions": {task: [id]},           in the order of the runs' scores
     "tasks": {task: {"metric", "chance", "kinds", "targets"}},
     "runs": [{"seed", "arm", "plan", "commit", "started", "machine", "precision", "hours",
               "tower", "language_model", "weights",             digests
               "scores", "log_probabilities", "answers",         by task, for each question
               "percent",                                        by task, as the harness computed it
               "logged", "stages", "evaluation", "own"}]}

A run's configuration, first norms and losses, stages and answers are left out of older records, and so are "tasks".
Some older runs also have "controls", percent right with the picture changed or taken away, and "training", evaluations
during stage 2.
More keys belong to the experiment: its `title`, `overall` result and `examples`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llava.compare.runs import (
    ARM_FIELDS,
    OWN_STAGE_1,
    RATE_FIELDS,
    SEED_FIELDS,
    Run,
    changed,
    check_results,
    check_runs,
    evaluation_settings,
)
from llava.eval.results import LLAVA_COMMIT, Results
from llava.launch.recipe import STAGES
from llava.utils.digests import revision
from llava.utils.files import write_text

FORMAT = 1
FILE = "record.json"
TOWER, LANGUAGE_MODEL = "mm_vision_tower", "mm_language_model"
"""Whose digests every run records: names in the configuration's `initial_weights`."""
BF16 = "training.bf16"
PRECISION = (BF16, ".dtype", ".torch_dtype", f"initial_weights.{LANGUAGE_MODEL}")
"""Ends of the names of what follows from the precision, which a CPU has instructions for or not."""
CURVES = {
    "loss": ("Loss", False),
    "norm/llm_input": ("Norm of visual tokens (dotted: text) at the LLM's input", True),
    "norm/text_embeddings": ("Norm of text embeddings", False),
    "norm/gain_mean_abs": ("Mean |gain| of the norm", False),
    "grad_norm": ("Gradient norm, all weights", True),
    "grad_norm/llm_input": ("Gradient at the LLM's input", True),
    "grad_norm/before_norm": ("Gradient before the norm", True),
    "grad_norm/vision_features": ("Gradient at the vision features", True),
}
"""Keys of `train_log.jsonl` that are recorded, each with its title and whether its axis is logarithmic."""
MAX_POINTS = 300  # of a curve; more are averaged in blocks
LOSS_STEPS = 10  # last steps, whose mean loss is recorded
Record = dict[str, Any]


def new_record(**more: Any) -> Record:
    """A record without runs, with an experiment's own keys."""
    return {"format": FORMAT, **more, "configuration": {}, "questions": {}, "tasks": {}, "runs": []}


def read_record(place: Path) -> Record:
    """The record in a file or a folder.

    Raises:
        ValueError: no such file, or not a record of this format.
    """
    path = place / FILE if place.is_dir() else place
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no file, or not JSON ({error}); an experiment writes it at its end") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not record.get("runs"):
        raise ValueError(f"{path}: not a record of runs, format {FORMAT} (a tuning's is none); restore it")
    return record


def write_record(record: Record, path: Path) -> None:
    """Replaces a record's file: a line for each run."""
    dense = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    parts = [f"{dense(name)}: {dense(part)}" for name, part in record.items() if name != "runs"]
    runs = ",\n".join(map(dense, record["runs"]))
    write_text(path, '{{\n{},\n"runs": [\n{}\n]\n}}\n'.format(",\n".join(parts), runs))


def add_runs(record: Record, runs: Sequence[Run], answers_of: Callable[[Run], Results], plan: str = "") -> None:
    """Adds runs, of which `answers_of` gives the answers, if nothing but arm and seed tells them apart.

    Args:
        plan: the digest of the plan that the runs follow.

    Raises:
        ValueError: they may not be compared with each other, or with the recorded runs; see `add_run`.
    """
    for stage in STAGES:
        check_runs(runs, stage)
    answers = {run: answers_of(run) for run in runs}
    check_results(runs, answers.__getitem__)
    for run in runs:
        add_run(record, run, answers[run], plan)


def add_run(record: Record, run: Run, results: Results, plan: str = "") -> None:
    """Adds a run with its answers to the record.

    Raises:
        ValueError: it differs from the recorded runs in more than arm, its rates and seed, or answered other questions.
    """
    shared = shared_configuration(run, results)
    if fields := changed(record["configuration"] or shared, shared, ("recorded", "now")):
        commit = record["runs"][-1]["commit"]
        raise ValueError(
            f"{run.name} differs from the recorded runs{fields}\nContinue at commit {commit}, on a clean tree."
        )
    asked = {name: [sample.id for sample in task.samples] for name, task in results.tasks.items()}
    before = record["questions"] or asked
    if {name: sorted(ids) for name, ids in before.items()} != {name: sorted(ids) for name, ids in asked.items()}:
        raise ValueError(f"{run.name} answered other questions than the recorded runs; prepare the inputs again")
    record |= {"configuration": shared, "questions": before}
    entry = entry_of(run, results, plan, record)
    for other in record["runs"]:
        if other["precision"] == entry["precision"] and other["language_model"] != entry["language_model"]:
            raise ValueError(
                f"{run.name} started from a language model of digest {entry['language_model']}, the recorded runs "
                f"in {entry['precision']} from {other['language_model']}; prepare the inputs again"
            )
        fields = changed(rates_of(other), rates_of(entry), ("recorded", "now"))
        if fields and other["arm"] == run.arm:
            raise ValueError(f"{run.name} was trained at other rates than its arm with seed {other['seed']}{fields}")
    record["tasks"] = record.get("tasks") or facts_of(results, before)
    record["runs"].append(entry)


def configuration_of(run: Run, results: Results) -> dict[str, Any]:
    """What decided a run and its evaluation, by dotted name."""
    stages = {f"{stage}.{name}": value for stage in STAGES for name, value in run.configuration(stage).items()}
    answers = {f"answers.{name}": value for name, value in evaluation_settings(results).items()}
    return json.loads(json.dumps(stages | answers))  # as it is read back


def shared_configuration(run: Run, results: Results) -> dict[str, Any]:
    """What must be the same in all runs of a record.

    Left out are arm and seed; the arm's rates; precision and tower, which are the same for all arms of a seed but not
    on all machines, and the language model's digest, which follows from the precision: every run records these; and
    where files are, since what they hold has its digest.
    """
    own = tuple(
        f"{stage}.{name}"
        for stage in STAGES
        for name in (*ARM_FIELDS, *SEED_FIELDS, *OWN_STAGE_1, f"initial_weights.{TOWER}")
    )
    return {
        name: value
        for name, value in configuration_of(run, results).items()
        if not name.startswith(own)
        and not name.endswith(PRECISION)
        and not (isinstance(value, str) and Path(value).is_absolute())
    }


def rates_of(entry: Record) -> dict[str, Any]:
    """What is recorded of a run's rates."""
    return {name: value for name, value in entry.get("own", {}).items() if name.endswith(RATE_FIELDS)}


def facts_of(results: Results, questions: Mapping[str, Sequence[str]]) -> Record:
    """What a record says of each task's questions, in their recorded order."""
    facts = {}
    for name, task in results.tasks.items():
        samples = in_order(task.samples, questions[name])
        facts[name] = {"metric": task.metric, "chance": task.chance, "targets": [sample.target for sample in samples]}
        facts[name]["kinds"] = [sample.group for sample in samples]
    return facts


def entry_of(run: Run, results: Results, plan: str, record: Record) -> Record:
    """What is recorded of a run; see `add_run`."""
    samples = {name: in_order(results.tasks[name].samples, ids) for name, ids in record["questions"].items()}
    start = run.starts(STAGES[0])[0]
    digests = start["configuration"].get("initial_weights", {})
    stages = {stage: stage_of(run, stage) for stage in STAGES}
    answering = sum(task.seconds for task in results.tasks.values())
    entry = {"seed": run.seed, "arm": run.arm, "plan": plan}
    entry |= {
        "commit": start["configuration"]["code"]["commit"],
        "started": start["provenance"]["started"],
        "machine": start["provenance"]["machine"],
        "precision": "bf16" if run.configuration(STAGES[0]).get(BF16) else "fp32",
        "hours": in_digits((sum(stage["seconds"] for stage in stages.values()) + answering) / 3600, 4),
        "tower": str(digests.get(TOWER))[:12],
        "language_model": str(digests.get(LANGUAGE_MODEL))[:12],
        "weights": revision(str(run.folder(STAGES[-1]))),
        "scores": {name: [sample.score for sample in own] for name, own in samples.items()},
        "answers": {name: [sample.answer for sample in own] for name, own in samples.items()},
        "percent": {name: results.tasks[name].score for name in samples},
    }
    if all(sample.log_probability is not None for own in samples.values() for sample in own):
        entry["log_probabilities"] = {
            name: [in_digits(sample.log_probability, 5) for sample in own] for name, own in samples.items()
        }
    limits = {name: results.settings[name] for name in ("limit", "num_gpus") if results.settings.get(name)}
    evaluation = {"command": results.command, "created": results.created, "seconds": answering} | limits
    evaluation["commit"] = results.versions.get(LLAVA_COMMIT)
    own = {name: value for name, value in configuration_of(run, results).items() if name not in record["configuration"]}
    return entry | {"logged": logged_by(run), "stages": stages, "evaluation": evaluation, "own": own}


def in_order(samples: Sequence[Any], ids: Sequence[str]) -> list[Any]:
    """The samples of a task in the order of `ids`."""
    by_id = {sample.id: sample for sample in samples}
    return [by_id[name] for name in ids]


def stage_of(run: Run, stage: str) -> Record:
    """A stage's cost, its starts, and its curves."""
    configuration, log = run.configuration(stage), run.log(stage)
    ranks = configuration["devices.ranks"]
    batch = configuration["training.per_device_train_batch_size"] * ranks
    batch *= configuration["training.gradient_accumulation_steps"]
    before = [0, *(line["step"] for line in log[:-1])]
    seconds = [(line["step"] - b) * batch / line["samples_per_second"] for line, b in zip(log, before, strict=True)]
    starts = [
        {"started": start["provenance"]["started"], "commit": start["configuration"]["code"]["commit"]}
        | {"command": start["provenance"]["command"]}
        for start in run.starts(stage)
    ]
    return {
        "steps": configuration["steps"],
        "batch": batch,
        "devices": f"{ranks} x {configuration['devices.kind']}",
        "seconds": sum(seconds),
        "device_hours": sum(seconds) * ranks / 3600,
        "tokens": sum(s * line.get("tokens_per_second", 0.0) for s, line in zip(seconds, log, strict=True)),
        "peak_memory_gib": max((line.get("peak_memory_gib", 0.0) for line in log), default=0.0),
        "starts": starts,
        "curves": {key: points for key in CURVES if (points := curve_of(log, key))},
    }


def curve_of(log: Sequence[Mapping[str, float]], key: str) -> list[list[float]]:
    """Steps and what was logged under `key` [K, 2], neighbours averaged where there are many."""
    points = np.array([(line["step"], line[key]) for line in log if line.get(key) is not None])
    block = max(1, len(points) // MAX_POINTS)
    length = len(points) - len(points) % block
    return [[in_digits(float(x), 6), in_digits(float(y), 6)]
            for x, y in points[:length].reshape(-1, block, 2).mean(axis=1)] if length else []  # fmt: skip


def logged_by(run: Run) -> dict[str, list[float | None]]:
    """Last losses of both stages, and norms at the LLM's input at the start and at the end of each stage."""
    logs = [run.log(stage) for stage in STAGES]
    logged: dict[str, list[float | None]] = {
        "loss": [float(np.mean([line["loss"] for line in log[-LOSS_STEPS:]])) if log else None for log in logs]
    }
    for name, key in (("visual norm", "norm/llm_input"), ("text norm", "norm/text_embeddings")):
        values = [[line[key] for line in log if key in line] or [None] for log in logs]
        logged[name] = [values[0][0], *(stage[-1] for stage in values)]
    return logged


def in_digits(value: Any, digits: int) -> Any:
    """A float rounded to this many significant digits; anything else as it is."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def differing(record: Record, other: Record) -> dict[str, list[str]]:
    """What the runs that both records have differ in, by run.

    Raises:
        ValueError: they are of different questions, or have no run in common.
    """
    ours, theirs = ({(entry["arm"], entry["seed"]): entry for entry in each["runs"]} for each in (record, other))
    if record["questions"] != other["questions"] or not ours.keys() & theirs.keys():
        raise ValueError("the records are of different questions, or have no run in common")
    parts = ("scores", "log_probabilities")
    return {
        f"{arm}, seed {seed}": [name for name in parts if entry.get(name) != theirs[arm, seed].get(name)]
        for (arm, seed), entry in ours.items()
        if (arm, seed) in theirs
    }
