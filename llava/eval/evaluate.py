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

from llava.conversation import conv_templates
from llava.eval.harness import LOG, EvaluationError, collect, local_data, run_harness, token_fault
from llava.eval.results import LLAVA_COMMIT, RESULTS_FILE, Results, TaskResult, read_results, write_results
from llava.eval.tasks import TASKS, Task, choose
from llava.utils.commands import Parser, exit_status, whole
from llava.utils.digests import revision
from llava.utils.locks import locked
from llava.utils.paths import WORK, checkpoint_name
from llava.utils.processes import last_lines
from llava.utils.provenance import differences
from llava.utils.versions import EVALUATION, git_commit, made_by

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "lmms-eval", "lm-eval")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns 0, 2 if it refuses, 1 if a task failed, and 130 after Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: evaluate(args), "\nstopped; rerun the same command for the missing tasks")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="bash scripts/evaluate.sh", description=__doc__.splitlines()[0])
    top.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder or hub id")
    names = "names or groups (paper, llava-1.5), joined by commas (default: paper, the nine of its Table 4)"
    top.add_argument("--tasks", help=names)
    top.add_argument("--output-dir", type=Path, help="default: outputs/eval/<last two parts of CKPT>")
    top.add_argument("--data-dir", type=Path, help="folder of <org>/<name> data sets; then nothing comes from the hub")
    own = {"choices": list(conv_templates), "metavar": "TEMPLATE"}
    named = "template for a checkpoint that does not name its own (LLaVA-1.5: v1)"
    top.add_argument("--conv-template", help=named, **own)
    first = "evaluate only the first N samples of every task; not for real scores"
    top.add_argument("--limit", type=whole(1), metavar="N", help=first)
    top.add_argument("--batch-size", type=whole(1), default=1, help="samples per batch on each device (scienceqa: 1)")
    top.add_argument("--num-gpus", type=whole(0), help="GPUs to spread the samples over; 0: CPU (default: all GPUs)")
    together = "run all tasks of a harness in one process: starts once, cannot resume"
    top.add_argument("--together", action="store_true", help=together)
    return top


def evaluate(args: argparse.Namespace) -> int:
    """Runs the missing tasks; scores and failures are printed as they come. Returns 1 if a task failed, else 0.

    Raises ValueError: refused arguments, or another call writes to the same folder.
    """
    import torch  # takes seconds

    tasks = choose(args.tasks)
    available = torch.cuda.device_count()
    if args.num_gpus is None:
        args.num_gpus = available
    if not 0 <= args.num_gpus <= available:
        raise ValueError(f"--num-gpus {args.num_gpus}: this machine has {available}; expected 0 (CPU) to {available}")
    data = {task.name: local_data(task, args.data_dir) for task in tasks}
    args.output_dir = args.output_dir or WORK / "outputs/eval" / checkpoint_name(args.checkpoint)
    settings = settings_of(args)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(args.output_dir / ".lock", f"--output-dir {args.output_dir}: another evaluate.sh writes there"):
        results = start_results(args, settings)
        failed = run_missing(tasks, data, args, results)
    if results.tasks:
        print(f"written: {args.output_dir / RESULTS_FILE}")
    if failed:
        print(f"error: {len(failed)} of {len(tasks)} tasks failed: {', '.join(failed)} (above)", file=sys.stderr)
    return int(bool(failed))


