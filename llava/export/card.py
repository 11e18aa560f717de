"""`python -m llava.export card`: the model's README.md, as the hub shows it.

What no record says can be given by flags, and is left out otherwise; nothing is guessed. Files and folders are
named by the last part of their path alone.
"""

import argparse
import hashlib
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from llava.export import card_facts
from llava.export.card_facts import LORA, PROJECTOR, WHOLE, Facts, Stage, interval, norms_over_training
from llava.utils.files import write_text

CARD_FILE = "README.md"
PAPER = "https://arxiv.org/abs/2512.08374"
_MARK = "<!-- written by python -m llava.export card, {} -->\n"
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", "([0-9a-f]{16})"))
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_ASKED = {
    "license": "--license",
    "language": "--language",
    "base_model": "--base-model",
    "datasets": "--dataset",
}
"""The metadata that a person may have to give, and the flags for it."""
_PLACES = {
    "vision_features": "vision features",
    "before_norm": "visual tokens, before the norm",
    "llm_input": "visual tokens, as the language model gets them",
    "text_embeddings": "text tokens",
    "gain_mean_abs": "mean gain of the norm",
}


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
    text = card_text(facts, metadata, args.repo and _id(args.repo))
    write_text(path, text, synced=True)
    print(f"{path}: written")
    for line in sources:
        print(f"  {line}")


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Raises ValueError where writing `path` would lose a text that this command did not write, or that was edited."""
    if overwrite or not path.exists():
        return
    found = path.read_text(encoding="utf-8", errors="replace")
    match = _MARKED.search(found)
    if match is None or match[1] != _digest(found.replace(match[0], "")):
        what = "was not written by this command" if match is None else "was edited since this command wrote it"
        raise ValueError(f"{path} {what}; pass --overwrite to replace it, or another --output")


def card_metadata(facts: Facts, args: argparse.Namespace) -> tuple[ModelCardData, list[str]]:
    """The card's metadata, and a line for each field that says where it comes from or how to give it."""
    recorded = {
        "base_model": card_facts.recorded_bases(facts.stages),
        "datasets": card_facts.recorded_datasets(facts.stages),
    }
    fields, lines = {}, []
    for name, flag in _ASKED.items():
        given = getattr(args, flag[2:].replace("-", "_"))
        if value := given or recorded.get(name):
            fields[name] = value
            shown = value if isinstance(value, str) else ", ".join(value)
            lines.append(f"{name}: {shown} ({f'given by {flag}' if given else 'recorded in run.json'})")
        else:
            lines.append(f"{name}: left out, as nothing records it for certain; give it by {flag}")
    tags = ["llava", "vision-language", *([] if facts.arm == "none" else [facts.arm])]
    fields |= {"library_name": "transformers"} if facts.exported else {}
    if facts.part != WHOLE:
        tags += ["adapter", facts.part]
        fields |= {"base_model_relation": "adapter"} if "base_model" in fields else {}
    return ModelCardData(**fields, pipeline_tag="image-text-to-text", tags=tags), lines


def card_text(facts: Facts, metadata: ModelCardData, repo: str | None = None) -> str:
    """The whole file, with the mark by which a later call knows it as its own."""
    sections = [
        f"# {plain(repo or facts.name)}",
        _summary(facts),
        "## The model",
        _table(("", ""), _model_rows(facts.config)),
        *_norm_section(facts),
        *_training_section(facts.stages),
        *_results_section(facts),
        "## How to load it",
        *_loading(facts, repo or facts.name, (metadata.base_model or ["BASE"])[0]),
    ]
    front = f"---\n{metadata.to_yaml()}\n---\n"
    body = "\n" + "\n\n".join(sections) + "\n"
    return front + _MARK.format(_digest(front + body)) + body


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- sections ---------------------------------------------------------------------------------------------------------


def _summary(facts: Facts) -> str:
    if facts.arm == "none":
        return "A LLaVA: the tokens of a vision tower go through an MLP projector into a language model."
    return (
        "A LLaVA whose projector ends in a norm: visual tokens enter the language model with about the norm of its "
        f"text embeddings, see [The Unseen Bias]({PAPER})."
    )


def _model_rows(config: dict[str, Any]) -> list[tuple[str, str]]:
    text = config.get("text_config") or config
    vision = config.get("vision_config") or config.get("mm_vision_config") or {}
    rows = {
        "language model": [
            text.get("model_type"),
            _count(text, "num_hidden_layers", "layers"),
            _count(text, "hidden_size", "wide"),
        ],
        "vision tower": [
            vision.get("model_type"),
            _count(vision, "image_size", "pixels a side"),
            _count(vision, "patch_size", "a patch"),
        ],
        "projector": [config.get("mm_projector_type")],
        "norm after it": [config.get("mm_projector_norm") or "none"],
        "conversation template": [config.get("mm_conv_version")],
        "pictures": [config.get("image_aspect_ratio")],
        "weights": [config.get("dtype") or config.get("torch_dtype") or text.get("dtype")],
    }
    shown = {name: ", ".join(plain(part) for part in parts if part) for name, parts in rows.items()}
    return [(name, value) for name, value in shown.items() if value]


def _count(config: dict[str, Any], field: str, unit: str) -> str:
    return f"{config[field]} {unit}" if isinstance(config.get(field), int) else ""


