"""The benchmarks of published tables in small: rows in the real schemas, and a model that sees a picture's colour.

The model says A to warm colours and B to cold ones (Yes and No to MME, words where people's answers are cleaned of
articles), so that its score on each is known.
`python table_benchmarks.py OUTPUT` lets stock lmms-eval score the model, on data sets of the working directory if they
are there, else of the hub.
"""

import json
import sys
from pathlib import Path

from benchmark_data import KINDS, PICTURES, PLAN, picture, write
from data_files import WARM

TASKS = (
    "mme",
    "gqa",
    "textvqa_val",
    "vizwiz_vqa_val",
    "seedbench",
)


SAID = {"mme": ("Yes", "No"), "textvqa_val": ("warm", "cold"), "vizwiz_vqa_val": ("warm", "cold")}


def says(task: str, colour: str) -> str:
    """The model's answer."""
    return SAID.get(task, "AB")[colour not in WARM]


MME = [("red", "Yes"), ("red", "No"), ("blue", "No"), ("blue", "No"), ("green", "Yes"), ("green", "No")]
"""The two questions of three pictures, of which the last is of cognition: one picture all right, one half right."""


def rows() -> dict[str, dict[str, dict[str, list[dict]]]]:
    """Rows by data set, config and split; the pictures and answers are those of `PLAN`."""
    several = [{"answers": [{"A": "warm", "B": "cold"}[target]] * 10} for _, target in PLAN]
    number = [{"question_id": index} for index in range(len(PLAN))]
    shared = [{"image": picture(colour), "question": "Which?"} for colour, _ in PLAN]
    answer = [{"answer": target} for _, target in PLAN]

    def joined(*parts: list[dict]) -> list[dict]:
        return [{name: value for part in row for name, value in part.items()} for row in zip(*parts, strict=True)]

    mme = [
        {
            "question_id": f"{'code' if index > 3 else 'colours'}/{colour}.png",
            "image": picture(colour),
            "question": "Warm? Please answer yes or no.",
            "answer": target,
            "category": "code_reasoning" if index > 3 else "color",
        }
        for index, (colour, target) in enumerate(MME)
    ]
    gqa = [{"id": str(i), "imageId": colour, "question": "Which?"} for i, (colour, _) in enumerate(PLAN)]
    pictures = [{"id": colour, "image": picture(colour)} for colour in sorted({colour for colour, _ in PLAN})]
    seed = [
        {"question": "Which?", "data_type": "image" if kind == "one" else "video", "image": [row["image"]]}
        for kind, row in zip(KINDS, shared, strict=True)
    ]
    choices = {f"choice_{letter}": word for letter, word in zip("abcd", ("warm", "cold", "no", "yes"), strict=True)}
    return {
        "lmms-lab-encoder/MME": {"default": {"test": mme}},
        "lmms-lab-encoder/GQA": {
            "testdev_balanced_instructions": {"testdev": joined(gqa, answer)},
            "testdev_balanced_images": {"testdev": pictures},
        },
        "lmms-lab-encoder/textvqa": {"default": {"validation": joined(number, shared, several)}},
        "lmms-lab-encoder/VizWiz-VQA": {
            "default": {"val": joined([{"question_id": f"VizWiz_{i}"} for i in range(len(PLAN))], shared, several)}
        },
        "lmms-lab-encoder/SEED-Bench": {"default": {"test": joined(number, answer, [choices] * 7, seed)}},
    }


def write_all(root: Path) -> None:
    """Writes every data set below `root`."""
    for name, configs in rows().items():
        write(root / name, configs)


def main(output: Path) -> None:
    from lmms_eval import evaluator
    from lmms_eval.api.model import lmms
    from lmms_eval.tasks import TaskManager

    class Colours(lmms):
        """Answers by the first pixel of a question's picture."""

        def generate_until(self, requests):
            answers = []
            for request in requests:
                context, _, doc_to_visual, doc_id, task, split = request.args
                shown = doc_to_visual(self.task_dict[task][split][doc_id])[0].getpixel((0, 0))
                colour = next(name for name in PICTURES if picture(name).getpixel((0, 0)) == shown)
                answers.append(says(task, colour))
            return answers

        def loglikelihood(self, requests):
            raise NotImplementedError

        def generate_until_multi_round(self, requests):
            raise NotImplementedError

    manager = TaskManager("ERROR")
    for task in TASKS:
        found = evaluator.simple_evaluate(
            model=Colours(), tasks=[task], task_manager=manager, batch_size=1, log_samples=True, bootstrap_iters=0
        )
        folder = output / task / "model"
        folder.mkdir(parents=True)
        scores = {"results": found["results"], "n-samples": found["n-samples"]}
        (folder / "now_results.json").write_text(json.dumps(scores, default=str))
        lines = [json.dumps(sample, default=str) + "\n" for sample in found["samples"][task]]
        (folder / f"now_samples_{task}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
