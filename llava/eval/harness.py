"""Runs tasks with the stock harnesses, and turns what they leave into results or names the samples that failed.

`python -m llava.eval.harness lmms_eval|lm_eval ARGUMENTS` starts a stock harness that knows our model types.
lmms-eval writes `<model>/<time>_results.json` and `<model>/<time>_samples_<task>.jsonl`, lm-eval
`<model>/results_<time>.json` and `<model>/samples_<task>_<time>.jsonl`. Neither harness says when something went
wrong: a failure may be a missing sample or a missing file.
"""

import argparse
import json
import math
import os
import runpy
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token

from llava.eval.results import TaskResult
from llava.eval.tasks import OWN_DATA, OWN_TASKS, Record, Task, doc_id
from llava.utils.digests import fingerprint
from llava.utils.paths import CODE
from llava.utils.processes import start, wait

LOG = "log.txt"
SHOWN_PROBLEMS = 20


class EvaluationError(RuntimeError):
    """A task failed; the message has a line for each of the first problems, which names the sample at fault."""

    def __init__(self, task: str, *problems: str):
        super().__init__("\n  ".join([f"{task} failed, problems: {len(problems)}", *problems[:SHOWN_PROBLEMS]]))


# --- running ----------------------------------------------------------------------------------------------------------


def local_data(task: Task, data_dir: Path | None) -> tuple[Path | None, str | None]:
    """The folder with the task's data set as `<org>/<name>`, and a text that changes with its files and an own task's
    definition; None and None where it comes from the hub.

    Raises ValueError: it should be local, and is missing.
    """
    folders = [folder for folder in (data_dir, OWN_DATA if task.own else None) if folder]
    for folder in folders:
        if (folder / task.dataset / "README.md").is_file():
            content = fingerprint(folder / task.dataset)
            return folder.resolve(), f"{content}-{fingerprint(OWN_TASKS)}" if task.own else content
    if not folders:
        return None, None
    advice = "run: python -m playground heldout" if task.own else "docs/evaluate.md says what --data-dir holds"
    raise ValueError(f"--tasks {task.name}: {folders[-1] / task.dataset}/README.md is missing; {advice}")


def token_fault(tasks: Sequence[Task]) -> str:
    """Why lmms-eval could not load these tasks' data sets from the hub, or nothing."""
    names = ", ".join(task.name for task in tasks if task.harness == "lmms_eval")
    if not names or constants.HF_HUB_OFFLINE or get_token():  # offline it takes what was loaded before
        return ""
    return f"{names}: lmms-eval loads public data sets with a token only; run: hf auth login, or set HF_TOKEN"


def run_harness(
    tasks: list[Task], place: Path | None, args: argparse.Namespace, settings: dict[str, Any]
) -> tuple[Path, int, float]:
    """Runs one harness process; returns the folder of its files and `LOG`, its exit status, its seconds.

    `place` is the folder of local data sets. The datasets library names what it caches by the data set's name, and so
    would return another folder's data, or older ones: a process with local data has its own cache.

    Raises ValueError: the folder holds something else.
    """
    folder = (args.output_dir / (tasks[0].name + "+" * (len(tasks) > 1))).resolve()
    log = folder / LOG
    if folder.exists() and not log.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and has no {LOG} of an earlier evaluation; give another --output-dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{', '.join(task.name for task in tasks)}: running, log in {log}", flush=True)
    begun = time.monotonic()
    cache = folder / "cache"
    command, env = harness_command(tasks, folder, args, settings), environment(place and cache, args.num_gpus)
    status = run_logged(command, log, cwd=place or folder, env=env)
    shutil.rmtree(cache, ignore_errors=True)
    return folder, status, time.monotonic() - begun


def run_logged(command: list[str], log: Path, cwd: Path, env: Mapping[str, str]) -> int:
    """Runs `command` with its output in `log`; returns the exit status."""
    with log.open("w", encoding="utf-8") as output:
        return wait(start(command, env, output, cwd=cwd), group=True)  # accelerate passes no signals on


