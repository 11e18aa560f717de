"""Unmodified tasks of stock lmms-eval on a model in memory, in this process: the benchmarks of a run in training.

The task makes the prompts, lmms-eval's own adapter (`--model llava`) asks them, its evaluator filters and scores the
answers, and `llava.eval.collect` reads what it writes: each is what scripts/evaluate.sh runs. Only who asks which
prompt is the caller's. Every rank builds and scores all questions, so that none depends on another's scores.
"""

import argparse
import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from llava.asking import Assistant
from llava.eval.collect import read_records, read_scores, result_of
from llava.eval.harness import datasets_cache
from llava.eval.results import TaskResult
from llava.eval.tasks import OWN_TASKS, Task
from llava.model.llava_arch import LlavaMetaForCausalLM, without_holes

Requests = Sequence[Any]
"""lmms-eval's instances; their `args` begin with prompt and generation options."""
Ask = Callable[[Requests], list[str]]
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class Prompt(NamedTuple):
    """What is known of a prompt before it is asked: its tokens, visual ones included, and whether it has pictures."""

    length: int
    pictured: bool


class LoadedTask(NamedTuple):
    """A task with its data set.

    Attributes:
        limit: number of its first questions that are asked; None for all.
        of_harness: lmms-eval's own tasks, by name; several where the task is a group.
    """

    task: Task
    limit: int | None
    of_harness: dict[str, Any]


def load_tasks(
    tasks: Sequence[tuple[Task, int | None]], places: dict[str, Path | None], flag: str, folder_flag: str
) -> list[LoadedTask]:
    """The tasks with their data sets, from local folders, the hub's cache or the hub.

    Args:
        tasks: each with its limit.
        places: by task the folder with its data set (`llava.eval.harness.data_place`).
        flag, folder_flag: the flags that give tasks and folder, for messages.

    Raises:
        ValueError: a data set cannot be loaded.
    """
    with _side_effects_undone():
        from lmms_eval.tasks import TaskManager, get_task_dict

        own = str(OWN_TASKS) if any(task.own for task, _ in tasks) else None
        manager = TaskManager("INFO", include_path=own, model_name="llava")  # of its prompts those for `--model llava`
        loaded = []
        for task, limit in tasks:
            place = places[task.name]
            try:  # the tasks' paths are relative, as in a harness that runs in that folder
                with _in_folder(task, place):
                    of_harness = get_task_dict([task.name], manager, "simple")
            except Exception as error:  # of the network, the hub, the file system or the format
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
                advice = "" if place else f"; without a network give {folder_flag}, as docs/evaluate.md describes"
                raise ValueError(
                    f"{flag} {task.name}: {task.dataset} cannot be loaded ({reason:.300}){advice}"
                ) from error
            for part in _leaves(of_harness).values():  # as lmms-eval's command does
                if part.get_config("num_fewshot") is None:
                    part.set_config(key="num_fewshot", value=0)
                part.set_fewshot_seed(seed=1234)
            loaded.append(LoadedTask(task, limit, of_harness))
    return loaded


@contextlib.contextmanager
def _in_folder(task: Task, place: Path | None) -> Iterator[None]:
    """A context in which lmms-eval finds the task's data set in a local folder, and caches it by its content."""
    if place is None:
        yield
        return
    from lmms_eval.api.task import _resolve_hf_datasets_cache_dir as cache_folder

    name = "LMMS_EVAL_DATASETS_CACHE"
    before = os.environ.get(name)
    os.environ[name] = str(datasets_cache([task], place))
    cache_folder.cache_clear()
    try:
        with contextlib.chdir(place):
            yield
    finally:
        del os.environ[name]
        os.environ |= {} if before is None else {name: before}
        cache_folder.cache_clear()


