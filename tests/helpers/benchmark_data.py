"""The benchmarks in small: Parquet files in the real schemas, and the prompts that the stock tasks make of them.

Every picture has one colour. A checkpoint that says A to warm colours and B to cold ones (Yes and No where POPE's
prompt asks, nothing at all to black) has a known score on each.
"""

from collections.abc import Callable
from pathlib import Path

from data_files import COLOURS, POPE_SUFFIX, WARM
from PIL import Image

LETTER = "\nAnswer with the option's letter from the given choices directly."
OPTIONS = "\nA. warm\nB. cold"
PICTURES = COLOURS | {"black": (0, 0, 0)}
PLAN = [("red", "A"), ("green", "A"), ("blue", "B"), ("yellow", "B"), ("yellow", "A"), ("green", "B"), ("blue", "B")]
"""Colour and recorded answer of the samples of a multiple-choice benchmark: two of seven will be wrong."""
YES_NO = [
    ("red", "yes"), ("green", "no"), ("blue", "no"), ("yellow", "yes"),
    ("red", "no"), ("green", "no"), ("blue", "yes"), ("yellow", "no"),
]  # fmt: skip
"""Picture and recorded answer: a checkpoint that tells warm from cold gets five of eight right, two by "yes"."""
MME = [("red", "Yes"), ("red", "No"), ("blue", "No"), ("blue", "No"), ("green", "Yes"), ("green", "No")]
"""The two questions of three pictures, of which the last is of cognition: one picture all right, one half right."""
WARM_COLOUR = "Is there a warm colour?"
KINDS = ("one", "one", "one", "one", "one", "two", "two")
PROMPTS = {
    "mmbench_en_dev_static": f"Bench? There are several options:{OPTIONS}\n{LETTER}",
    "mmstar": f"Star?{OPTIONS}{LETTER.removesuffix('.')}",
    "ocrbench": "Which letter?",
    "seedbench_2_plus": f"Seed?{OPTIONS}\nC. no\nD. yes{LETTER}",
    "scienceqa": f"Context: Some.\nScience?{OPTIONS}{LETTER}",
    "ai2d": f"Diagram?{OPTIONS}{LETTER}",
    "pope": f"{WARM_COLOUR}{POPE_SUFFIX}",  # also of MME and TextVQA
    "scenes": "What is it?",
}
TEXT_PROMPT = f"No picture?{OPTIONS}{LETTER}"
HELLASWAG = [
    (f"Task {i}", f"A man goes {i}.", "he", ["runs.", "waits for long.", "sings a.", "is off"]) for i in range(4)
]


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (20, 16), PICTURES[colour])


def answer(task: str, colour: str) -> str:
    """What the checkpoint learns to say."""
    if colour == "black":
        return ""
    return ("Yes", "No")[colour not in WARM] if task == "pope" else "AB"[colour not in WARM]


