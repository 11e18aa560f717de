"""The benchmarks: which harness runs each, and how its per-sample records and score become ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llava.eval.results import PAPER_COLUMNS, Answered
from llava.utils.paths import CODE, WORK

Record = Mapping[str, Any]
OWN_TASKS = CODE / "playground/tasks"
OWN_DATA = WORK / "playground/data/harness"

JUDGED = {
    "mmbench": "mmbench_en_dev_static",
    "hallusion_bench": "pope",
    "mathvista": "mmstar",
    "mmvet": "mmstar",
    "llava_in_the_wild": "mmstar",
}
"""First part of the names of lmms-eval's tasks whose answers another model judges, and what to run instead."""


def answer_of(record: Record) -> str:
    """What lmms-eval recorded as the answer, without white space around it."""
    answer = record.get("filtered_resps")
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return "" if answer is None else str(answer).strip()


def doc_id(record: Record) -> str:
    """The sample's index in the data set; the samples of each subject are counted separately."""
    name = str(record["doc_id"])
    return f"{record['subtask']}/{name}" if "subtask" in record else name


def each(score: Callable[[Record], float], group: Callable[[Record], str | None] = lambda record: None):
    """A function from records to samples, one for each, with this score and kind of question."""

    def samples(records: Sequence[Record]) -> list[Answered]:
        return [
            Answered(doc_id(record), float(score(record)), answer_of(record), str(record["target"]), group(record))
            for record in records
        ]

    return samples


def mmbench_samples(records: Sequence[Record]) -> list[Answered]:
    """One sample for each question: right only if it is right under every order of its options that the data set has.

    lmms-eval keeps the verdict on a question to itself, so its evaluator runs once more.
    """
    import pandas
    from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator

    evaluator = MMBench_Evaluator()
    rows = sorted((record["gpt_eval_score"] for record in records), key=lambda row: row["index"])
    questions: dict[int, list[Record]] = {}
    for row in rows:
        questions.setdefault(row["index"] % 1_000_000, []).append(row)
    correct = {row["index"]: row["answer"] for row in rows}
    samples = []
    for index, orders in questions.items():
        right = evaluator.eval_sub_data(pandas.DataFrame(orders), correct, static_only=True)
        answer = " | ".join(str(row["prediction"]) for row in orders)
        target = " | ".join(str(row["answer"]) for row in orders)
        samples.append(Answered(str(index), float(right), answer, target, orders[0]["category"]))
    return samples


def likelihood_samples(metric: str, by_length: bool, grouped: bool):
    """A function from lm-eval's multiple-choice records to samples; the answer is the likeliest choice."""

    def samples(records: Sequence[Record]) -> list[Answered]:
        result = []
        for record in records:
            choices = [request["arg_1"].strip() for request in record["arguments"].values()]
            likelihoods = [float(response[0]) for response in record["filtered_resps"]]
            if by_length:
                likelihoods = [value / len(text) for value, text in zip(likelihoods, choices, strict=True)]
            target = record["target"]
            if str(target).isdigit():
                target = choices[int(target)]
            best = choices[max(range(len(choices)), key=likelihoods.__getitem__)]
            group = record["subtask"] if grouped else None
            result.append(Answered(doc_id(record), float(record[metric]), best, str(target).strip(), group))
        return result

    return samples


def own_samples(records: Sequence[Record]) -> list[Answered]:
    """The samples of the tasks in `playground/tasks`, which say id and kind of each question."""
    return [
        Answered(info["id"], info["score"], answer_of(record), str(record["target"]), info["kind"])
        for record in records
        for info in [record["accuracy"]]
    ]


def mean(samples: Sequence[Answered]) -> float:
    """Mean score in percent."""
    return 100 * sum(sample.score for sample in samples) / len(samples)


def mean_of_groups(samples: Sequence[Answered]) -> float:
    """Mean over the kinds of questions of their mean scores, in percent."""
    kinds = {sample.group for sample in samples}
    return sum(mean([sample for sample in samples if sample.group == kind]) for kind in kinds) / len(kinds)


def _own_chance(records: Sequence[Record]) -> float:
    return sum(record["accuracy"]["chance"] for record in records) * 100 / len(records)


