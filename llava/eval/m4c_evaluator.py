"""TextVQA's score under the names that LLaVA's programs import, by lmms-eval's own normalisation.

An answer is normalised as the VQA challenge does (https://visualqa.org/evaluation.html).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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
