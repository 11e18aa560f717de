"""Scores a checkpoint with stock lmms-eval and lm-eval: `bash scripts/evaluate.sh CKPT [--tasks a,b]`.

Every task runs in a process of its own, so that a call that was stopped loses one task. What is finished lies in
`results.json` (`llava.eval.results`) and is not done again while checkpoint, settings, data and versions are the same.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from llava.analysis.models import fingerprint, named_model, revision
from llava.analysis.output import format_table, git_commit
from llava.eval.ask import exit_status, is_captioner
from llava.eval.collect import EvaluationError, collect, crash_problems
from llava.eval.process import run_logged
from llava.eval.results import RESULTS_FILE, Results, TaskResult, read_results, write_results
from llava.eval.tasks import OWN_DATA, OWN_TASKS, ROOT, Task, choose

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "lmms-eval", "lm-eval")
CODE = "llava (git commit)"
IDENTITY = ("conv_template", "limit", "mmlu_fewshot")
"""Settings on which the scores depend; another batch size or number of GPUs finds finished tasks done."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0, 2 for refused arguments, 1 where a task failed."""
    args = parser().parse_args(argv)
    try:
        return exit_status(evaluate, args)
    except EvaluationError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="bash scripts/evaluate.sh", description=__doc__.splitlines()[0])
    top.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder or hub id")
    top.add_argument("--tasks", help="names, joined by commas (default: the nine of the paper's Table 4)")
    top.add_argument("--output-dir", type=Path, help="default: outputs/eval/<last two parts of CKPT>")
    top.add_argument("--data-dir", type=Path, help="folder of <org>/<name> data sets; then nothing comes from the hub")
    top.add_argument("--conv-template", help="template for a checkpoint that does not say its own (LLaVA-1.5: v1)")
    top.add_argument("--limit", type=_positive, help="ask only the first N samples of every task; not for real scores")
    top.add_argument(
        "--mmlu-fewshot", type=int, default=5, metavar="N", help="solved examples before each question (default: 5)"
    )
    top.add_argument("--batch-size", type=_positive, default=1, help="samples at a time on each device (default: 1)")
    top.add_argument("--num-gpus", type=int, help="data parallel over so many; 0: CPU (default: all there are)")
    top.add_argument("--allow-empty", action="store_true", help="count empty answers as wrong instead of failing")
    top.add_argument(
        "--together", action="store_true", help="one process for all tasks of a harness: starts once, resumes nothing"
    )
    top.add_argument("--force", action="store_true", help="evaluate again what is finished")
    return top


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text}")
    return value


def evaluate(args: argparse.Namespace) -> None:
    """Runs what is missing, task by task, and prints the scores.

    Raises:
        ValueError: refused arguments.
        EvaluationError: a task failed, after all others had their turn.
    """
    tasks = choose(args.tasks)
    require_harnesses(tasks)
    if args.num_gpus is None:
        import torch

        args.num_gpus = torch.cuda.device_count()
    places = {task.name: data_place(task, args.data_dir) for task in tasks}
    args.output_dir = args.output_dir or ROOT / "outputs/eval" / named_model(args.checkpoint).name
    results = start_results(args)
    missing = [task for task in tasks if args.force or not is_finished(task, results, places)]
    for task in [task for task in tasks if task not in missing]:
        print(f"{task.name}: finished before, {results.tasks[task.name].score:.2f} (--force evaluates again)")
    failures = []
    for group in process_groups(missing, places, args.together, args.mmlu_fewshot):
        try:
            for name, result in run_group(group, places[group[0].name], args, results.settings).items():
                results.tasks[name] = result
                results.created = now()
                write_results(results, args.output_dir)
                print(f"{name}: {result.score:.2f} % ({result.metric}, {len(result.samples)} samples)", flush=True)
        except EvaluationError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failures.append(error)
    rows = [
        {"task": name, "score, %": result.score, "chance, %": result.chance, "samples": len(result.samples)}
        for name, result in results.tasks.items()
    ]
    if rows:
        print(f"\n{format_table(rows)}\nwritten: {args.output_dir / RESULTS_FILE}")
    if failures:
        raise EvaluationError(f"{len(failures)} of {len(tasks)} tasks", [line for e in failures for line in e.problems])


def require_harnesses(tasks: list[Task]) -> None:
    """Raises ValueError unless the harnesses of `tasks` are installed."""
    for name in dict.fromkeys(task.harness for task in tasks):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{name} is not installed; run: EXTRAS=eval bash scripts/setup.sh")


def data_place(task: Task, data_dir: Path | None) -> Path | None:
    """The folder that holds the task's data set as `<org>/<name>`, or None where it comes from the hub.

    Raises:
        ValueError: it should be local and is not there.
    """
    for folder in [data_dir] * (data_dir is not None) + [OWN_DATA] * task.own:
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


def data_fingerprint(task: Task, place: Path | None) -> str | None:
    """Changes with the task's local data files; None where they come from the hub."""
    if place is None:
        return None
    folders = [place / task.dataset, *sorted(f for f in (place / task.dataset).rglob("*") if f.is_dir())]
    return "-".join(fingerprint(folder) for folder in folders)


