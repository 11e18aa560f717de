"""Runs tasks with the stock harnesses, and turns what they leave into results or names the samples that failed.

lmms-eval writes `<model>/<time>_results.json` and `<model>/<time>_samples_<task>.jsonl`, lm-eval
`<model>/results_<time>.json` and `<model>/samples_<task>_<time>.jsonl`. Neither harness says when something went
wrong: a failure may be an empty answer, an answer that is an error text, a missing sample, or a missing file.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token

from llava.eval.results import TaskResult
from llava.eval.tasks import OWN_DATA, OWN_TASKS, Record, Task, answer_of, doc_id
from llava.utils.digests import fingerprint
from llava.utils.paths import CODE
from llava.utils.processes import last_lines, start, wait
from llava.utils.progress import EVERY

ERROR_TEXTS = re.compile(
    r"^(failed to obtain answer via api|error(?: code)?:|traceback \(most recent call last\)|\[lmms[-_]eval)",
    re.IGNORECASE,
)


class EvaluationError(RuntimeError):
    """A task failed; `problems` are one line each and name the samples at fault."""

    def __init__(self, task: str, problems: list[str], shown: int = 20):
        self.problems = problems
        rest = f"\n  ... and {len(problems) - shown} more" if len(problems) > shown else ""
        super().__init__(f"{task} failed:\n  " + "\n  ".join(problems[:shown]) + rest)


# --- running ----------------------------------------------------------------------------------------------------------


def require_harnesses(tasks: list[Task]) -> None:
    """Raises ValueError unless the harnesses of `tasks` are installed."""
    for name in dict.fromkeys(task.harness for task in tasks):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed; run: EXTRAS=eval bash scripts/setup.sh")


def data_place(task: Task, data_dir: Path | None) -> Path | None:
    """The folder that holds the task's data set as `<org>/<name>`, or None where it comes from the hub.

    Raises:
        ValueError: it should be local, and is missing.
    """
    for folder in ([] if data_dir is None else [data_dir]) + ([OWN_DATA] if task.own else []):
        if (folder / task.dataset / "README.md").is_file():
            return folder.resolve()
    if task.own:
        raise ValueError(
            f"--tasks {task.name}: {OWN_DATA / task.dataset} is missing; run: python -m playground heldout"
        )
    if data_dir is not None:
        raise ValueError(
            f"--tasks {task.name}: {data_dir / task.dataset}/README.md is missing; --data-dir needs the data set "
            "there, as docs/evaluate.md describes"
        )
    return None


def token_fault(tasks: Sequence[Task]) -> str:
    """Why lmms-eval could not load these tasks' data sets from the hub, or nothing.

    It asks for a token even where they are public.
    """
    asking = [task.name for task in tasks if task.harness == "lmms_eval"]
    if not asking or constants.HF_HUB_OFFLINE or get_token():  # offline it takes what was loaded before
        return ""
    return (
        f"{', '.join(asking)}: lmms-eval loads data sets of the hub with a token only, public ones too; run: hf auth "
        "login, or set HF_TOKEN"
    )


def data_fingerprint(task: Task, place: Path | None) -> str | None:
    """A text that changes with the task's local data files and its own definition; None for data from the hub."""
    if place is None:
        return None
    data = fingerprint(place / task.dataset, deep=True)
    return f"{data}-{fingerprint(OWN_TASKS)}" if task.own else data


def datasets_cache(tasks: Sequence[Task], place: Path) -> Path:
    """Where the datasets library keeps what it reads from the tasks' local data sets, named by their content.

    The library itself names it by the data set's name, and so would return another folder's data, or older ones.
    """
    contents = "-".join(fingerprint(place / name, deep=True) for name in sorted({task.dataset for task in tasks}))
    folder = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
    return Path(folder, f"llava-{hashlib.sha256(contents.encode()).hexdigest()[:16]}").absolute()


def process_groups(
    tasks: list[Task], places: dict[str, Path | None], together: bool, mmlu_fewshot: int
) -> list[list[Task]]:
    """The tasks of each process: one, or with `together` all that have harness and data folder in common."""
    groups: dict[object, list[Task]] = {}
    for task in tasks:
        few_shot = task.name == "mmlu" and mmlu_fewshot  # a process has one number of examples for all its tasks
        key = (task.harness, places[task.name], few_shot) if together else task.name
        groups.setdefault(key, []).append(task)
    return list(groups.values())


