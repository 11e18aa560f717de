"""Benchmarks that the model in training answers at every evaluation: `--eval_tasks mmstar:500,scenes`.

Tasks, prompts, scoring and the asking are those of scripts/evaluate.sh (`llava.eval.in_process`). The ranks share the
questions as they share held-out samples: batches are of one modality, every rank asks the same number of them, and in
each place the same modality, so that ZeRO-3's collectives meet. Then every rank gets all answers and scores them.

Logged keys, shares of 1: `eval/<task>`, its 95 % interval `eval/<task>_low` and `_high` where the score is a mean over
questions (`llava.eval.tasks.score_interval`), and the number of questions `eval/<task>_questions`.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llava.asking import Assistant, is_captioner
from llava.conversation import get_template
from llava.eval.harness import data_fingerprint, data_place, require_harnesses
from llava.eval.in_process import Ask, Harness, LoadedTask, Prompt, Requests, load_tasks
from llava.eval.results import TaskResult
from llava.eval.tasks import Task, choose_limited, score_interval
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.train.arguments import TrainingArguments
from llava.train.heldout import assigned, kept_random_states, parts_of
from llava.train.ranks import from_all
from llava.utils.progress import progress

logger = logging.getLogger(__name__)

FLAG, FOLDER_FLAG = "--eval_tasks", "--eval_tasks_dir"


class _Interrupted(Exception):
    """`at_batch` stopped the evaluation, inside the harness."""


def check_benchmark_flags(version: str, training_args: TrainingArguments) -> None:
    """Raises ValueError if `--eval_tasks` cannot be evaluated; the message names the task and says what to do."""
    if not training_args.eval_tasks:
        if training_args.eval_tasks_dir:
            raise ValueError(f"{FOLDER_FLAG} {training_args.eval_tasks_dir} needs {FLAG}")
        return
    tasks = _tasks(training_args)
    if is_captioner(get_template(version)):
        raise ValueError(
            f"{FLAG} {training_args.eval_tasks}: a captioner's template (--version plain, stage 1) has no questions; "
            "leave it out"
        )
    require_harnesses([task for task, _ in tasks])
    _places(tasks, training_args)


def load_benchmarks(training_args: TrainingArguments) -> list[LoadedTask]:
    """The tasks of `--eval_tasks` with their data sets, of which one rank per node fetches what is missing.

    Raises:
        ValueError: a data set is missing or cannot be loaded.
    """
    if not training_args.eval_tasks:
        return []
    tasks = _tasks(training_args)
    with training_args.main_process_first(desc="loading benchmarks"), kept_random_states():
        return load_tasks(tasks, _places(tasks, training_args), FLAG, FOLDER_FLAG)


def benchmarks_content(training_args: TrainingArguments) -> str:
    """Digests of the local data of `--eval_tasks`, by task; data from the hub have none."""
    tasks = [task for task, _ in _tasks(training_args)]
    places = _places(_tasks(training_args), training_args)
    return ", ".join(f"{task.name} {data_fingerprint(task, places[task.name])}" for task in tasks)


def _tasks(training_args: TrainingArguments) -> list[tuple[Task, int | None]]:
    return choose_limited(training_args.eval_tasks, FLAG)


def _places(tasks: Sequence[tuple[Task, int | None]], training_args: TrainingArguments) -> dict[str, Path | None]:
    folder = Path(training_args.eval_tasks_dir) if training_args.eval_tasks_dir else None
    return {task.name: data_place(task, folder, FLAG, FOLDER_FLAG) for task, _ in tasks}


class Benchmarks:
    """The benchmarks of a run; every question's prompt is made, and its scoring rehearsed, before the first step.

    Args:
        loaded: the tasks.
        assistant: the model in training, before any engine wraps it.
        version: the name of its template.
        args: the training arguments.

    Raises:
        ValueError: a question does not fit the model.
        EvaluationError: this version of the harness scores a task in another way.
    """

    def __init__(self, loaded: Sequence[LoadedTask], assistant: Assistant, version: str, args: TrainingArguments):
        self.loaded, self.batch_size = loaded, args.per_device_eval_batch_size
        self.rank, self.ranks = args.process_index, args.world_size
        self.assistant, self.version = assistant, version
        self.unscored: set[str] = set()  # in the last evaluation
        self.prompts: dict[str, list[Prompt]] = {}
        for task in loaded:
            logger.info("%s %s: preparing its questions", FLAG, task.task.name)
            try:
                with kept_random_states():
                    self.prompts[task.task.name] = Harness(assistant, version).rehearse(task)
            except ValueError as error:
                raise ValueError(f"{FLAG} {task.task.name}: {error}") from error

    @property
    def keys(self) -> list[str]:
        """The scores' logged keys, without `eval/`."""
        return [task.task.name for task in self.loaded]

    def metrics(
        self, model: LlavaMetaForCausalLM, at_batch: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """The scores of a model in evaluation mode by logged name; None if `at_batch` stops it, as in `HeldOut.totals`.

        A task whose scoring raises at the model's answers has no score, and is named. Every rank must call.
        """
        harness = Harness(self.assistant._replace(model=model), self.version)
        metrics: dict[str, float] = {}
        self.unscored = set()
        for loaded in self.loaded:
            name = loaded.task.name

            answered = set()

            def answer_all(requests: Requests, ask: Ask, name: str = name, answered: set[str] = answered) -> list[str]:
                answers = self._answer_all(name, requests, ask, at_batch)
                answered.add(name)
                return answers

            try:
                result = harness.score(loaded, answer_all)
            except _Interrupted:
                return None
            except Exception as error:
                if not answered:
                    raise
                # All ranks have the same answers, and so are here together.
                logger.warning(
                    "%s %s: lmms-eval cannot score the model's answers (%s: %.300s); it has no score at this step",
                    FLAG, name, type(error).__name__, error,
                )  # fmt: skip
                self.unscored.add(name)
                continue
            metrics |= named(loaded.task, result)
            if empty := sum(not sample.answer for sample in result.samples):
                logger.info("%s: %d of %d answers are empty and count as wrong", name, empty, len(result.samples))
        return metrics

    def _answer_all(self, name: str, requests: Requests, ask: Ask, at_batch: Callable[[], bool]) -> list[str]:
        """The answers to all requests, of which every rank asks its batches."""
        lengths = [prompt.length if prompt.pictured else -prompt.length for prompt in self.prompts[name]]
        options = [str(request.args[1]) for request in requests]  # a batch has the same
        batches = assigned(parts_of(lengths, options, self.batch_size, sys.maxsize), self.ranks)[self.rank]
        answers: dict[int, str] = {}
        for batch in progress(batches, f"asking {name}", "batches", hidden=self.rank != 0):
            if at_batch():
                raise _Interrupted
            indices = [max(index, ~index) for index in batch.samples]  # ~index: only so that no rank stays behind
            answers |= dict(zip(batch.samples, ask([requests[index] for index in indices]), strict=True))
        everyones = {index: answer for of_rank in from_all(answers) for index, answer in of_rank.items()}
        return [everyones[index] for index in range(len(requests))]


def named(task: Task, result: TaskResult) -> dict[str, float]:
    """A result by logged name: the score, its interval where it has one, and the number of questions."""
    metrics = {"": result.score / 100}
    if interval := score_interval(task, result.samples):
        metrics |= dict(zip(("_low", "_high"), interval, strict=True))
    metrics["_questions"] = len(result.samples)
    return {f"eval_{task.name}{suffix}": value for suffix, value in metrics.items()}