class Harness:
    """lmms-eval's adapter and evaluator around a model.

    Args:
        assistant: the model with its tokenizer and image processor.
        conv_template: the name of its template.
    """

    def __init__(self, assistant: Assistant, conv_template: str):
        self.assistant, self.conv_template = assistant, conv_template

    @cached_property
    def _letter(self) -> torch.Tensor:
        """The ids [1, S] of an answer that every task can score."""
        return torch.tensor([self.assistant.tokenizer("A", add_special_tokens=False)["input_ids"]])

    def rehearse(self, loaded: LoadedTask) -> list[Prompt]:
        """Prepares and scores all questions without the model, as if it said A; returns their prompts.

        Raises:
            ValueError: a prompt does not fit the model's context, or has other pictures than placeholders.
            EvaluationError: see `score`.
        """
        prompts: list[Prompt] = []

        def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, images: Any, image_sizes: Any, **_: Any):
            mask = without_holes(attention_mask)
            layout, pixels = self.assistant.model.lay_out(input_ids, mask, None, images, image_sizes, "left")
            prompts.append(Prompt(layout.lengths[0], pixels is not None))
            return self._letter

        stand_in = SimpleNamespace(config=self.assistant.model.config, generate=generate, device=torch.device("cpu"))
        self.score(loaded, lambda requests, ask: [ask([request])[0] for request in requests], stand_in)
        return prompts

    def score(
        self, loaded: LoadedTask, answer_all: Callable[[Requests, Ask], list[str]], model: Any = None
    ) -> TaskResult:
        """The result of a task, of which `answer_all` says who asks which of its requests, and in which batches.

        Args:
            answer_all: gets all requests and a function that has the adapter ask some of them as one batch; returns the
                answers to all.
            model: what the adapter asks in place of the assistant's model.

        Raises:
            EvaluationError: lmms-eval's score is not that of its records.
        """
        start = time.monotonic()
        with (
            _side_effects_undone(),
            _one_process() as ranks,
            tempfile.TemporaryDirectory(prefix="llava-eval-") as folder,
        ):
            from lmms_eval.evaluator import evaluate
            from lmms_eval.loggers.evaluation_tracker import EvaluationTracker

            adapter = self._adapter(loaded, model or self.assistant.model)
            ask = adapter.generate_until

            def generate_until(requests: Requests) -> list[str]:
                with _environment(ranks):  # ZeRO-3 reads it in a model's forward
                    return answer_all(requests, ask)

            adapter.generate_until = generate_until
            results = evaluate(
                lm=adapter,
                task_dict=loaded.of_harness,
                limit=loaded.limit,
                bootstrap_iters=0,
                distributed_executor_backend="torchrun",  # accelerate's would make an Accelerator of its own
                cli_args=argparse.Namespace(output_path=folder, process_with_media=False),
                process_docs_parallel=1,
            )
            samples = results.pop("samples")
            tracker = EvaluationTracker(output_path=folder)
            tracker.general_config_tracker.log_experiment_args("llava", "pretrained=model", "", "", False)
            tracker.save_results_aggregated(results, samples, "now")
            for name in results["configs"]:
                tracker.save_results_samples(name, samples[name])
            scores = read_scores(loaded.task, Path(folder))
            records = read_records(loaded.task, Path(folder), scores["n-samples"])
        return result_of(loaded.task, scores, records, time.monotonic() - start)

    def _adapter(self, loaded: LoadedTask, model: LlavaMetaForCausalLM | Any) -> Any:
        """lmms-eval's `llava` around `model`; its own constructor would load a checkpoint."""
        from lmms_eval.api.model import lmms
        from lmms_eval.models.simple.llava import Llava

        adapter = Llava.__new__(Llava)
        lmms.__init__(adapter)
        vars(adapter).update(
            _tokenizer=self.assistant.tokenizer,
            _model=model,
            _image_processor=self.assistant.image_processor,
            _config=model.config,
            _device=model.device,
            _rank=1,  # shows no bar
            batch_size_per_gpu=1_000_000,  # what it is asked at once is one batch
            conv_template=self.conv_template,
            use_cache=True,
            task_dict={name: task.dataset for name, task in _leaves(loaded.of_harness).items()},
        )
        return adapter


def _leaves(tasks: dict[Any, Any]) -> dict[str, Any]:
    """lmms-eval's tasks by name, those of groups too."""
    leaves = {}
    for name, task in tasks.items():
        leaves |= _leaves(task) if isinstance(task, dict) else {name: task}
    return leaves


@contextlib.contextmanager
def _side_effects_undone() -> Iterator[None]:
    """A context in which lmms-eval is imported and called: without its bars, and without what it sets for all.

    Its modules turn TF32 on and warnings off when they are imported.
    """

    import lmms_eval

    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.matmul = SimpleNamespace()  # pyrefly: ignore[bad-assignment]  # takes what they set
    try:
        with warnings.catch_warnings():
            import lmms_eval.api.task
            import lmms_eval.evaluator
            import lmms_eval.models.simple.llava
    finally:
        torch.backends.cuda.matmul = matmul
    modules = (lmms_eval.api.task, lmms_eval.evaluator)
    bars = [module.tqdm for module in modules]
    for module, bar in zip(modules, bars, strict=True):
        module.tqdm = partial(bar, disable=True)  # pyrefly: ignore[bad-assignment]  # called as the class is
    try:
        yield
    finally:
        for module, bar in zip(modules, bars, strict=True):
            module.tqdm = bar


@contextlib.contextmanager
def _one_process() -> Iterator[dict[str, str]]:
    """A context in which lmms-eval takes this process for the only one, and so asks and scores all questions.

    Gives the variables that it takes away.
    """
    ranks = {name: os.environ[name] for name in _RANKS if name in os.environ}
    for name in ranks:
        del os.environ[name]
    try:
        yield ranks
    finally:
        os.environ.update(ranks)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """A context in which these variables, absent otherwise, are set."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
