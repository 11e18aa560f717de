"""`python -m llava.export card`: the model's README.md, as the hub shows it.

What no record says can be given by flags, and is left out otherwise; nothing is guessed. Files and folders are
named by the last part of their path alone.
"""

import argparse
import hashlib
import html
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from llava.export import card_facts
from llava.export.card_facts import WHOLE, Facts, Stage, interval, norms_over_training
from llava.model.multimodal_projector.norm import NORM_TYPES
from llava.utils.files import write_text

CARD_FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_MARK = "<!-- written by python -m llava.export card, "
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_METADATA = {"license": "--license", "language": "--language", "base_model": "--base-model", "datasets": "--dataset"}
"""The metadata that a person may have to give, and the flags for it."""
_PLACES = {
    "vision_features": "vision features",
    "before_norm": "visual tokens, before the norm",
    "llm_input": "visual tokens, as the language model gets them",
    "text_embeddings": "text tokens",
    "gain_mean_abs": "mean gain of the norm",
}

Rows = list[tuple[str, ...]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, required=True, help="folder of the model, as trained or as exported")
    parser.add_argument("--output", type=Path, help="file to write (default: README.md in the model's folder)")
    parser.add_argument("--overwrite", action="store_true", help="replace a README that this command did not write")
    parser.add_argument("--run-dir", type=Path, help="folder with run.json and log (default: the model's)")
    parser.add_argument("--results", type=Path, help="results.json or its folder (default: that of --run-dir)")
    parser.add_argument("--repo", help="OWNER/NAME that it will have on the hub, for the lines on how to load it")
    parser.add_argument("--license", type=_word(_LICENSE, "a licence's id on the hub, such as apache-2.0"))
    parser.add_argument("--language", type=_word(_LANGUAGE, "a code such as en"), action="append", default=[])
    parser.add_argument(
        "--base-model", type=_id, action="append", default=[], help="hub id; may be given several times"
    )
    parser.add_argument("--dataset", type=_id, action="append", default=[], help="hub id; may be given several times")


def run(args: argparse.Namespace) -> None:
    """Writes the card and says which metadata it has, from where, and which it lacks.

    Raises:
        ValueError: there is no model, or `check_replaceable` refuses the file.
    """
    facts = card_facts.read_facts(args.model_path, args.run_dir, args.results)
    path = args.output or args.model_path / CARD_FILE
    check_replaceable(path, args.overwrite)
    metadata, sources = card_metadata(facts, args)
    write_text(path, signed(card_text(facts, metadata, args.repo and _id(args.repo))), synced=True)
    print(f"{path}: written")
    for line in sources:
        print(f"  {line}")


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Raises ValueError where writing `path` would lose a text that this command did not write, or that was edited."""
    if overwrite or not path.exists():
        return
    present = path.read_text(encoding="utf-8", errors="replace")
    text, mark, _ = present.rpartition(_MARK)
    if present != signed(text):
        what = "was edited since this command wrote it" if mark else "was not written by this command"
        raise ValueError(f"{path} {what}; pass --overwrite to replace it, or another --output")


def signed(text: str) -> str:
    """`text` with a last line by which a later call knows it as its own."""
    return f"{text}{_MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def card_metadata(facts: Facts, args: argparse.Namespace) -> tuple[ModelCardData, list[str]]:
    """The card's metadata, and a line for each field that says where it comes from or how to give it."""
    recorded = {"base_model": card_facts.recorded_bases(facts.stages)}
    fields, lines = {}, []
    for name, flag in _METADATA.items():
        by_flag = getattr(args, flag[2:].replace("-", "_"))
        if value := by_flag or recorded.get(name):
            fields[name] = value
            shown = value if isinstance(value, str) else ", ".join(value)
            lines.append(f"{name}: {shown} ({f'given by {flag}' if by_flag else 'recorded in run.json'})")
        else:
            lines.append(f"{name}: left out, as nothing records it for certain; give it by {flag}")
    tags = ["llava", "vision-language", *([] if facts.arm == "none" else [facts.arm])]
    fields |= {"library_name": "transformers"} if facts.exported else {}
    if facts.part != WHOLE:
        tags += ["adapter", facts.part]
        fields |= {"base_model_relation": "adapter"} if "base_model" in fields else {}
    if scores := eval_results(facts):
        fields |= {"model_name": facts.name, "eval_results": scores}
    return ModelCardData(**fields, pipeline_tag="image-text-to-text", tags=tags), lines


def eval_results(facts: Facts) -> list[EvalResult]:
    """The scores in percent, as the hub's own lists of results read them."""
    return [
        EvalResult(
            task_type="image-text-to-text",
            dataset_type=one_line(name),
            dataset_name=one_line(name),
            metric_type=one_line(task.metric),
            metric_value=task.score,
        )
        for name, task in (facts.results.tasks if facts.results else {}).items()
    ]


