"""Scores a checkpoint with stock lmms-eval and lm-eval: `bash scripts/evaluate.sh CKPT [--tasks a,b]`.

Every task runs in its own process, so that an interrupted run loses at most one task. Finished tasks are in
`results.json` (`llava.eval.results`) and are not rerun while checkpoint, settings, data, code and versions stay equal.
"""

import argparse
import datetime
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from llava.eval.harness import (
    EvaluationError,
    data_fingerprint,
    data_place,
    process_groups,
    require_harnesses,
    run_group,
    token_fault,
)
from llava.eval.results import LLAVA_CODE, LLAVA_COMMIT, RESULTS_FILE, Results, read_results, write_results
from llava.eval.tasks import Task, choose
from llava.utils.commands import Parser, exit_status, whole
from llava.utils.digests import revision
from llava.utils.locks import locked
from llava.utils.paths import WORK, checkpoint_name
from llava.utils.presentation import format_table
from llava.utils.versions import EVALUATION, code_digest, git_commit, version_of

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "lmms-eval", "lm-eval")
IDENTITY = ("conv_template", "limit", "mmlu_fewshot")
"""Settings on which the scores depend; with another batch size or number of GPUs, finished tasks stay finished."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, 2 if it refuses, 1 if a task failed, and 130 after Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        return exit_status(lambda: evaluate(args), "\nstopped; rerun the same command for the missing tasks")
    except EvaluationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="bash scripts/evaluate.sh", description=__doc__.splitlines()[0])
    top.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder or hub id")
    top.add_argument(
        "--tasks", help="names or groups (paper, llava-1.5), joined by commas (default: paper, the nine of its Table 4)"
    )
    top.add_argument("--output-dir", type=Path, help="default: outputs/eval/<last two parts of CKPT>")
    top.add_argument("--data-dir", type=Path, help="folder of <org>/<name> data sets; then nothing comes from the hub")
    top.add_argument("--conv-template", help="template for a checkpoint that does not name its own (LLaVA-1.5: v1)")
    top.add_argument(
        "--limit", type=whole(1), help="evaluate only the first N samples of every task; not for real scores"
    )
    top.add_argument(
        "--mmlu-fewshot",
        type=whole(0),
        default=5,
        metavar="N",
        help="solved examples before each question (default: 5)",
    )
    top.add_argument("--batch-size", type=whole(1), default=1, help="samples per batch on each device (default: 1)")
    top.add_argument("--num-gpus", type=whole(0), help="GPUs to spread the samples over; 0: CPU (default: all GPUs)")
    top.add_argument("--allow-empty", action="store_true", help="count empty answers as wrong instead of failing")
    top.add_argument(
        "--together",
        action="store_true",
        help="run all tasks of a harness in one process: starts once, cannot resume",
    )
    top.add_argument("--force", action="store_true", help="evaluate finished tasks again")
    return top


def evaluate(args: argparse.Namespace) -> None:
    """Runs the missing tasks and prints the scores; a task that fails is reported, and the others still run.

    Raises:
        ValueError: refused arguments, or another call writes to the same folder.
        EvaluationError: a task failed.
    """
    import torch  # takes seconds

    tasks = choose(args.tasks)
    require_harnesses(tasks)
    available = torch.cuda.device_count()
    if args.num_gpus is None:
        args.num_gpus = available
    if not 0 <= args.num_gpus <= available:
        raise ValueError(f"--num-gpus {args.num_gpus}: this machine has {available}; expected 0 (CPU) to {available}")
    places = {task.name: data_place(task, args.data_dir) for task in tasks}
    args.output_dir = args.output_dir or WORK / "outputs/eval" / checkpoint_name(args.checkpoint)
    settings = settings_of(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(args.output_dir / ".lock", f"--output-dir {args.output_dir}: another evaluate.sh writes there"):
        run_missing(tasks, places, args, start_results(args, settings))


def run_missing(tasks: list[Task], places: dict[str, Path | None], args: argparse.Namespace, results: Results) -> None:
    """Runs the tasks that `results` lacks, writing it after each; raises as `evaluate`."""
    missing = [task for task in tasks if args.force or not is_finished(task, results, places)]
    if fault := token_fault([task for task in missing if places[task.name] is None]):
        raise ValueError(f"--tasks {fault}, or give --data-dir")
    for task in [task for task in missing if not args.force and task.name in results.tasks]:
        print(f"{task.name}: made from other data or pictures; evaluated again")
    for task in [task for task in tasks if task not in missing]:
        print(f"{task.name}: finished before, {results.tasks[task.name].score:.2f} (--force evaluates again)")
    if [task.name for task in missing if results.tasks.pop(task.name, None)]:
        write_results(results, args.output_dir)  # a stale score must not outlive a failure
    failed = []
    for group in process_groups(missing, places, args.together, args.mmlu_fewshot):
        for task, result in run_group(group, places[group[0].name], args, results.settings):
            if isinstance(result, EvaluationError):
                print(f"error: {result}", file=sys.stderr, flush=True)
                failed.append(task.name)
                continue
            results.tasks[task.name] = result
            results.created = now()
            write_results(results, args.output_dir)
            print(f"{task.name}: {result.score:.2f} % ({result.metric}, {len(result.samples)} samples)", flush=True)
    rows = [
        {"task": name, "score, %": result.score, "chance, %": result.chance, "samples": len(result.samples)}
        for name, result in results.tasks.items()
    ]
    if rows:
        print(f"\n{format_table(rows)}\nwritten: {args.output_dir / RESULTS_FILE}")
    if failed:
        raise EvaluationError(f"{len(failed)} of {len(tasks)} tasks", [f"{name} (above)" for name in failed])


def start_results(args: argparse.Namespace, settings: dict[str, Any]) -> Results:
    """The results in the output folder if the same checkpoint, settings and versions made them, else empty ones.

    Other results are renamed by their time.

    Raises:
        ValueError: there is no such checkpoint, or `results.json` cannot be read.
    """
    digest = revision(args.checkpoint)
    if digest is None:
        raise ValueError(f"{args.checkpoint}: no such folder, and not a model in the hub's local cache")
    results = Results(
        checkpoint=args.checkpoint,
        fingerprint=digest,
        command=shlex.join(["bash", "scripts/evaluate.sh", *args.argv]),
        versions=versions(),
        settings=settings,
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
    renamed = path.with_name(f"results.{before.created.replace(':', '')}.json")
    print(f"{path}: made with other {', '.join(changed)}; kept as {renamed.name}, every task is evaluated again")
    path.rename(renamed)
    return results


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the scores depend on, the model's context, and those that only say how to run.

    Raises:
        ValueError: the template is not known, or has no questions.
    """
    from llava.asking import choose_template, is_captioner  # these take seconds
    from llava.model.builder import read_config
    from llava.model.context import context_length
    from llava.model.decoding import evaluation_record, other_settings, read_generation_config, unused

    config = read_config(args.checkpoint)
    template = choose_template(config, args.checkpoint, args.conv_template)
    if is_captioner(template):
        raise ValueError(
            f"{args.checkpoint}: template 'plain' (stage 1) has no questions; evaluate a stage-2 checkpoint"
        )
    name = args.conv_template or config.mm_conv_version
    chosen = {"conv_template": name, "limit": args.limit, "mmlu_fewshot": args.mmlu_fewshot}
    chosen["context"] = context_length(config)
    own = other_settings(read_generation_config(args.checkpoint))
    if note := unused(args.checkpoint, own):
        print(f"note: {note}")
    chosen |= evaluation_record(own, "as each task says; greedy where it says nothing")
    return chosen | {"batch_size": args.batch_size, "num_gpus": args.num_gpus}


def differences(before: Results, now: Results) -> list[str]:
    """What the scores depend on and two runs differ in."""
    changed = ["checkpoint"] * (before.fingerprint != now.fingerprint)
    changed += [name for name in IDENTITY if before.settings.get(name) != now.settings[name]]
    other = [name for name in now.versions if name != LLAVA_COMMIT and before.versions.get(name) != now.versions[name]]
    return changed + [name if name == LLAVA_CODE else f"{name} version" for name in other]


def versions() -> dict[str, str | None]:
    """What the scores depend on besides checkpoint, settings and data, and this tree's commit."""
    packages = {name: version_of(name) for name in PACKAGES}
    return packages | {LLAVA_CODE: code_digest(EVALUATION), LLAVA_COMMIT: git_commit()}


def is_finished(task: Task, results: Results, places: dict[str, Path | None]) -> bool:
    """Whether the task's result is there and was made from the same data."""
    return task.name in results.tasks and results.tasks[task.name].data == data_fingerprint(task, places[task.name])


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