def records() -> list[dict]:
    """Training records for a checkpoint of that kind."""
    questions = [
        (f"<image>\n{prompt}", answer(task, colour), {"image": f"{colour}.png"})
        for task, prompt in PROMPTS.items()
        for colour in PICTURES
    ]
    questions += [(TEXT_PROMPT, "A", {})] * 5
    return [
        {"id": str(i), "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}], **image}
        for i, (q, a, image) in enumerate(questions)
    ]


def write(folder: Path, configs: dict[str, dict[str, list[dict]]]) -> None:
    """Writes a data set as the hub has it: `configs` maps names to splits to rows; equal rows share a file."""
    import datasets

    (folder / "data").mkdir(parents=True)
    files: dict[int, str] = {}
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            if id(rows) not in files:
                files[id(rows)] = f"data/{config}-{split}-00000-of-00001.parquet"
                datasets.Dataset.from_list(rows).to_parquet(folder / files[id(rows)])
            lines += [f"  - split: {split}", f"    path: {files[id(rows)]}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_all(root: Path) -> None:
    """Writes every benchmark whose answers are words below `root`."""
    write(root / "lmms-lab-encoder/MMBench", {"en": {"dev": mmbench()}})
    write(root / "Lin-Chen/MMStar", {"val": {"val": mmstar()}})
    write(root / "echo840/OCRBench", {"default": {"test": ocrbench()}})
    write(root / "doolayer/SEED-Bench-2-Plus", {"default": {"test": seedbench()}})
    write(root / "lmms-lab-encoder/ScienceQA", {"ScienceQA-FULL": {"test": scienceqa()}})
    write(root / "lmms-lab-encoder/ai2d", {"default": {"test": ai2d()}})
    write(root / "lmms-lab-encoder/POPE", {"default": {"test": pope()}})
    write(root / "lmms-lab-encoder/MME", {"default": {"test": mme()}})
    write(root / "lmms-lab-encoder/textvqa", {"default": {"validation": textvqa()}})


def rows(plan: list[tuple], of: Callable, **fields: object) -> list[dict]:
    """A row for each colour and recorded answer: what `of` makes of its number and both, and `fields`."""
    return [
        of(index, colour, target) | {"image": picture(colour)} | fields for index, (colour, target) in enumerate(plan)
    ]


def mmbench() -> list[dict]:
    """Questions 0 to 6; the fifth is asked with its options in both orders, and is right in the first only."""
    fields = {"question": "Bench?", "hint": "nan", "A": "warm", "B": "cold", "C": "nan", "D": "nan", "source": "made"}
    fields |= {"L2-category": "level 2", "comment": "nan", "split": "dev"}
    made = rows(PLAN, lambda i, _, target: {"index": i, "answer": target, "category": f"category {KINDS[i]}"}, **fields)
    return [*made, made[4] | {"index": 1_000_004, "answer": "B"}]


def mmstar() -> list[dict]:
    fields = {"question": f"Star?{OPTIONS}", "category": "math"}
    fields["meta_info"] = {"source": "made", "split": "val", "image_path": "0.jpg"}
    return rows(PLAN, lambda i, _, target: {"index": i, "answer": target, "l2_category": f"kind {KINDS[i]}"}, **fields)


def ocrbench() -> list[dict]:
    kinds = {"one": "Doc-oriented VQA", "two": "Key Information Extraction"}
    fields = {"dataset": "made", "question": PROMPTS["ocrbench"]}
    return rows(PLAN, lambda i, _, target: {"question_type": kinds[KINDS[i]], "answer": [target]}, **fields)


def seedbench() -> list[dict]:
    fields = {"question": "Seed?", "choice_A": "warm", "choice_B": "cold", "choice_C": "no", "choice_D": "yes"}
    fields |= {"data_id": "0.png", "data_type": "single-image", "data_source": "made", "level": "L1"}
    fields["question_image_subtype"] = "bar"
    kinds = {"one": "chart", "two": "map"}

    def of(index, _, target):
        return {"question_id": str(index), "answer": target, "question_image_type": kinds[KINDS[index]]}

    return rows(PLAN, of, **fields)


def scienceqa() -> list[dict]:
    """Rows as in `PLAN`, and two questions without a picture, which the checkpoint always answers with A."""
    fields = {"task": "closed choice", "grade": "grade2", "subject": "natural science", "topic": "physics"}
    fields |= {"category": "colours", "skill": "see", "lecture": "", "solution": "", "choices": ["warm", "cold"]}
    seen = {"question": "Science?", "hint": "Some."} | fields
    without = {"image": None, "question": "No picture?", "hint": ""} | fields
    made = rows(PLAN, lambda _, colour, target: {"answer": "AB".index(target)}, **seen)
    return made + [{"answer": answer} | without for answer in (0, 1)]


def ai2d() -> list[dict]:
    fields = {"question": "Diagram?", "options": ["warm", "cold"]}
    return rows(PLAN, lambda _, colour, target: {"answer": str("AB".index(target))}, **fields)


def pope() -> list[dict]:
    def of(index, colour, target):
        return {"id": str(index), "question_id": str(index), "answer": target, "image_source": colour}

    return rows(YES_NO, of, question=WARM_COLOUR, category="adversarial")


def mme() -> list[dict]:
    def of(index, colour, target):
        category, folder = ("code_reasoning", "code") if index > 3 else ("color", "colours")
        return {"question_id": f"{folder}/{colour}.png", "answer": target, "category": category}

    return rows(MME, of, question=f"{WARM_COLOUR} Please answer yes or no.")


def textvqa() -> list[dict]:
    return rows(YES_NO, lambda i, _, target: {"question_id": i, "answers": [target] * 10}, question=WARM_COLOUR)


def hellaswag() -> list[dict]:
    """Every question with each of its four endings as the right one."""
    return [
        {"ind": i, "activity_label": activity, "ctx_a": first, "ctx_b": second, "ctx": f"{first} {second}"}
        | {"endings": endings, "source_id": str(i), "label": str(label), "split": "val", "split_type": "indomain"}
        for i, (activity, first, second, endings) in enumerate(HELLASWAG)
        for label in range(4)
    ]


def by_group(result) -> dict[str, float]:
    """Mean score of each kind of question of a `TaskResult`, in percent."""
    scores: dict[str, list[float]] = {}
    for sample in result.samples:
        scores.setdefault(sample.group, []).append(sample.score)
    return {kind: 100 * sum(own) / len(own) for kind, own in scores.items()}
