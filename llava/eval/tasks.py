"""The benchmarks: which harness runs each, and how its per-sample records and score become ours."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llava.eval.results import PAPER_COLUMNS, Answered
from llava.utils.paths import CODE, WORK

Record = Mapping[str, Any]
MME_POINTS = 2000  # of the ten categories of MME's perception
OWN_TASKS = CODE / "playground/tasks"
OWN_DATA = WORK / "playground/data/harness"


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


def mme_samples(records: Sequence[Record]) -> list[Answered]:
    """MME's questions of perception with their category; an id starts with the picture's, of which there are two.

    Questions of cognition have no part in the score.
    """
    return [
        Answered(
            f"{verdict['question_id']}:{doc_id(record)}",
            verdict["score"],
            answer_of(record),
            str(record["target"]),
            verdict["category"],
        )
        for record in records
        for verdict in [record.get("mme_perception_score")]
        if verdict
    ]


def mme_points(samples: Sequence[Answered]) -> float:
    """MME's perception in percent of its points: in each category 100 for accuracy, 100 for pairs all right."""
    pairs: dict[str | None, dict[str, list[float]]] = {}
    for sample in samples:
        pairs.setdefault(sample.group, {}).setdefault(sample.id.rpartition(":")[0], []).append(sample.score)
    points = [
        sum(100 * sum(pair) / len(pair) + 100 * all(pair) for pair in of_category.values()) / len(of_category)
        for of_category in pairs.values()
    ]
    return sum(points) / MME_POINTS * 100


def vqa_samples(records: Sequence[Record]) -> list[Answered]:
    """One sample for each question with ten people's answers; the target is the most common one."""
    samples = []
    for record in records:
        answers = record.get("doc", {}).get("answers") or [record["target"]]
        target = max(answers, key=answers.count)
        samples.append(Answered(doc_id(record), float(record["exact_match"]), answer_of(record), str(target)))
    return samples


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
    Task("mme", "lmms-lab-encoder/MME", "mme_perception_score,none", mme_samples, score=mme_points, unit=MME_POINTS),
    Task("gqa", "lmms-lab-encoder/GQA", "exact_match,none", _SCIENCE),
    Task("textvqa_val", "lmms-lab-encoder/textvqa", "exact_match,none", vqa_samples),
    Task("vizwiz_vqa_val", "lmms-lab-encoder/VizWiz-VQA", "exact_match,none", vqa_samples),
    Task(
        "seedbench",
        "lmms-lab-encoder/SEED-Bench",
        "seed_all,none",
        each(
            lambda record: record["seed_all"]["pred"].lower() == record["seed_all"]["answer"].lower().strip(),
            lambda record: "image" if "seed_image" in record else "video",
        ),
        chance=25,
    ),
    Task("scenes", "heldout/scenes", "accuracy,none", own_samples, chance=_own_chance, own=True),
    Task("stamps", "heldout/stamps", "accuracy,none", own_samples, chance=_own_chance, own=True),
    Task("probes", "heldout/probes", "accuracy,none", own_samples, chance=_own_chance, own=True),
)
TASKS = {task.name: task for task in _TASKS}
GROUPS = {
    "paper": tuple(PAPER_COLUMNS.values()),
    "llava-1.5": (
        "gqa", "vizwiz_vqa_val", "scienceqa_img", "textvqa_val", "pope", "mme", "mmbench_en_dev_static", "seedbench",
    ),
}  # fmt: skip
"""Names that stand for several tasks: the paper's Table 4, and LLaVA-1.5's table as far as no judge is needed."""


def question_weights(task: Task, samples: Sequence[Answered]) -> list[float] | None:
    """The weight of each question in the task's score, 1 in all; None if the score is not a weighted mean (MME)."""
    if task.score is mean:
        return [1 / len(samples)] * len(samples)
    if task.score is mean_of_groups:
        sizes = Counter(sample.group for sample in samples)
        return [1 / len(sizes) / sizes[sample.group] for sample in samples]
    return None


def choose(names: str | None) -> list[Task]:
    """The tasks of a comma-separated list of tasks and `GROUPS`; of the paper's Table 4 for None.

    Raises:
        ValueError: one is not known, or none is named.
    """
    named = [name.strip() for name in (names or "paper").split(",") if name.strip()]
    chosen = [name for each_name in named for name in GROUPS.get(each_name, (each_name,))]
    for name in chosen:
        if name in TASKS:
            continue
        raise ValueError(
            f"--tasks {name}: not known here; known: {', '.join([*TASKS, *GROUPS])}; stock lmms-eval runs others"
        )
    if not chosen:
        raise ValueError(f"--tasks {names}: names no task; known: {', '.join(TASKS)}")
    return [TASKS[name] for name in dict.fromkeys(chosen)]
