"""The benchmarks: which harness runs each, and how its per-sample records and score become ours."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llava.eval.results import Answered
from llava.utils.paths import CODE, WORK

Record = Mapping[str, Any]
Reader = Callable[[Sequence[Record], str, str], Iterable[Answered]]
"""From a harness's records, the metric and `Task.kind` to samples, one for each question."""
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


# --- readers ----------------------------------------------------------------------------------------------------------


def sample_of(record: Record, verdict: Record, kind: str) -> Answered:
    """The sample of lmms-eval's verdict on a question."""
    identifier = verdict.get("id", doc_id(record))
    return Answered(identifier, float(verdict["score"]), answer_of(record), str(record["target"]), verdict.get(kind))


def plain(records: Sequence[Record], metric: str, kind: str) -> Iterator[Answered]:
    """Reads records whose metric is a score, or a verdict with a score."""
    for record in records:
        verdict = record[metric]
        yield sample_of(record, verdict if isinstance(verdict, Mapping) else {"score": verdict}, kind)


def by_people(records: Sequence[Record], metric: str, kind: str) -> Iterator[Answered]:
    """Reads records of questions that several people answered, which lmms-eval scores by and does not record."""
    return (replace(sample, target="") for sample in plain(records, metric, kind))


def likelihood(records: Sequence[Record], metric: str, kind: str) -> Iterator[Answered]:
    """Reads lm-eval's multiple-choice records; the answer is the likeliest choice."""
    for record in records:
        choices = [request["arg_1"].strip() for request in record["arguments"].values()]
        likelihoods = [float(response[0]) for response in record["filtered_resps"]]
        if metric == "acc_norm":
            likelihoods = [value / len(text) for value, text in zip(likelihoods, choices, strict=True)]
        target = str(record["target"])
        right = choices[int(target)] if target.isdigit() else target.strip()
        best = choices[max(range(len(choices)), key=likelihoods.__getitem__)]
        yield Answered(doc_id(record), float(record[metric]), best, right, record.get("subtask"))


def mmbench(records: Sequence[Record], metric: str, kind: str) -> Iterator[Answered]:
    """Reads MMBench: a question is right only if it is right under every order of its options that the data set has.

    lmms-eval does not record the verdict on a question, so its evaluator runs once more.
    """
    import pandas
    from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator

    evaluator = MMBench_Evaluator()
    rows = sorted((record[metric] for record in records), key=lambda row: row["index"])
    questions: dict[int, list[Record]] = {}
    for row in rows:
        questions.setdefault(row["index"] % 1_000_000, []).append(row)
    correct = {row["index"]: row["answer"] for row in rows}
    for index, orders in questions.items():
        right = evaluator.eval_sub_data(pandas.DataFrame(orders), correct, static_only=True)
        answer, target = (" | ".join(str(row[name]) for row in orders) for name in ("prediction", "answer"))
        yield Answered(str(index), float(right), answer, target, orders[0]["category"])


def seedbench(records: Sequence[Record], metric: str, kind: str) -> Iterator[Answered]:
    """Reads SEED-Bench, whose records have the verdict under `<prefix>all` and under `<prefix><kind of question>`."""
    prefix = metric.removesuffix("all")
    for record in records:
        right = record[metric]["pred"].lower().strip() == record[metric]["answer"].lower().strip()
        (own,) = (key for key in record if key.startswith(prefix) and key != metric)
        yield sample_of(record, {"score": right, "kind": own.removeprefix(prefix)}, "kind")


def mme(records: Sequence[Record], metric: str, kind: str) -> Iterator[Answered]:
    """Reads MME's perception: a sample for each picture, half its score for the share of its two questions that are
    right, half for both right; questions of cognition have no part in the score."""
    pictures: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if verdict := record.get(metric):
            pictures.setdefault((verdict[kind], verdict["question_id"]), []).append(record)
    for (category, picture), pair in pictures.items():
        right = [record[metric]["score"] for record in pair]
        answer, target = (" | ".join(map(read, pair)) for read in (answer_of, lambda record: str(record["target"])))
        yield Answered(f"{category}/{picture}", (sum(right) / len(right) + all(right)) / 2, answer, target, category)


# --- scores in percent ------------------------------------------------------------------------------------------------


def mean(samples: Sequence[Answered]) -> float:
    """Mean score in percent."""
    return 100 * sum(sample.score for sample in samples) / len(samples)


def mean_of_groups(samples: Sequence[Answered]) -> float:
    """Mean over the kinds of questions of their mean scores, in percent."""
    kinds = {sample.group for sample in samples}
    return sum(mean([sample for sample in samples if sample.group == kind]) for kind in kinds) / len(kinds)


def mme_points(samples: Sequence[Answered]) -> float:
    """MME's points for everything right: 200 in each of the categories asked, 2,000 in all ten of perception."""
    return 200 * len({sample.group for sample in samples})


