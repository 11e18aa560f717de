"""Runs tasks with the stock harnesses: their data folders, processes, command lines and environments."""

import argparse
import hashlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token

from llava.eval.collect import EvaluationError, collect, crash_problems
from llava.eval.process import run_logged
from llava.eval.results import TaskResult
from llava.eval.tasks import OWN_DATA, OWN_TASKS, Task
from llava.utils.digests import fingerprint
from llava.utils.paths import CODE

TOO_LONG = "exceeds model's maximum length"
"""lm-eval's warning for every prompt whose beginning it cuts, as few-shot examples."""


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
    start = time.monotonic()
    command = harness_command(tasks, folder, args, settings)
    status = run_logged(command, log, cwd=place or folder, env=environment(tasks, args, place), title=title)
    seconds = (time.monotonic() - start) / len(tasks)
    if longer := log.read_text(errors="replace").count(TOO_LONG):
        print(f"{title}: {longer} prompts are longer than the model's context, and lm-eval cut their beginning")
    for task in tasks:
        try:
            if status:
                hint = [] if place else [f"{task.dataset} comes from the hub; without a network give --data-dir"]
                raise EvaluationError(task.name, crash_problems(status, log) + hint)
            yield task, collect(task, folder, seconds, data_fingerprint(task, place), args.allow_empty)
        except EvaluationError as error:
            yield task, error


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