def card_text(facts: Facts, metadata: ModelCardData, repo: str | None = None) -> str:
    """The whole card, by its template."""
    name = repo or facts.name
    measured = norms_over_training(facts.stages)
    places = [place for place in _PLACES if any(place in norms for _, norms in measured)]
    card = ModelCard.from_template(
        metadata,
        template_path=str(_TEMPLATE),
        plain=plain,
        table=table,
        facts=facts,
        name=name,
        own=name.rpartition("/")[2],
        base=(metadata.base_model or ["BASE"])[0],
        model=_model_rows(facts.config),
        norm=_norm_rows(facts),
        measured_heads=["", *(when for when, _ in measured)],
        measured=[(_PLACES[p], *(f"{norms[p]:.4g}" if p in norms else "" for _, norms in measured)) for p in places],
        stages=[_stage(stage) for stage in facts.stages],
        results=_result_rows(facts),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card).rstrip()) + "\n"


# --- tables -----------------------------------------------------------------------------------------------------------


def _model_rows(config: dict[str, Any]) -> Rows:
    text = config.get("text_config") or config
    vision = config.get("vision_config") or config.get("mm_vision_config") or {}

    def count(part: dict[str, Any], field: str, unit: str) -> str:
        return f"{part[field]} {unit}" if isinstance(part.get(field), int) else ""

    rows = {
        "language model": [
            text.get("model_type"),
            count(text, "num_hidden_layers", "layers"),
            count(text, "hidden_size", "wide"),
        ],
        "vision tower": [
            vision.get("model_type"),
            count(vision, "image_size", "pixels a side"),
            count(vision, "patch_size", "a patch"),
        ],
        "projector": [config.get("mm_projector_type")],
        "norm after it": [config.get("mm_projector_norm") or "none"],
        "conversation template": [config.get("mm_conv_version")],
        "pictures": [config.get("image_aspect_ratio")],
        "weights": [config.get("dtype") or config.get("torch_dtype") or text.get("dtype")],
    }
    shown = {name: ", ".join(plain(part) for part in parts if part) for name, parts in rows.items()}
    return [(name, value) for name, value in shown.items() if value]


def _norm_rows(facts: Facts) -> Rows:
    if facts.arm == "none":
        return []
    numbers = {
        "target norm of a visual token": facts.config.get("mm_projector_norm_target"),
        "gain at the start": facts.config.get("mm_projector_norm_init_gain"),
        "mean gain now": facts.gain,
    }
    norm = NORM_TYPES.get(facts.arm)
    return [
        ("arm", code(facts.arm)),
        *((name, f"{value:.6g}") for name, value in numbers.items() if isinstance(value, int | float)),
        ("gradient compensated by the mean gain", "yes" if norm and norm.compensated else "no"),
    ]


def _stage(stage: Stage) -> dict[str, list]:
    devices, training = stage.configuration["devices"], stage.configuration["training"]
    data = card_facts.base_name(stage.configuration["data"].get(card_facts.DATA), stage.started_in)
    batch = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * devices["ranks"]
    facts = [f"data: {plain(data)}", f"{devices['ranks']} x {plain(devices['kind'])}", f"{batch} samples a step"]
    facts += [f"{stage.steps} steps"] if stage.steps is not None else []
    losses = [line["loss"] for line in stage.log if "loss" in line]
    facts += [f"last logged loss {losses[-1]:.4g}"] if losses else []
    facts += [f"own parts: {plain(', '.join(files))}"] if (files := stage.configuration.get("plugins")) else []
    facts += [f"continued {stage.starts - 1} times"] if stage.starts > 1 else []
    flags = card_facts.changed_flags(stage)
    return {"facts": facts, "flags": [(code(f"--{name}"), code(value)) for name, value in flags.items()]}


def _result_rows(facts: Facts) -> Rows:
    rows = []
    for name, task in (facts.results.tasks if facts.results else {}).items():
        bounds = interval(task)
        shown = f"{bounds[0]:.1f} to {bounds[1]:.1f}" if bounds else "not a mean over questions"
        chance = "" if task.chance is None else f"{task.chance:.1f}"
        rows.append((plain(name), plain(task.metric), f"{task.score:.2f}", shown, chance, str(len(task.samples))))
    return rows


# --- Markdown ---------------------------------------------------------------------------------------------------------


def one_line(text: object) -> str:
    """`text` with single spaces for all white space."""
    return " ".join(str(text).split())


def plain(text: object) -> str:
    """`text` as one line of Markdown that shows it as it is."""
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", html.escape(one_line(text), quote=False))


def code(text: object) -> str:
    """`text` as one line of code, which may stand in a table."""
    line = one_line(text)
    if not set(line) & set("`|"):
        return f"`{line}`"
    return f"<code>{re.sub('[`|*_~]', lambda mark: f'&#{ord(mark[0])};', html.escape(line, quote=False))}</code>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that are Markdown already."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


# --- flags ------------------------------------------------------------------------------------------------------------


def _word(form: re.Pattern, expected: str) -> Callable[[str], str]:
    def checked(text: str) -> str:
        if not form.fullmatch(text):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return text

    return checked


def _id(text: str) -> str:
    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise argparse.ArgumentTypeError(f"expected a hub id, OWNER/NAME, found {text!r}") from error
    return text
