"""Gain and bias of the projector's norm, over the checkpoints of a run, read from the files alone (paper table 5).

Of our checkpoints it is the norm that ends the projector. Of any other model every norm with a gain that its projector
has gets a row, such as those of HunYuan-VL, Ernie 4.5 VL, Gemma 3n and Granite-Docling.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from llava.analysis.commands import NamedModel, required_models
from llava.analysis.output import TableRow, draw_rows, write_result
from llava.analysis.weights import WeightFiles
from llava.families import PROJECTOR_NAMES

PROJECTORS = {*PROJECTOR_NAMES, "perceive", "patch_merger", "resampler_model"}
"""Names of modules between encoder and LLM; those that `families` does not know are read here alone."""
PAPER_ROWS = (
    {"model": "paper, default init", "D": 3072, "gain L2": 53.2500, "gain mean |.|": 0.9609}
    | {"gain std |.|": 0.0005, "bias mean |.|": 0.0175},
    {"model": "paper, aligned init", "D": 3072, "gain L2": 2.2812, "gain mean |.|": 0.0400}
    | {"gain std |.|": 0.0001, "bias mean |.|": 0.0152},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has the shared flags alone."""


def run(args: argparse.Namespace) -> None:
    """Writes the table, ending with the paper's rows, and the figure over the steps.

    Raises ValueError: none of the models has a norm.
    """
    rows, without = [], []
    folders = [(model, folder) for model in required_models(args.models) for folder in checkpoints(model.path)]
    for model, folder in folders:
        own = table_rows(model, folder)
        rows += own
        without += [] if own else [folder]
    if without:
        print(f"no norm in the projector, so no row: {', '.join(without)}")
    if not rows:
        raise ValueError("none of the given models has a norm in its projector")
    write_result(args, rows + list(PAPER_ROWS))
    titles = {"gain L2": {"title": "gain, L2 norm"}, "gain mean |.|": {"title": "gain, mean of |g|"}}
    draw_rows(args, rows, "step", titles | {"bias mean |.|": {"title": "bias, mean of |b|"}})


def checkpoints(path: str) -> list[str]:
    """The run's `checkpoint-N` folders by step, then the folder itself where it holds weights; else just `path`."""
    numbered = {folder: int(folder.name.split("-")[1]) for folder in Path(path).glob("checkpoint-*[0-9]")}
    folders = [str(folder) for folder in sorted(numbered, key=numbered.get)]
    has_weights = any(Path(path).glob("*.safetensors*")) or any(Path(path).glob("*.bin"))
    return [*folders, path] if has_weights or not folders else folders


def table_rows(model: NamedModel, folder: str) -> list[TableRow]:
    """Table 5's numbers of one checkpoint, in fp64, a row per norm; none where its projector has no norm.

    Raises FileNotFoundError: no weights, or DeepSpeed's partitioned ones only; see `WeightFiles`.
    """
    files, config = WeightFiles(folder), _read_json(folder, "config.json")
    prefixes, rows = find_norms(files), []
    for prefix in prefixes:
        gain = files.read(f"{prefix}.weight").double()
        bias = files.read(f"{prefix}.bias").double() if f"{prefix}.bias" in files.names else None
        width = len(gain) if len(gain) > 1 else config.get("hidden_size")  # of an arm with one gain
        row = {"model": f"{model.name}, {prefix}" if len(prefixes) > 1 else model.name, "step": step_of(folder)}
        row |= {"D": width, "init": str(config.get("mm_projector_norm_init", ""))}
        row |= {"target norm": config.get("mm_projector_norm_target"), "gains": len(gain)}
        row |= {"initial gain": config.get("mm_projector_norm_init_gain"), "gain L2": gain.norm().item()}
        for kind, weight in (("gain", gain), ("bias", bias)):
            row[f"{kind} mean |.|"] = None if weight is None else weight.abs().mean().item()
            row[f"{kind} std |.|"] = None if weight is None else weight.abs().std(correction=0).item()
        rows.append(row)
    return rows


def find_norms(files: WeightFiles) -> list[str]:
    """The prefix of the norm that ends `mm_projector`; without an `mm_projector`, of every gain in the projector."""
    elements = filter(None, (re.fullmatch(r"(.*mm_projector\.(\d+))\.weight", name) for name in files.names))
    if names := [match[1] for match in sorted(elements, key=lambda match: int(match[2]))]:
        return names[-1:] if len(files.shape(f"{names[-1]}.weight")) == 1 else []
    inside = [name for name in files.names if name.endswith(".weight") and PROJECTORS & set(name.split("."))]
    return [name.removesuffix(".weight") for name in inside if len(files.shape(name)) == 1]


def step_of(folder: str) -> int | None:
    """The optimizer step of a checkpoint: from its folder's name, else from the Trainer's state; None if unknown."""
    if match := re.fullmatch(r"checkpoint-(\d+)", Path(folder).name):
        return int(match[1])
    return _read_json(folder, "trainer_state.json").get("global_step")


def _read_json(folder: str, name: str) -> dict[str, Any]:
    file = Path(folder, name)
    return json.loads(file.read_text()) if file.is_file() else {}