def run_group(
    tasks: list[Task], place: Path | None, args: argparse.Namespace, settings: dict[str, Any]
) -> Iterator[tuple[Task, TaskResult | EvaluationError]]:
    """Runs one harness process and yields each of its tasks with its result or its error.

    Raises:
        ValueError: the folder for the harness's files holds something else.
    """
    title = ",".join(task.name for task in tasks)
    folder = (args.output_dir / (tasks[0].name + "+" * (len(tasks) > 1))).resolve()
    log = folder / "log.txt"
    if folder.exists() and not log.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and has no log.txt of an earlier evaluation; give another --output-dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{title}: running, log in {log}", flush=True)
    begun = time.monotonic()
    command = harness_command(tasks, folder, args, settings)
    status = run_logged(command, log, cwd=place or folder, env=environment(tasks, args, place), title=title)
    seconds = (time.monotonic() - begun) / len(tasks)
    for task in tasks:
        try:
            if status:
                said = [f"the harness ended with exit status {status}; the end of {log}:", *last_lines(log, 15)]
                hint = [] if place else [f"{task.dataset} comes from the hub; without a network give --data-dir"]
                raise EvaluationError(task.name, said + hint)
            yield task, collect(task, folder, seconds, data_fingerprint(task, place), args.allow_empty)
        except EvaluationError as error:
            yield task, error


def run_logged(command: list[str], log: Path, cwd: Path, env: Mapping[str, str], title: str) -> int:
    """Runs `command` with all its output in `log`, and returns its exit status; says now and then how far it is."""
    with log.open("w", encoding="utf-8") as output:
        process = start(command, env, output, cwd=cwd)

    def show() -> None:
        print(f"  {title}: {last_lines(log, 1)[0]}", file=sys.stderr, flush=True)

    return wait(process, show, EVERY, group=True)  # accelerate passes no signals on


