"""The quickstart's page: scores, figures, answers and commands in one file that needs no network."""

import argparse
import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from llava.eval.paired import UNCHANGED
from llava.experiment import answers
from llava.experiment.figures import analysis_figures, colour_of, data_uri
from llava.experiment.quickstart import TIMES
from llava.experiment.report import render
from llava.utils.presentation import STYLE, import_pyplot
from llava.utils.versions import git_commit
from playground.store import shown_python

FILE = "index.html"
EXAMPLES = 3
SHOWN_SIDE = 256  # longest side of a picture on the page, in pixels
Logs = Mapping[str, Sequence[Sequence[Mapping[str, float]]]]

ALL = "all questions"
ROWS = (
    ("final loss, stage 1", "final_loss", 0),
    ("final loss, stage 2", "final_loss", 1),
    ("visual token norm, start", "visual_norm", 0),
    ("visual token norm, after stage 1", "visual_norm", 1),
    ("visual token norm, after stage 2", "visual_norm", 2),
    ("text token norm, start", "text_norm", 0),
    ("text token norm, after stage 2", "text_norm", 2),
)
"""Rows below the scores: label, key of an arm's summary, index."""


def write_page(
    args: argparse.Namespace, results: Mapping[str, Any], logs: Logs, examples: Sequence[Mapping[str, Any]]
) -> None:
    """Writes `index.html` and its figures.

    Args:
        args: the command line of `compare`.
        results: what `results.json` holds.
        logs: every arm's optimizer steps, by stage.
        examples: see `examples`.
    """
    folder = args.output_dir
    draw_norms(logs, folder / "norms")
    arms = list(results["arms"])
    context = {
        "title": f"{' and '.join(arms)} on {args.data.name}",
        "arms": arms,
        "colours": {arm: colour_of(arms, arm) for arm in arms},
        "results": results,
        "log_rows": ROWS,
        "all": ALL,
        "verdict": verdict(results, logs, ALL),
        "norms": data_uri((folder / "norms.svg").read_bytes(), "svg+xml"),
        "analysis": update_rates(args) if args.pictures else [],
        "rates": rate_rows(folder / answers.ANALYSIS) if args.pictures else [],
        "measured_pictures": args.pictures,
        "examples": examples,
        "times": json.loads((folder / TIMES).read_text()) if (folder / TIMES).is_file() else {},
        "logs": log_links(args),
        "commands": commands(args, examples),
        "commit": git_commit(),
    }
    (folder / FILE).write_text(render("page.html.jinja", **context), encoding="utf-8")


def verdict(results: Mapping[str, Any], logs: Logs, everything: str) -> str:
    """What the run can tell and what it cannot, in words."""
    arms, chance = results["arms"], results["chance_percent"][everything]
    scores = ", ".join(f"{name} {arm['accuracy_percent'][everything]:.0f} %" for name, arm in arms.items())
    said = [f"Right answers to {len(results['records'])} held-out questions: {scores}; guessing gives {chance:.0f} %."]
    for name, found in results["differences"].items():
        one = found[everything]
        shown = "no difference is shown" if one["verdict"] == UNCHANGED else f"{one['verdict']} on such questions"
        interval = "{:+.1f} to {:+.1f}".format(*one["interval"])
        said.append(
            f"{name} against {next(iter(arms))}: {one['points']:+.1f} points (95 % interval {interval}): {shown}."
        )
    steps = " + ".join(str(log[-1]["step"]) for log in next(iter(logs.values())))
    said.append(
        f"This is one training of {steps} steps: it tells whether an arm reads the pictures, and how large its visual "
        "tokens are. It cannot rank the arms: the intervals cover the choice of questions, not what another training "
        "would have given."
    )
    return " ".join(said)


def examples(
    records: Sequence[Mapping[str, Any]], given: Mapping[str, Sequence[str]], images: Path
) -> list[dict[str, Any]]:
    """Held-out pictures, at first one per kind of question, with question, expected answer and all arms' answers."""
    chosen: dict[str, int] = {}
    pictures: set[str] = set()
    for index, record in enumerate(records):
        if record["kind"] not in chosen and record["image"] not in pictures:
            chosen[record["kind"]] = index
            pictures.add(record["image"])
    others = (i for i, record in enumerate(records) if record["image"] not in pictures)
    indices = [*chosen.values(), *others][:EXAMPLES]
    found = []
    for index in indices:
        question, expected = (message["value"] for message in records[index]["conversations"][:2])
        found.append(
            {
                "image": records[index]["image"],
                "path": str(images / records[index]["image"]),
                "uri": picture_uri(images / records[index]["image"]),
                "question": question.replace("<image>\n", ""),
                "expected": expected,
                "replies": [f"{name}: {texts[index]}" for name, texts in given.items()],
            }
        )
    return found


