"""What a model card is written from: the model's own files, the records of its training, its results."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from llava.eval.results import RESULTS_FILE, Results, TaskResult, read_results
from llava.model.multimodal_projector.adapter import ADAPTER_FILE, read_tensors
from llava.train.checkpoint import finished_step
from llava.train.run_identity import default_settings
from llava.train.telemetry import LOG_FILE
from llava.utils.intervals import share_interval
from llava.utils.provenance import RUN_FILE, read_starts

LANGUAGE_MODEL, VISION_TOWER, DATA = "model_name_or_path", "vision_tower", "data_path"
WHOLE, LORA, PROJECTOR = "whole", "lora", "projector"
TOLERANCE = 0.05  # points by which a recorded score may differ from the mean of its questions
_GAIN = re.compile(r"(?:mm_projector|multi_modal_projector)\..*weight$")


class Stage(NamedTuple):
    """One training run, by the records in its folder.

    Attributes:
        configuration: of its newest start, see `llava.train.run_record`.
        started_in: the folder that its relative paths start from.
        starts: how often it was started; 1 if it was never interrupted.
        log: the lines of `train_log.jsonl`; empty where there is none.
        steps: number of steps after which it was finished, or None where nothing says so.
    """

    configuration: dict[str, Any]
    started_in: Path
    starts: int
    log: list[dict[str, Any]]
    steps: int | None


class Facts(NamedTuple):
    """All that a card can say.

    Attributes:
        name: of the model's folder.
        config: its `config.json`.
        part: what there is of a model: WHOLE, LORA or PROJECTOR; the last two need the model they were trained on.
        gain: mean |gain| of the projector's norm in the weights; None where there is none.
        stages: its training runs that left a record, the first stage's first.
        results: of an evaluation, or None.
    """

    name: str
    config: dict[str, Any]
    part: str
    gain: float | None
    stages: list[Stage]
    results: Results | None

    @property
    def arm(self) -> str:
        return self.config.get("mm_projector_norm") or "none"

    @property
    def exported(self) -> bool:
        """Whether the folder has transformers' layout, not LLaVA's."""
        return "text_config" in self.config

    @property
    def remote_code(self) -> bool:
        """Whether transformers loads it by code in the folder."""
        return "auto_map" in self.config


def read_facts(folder: Path, run: Path | None = None, results: Path | None = None) -> Facts:
    """What is known of the model in `folder`.

    Args:
        run: the folder that it was trained in, with `run.json`, log and results; None: `folder`.
        results: a `results.json`, or its folder; None: that of `run`, where there is one.

    Raises:
        ValueError: there is no model, `run` or `results` is given and holds no record, or a file cannot be read.
    """
    config = read_config(folder)
    stages = read_stages(run or folder, required=run is not None)
    results_path = results or (run or folder) / RESULTS_FILE
    return Facts(
        name=folder.resolve().name,
        config=config,
        part=part_of(folder),
        gain=norm_gain(folder) if (config.get("mm_projector_norm") or "none") != "none" else None,
        stages=stages,
        results=read_results(results_path) if results or results_path.is_file() else None,
    )


def part_of(folder: Path) -> str:
    """WHOLE, LORA or PROJECTOR, by the files of `folder`."""
    if (folder / "adapter_config.json").is_file():
        return LORA
    weights = any(any(folder.glob(form)) for form in ("*.safetensors", "pytorch_model*.bin"))
    return PROJECTOR if (folder / ADAPTER_FILE).is_file() and not weights else WHOLE


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`.

    Raises:
        ValueError: there is none, or it does not name a kind of model.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--model-path {folder}: no config.json there with a model_type ({error!r})") from error
    return config


def read_stages(folder: Path, required: bool = False) -> list[Stage]:
    """The run of `folder`, and before it the run whose adapter it began with, if that is still there.

    Raises:
        ValueError: a record cannot be read, or there is none and it is `required`.
    """
    file = folder / RUN_FILE
    if not file.is_file() and not required:
        return []
    starts = read_starts(file)
    newest, started_in = starts[-1]["configuration"], Path(starts[-1]["provenance"]["folder"])
    stage = Stage(newest, started_in, len(starts), read_log(folder), finished_step(folder))
    adapter = newest["model"].get("pretrain_mm_mlp_adapter")
    if not adapter:
        return [stage]
    path = started_in / adapter
    return [*read_stages(path if path.is_dir() else path.parent), stage]


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of the folder's `train_log.jsonl`; a line that a killed run cut off is left out."""
    lines = []
    if (folder / LOG_FILE).is_file():
        for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def norm_gain(folder: Path) -> float | None:
    """Mean |gain| of the norm that ends the projector: its last vector named weight, read from the files alone."""
    gains = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                for name in filter(_GAIN.search, tensors.keys()):
                    if len(tensors.get_slice(name).get_shape()) == 1:
                        gains[name] = tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file}: not a whole file of tensors ({error}); write the model again") from error
    if not gains and (folder / ADAPTER_FILE).is_file():
        tensors = read_tensors(folder / ADAPTER_FILE)
        gains = {name: tensor for name, tensor in tensors.items() if _GAIN.search(name) and tensor.ndim == 1}
    return gains[max(gains)].double().abs().mean().item() if gains else None


