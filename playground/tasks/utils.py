"""What the tasks beside this file show, ask and count as right."""

from typing import Any

from PIL import Image

from playground.records import is_right


def doc_to_visual(doc: dict[str, Any]) -> list[Image.Image]:
    return [doc["image"].convert("RGB")]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, Any] | None = None) -> str:
    return doc["question"]


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, dict[str, Any]]:
    score = float(is_right(results[0].strip(), doc["answer"]))
    return {"accuracy": {"id": doc["id"], "kind": doc["kind"], "chance": doc["chance"], "score": score}}


def mean_score(results: list[dict[str, Any]]) -> float:
    return sum(result["score"] for result in results) / len(results)
