"""The paper's Table 4, in percent (arXiv 2512.08374)."""

from llava.eval.tasks import PAPER_COLUMNS
from llava.model.multimodal_projector.norm import PAPER_ARMS as ARMS

# A row for each of `ARMS`.
_SCORES = {
    "Llama-3.2-3B": (
        (71.39, 37.72, 88.14, 42.86, 40.70, 78.99, 60.17, 65.96, 45.19),
        (72.16, 41.19, 88.88, 47.26, 45.60, 80.83, 63.24, 66.01, 53.21),
        (71.82, 41.24, 88.26, 45.56, 44.10, 81.00, 61.85, 65.99, 51.60),
    ),
    "Qwen2.5-7B": (
        (76.80, 50.34, 87.51, 56.65, 47.00, 82.81, 73.74, 70.56, 71.02),
        (75.60, 48.08, 87.83, 59.51, 47.60, 82.20, 72.70, 73.73, 71.14),
        (77.66, 50.58, 87.87, 58.27, 49.40, 82.93, 74.61, 71.64, 71.74),
    ),
}
TABLE_4 = {
    llm: {arm: dict(zip(PAPER_COLUMNS.values(), scores, strict=True)) for arm, scores in zip(ARMS, rows, strict=True)}
    for llm, rows in _SCORES.items()
}
"""`TABLE_4[language model][arm][task]`."""


def language_model_of(path: str) -> str | None:
    """The paper's language model that `path` (a folder or hub id) names, or None."""
    return next((llm for llm in TABLE_4 if llm.lower() in path.lower()), None)
