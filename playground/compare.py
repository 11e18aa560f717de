"""Scores trained checkpoints on held-out pictures and shows arms side by side: table, norms over training, examples."""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from llava.eval.ask import load_assistant
from playground.records import is_right
from playground.store import PlaygroundError, write_json

LOG_FILE = "train_log.jsonl"
EXAMPLES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m playground compare`."""
    parser.add_argument(
        "--arm",
        nargs=3,
        action="append",
        required=True,
        metavar=("NAME", "STAGE1", "STAGE2"),
        help="an arm's name and the output folders of its two stages; repeat for every arm",
    )
    parser.add_argument("--data", type=Path, required=True, help="prepared folder with heldout.json and images/")
    parser.add_argument("--output-dir", type=Path, required=True, help="where table, figures and results go")
    parser.add_argument("--batch-size", type=int, default=40, help="questions answered at a time")
    parser.add_argument("--max-new-tokens", type=int, default=8, help="longest answer in tokens")


def run(args: argparse.Namespace) -> None:
    """Writes `results.json`, `table.md`, `norms.png` and `examples.png`, and prints the table."""
    records = json.loads((args.data / "heldout.json").read_text(encoding="utf-8"))
    arms = {}
    for name, stage_1, stage_2 in args.arm:
        logs = [read_log(Path(folder)) for folder in (stage_1, stage_2)]
        answers = answer(stage_2, records, args.data / "images", args.batch_size, args.max_new_tokens, name)
        arms[name] = {"summary": summarize(logs, records, answers), "answers": answers, "logs": logs}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    chance = chance_percent(records)
    table = markdown_table({name: arm["summary"] for name, arm in arms.items()}, chance)
    (args.output_dir / "table.md").write_text(table + "\n")
    results = {
        "chance_percent": chance,
        "arms": {name: {"folder": stage_2, **arms[name]["summary"]} for name, _, stage_2 in args.arm},
        "records": [
            {
                "id": record["id"],
                "kind": record["kind"],
                "expected": expected_answer(record),
                **{name: arm["answers"][i] for name, arm in arms.items()},
            }
            for i, record in enumerate(records)
        ],
    }
    write_json(args.output_dir / "results.json", results)
    draw_norms({name: arm["logs"] for name, arm in arms.items()}, args.output_dir / "norms.png")
    answers = {name: arm["answers"] for name, arm in arms.items()}
    print(draw_examples(records, answers, args.data / "images", args.output_dir / "examples.png"))
    print(table)


def read_log(folder: Path) -> list[dict[str, float]]:
    """The optimizer steps that a run logged."""
    path = folder / LOG_FILE
    if not path.is_file():
        raise PlaygroundError(f"{path} does not exist; --arm wants the two output folders of a finished training")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [step for step in steps if "loss" in step]


def answer(
    checkpoint: str, records: list[dict[str, Any]], images: Path, batch_size: int, max_new_tokens: int, name: str
) -> list[str]:
    """The checkpoint's greedy answer to the first question of every record."""
    assistant = load_assistant(checkpoint)
    answers: list[str] = []
    for start in tqdm(range(0, len(records), batch_size), desc=f"answering, {name}"):
        batch = records[start : start + batch_size]
        answers += assistant.answer(
            [record["conversations"][:1] for record in batch],
            [Image.open(images / record["image"]) for record in batch],
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
    return answers


def expected_answer(record: dict[str, Any]) -> str:
    return record["conversations"][1]["value"]


def chance_percent(records: list[dict[str, Any]]) -> dict[str, float]:
    """What guessing one of the possible answers scores, per kind of question."""
    return {record["kind"]: 100 / len(record["choices"]) for record in records}


def summarize(logs: list[list[dict[str, float]]], records: list[dict[str, Any]], answers: list[str]) -> dict[str, Any]:
    """Accuracy per kind, last losses (mean of ten steps), and norms at the LLM's input before and after training."""
    right: dict[str, list[bool]] = defaultdict(list)
    for record, given in zip(records, answers, strict=True):
        right[record["kind"]].append(is_right(given, expected_answer(record)))
    stage_1, stage_2 = logs
    return {
        "accuracy_percent": {kind: 100 * sum(hits) / len(hits) for kind, hits in right.items()},
        "final_loss": [sum(step["loss"] for step in log[-10:]) / len(log[-10:]) for log in logs],
        "visual_norm": [_first(stage_1, "norm/llm_input"), _last(stage_1, "norm/llm_input")]
        + [_last(stage_2, "norm/llm_input")],
        "text_norm": [_first(stage_1, "norm/text_embeddings"), _last(stage_1, "norm/text_embeddings")]
        + [_last(stage_2, "norm/text_embeddings")],
    }


def _first(log: list[dict[str, float]], key: str) -> float:
    return next((step[key] for step in log if key in step), math.nan)


def _last(log: list[dict[str, float]], key: str) -> float:
    return _first(log[::-1], key)


def markdown_table(summaries: dict[str, dict[str, Any]], chance: dict[str, float]) -> str:
    """One column per arm, and what chance gives."""
    names = list(summaries)
    rows = [("held-out accuracy, %", *[""] * len(names), "chance")]
    for kind in chance:
        values = [f"{summaries[name]['accuracy_percent'][kind]:.1f}" for name in names]
        rows.append((f"  {kind}", *values, f"{chance[kind]:.1f}"))
    for label, key, index in (
        ("final loss, stage 1", "final_loss", 0),
        ("final loss, stage 2", "final_loss", 1),
        ("visual token norm, start", "visual_norm", 0),
        ("visual token norm, after stage 1", "visual_norm", 1),
        ("visual token norm, after stage 2", "visual_norm", 2),
        ("text token norm, start", "text_norm", 0),
        ("text token norm, after stage 2", "text_norm", 2),
    ):
        rows.append((label, *[f"{summaries[name][key][index]:.3g}" for name in names], ""))
    header = ("", *names, "")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def draw_norms(logs: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Mean norm of visual and text tokens at the LLM's input over both stages, one line per arm, log scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    boundary = 0
    for name, (stage_1, stage_2) in logs.items():
        boundary = stage_1[-1]["step"]
        steps = [(s["step"], s) for s in stage_1] + [(boundary + s["step"], s) for s in stage_2]
        points = [(x, s["norm/llm_input"]) for x, s in steps if "norm/llm_input" in s]
        axes.plot(*zip(*points, strict=True), label=f"visual tokens, {name}")
    points = [(x, s["norm/text_embeddings"]) for x, s in steps if "norm/text_embeddings" in s]
    axes.plot(*zip(*points, strict=True), color="black", linestyle=":", label="text tokens")
    axes.axvline(boundary + 0.5, color="grey", linewidth=0.8)
    axes.set(yscale="log", xlabel="optimizer step (stage 1 | stage 2)", ylabel="mean L2 norm at the LLM's input")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_examples(records: list[dict[str, Any]], answers: dict[str, list[str]], images: Path, path: Path) -> str:
    """Draws one held-out picture per kind with question and answers; returns the same as text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen: dict[str, int] = {}
    for index, record in enumerate(records):
        chosen.setdefault(record["kind"], index)
    indices = [*chosen.values(), *(i for i in range(len(records)) if i not in chosen.values())][:EXAMPLES]
    figure, axes = pyplot.subplots(1, len(indices), figsize=(3.4 * len(indices), 4.4), layout="constrained")
    lines = []
    for index, axis in zip(indices, axes.flat if len(indices) > 1 else [axes], strict=True):
        record = records[index]
        question = record["conversations"][0]["value"].replace("<image>\n", "")
        replies = [f"{name}: {given[index]}" for name, given in answers.items()]
        axis.imshow(Image.open(images / record["image"]), interpolation="nearest")
        axis.set_axis_off()
        axis.set_title("\n".join([question, f"expected: {expected_answer(record)}", *replies]), fontsize=9, loc="left")
        lines.append(f"{record['image']}: {question} expected: {expected_answer(record)} | " + " | ".join(replies))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return "\n".join(lines)