def run_missing(tasks: list[Task], data: dict[str, Any], args: argparse.Namespace, results: Results) -> list[str]:
    """Runs the tasks that `results` lacks, writing it after each; returns the names of those that failed.

    `data` has the `local_data` of each task.
    """
    missing = []
    for task in tasks:
        before = results.tasks.get(task.name)
        if before and before.data == data[task.name][1]:
            print(f"{task.name}: finished before, {summary(before)}")
            continue
        missing.append(task)
        if before:
            print(f"{task.name}: made from other data or pictures; evaluated again")
    if fault := token_fault([task for task in missing if data[task.name] == (None, None)]):
        raise ValueError(f"--tasks {fault}, or give --data-dir")
    if [task for task in missing if results.tasks.pop(task.name, None)]:
        write_results(results, args.output_dir)  # a stale score must not outlive a failure
    groups: dict[object, list[Task]] = {}  # what runs in one process, which has one number of solved examples
    for task in missing:
        key = (task.harness, data[task.name][0], task.few_shot) if args.together else task.name
        groups.setdefault(key, []).append(task)
    failed = []
    for group in groups.values():
        folder, status, seconds = run_harness(group, data[group[0].name][0], args, results.settings)
        for task in group:
            try:
                if status:
                    ended = f"the harness ended with exit status {status}; the end of {folder / LOG}:"
                    raise EvaluationError(task.name, ended, *last_lines(folder / LOG, 15))
                if local_data(task, args.data_dir) != data[task.name]:
                    raise EvaluationError(task.name, "its data changed while it was evaluated; rerun the same command")
                result = collect(task, folder, seconds / len(group), data[task.name][1])
            except EvaluationError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                failed.append(task.name)
                continue
            results.tasks[task.name] = result
            results.created = now()
            write_results(results, args.output_dir)
            print(f"{task.name}: {summary(result)}", flush=True)
    return failed


def summary(result: TaskResult) -> str:
    """A task's score with what one needs to read it."""
    chance = "" if result.chance is None else f"chance {result.chance:.2f} %, "
    empty = sum(not sample.answer.strip(" |") for sample in result.samples)  # counted as wrong; `|` joins answers
    return f"{result.score:.2f} % ({chance}{result.metric}, {len(result.samples)} samples, {empty} without an answer)"


def start_results(args: argparse.Namespace, settings: dict[str, Any]) -> Results:
    """The results in the output folder if the same checkpoint, settings and versions made them, else empty ones.

    Other results are renamed by their time.

    Raises ValueError: there is no such checkpoint, or `results.json` cannot be read.
    """
    digest = revision(args.checkpoint)
    if digest is None:
        raise ValueError(f"{args.checkpoint}: no such folder, and not a model in the hub's local cache")
    command = shlex.join(["bash", "scripts/evaluate.sh", *args.argv])
    versions = made_by(EVALUATION, PACKAGES) | {LLAVA_COMMIT: git_commit()}
    results, path = Results(args.checkpoint, digest, command, versions, settings, now()), args.output_dir / RESULTS_FILE
    if not path.exists():
        return results
    before = read_results(path)
    if changed := differences(before.identity(), results.identity()):
        renamed = path.with_name(f"results.{before.created.replace(':', '')}.json")
        print(f"{path}: made with other {', '.join(changed)}; kept as {renamed.name}, every task is evaluated again")
        path.rename(renamed)
    else:
        results.tasks = before.tasks
    return results


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the scores depend on, the model's context, and those that only say how to run.

    Raises ValueError: the template is not known, or has no questions.
    """
    from llava.asking import choose_template, is_captioner  # these take seconds
    from llava.model.builder import read_config
    from llava.model.context import context_length
    from llava.model.decoding import evaluation_record, other_settings, read_generation_config, unused

    config = read_config(args.checkpoint)
    if is_captioner(choose_template(config, args.checkpoint, args.conv_template)):
        raise ValueError(
            f"{args.checkpoint}: template 'plain' (stage 1) has no questions; evaluate a stage-2 checkpoint"
        )
    own = other_settings(read_generation_config(args.checkpoint))
    if note := unused(args.checkpoint, own):
        print(f"note: {note}")
    chosen = {"conv_template": args.conv_template or config.mm_conv_version, "limit": args.limit}
    chosen |= {"mmlu_fewshot": TASKS["mmlu"].few_shot, "context": context_length(config)}
    chosen |= evaluation_record(own, "as each task says; greedy where it says nothing")
    chosen["precision"] = "the checkpoint's" if args.num_gpus else "float32"
    return chosen | {"batch_size": args.batch_size, "num_gpus": args.num_gpus}


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