# --- what of it may be said -------------------------------------------------------------------------------------------


def hub_id(value: object, started_in: Path = Path()) -> str | None:
    """The hub id OWNER/NAME of a model that `value` is; None if this machine's cache lacks it.

    `checkpoints/vicuna` has the same form once its folder is gone, so the form alone says nothing.

    Args:
        started_in: the folder that a relative path starts from.
    """
    text = str(value or "")
    if text.count("/") != 1 or (started_in / text).exists() or Path(text).exists():
        return None
    try:
        validate_repo_id(text)
    except HFValidationError:
        return None
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=text, repo_type="model"), "snapshots")
    return text if cached.is_dir() else None


def base_name(value: object, started_in: Path = Path()) -> str:
    """A flag's value without the folders of the machine that it was given on; a hub id keeps its owner."""
    return str(_without_folders(value, started_in))


def _without_folders(value: object, started_in: Path) -> object:
    if isinstance(value, str) and value.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict):
        return {name: _without_folders(inner, started_in) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner, started_in) for inner in value]
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")] if "," in value and "/" in value else [value]
    return ", ".join(hub_id(part, started_in) or re.split(r"[/\\]", part.rstrip("/\\"))[-1] for part in parts)


def recorded_bases(stages: list[Stage]) -> list[str]:
    """The hub ids of what the first stage started from, language model, then vision tower; empty if one has no id."""
    if not stages:
        return []
    settings, folder = stages[0].configuration["model"], stages[0].started_in
    bases = [hub_id(settings[flag], folder) for flag in (LANGUAGE_MODEL, VISION_TOWER) if settings.get(flag)]
    return bases if all(bases) else []


def changed_flags(stage: Stage) -> dict[str, str]:
    """The flags that decide the weights and differ from their defaults, and the seed; of paths the last part."""
    settings = {
        name: value for part in ("model", "data", "training") for name, value in stage.configuration[part].items()
    }
    defaults = default_settings()
    for implied in ("accelerator_config", "tf32", "warmup_steps" if settings.get("warmup_ratio") else ""):
        defaults.pop(implied, None)  # no flag of ours, or derived by the library from another flag
    changed = {name for name, default in defaults.items() if name in settings and str(settings[name]) != str(default)}
    changed |= {LANGUAGE_MODEL, "seed"} & settings.keys()
    return {name: base_name(value, stage.started_in) for name, value in settings.items() if name in changed}


def norms_over_training(stages: list[Stage]) -> list[tuple[str, dict[str, float]]]:
    """The norms of tokens and gain at the first measured step, and at the last of each stage, by the place's name."""
    rows = []
    for number, stage in enumerate(stages):
        lines = [{k.removeprefix("norm/"): v for k, v in line.items() if k.startswith("norm/")} for line in stage.log]
        measured = [norms for norms in lines if norms]
        name = f"stage {number + 1}" if len(stages) > 1 else "training"
        if measured:
            rows += [(f"{name}, first step", measured[0])] if number == 0 else []
            rows += [(f"{name}, last step", measured[-1])]
    return rows


def interval(task: TaskResult) -> tuple[float, float] | None:
    """The 95 % interval of a task's score in percent; None where the score is not the mean of its questions'."""
    total, right = len(task.samples), sum(sample.score for sample in task.samples)
    if not total or abs(100 * right / total - task.score) > TOLERANCE:
        return None
    low, high = share_interval(right, total)
    return 100 * low, 100 * high
