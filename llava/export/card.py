"""`python -m llava.export card`: the model's README.md, as the hub shows it.

It says what the folder, `run.json`, the log and `results.json` record, and what flags give; nothing is guessed. Files
and folders are named by the last part of their path alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from llava.analysis.norm_params import find_norms
from llava.analysis.weights import WeightFiles
from llava.eval.results import RESULTS_FILE, TaskResult, read_results
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.train.telemetry import LOG_FILE
from llava.utils.digests import revision
from llava.utils.files import write_text
from llava.utils.intervals import share_interval
from llava.utils.provenance import RUN_FILE, read_starts

SETTINGS = (
    "mm_tunable_parts", "learning_rate", "mm_projector_lr", "mm_vision_tower_lr", "lr_scheduler_type", "warmup_ratio",
    "num_train_epochs", "max_grad_norm", "bf16", "lora_enable", "image_aspect_ratio", "label_masking", "seed",
)  # fmt: skip
"""The flags of a stage that the card shows; `run.json` has all."""
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_TOLERANCE = 0.05  # points by which a score may differ from the mean of its questions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--model-path", type=Path, required=True, help="folder of the model, as trained or as exported")
    parser.add_argument("--run-dir", type=Path, help="folder with run.json and log (default: the model's)")
    parser.add_argument("--results", type=Path, help="results.json or its folder (default: that of --run-dir)")
    parser.add_argument("--repo", help="OWNER/NAME that it will have on the hub, for the lines on how to load it")
    parser.add_argument("--license", help="a licence's id on the hub, such as apache-2.0")
    parser.add_argument("--base-model", action="append", help="hub id; may be given several times")
    parser.add_argument("--dataset", action="append", help="hub id; may be given several times")


def run(args: argparse.Namespace) -> None:
    """Writes the card.

    Raises:
        ValueError: there is no model, a named record is missing, or the folder has a card.
    """
    path = args.model_path / "README.md"
    if path.exists():
        raise ValueError(f"{path}: already there; remove it, or move it away")
    write_text(path, card_text(args), synced=True)
    print(f"{path}: written")


def card_text(args: argparse.Namespace) -> str:
    """The whole card, by its template."""
    folder, run_dir = args.model_path, args.run_dir or args.model_path
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--model-path {folder}: no config.json there with a model_type ({error!r})") from error
    results = args.results or run_dir / RESULTS_FILE
    known = read_results(results) if args.results or results.is_file() else None
    if known and known.fingerprint not in (revision(str(folder)), revision(str(run_dir))):
        print(f"note: {results} is of {known.checkpoint}, which by its digest is not the model of this card or its run")
    tasks = known.tasks if known else {}
    arm, part = config.get("mm_projector_norm") or "none", part_of(folder)
    name = args.repo or folder.resolve().name
    scores = [EvalResult("image-text-to-text", task, task, own.metric, own.score) for task, own in tasks.items()]
    metadata = ModelCardData(
        license=args.license,
        base_model=args.base_model,
        base_model_relation="adapter" if args.base_model and part != "whole" else None,
        datasets=args.dataset,
        library_name="transformers" if "text_config" in config else None,
        model_name=name if scores else None,
        eval_results=scores or None,
        pipeline_tag="image-text-to-text",
        tags=["llava", "vision-language", *[arm] * (arm != "none"), *["adapter", part] * (part != "whole")],
    )
    template = {
        "name": name,
        "own": name.rpartition("/")[2],
        "base": (args.base_model or ["BASE"])[0],
        "part": part,
        "config": config,
        "text": config.get("text_config") or config,
        "vision": config.get("vision_config") or config.get("mm_vision_config") or {},
        "arm": arm,
        "gain": norm_gain(folder) if arm != "none" else None,
        "stages": read_stages(run_dir) if args.run_dir or (run_dir / RUN_FILE).is_file() else [],
        "results": [(task, own.metric, own.score, *uncertainty(own)) for task, own in tasks.items()],
    }
    return str(ModelCard.from_template(metadata, template_path=str(_TEMPLATE), **template)).rstrip() + "\n"


def part_of(folder: Path) -> str:
    """What `folder` has: a `whole` model, or `lora` or `projector`, which need the model they were trained on."""
    if (folder / "adapter_config.json").is_file():
        return "lora"
    weights = any(any(folder.glob(form)) for form in ("*.safetensors", "pytorch_model*.bin"))
    return "projector" if (folder / ADAPTER_FILE).is_file() and not weights else "whole"


def norm_gain(folder: Path) -> float | None:
    """Mean |gain| of the norm that ends the projector, from the files alone; None without one."""
    files = WeightFiles(str(folder))
    norms = find_norms(files)
    return files.read(f"{norms[-1]}.weight").double().abs().mean().item() if norms else None


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """What the card shows of the run in `folder`, and before it of the run whose adapter it began with."""
    newest = read_starts(folder / RUN_FILE)[-1]
    log = folder / LOG_FILE
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    adapter = newest["configuration"]["model"].get("pretrain_mm_mlp_adapter")
    path = Path(newest["provenance"]["folder"]) / (adapter or "")
    first = path if path.is_dir() else path.parent
    earlier = read_stages(first) if adapter and (first / RUN_FILE).is_file() else []
    return [*earlier, stage_facts(newest["configuration"], lines)]


def stage_facts(configuration: dict[str, Any], log: list[dict[str, Any]]) -> dict[str, Any]:
    """What the card shows of a stage: settings, and the norms at the first and last step that measured them."""
    settings = configuration["model"] | configuration["data"] | configuration["training"]
    ranks = configuration["devices"]["ranks"]
    batch = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * ranks
    shown = {"data": ", ".join(Path(path).name for path in str(settings["data_path"]).split(","))}
    shown |= {name: settings[name] for name in SETTINGS if settings.get(name) not in (None, "", False)}
    shown |= {"own parts": ", ".join(plugins)} if (plugins := configuration.get("plugins")) else {}
    shown |= {"samples per step": batch, "devices": f"{ranks} x {configuration['devices']['kind']}"}
    losses = [line for line in log if "loss" in line]
    shown |= {"steps": losses[-1]["step"], "last logged loss": f"{losses[-1]['loss']:.4g}"} if losses else {}
    measured = [line["norm/llm_input"] for line in log if "norm/llm_input" in line]
    return {"settings": shown, "norms": measured[:1] + measured[1:][-1:]}


def uncertainty(task: TaskResult) -> tuple[str, str, int]:
    """Wilson's interval where a score is a mean over questions, chance, and the number of questions."""
    total, right = len(task.samples), sum(sample.score for sample in task.samples)
    interval = "not a mean over questions"
    if total and abs(100 * right / total - task.score) <= _TOLERANCE:
        interval = "{:.1f} to {:.1f}".format(*(100 * bound for bound in share_interval(right, total)))
    return interval, "" if task.chance is None else f"{task.chance:.1f}", total
