"""TextVQA and ST-VQA scores under the names that LLaVA's programs import, by lmms-eval's own metrics.

An answer is normalised as the VQA challenge does (https://visualqa.org/evaluation.html).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.metrics import levenshtein_distance
from lmms_eval.tasks._task_utils.vqa_eval_metric import EvalAIAnswerProcessor

Entry = Mapping[str, Any]
"""`pred_answer`, the answer to score, and `gt_answers`, the right ones."""


class TextVQAAccuracyEvaluator:
    """The soft accuracy of TextVQA and VQA v2: an answer that three of nine annotators gave is right."""

    def __init__(self) -> None:
        self.answer_processor = EvalAIAnswerProcessor()

    def eval_pred_list(self, pred_list: Sequence[Entry]) -> float:
        """Mean score in [0, 1]; raises ValueError without answers, or for an entry that cannot be scored."""
        if not pred_list:
            raise ValueError("expected at least one answer to score, found none")
        return sum(map(self._score, pred_list)) / len(pred_list)

    def _score(self, entry: Entry) -> float:
        # The mean over the ten ways to leave one annotator out; those who agree with the answer see one fewer.
        right = Counter(map(self.answer_processor, entry["gt_answers"]))
        if right.total() != 10:
            raise ValueError(f"gt_answers: expected 10 answers, found {right.total()}")
        same = right[self.answer_processor(entry["pred_answer"])]
        return (same * min(3, max(0, same - 1)) + (10 - same) * min(3, same)) / 30


class STVQAAccuracyEvaluator(TextVQAAccuracyEvaluator):
    """The share of answers that equal a right one."""

    def _score(self, entry: Entry) -> float:
        right = set(map(self.answer_processor, entry["gt_answers"]))
        return float(self.answer_processor(entry["pred_answer"]) in right)


class STVQAANLSEvaluator(TextVQAAccuracyEvaluator):
    """ANLS: one minus the edit distance over the longer text's length, 0 below one half (arXiv 1905.13648)."""

    def _score(self, entry: Entry) -> float:
        return max(self.get_anls(entry["pred_answer"], right) for right in entry["gt_answers"])

    def get_anls(self, s1: str, s2: str) -> float:
        """The similarity of two texts in [0, 1]; case and outer space do not count."""
        first, second = s1.lower().strip(), s2.lower().strip()
        similarity = 1 - levenshtein_distance(first, second) / max(len(first), len(second), 1)
        return similarity if similarity >= 0.5 else 0.0