def harness_command(tasks: list[Task], folder: Path, args: argparse.Namespace, settings: dict[str, Any]) -> list[str]:
    """The command line of one harness process."""
    harness = tasks[0].harness
    path = Path(args.checkpoint)
    pretrained = str(path.resolve()) if path.exists() else args.checkpoint
    if "," in pretrained or "=" in pretrained:
        raise ValueError(f"{pretrained}: the harnesses cannot take a path with a comma or an equals sign; link it")
    launcher = ["-m"]
    if args.num_gpus > 1:
        launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(args.num_gpus), "--num_machines", "1"]
        launcher += ["--main_process_port", "0", "--multi_gpu", "--mixed_precision", "no"]
        launcher += ["--dynamo_backend", "no", "-m"]
    device = "cuda" if args.num_gpus else "cpu"
    model_args = {"pretrained": pretrained}
    if harness == "lmms_eval":
        model = "llava"
        model_args |= {"conv_template": settings["conv_template"]}
        model_args |= {} if args.num_gpus else {"device_map": "auto"}  # else it takes the process's own GPU
        # Without DEBUG lmms-eval catches what went wrong and ends with status 0.
        extra = ["--verbosity", "DEBUG"] + ["--include_path", str(OWN_TASKS)] * any(task.own for task in tasks)
    else:
        model = "hf"
        model_args |= {"dtype": "auto" if args.num_gpus else "float32"}
        model_args |= {"max_length": str(settings["context"])}  # it knows no rope scaling
        extra = ["--num_fewshot", str(args.mmlu_fewshot)] if "mmlu" in [task.name for task in tasks] else []
    return [
        *(sys.executable, *launcher, "llava.eval.launch", harness, "--model", model),
        *("--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())),
        *("--tasks", ",".join(task.name for task in tasks), "--batch_size", str(args.batch_size)),
        *("--device", device, "--output_path", str(folder), "--log_samples", *extra),
        *(["--limit", str(args.limit)] if args.limit else []),
    ]


def environment(tasks: Sequence[Task], args: argparse.Namespace, place: Path | None) -> dict[str, str]:
    """The harness's environment: imports of this tree; no GPU with 0 GPUs; no hub and an own cache with local data."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(CODE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    if place is not None:
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(datasets_cache(tasks, place))}
    if args.num_gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


# --- what it left ----------------------------------------------------------------------------------------------------


def collect(task: Task, folder: Path, seconds: float, data: str | None = None, allow_empty: bool = False) -> TaskResult:
    """The result of `task` from a harness's output `folder`.

    Raises:
        EvaluationError: no results, missing or doubled samples, empty answers (unless allowed) or error texts, or a
            score that the samples do not give.
    """
    value, counts = read_score(task, folder)
    records = read_records(task, folder, counts)
    if problems := record_problems(task, records, allow_empty):
        raise EvaluationError(task.name, problems)
    samples = task.samples(records)
    score = task.score(samples)
    if not math.isclose(task.percent(value, len(samples)), score, abs_tol=1e-3):
        fault = f"the harness's {task.metric} is {value}, which is not the samples' score of {score:.4f} %"
        raise EvaluationError(task.name, [f"{fault}; this version of the harness may compute it differently"])
    chance = task.chance(records) if callable(task.chance) else task.chance
    return TaskResult(task.metric, score, samples, chance, seconds, data)


def read_score(task: Task, folder: Path) -> tuple[float, dict[str, dict[str, int]]]:
    """The score of the task, or of the group of its name, in the harness's file, and its numbers of samples by task.

    Raises:
        EvaluationError: there is none.
    """
    files = sorted([*folder.rglob("*_results.json"), *folder.rglob("results_*.json")], key=lambda f: f.stat().st_mtime)
    if not files:
        raise EvaluationError(task.name, [f"{folder}: the harness ended without writing results"])
    results = json.loads(files[-1].read_text(encoding="utf-8"))
    scores = results["results"].get(task.name) or results.get("groups", {}).get(task.name) or {}
    value = scores.get(task.metric)
    if not isinstance(value, int | float):
        keys = ", ".join(scores) or "nothing"
        raise EvaluationError(task.name, [f"{files[-1]}: expected a number {task.metric} for it, found {keys}"])
    return value, results["n-samples"]


def read_records(task: Task, folder: Path, counts: dict[str, dict[str, int]]) -> list[Record]:
    """The records of all samples in the order of the data set; those of a group's tasks have their name as `subtask`.

    Args:
        counts: by task, the numbers of samples; `effective` is how many the harness was to evaluate.

    Raises:
        EvaluationError: a sample is missing or doubled.
    """
    own = {name: count for name, count in counts.items() if name == task.name or name.startswith(task.name + "_")}
    if task.name in own:
        own = {task.name: own[task.name]}  # `scienceqa` beside `scienceqa_img`
    problems, records = [], []
    for name, count in own.items():
        files = [*folder.rglob(f"*_samples_{name}.jsonl"), *folder.rglob(f"samples_{name}_[0-9]*.jsonl")]
        lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
        samples = sorted((json.loads(line) for line in lines), key=lambda record: record["doc_id"])
        if name != task.name:
            samples = [record | {"subtask": name.removeprefix(task.name + "_")} for record in samples]
        problems += count_problems(name, samples, int(count["effective"]))  # with --limit it may be 8.0
        records += samples
    if problems or not records:
        raise EvaluationError(task.name, problems or [f"{folder}: the harness wrote no samples"])
    return records


def count_problems(name: str, records: Sequence[Record], expected: int) -> list[str]:
    """What is wrong with the number of samples; the harness numbers them from 0."""
    seen = Counter(record["doc_id"] for record in records)
    missing = [str(index) for index in range(expected) if index not in seen]
    doubled = [str(index) for index, count in seen.items() if count > 1]
    problems = []
    if missing:
        problems.append(f"{name}: {len(missing)} of {expected} samples are missing: doc {_listed(missing)}")
    if doubled:
        problems.append(f"{name}: {len(doubled)} samples are there more than once: doc {_listed(doubled)}")
    return problems


def _listed(items: list[str], shown: int = 20) -> str:
    return ", ".join(items[:shown]) + (", ..." if len(items) > shown else "")


def record_problems(task: Task, records: Sequence[Record], allow_empty: bool) -> list[str]:
    """One line for every sample with an empty answer, an error text, or a likelihood that is not a number."""
    problems = []
    for record in records:
        answer = answer_of(record)
        if not task.generates:
            values = [response[0] for response in record["filtered_resps"]]
            fault = "" if all(math.isfinite(float(value)) for value in values) else f"likelihoods {values}"
        elif not answer:
            fault = "" if allow_empty else "empty answer (--allow-empty counts it as wrong)"
        else:
            fault = f"an error text instead of an answer: {answer[:100]!r}" if ERROR_TEXTS.match(answer) else ""
        problems += [f"doc {doc_id(record)}: {fault}"] if fault else []
    return problems