def picture_uri(path: Path) -> str:
    """A picture of at most `SHOWN_SIDE` pixels, inline."""
    stream = io.BytesIO()
    with Image.open(path) as picture:
        picture = picture.convert("RGB")
        picture.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
        picture.save(stream, "PNG")
    return data_uri(stream.getvalue(), "png")


def draw_norms(logs: Logs, path: Path) -> None:
    """Draws the mean norm of visual and text tokens at the LLM's input over both stages: a line per arm, log scale."""
    pyplot = import_pyplot()
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        boundary = 0
        for name, (stage_1, stage_2) in logs.items():
            boundary = stage_1[-1]["step"]
            steps = [(s["step"], s) for s in stage_1] + [(boundary + s["step"], s) for s in stage_2]
            points = [(x, s["norm/llm_input"]) for x, s in steps if "norm/llm_input" in s]
            axes.plot(*zip(*points, strict=True), color=colour_of(list(logs), name), label=f"visual tokens, {name}")
        points = [(x, s["norm/text_embeddings"]) for x, s in steps if "norm/text_embeddings" in s]
        axes.plot(*zip(*points, strict=True), color="black", linestyle=":", label="text tokens")
        axes.axvline(boundary + 0.5, color="grey", linewidth=0.8)
        axes.set(yscale="log", xlabel="optimizer step (stage 1 | stage 2)", ylabel="mean L2 norm at the LLM's input")
        axes.legend()
        for kind in ("png", "svg"):
            figure.savefig(f"{path}.{kind}", metadata={"Software": None} if kind == "png" else {"Date": None})
        pyplot.close(figure)


def update_rates(args: argparse.Namespace) -> list[dict[str, str]]:
    """The figures of `python -m llava.analysis update-rates` for all arms; what `answers` measured is not repeated."""
    from llava.analysis import update_rates

    update_rates.run(answers.update_rates_arguments([(name, folder) for name, _, folder in args.arm], args))
    return analysis_figures(args.output_dir / answers.ANALYSIS)


def rate_rows(folder: Path) -> list[dict[str, Any]]:
    """The part of the measurement's summary that a reader needs: how much of a token's direction a layer keeps."""
    rows = json.loads((folder / f"{answers.UPDATE_RATES}.json").read_text())["rows"]
    names = {"model": "arm", "tokens": "tokens", "count": "tokens seen", "cosine mean": "cosine of successive layers"}
    shown = [{new: row[old] for old, new in names.items()} for row in rows if "with sinks" not in row["tokens"]]
    return [{name: f"{v:.3f}" if isinstance(v, float) else v for name, v in row.items()} for row in shown]


def log_links(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Titles and relative paths of every stage's log."""
    found = []
    for name, *folders in args.arm:
        for number, folder in enumerate(map(Path, folders), 1):
            for file in (folder / "train_log.jsonl", folder.with_suffix(".log")):
                if file.is_file():
                    found.append((f"{name}, stage {number}: {file.name}", os.path.relpath(file, args.output_dir)))
    return found


def commands(args: argparse.Namespace, examples: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What to type next: a command for each thing it does."""
    python, last = shown_python(), args.arm[-1][2]
    talk = [python, "-m", "llava.serve.cli", "--model-path", last, "--image-file", examples[0]["path"]]
    return {
        "talk to the model": shlex.join(talk),
        "every table and figure of the paper for these models": shlex.join(
            ["bash", "scripts/analyze.sh", *(f"{name}={folder}" for name, _, folder in args.arm)]
        ),
        "a comparison of arms over several seeds": "bash scripts/compare.sh --preset demo --seeds 2",
        "the paper's recipe on GPUs": "PRESET=llama-3.2-3b NORM=gwc_layernorm bash scripts/pretrain.sh",
    }