def start_results(args: argparse.Namespace) -> Results:
    """The results in the output folder if the same checkpoint, settings and versions made them, else empty ones.

    Others are kept under a name with their time, so that no file mixes two checkpoints or settings.
    """
    found = revision(args.checkpoint)
    if found is None:
        raise ValueError(f"{args.checkpoint}: no such folder, and not a model in the hub's local cache")
    results = Results(
        checkpoint=args.checkpoint,
        fingerprint=found,
        command=shlex.join(["bash", "scripts/evaluate.sh", *(args.argv if hasattr(args, "argv") else sys.argv[1:])]),
        versions={name: _version(name) for name in PACKAGES} | {CODE: git_commit()},
        settings=settings_of(args),
        created=now(),
    )
    path = args.output_dir / RESULTS_FILE
    if not path.exists():
        return results
    before = read_results(path)
    changed = differences(before, results)
    if not changed:
        results.tasks = before.tasks
        return results
    kept = path.with_name(f"results.{before.created.replace(':', '')}.json")
    print(f"{path}: made with other {', '.join(changed)}; kept as {kept.name}, starting anew")
    path.rename(kept)
    return results


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the scores depend on besides the checkpoint, and how it is run.

    Raises:
        ValueError: the template is not known, or has no questions.
    """
    from llava.eval.ask import choose_template
    from llava.model.builder import read_config

    config = read_config(args.checkpoint)
    template = choose_template(config, args.checkpoint, args.conv_template)
    if is_captioner(template):
        raise ValueError(
            f"{args.checkpoint}: template 'plain' (stage 1) knows no questions; evaluate a stage-2 checkpoint"
        )
    name = args.conv_template or config.mm_conv_version
    chosen = {"conv_template": name, "limit": args.limit, "mmlu_fewshot": args.mmlu_fewshot}
    return chosen | {"batch_size": args.batch_size, "num_gpus": args.num_gpus}


def differences(before: Results, now: Results) -> list[str]:
    """What in which two calls differ on which scores depend."""
    changed = ["checkpoint"] * (before.fingerprint != now.fingerprint)
    changed += [name for name in IDENTITY if before.settings.get(name) != now.settings[name]]
    return changed + [f"{name} version" for name in PACKAGES if before.versions.get(name) != now.versions[name]]


def is_finished(task: Task, results: Results, places: dict[str, Path | None]) -> bool:
    """Whether the task's result is there and was made from the same data."""
    return task.name in results.tasks and results.tasks[task.name].data == data_fingerprint(task, places[task.name])


def process_groups(
    tasks: list[Task], places: dict[str, Path | None], together: bool, mmlu_fewshot: int
) -> list[list[Task]]:
    """Which tasks share a process: none, or all that have harness and data folder in common."""
    groups: dict[Any, list[Task]] = {}
    for task in tasks:
        few_shot = task.name == "mmlu" and mmlu_fewshot  # one number for all tasks of a process
        key = (task.harness, places[task.name], few_shot) if together else task.name
        groups.setdefault(key, []).append(task)
    return list(groups.values())


def run_group(
    tasks: list[Task], place: Path | None, args: argparse.Namespace, settings: dict[str, Any]
) -> dict[str, TaskResult]:
    """Runs one harness process and collects the results of its tasks, by name.

    Raises:
        EvaluationError: the process or one of its tasks failed.
    """
    title = ",".join(task.name for task in tasks)
    folder = (args.output_dir / (tasks[0].name + "+" * (len(tasks) > 1))).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    print(f"{title}: running, log in {log}", flush=True)
    start = time.monotonic()
    command = harness_command(tasks, folder, args, settings)
    status = run_logged(command, log, cwd=place or folder, env=environment(args, place), title=title)
    if status:
        raise EvaluationError(title, crash_problems(status, log))
    seconds = (time.monotonic() - start) / len(tasks)
    return {
        task.name: collect(task, folder, seconds, data_fingerprint(task, place), args.allow_empty) for task in tasks
    }


def harness_command(tasks: list[Task], folder: Path, args: argparse.Namespace, settings: dict[str, Any]) -> list[str]:
    """The command line of one harness process."""
    harness = tasks[0].harness
    path = Path(args.checkpoint)
    pretrained = str(path.resolve()) if path.exists() else args.checkpoint
    launcher = ["-m"]
    if args.num_gpus > 1:
        launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(args.num_gpus), "--num_machines", "1"]
        launcher += ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no", "-m"]
    device = "cuda" if args.num_gpus else "cpu"
    model_args = {"pretrained": pretrained}
    if harness == "lmms_eval":
        model = "llava"
        model_args |= {"conv_template": settings["conv_template"], "device_map": "auto"}
        # Without DEBUG lmms-eval catches what went wrong and ends with status 0.
        extra = ["--verbosity", "DEBUG"] + ["--include_path", str(OWN_TASKS)] * any(task.own for task in tasks)
    else:
        model = "hf"
        model_args |= {"dtype": "auto" if args.num_gpus else "float32"}
        extra = ["--num_fewshot", str(args.mmlu_fewshot)] if "mmlu" in [task.name for task in tasks] else []
    return [
        *(sys.executable, *launcher, "llava.eval.launch", harness, "--model", model),
        *("--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())),
        *("--tasks", ",".join(task.name for task in tasks), "--batch_size", str(args.batch_size)),
        *("--device", device, "--output_path", str(folder), "--log_samples", *extra),
        *(["--limit", str(args.limit)] if args.limit else []),
    ]


def environment(args: argparse.Namespace, place: Path | None) -> dict[str, str]:
    """The harness's environment: this tree importable, no device but those asked for, no hub beside local data."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    if place is not None:
        env["HF_HUB_OFFLINE"] = "1"
    if args.num_gpus == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