@dataclass(frozen=True)
class Task:
    """One benchmark.

    Attributes:
        name: the harness's name of the task.
        dataset: the folder or hub id that the task loads.
        metric: the harness's key of the score, with its filter.
        samples: from the harness's records to ours.
        harness: `lmms_eval` or `lm_eval`.
        score: percent from the samples; must equal what the harness computed.
        unit: the harness's number for 100 %; None: a thousandth of the number of samples (OCRBench).
        chance: percent that guessing reaches, or a function of the records, or None where that is not known.
        generates: whether the model writes its answer (and could write an empty one).
        own: whether it is one of `playground/tasks`.
    """

    name: str
    dataset: str
    metric: str
    samples: Callable[[Sequence[Record]], list[Answered]]
    harness: str = "lmms_eval"
    score: Callable[[Sequence[Answered]], float] = mean
    unit: float | None = 1
    chance: float | Callable[[Sequence[Record]], float] | None = None
    generates: bool = True
    own: bool = False

    def percent(self, value: float, num_samples: int) -> float:
        """The harness's score in percent of the samples."""
        return value * 100 / (num_samples / 1000 if self.unit is None else self.unit)


def _seed_score(record: Record) -> bool:
    verdict = record["seedbench_2_plus_all"]
    return verdict["pred"].lower().strip() == verdict["answer"].lower().strip()


def _seed_kind(record: Record) -> str:
    return next(key for key in record if key.startswith("seedbench_2_plus_") and not key.endswith("_all")).split("_")[
        -1
    ]


_SCIENCE = each(lambda record: record["exact_match"])
_TASKS = (
    Task("mmbench_en_dev_static", "lmms-lab-encoder/MMBench", "gpt_eval_score,none", mmbench_samples, unit=100),
    Task(
        "mmstar",
        "Lin-Chen/MMStar",
        "average,none",
        each(lambda record: record["average"]["score"], lambda record: record["average"]["l2_category"]),
        score=mean_of_groups,
        chance=25,
    ),
    Task(
        "ocrbench",
        "echo840/OCRBench",
        "ocrbench_accuracy,none",
        each(
            lambda record: record["ocrbench_accuracy"]["score"],
            lambda record: record["ocrbench_accuracy"]["question_type"],
        ),
        unit=None,
    ),
    Task(
        "seedbench_2_plus",
        "doolayer/SEED-Bench-2-Plus",
        "seedbench_2_plus_all,none",
        each(_seed_score, _seed_kind),
        chance=25,
    ),
    Task("scienceqa", "lmms-lab-encoder/ScienceQA", "exact_match,none", _SCIENCE),
    Task("scienceqa_img", "lmms-lab-encoder/ScienceQA", "exact_match,none", _SCIENCE),
    Task("ai2d", "lmms-lab-encoder/ai2d", "exact_match,flexible-extract", _SCIENCE, chance=25),
    Task(
        "pope",
        "lmms-lab-encoder/POPE",
        "pope_accuracy,none",
        each(lambda record: record["pope_accuracy"]["score"]),
        chance=50,
    ),
    Task(
        "hellaswag",
        "Rowan/hellaswag",
        "acc_norm,none",
        likelihood_samples("acc_norm", by_length=True, grouped=False),
        harness="lm_eval",
        chance=25,
        generates=False,
    ),
    Task(
        "mmlu",
        "cais/mmlu",
        "acc,none",
        likelihood_samples("acc", by_length=False, grouped=True),
        harness="lm_eval",
        chance=25,
        generates=False,
    ),
    Task("scenes", "heldout/scenes", "accuracy,none", own_samples, chance=_own_chance, own=True),
    Task("stamps", "heldout/stamps", "accuracy,none", own_samples, chance=_own_chance, own=True),
    Task("probes", "heldout/probes", "accuracy,none", own_samples, chance=_own_chance, own=True),
)
TASKS = {task.name: task for task in _TASKS}


def choose(names: str | None) -> list[Task]:
    """The tasks of a comma-separated list; of the paper's Table 4 for None.

    Raises:
        ValueError: a task that needs a judge, naming what to run instead, or one that is not known.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()] if names else list(PAPER_COLUMNS.values())
    for name in chosen:
        if name in TASKS:
            continue
        judged = [other for start, other in JUDGED.items() if name.startswith(start)]
        if judged:
            raise ValueError(f"--tasks {name}: another model judges its answers; run {judged[0]}, which needs none")
        raise ValueError(f"--tasks {name}: not known here; known: {', '.join(TASKS)}")
    if not chosen:
        raise ValueError(f"--tasks {names}: names no task; known: {', '.join(TASKS)}")
    return [TASKS[name] for name in dict.fromkeys(chosen)]