def _norm_section(facts: Facts) -> list[str]:
    rows = []
    if facts.arm != "none":
        numbers = {
            "target norm of a visual token": facts.config.get("mm_projector_norm_target"),
            "gain at the start": facts.config.get("mm_projector_norm_init_gain"),
            "mean gain now": facts.gain,
        }
        rows = [(name, f"{value:.6g}") for name, value in numbers.items() if isinstance(value, int | float)]
        compensated = facts.arm.startswith("gwc_")
        rows = [
            ("arm", code(facts.arm)),
            *rows,
            ("gradient compensated by the mean gain", "yes" if compensated else "no"),
        ]
    measured = norms_over_training(facts.stages)
    places = [place for place in _PLACES if any(place in norms for _, norms in measured)]
    tables = [_table(("", ""), rows)] if rows else []
    if measured:
        lines = [(_PLACES[p], *(f"{norms[p]:.4g}" if p in norms else "" for _, norms in measured)) for p in places]
        tables += ["Mean L2 norms, as they were logged:", _table(("", *(name for name, _ in measured)), lines)]
    return ["## Norms", *tables] if tables else []


def _training_section(stages: list[Stage]) -> list[str]:
    sections = ["## Training"] if stages else []
    for number, stage in enumerate(stages):
        flags = card_facts.changed_flags(stage)
        data = card_facts.base_name(stage.configuration["data"].get(card_facts.DATA), stage.started_in)
        devices, given = stage.configuration["devices"], stage.configuration["training"]
        batch = given["per_device_train_batch_size"] * given["gradient_accumulation_steps"] * devices["ranks"]
        facts = [f"data: {plain(data)}", f"{devices['ranks']} x {plain(devices['kind'])}", f"{batch} samples a step"]
        facts += [f"{stage.steps} steps"] if stage.steps is not None else []
        losses = [line["loss"] for line in stage.log if "loss" in line]
        facts += [f"last logged loss {losses[-1]:.4g}"] if losses else []
        facts += [f"continued {stage.starts - 1} times"] if stage.starts > 1 else []
        title = [f"Stage {number + 1}. "] if len(stages) > 1 else [""]
        sections += [title[0] + "; ".join(facts) + ". Flags that differ from their defaults, and the seed:"]
        sections += [_table(("flag", "value"), [(code(f"--{name}"), code(value)) for name, value in flags.items()])]
    return sections


def _results_section(facts: Facts) -> list[str]:
    if facts.results is None or not facts.results.tasks:
        return []
    rows = []
    for name, task in facts.results.tasks.items():
        ends = interval(task)
        shown = f"{ends[0]:.1f} to {ends[1]:.1f}" if ends else "not a mean over questions"
        chance = "" if task.chance is None else f"{task.chance:.1f}"
        rows.append((plain(name), plain(task.metric), f"{task.score:.2f}", shown, chance, str(len(task.samples))))
    heads = ("task", "metric", "score, %", "95 % interval", "chance, %", "questions")
    note = "The intervals are Wilson's, over the choice of questions; another training run would vary as well."
    return ["## Results", _table(heads, rows), note]


def _loading(facts: Facts, name: str, base: str) -> list[str]:
    model_base = "None" if facts.part == WHOLE else f'"{base}"'
    tree = (
        "from llava.model.builder import load_pretrained_model\n\n"
        f'tokenizer, model, image_processor, context_len = load_pretrained_model("{name}", {model_base}, "llava")'
    )
    in_tree = ["In the tree that trained it:", _block("python", tree)]
    trained_on = f"the model that it was trained on{', here BASE' if base == 'BASE' else ''}"
    if facts.part == PROJECTOR:
        return [f"The folder holds the projector alone, and needs {trained_on}.", *in_tree]
    own = name.rpartition("/")[2]
    if facts.part == LORA:
        merged = f"{own}-merged"
        merge = f"python -m llava.model.merge_lora --model-path {name} --model-base {base} --save-model-path {merged}"
        lines = _block("bash", f"{merge}\n{_export(merged, own)}")
        needs = f"The folder holds LoRA weights, and needs {trained_on}."
        return [needs, *in_tree, "For transformers and vLLM, merge it and write it in their layout first:", lines]
    if not facts.exported:
        lines = _block("bash", _export(name, own))
        return [*in_tree, "For transformers and vLLM, write it in their layout first:", lines]
    trust = ", trust_remote_code=True" if facts.remote_code else ""
    stock = (
        "from transformers import pipeline\n\n"
        f'ask = pipeline("image-text-to-text", model="{name}"{trust})\n'
        'content = [{"type": "image", "url": "photo.jpg"}, {"type": "text", "text": "What is this?"}]\n'
        'print(ask(text=[{"role": "user", "content": content}], max_new_tokens=64, return_full_text=False)'
        '[0]["generated_text"])'
    )
    serve = f"vllm serve {name}"
    needs = " (its norm needs the plugin that comes with the training tree)" if facts.remote_code else ""
    return [
        *("In transformers:", _block("python", stock)),
        *(f"In vLLM{needs}:", _block("bash", serve)),
        *in_tree,
    ]


def _export(name: str, own: str) -> str:
    return f"python -m llava.export hf --model-path {name} --output-dir {own}-hf"


# --- Markdown ---------------------------------------------------------------------------------------------------------


def plain(text: object) -> str:
    """`text` as one line of Markdown that shows it as it is."""
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", html.escape(" ".join(str(text).split()), quote=False))


def code(text: object) -> str:
    """`text` as one line of code, which may stand in a table."""
    line = " ".join(str(text).split())
    if not set(line) & set("`|"):
        return f"`{line}`"
    return f"<code>{re.sub('[`|*_~]', lambda mark: f'&#{ord(mark[0])};', html.escape(line, quote=False))}</code>"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


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