@dataclass(frozen=True)
class Task:
    """One benchmark."""

    name: str  # the harness's
    dataset: str  # the folder or hub id that the task loads
    metric: str = "exact_match,none"  # the harness's key of the score, with its filter
    column: str = ""  # its name in the paper's Table 4, if it is there
    read: Reader = plain
    kind: str = ""  # the field of a verdict that has the kind of question
    score: Callable[[Sequence[Answered]], float] = mean  # percent, which must equal what the harness computed
    unit: Callable[[Sequence[Answered]], float] = lambda samples: 1  # the harness's number for 100 %
    chance: float | None = None  # percent that guessing reaches, where that is known
    few_shot: int = 0  # solved examples before each question
    batched: bool = True  # False: LLaVA's adapter puts a line break before a question that has no picture in its batch
    own: bool = False  # one of `playground/tasks`, whose verdicts say a question's id, kind and chance

    @property
    def harness(self) -> str:
        """`lmms_eval`, whose models write answers, or `lm_eval`, whose models compare likelihoods."""
        return "lm_eval" if self.read is likelihood else "lmms_eval"

    def samples(self, records: Sequence[Record]) -> list[Answered]:
        """One sample for each question."""
        return list(self.read(records, self.metric.partition(",")[0], self.kind))

    def chance_of(self, records: Sequence[Record]) -> float | None:
        """Percent that guessing reaches on these questions, or None where that is not known."""
        if not self.own:
            return self.chance
        return sum(record["accuracy"]["chance"] for record in records) * 100 / len(records)


_MMBENCH: dict[str, Any] = {"read": mmbench, "unit": lambda samples: 100}
_MMSTAR: dict[str, Any] = {"kind": "l2_category", "score": mean_of_groups, "chance": 25}
_OCRBENCH: dict[str, Any] = {"kind": "question_type", "unit": lambda samples: len(samples) / 1000}
_SEED: dict[str, Any] = {"read": seedbench, "chance": 25}
_LIKELIHOOD: dict[str, Any] = {"read": likelihood, "chance": 25}
_MME: dict[str, Any] = {"read": mme, "kind": "category", "score": mean_of_groups, "unit": mme_points}
_OWN: dict[str, Any] = {"metric": "accuracy,none", "kind": "kind", "own": True}
_TASKS = (
    Task("mmbench_en_dev_static", "lmms-lab-encoder/MMBench", "gpt_eval_score,none", "MMBench-EN", **_MMBENCH),
    Task("mmstar", "Lin-Chen/MMStar", "average,none", "MM-Star", **_MMSTAR),
    Task("pope", "lmms-lab-encoder/POPE", "pope_accuracy,none", "POPE", chance=50),
    Task("seedbench_2_plus", "doolayer/SEED-Bench-2-Plus", "seedbench_2_plus_all,none", "SEED-Bench-2-Plus", **_SEED),
    Task("ocrbench", "echo840/OCRBench", "ocrbench_accuracy,none", "OCRBench", **_OCRBENCH),
    Task("scienceqa", "lmms-lab-encoder/ScienceQA", column="ScienceQA", batched=False),
    Task("ai2d", "lmms-lab-encoder/ai2d", "exact_match,flexible-extract", "AI2D", chance=25),
    Task("hellaswag", "Rowan/hellaswag", "acc_norm,none", "HellaSwag", **_LIKELIHOOD),
    Task("mmlu", "cais/mmlu", "acc,none", "MMLU", few_shot=5, **_LIKELIHOOD),
    Task("scienceqa_img", "lmms-lab-encoder/ScienceQA"),
    Task("mme", "lmms-lab-encoder/MME", "mme_perception_score,none", **_MME),
    Task("gqa", "lmms-lab-encoder/GQA"),
    Task("textvqa_val", "lmms-lab-encoder/textvqa", read=by_people),
    Task("vizwiz_vqa_val", "lmms-lab-encoder/VizWiz-VQA", read=by_people),
    Task("seedbench", "lmms-lab-encoder/SEED-Bench", "seed_all,none", **_SEED),
    *(Task(name, f"heldout/{name}", **_OWN) for name in ("scenes", "probes")),
)
TASKS = {task.name: task for task in _TASKS}
PAPER_COLUMNS = {task.column: task.name for task in _TASKS if task.column}
"""Columns of the paper's Table 4 in its order, and their tasks. All are percent, OCRBench's 0 to 1000 divided by 10."""
GROUPS = {
    "paper": tuple(PAPER_COLUMNS.values()),
    "llava-1.5": (
        "gqa", "vizwiz_vqa_val", "scienceqa_img", "textvqa_val", "pope", "mme", "mmbench_en_dev_static", "seedbench",
    ),
}  # fmt: skip
"""Names that stand for several tasks: the paper's Table 4, and LLaVA-1.5's table without what needs a judge."""


def choose(names: str | None) -> list[Task]:
    """The tasks of a comma-separated list of tasks and `GROUPS`; of the paper's Table 4 for None.

    Raises ValueError: one is not known, or none is named.
    """
    named = [name.strip() for name in (names or "paper").split(",") if name.strip()]
    chosen = [task for name in named for task in GROUPS.get(name, (name,))]
    if not chosen or (unknown := [name for name in chosen if name not in TASKS]):
        fault = f"{unknown[0]}: not known here" if chosen else f"{names}: names no task"
        raise ValueError(f"--tasks {fault}; known: {', '.join([*TASKS, *GROUPS])}; stock lmms-eval runs others")
    return [TASKS[name] for name in dict.fromkeys(chosen)]