def harness_command(tasks: list[Task], folder: Path, args: argparse.Namespace, settings: dict[str, Any]) -> list[str]:
    """The command line of one harness process."""
    pretrained = str(Path(args.checkpoint).resolve()) if Path(args.checkpoint).exists() else args.checkpoint
    if "," in pretrained or "=" in pretrained:
        raise ValueError(f"{pretrained}: the harnesses cannot take a path with a comma or an equals sign; link it")
    command, names = [sys.executable], [task.name for task in tasks]
    if args.num_gpus > 1:
        command += ["-m", "accelerate.commands.launch", "--num_processes", str(args.num_gpus), "--num_machines", "1"]
        command += ["--main_process_port", "0", "--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["-m", "llava.eval.harness", tasks[0].harness]
    if tasks[0].harness == "lmms_eval":
        place = "" if args.num_gpus else ",device_map=auto"  # else it takes the process's own GPU
        model = f"pretrained={pretrained},conv_template={settings['conv_template']}{place}"
        # Without DEBUG lmms-eval catches what went wrong and ends with status 0.
        command += ["--model", "llava", "--model_args", model, "--verbosity", "DEBUG"]
        command += ["--include_path", str(OWN_TASKS)] if any(task.own for task in tasks) else []
    else:
        dtype = "auto" if args.num_gpus else "float32"
        model = f"pretrained={pretrained},dtype={dtype},max_length={settings['context']}"  # it knows no rope scaling
        command += ["--model", "hf", "--model_args", model]
        command += ["--num_fewshot", str(tasks[0].few_shot)] if tasks[0].few_shot else []
    batch_size = args.batch_size if all(task.batched for task in tasks) else 1
    command += ["--tasks", ",".join(names), "--batch_size", str(batch_size)]
    command += ["--device", "cuda" if args.num_gpus else "cpu", "--output_path", str(folder), "--log_samples"]
    return command + (["--limit", str(args.limit)] if args.limit else [])


def environment(cache: Path | None, num_gpus: int) -> dict[str, str]:
    """The harness's environment: imports of this tree; no GPU with 0 GPUs; no hub and this `cache` with local data."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(CODE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache)} if cache else {}
    return env if num_gpus else env | {"CUDA_VISIBLE_DEVICES": ""}


# --- what it left ----------------------------------------------------------------------------------------------------


def collect(task: Task, folder: Path, seconds: float, data: str | None = None) -> TaskResult:
    """The result of `task` from a harness's output `folder`.

    Raises EvaluationError: no results, missing or doubled samples, likelihoods that are not numbers, or a score that
    the samples do not give.
    """
    value, counts = read_score(task, folder)
    records = read_records(task, folder, counts)
    responses = {} if task.harness == "lmms_eval" else {doc_id(r): r["filtered_resps"] for r in records}
    if lost := [name for name, own in responses.items() if not all(math.isfinite(float(r[0])) for r in own)]:
        raise EvaluationError(task.name, *(f"doc {name}: its likelihoods are not numbers" for name in lost))
    samples = task.samples(records)
    score = task.score(samples)
    if not math.isclose(value * 100 / task.unit(samples), score, abs_tol=1e-3):
        fault = f"the harness's {task.metric} is {value}, which is not the samples' score of {score:.4f} %"
        raise EvaluationError(task.name, f"{fault}; this version of the harness may compute it differently")
    return TaskResult(task.metric, score, samples, task.chance_of(records), seconds, data)


def read_score(task: Task, folder: Path) -> tuple[float, dict[str, dict[str, int]]]:
    """The score of the task, or of the group of its name, in the harness's file, and its numbers of samples by task.

    Raises EvaluationError: there is none.
    """
    files = sorted([*folder.rglob("*_results.json"), *folder.rglob("results_*.json")], key=lambda f: f.stat().st_mtime)
    if not files:
        raise EvaluationError(task.name, f"{folder}: the harness ended without writing results")
    results = json.loads(files[-1].read_text(encoding="utf-8"))
    scores = results["results"].get(task.name) or results.get("groups", {}).get(task.name) or {}
    if not isinstance(value := scores.get(task.metric), int | float):
        raise EvaluationError(task.name, f"{files[-1]}: expected a number {task.metric} for it, found {[*scores]}")
    return value, results["n-samples"]


def read_records(task: Task, folder: Path, counts: dict[str, dict[str, int]]) -> list[Record]:
    """The records of all samples in the order of the data set; those of a group's tasks have their name as `subtask`.

    Args:
        counts: by task, the numbers of samples; `effective` is how many the harness was to evaluate.

    Raises EvaluationError: a sample is missing or doubled.
    """
    prefix = f"{task.name}_"
    names = [task.name] if task.name in counts else [name for name in counts if name.startswith(prefix)]
    problems, records = [], []
    for name in names:
        files = [*folder.rglob(f"*_samples_{name}.jsonl"), *folder.rglob(f"samples_{name}_[0-9]*.jsonl")]
        lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
        samples = sorted(map(json.loads, lines), key=lambda record: record["doc_id"])
        times = Counter(record["doc_id"] for record in samples)
        expected = int(counts[name]["effective"])  # with --limit it may be 8.0
        odd = [index for index in sorted({*times, *range(expected)}) if times[index] != 1]
        problems += [f"{name}, doc {index}: {times[index]} samples instead of one" for index in odd]
        subtask = {} if name == task.name else {"subtask": name.removeprefix(prefix)}
        records += [record | subtask for record in samples]
    if problems or not records:
        raise EvaluationError(task.name, *(problems or [f"{folder}: the harness wrote no samples"]))
    return records


if __name__ == "__main__":
    import llava.model.language_model.families  # noqa: F401  registers our types with the classes by which lm-eval loads

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
