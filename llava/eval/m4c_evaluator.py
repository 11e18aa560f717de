"""TextVQA and ST-VQA scores under the names that LLaVA's programs import, from the metrics' published definitions.

An answer is normalised as the VQA challenge does (https://visualqa.org/evaluation.html), by lmms-eval's own class.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmms_eval.tasks._task_utils.vqa_eval_metric import EvalAIAnswerProcessor

from llava.utils.progress import progress

ANNOTATORS = 10
"""Human answers to each question of TextVQA and VQA v2."""
LEAST_SIMILARITY = 0.5
"""Below it ANLS counts an answer as wrong."""
Entry = Mapping[str, Any]
"""`pred_answer`, the answer to score, and `gt_answers`, the right ones."""


def _mean(score: Callable[[Entry], float], entries: Sequence[Entry]) -> float:
    if not entries:
        raise ValueError("expected at least one answer to score, found none")
    return sum(map(score, progress(entries, "scoring", "answers"))) / len(entries)


class TextVQAAccuracyEvaluator:
    """The soft accuracy of TextVQA and VQA v2: an answer that three of nine annotators gave is right."""

    def __init__(self) -> None:
        self.answer_processor = EvalAIAnswerProcessor()

    def eval_pred_list(self, pred_list: Sequence[Entry]) -> float:
        """Mean score in [0, 1].

        Raises:
            ValueError: no answers, or an entry without ten right ones.
        """
        return _mean(self._score, pred_list)

    def _score(self, entry: Entry) -> float:
        # The mean over the ten ways to leave one annotator out; those who agree with the answer see one fewer.
        right = Counter(map(self.answer_processor, entry["gt_answers"]))
        if right.total() != ANNOTATORS:
            raise ValueError(f"gt_answers: expected {ANNOTATORS} answers, found {right.total()}")
        same = right[self.answer_processor(entry["pred_answer"])]
        return (same * min(3, max(0, same - 1)) + (ANNOTATORS - same) * min(3, same)) / (3 * ANNOTATORS)


class STVQAAccuracyEvaluator:
    """The share of answers that equal a right one."""

    def __init__(self) -> None:
        self.answer_processor = EvalAIAnswerProcessor()

    def eval_pred_list(self, pred_list: Sequence[Entry]) -> float:
        """Mean score in [0, 1]; raises ValueError if there is no answer."""
        return _mean(self._score, pred_list)

    def _score(self, entry: Entry) -> float:
        right = set(map(self.answer_processor, entry["gt_answers"]))
        return float(self.answer_processor(entry["pred_answer"]) in right)


class STVQAANLSEvaluator:
    """ANLS: one minus the edit distance over the longer text's length, 0 below one half (arXiv 1905.13648)."""

    def eval_pred_list(self, pred_list: Sequence[Entry]) -> float:
        """Mean, over the answers, of the best similarity to a right one; raises ValueError if there is no answer."""
        return _mean(self._score, pred_list)

    def _score(self, entry: Entry) -> float:
        return max(self.get_anls(entry["pred_answer"], right) for right in entry["gt_answers"])

    def get_anls(self, s1: str, s2: str) -> float:
        """The similarity of two texts in [0, 1]; case and outer space do not count."""
        first, second = s1.lower().strip(), s2.lower().strip()
        similarity = 1 - _edit_distance(first, second) / max(len(first), len(second), 1)
        return similarity if similarity >= LEAST_SIMILARITY else 0.0


def _edit_distance(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, 1):
        before, row = row, [i]
        for j, right in enumerate(second, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (left != right)))
    return row[-1]
