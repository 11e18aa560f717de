"""Measures models over samples: raw values of every sample in one file each, read back for means and quantiles.

    <output-dir>/measurements/<what>-<digest>/<sample>.npz

The digest is of the weights, the samples, the code, the packages and every setting that decides a value, so a number is
tied to what made it, and finished samples are skipped. 1,000 samples of 800 tokens are about 450 MB for a decoder of 28
layers, on disk and in memory; `--samples` bounds it.

One pass serves `interface-norms`, `layer-norms` and `update-rates`. State l (0 to L) is what enters layer l, state L
what leaves the last one. Per token:
    norm        |h_l|
    cosine      cos(h_l, h_{l+1}); its quantiles come from `turn`, the angle in degrees (paper Figures 3 to 5)
    update      |h_{l+1} - h_l| / |h_l|
    drift       angle between h_l and h_0 in degrees
Where a model adds visual features between two layers (DeepStack), h_{l+1} is the state before the addition in cosine,
turn and update.
A **sink** is a token whose norm exceeds `SINK_RATIO` times the median of its sample's tokens of its kind (visual, or
text with special tokens) in any state: massive activations, which hardly turn and swamp a mean.

Shapes: B samples, S sequence with visual tokens, N tokens of all samples, D LLM hidden size, L decoder layers.
"""

import argparse
import hashlib
import inspect
import json
import shutil
from collections.abc import Callable
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from llava.analysis import models, samples
from llava.analysis.commands import NamedModel, required_models
from llava.analysis.probe import PADDING, TEXT_AFTER, TEXT_BEFORE, VISUAL, Observation, Probe
from llava.analysis.samples import PicturePrompt, Samples
from llava.utils.digests import revision
from llava.utils.files import replacing
from llava.utils.progress import progress
from llava.utils.versions import ANALYSIS, PACKAGES, made_by

FOLDER = "measurements"
SINK_RATIO = 10.0
STATE_METRICS, STEP_METRICS = ("norm", "drift"), ("cosine", "turn", "update")
FEATURES, PROJECTED = "vision features", "projector output"
TEXT_GROUPS = (TEXT_BEFORE, TEXT_AFTER)
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_LOADING_FLAGS = ("conv_mode", "layers_path", "projector_path", "vision_path", "image_token_id")

Values = dict[str, np.ndarray]
"""What one sample gives, by name."""


def add_arguments(parser: argparse.ArgumentParser, default: int = 40) -> None:
    """The flags of every command that runs models over samples."""
    models.add_arguments(parser)
    samples.add_arguments(parser, default)


def begin(args: argparse.Namespace) -> tuple[list[NamedModel], Samples]:
    """The models, each of which has a config, and the samples to run them on."""
    for model in required_models(args.models):
        models.config_fields(model.path, args.trust_remote_code)
    return args.models, samples.choose(args)


def per_sample(
    what: str,
    named: NamedModel,
    drawn: Samples,
    args: argparse.Namespace,
    values_of: Callable[[Any, PicturePrompt], Values],
    *,
    load: Callable[[NamedModel, argparse.Namespace], Any] | None = None,
) -> list[Values]:
    """The values of every sample of a measurement; measures those that `--output-dir` does not have.

    Args:
        what: is measured, with the settings that this measurement alone has; begins the folder's name.
        values_of: makes values of what `load` gives and of one sample.
        load: loads the model, only if there is something to measure; `models.load` where None.
    """
    inputs = _inputs(named, drawn, args)
    folder = args.output_dir / FOLDER / _name(what, inputs, args)
    files = [folder / f"{index}.npz" for index in range(len(drawn))]
    there = {file for file in files if file.is_file()}
    if there:
        print(f"{named.name}: {len(there)} of {len(files)} samples are measured already ({folder})")
    loaded = (load or models.load)(named, args) if len(there) < len(files) else None
    folder.mkdir(parents=True, exist_ok=True)
    measured = []
    with progress(len(drawn), f"{args.command}, {named.name}") as bar:
        for index, file in enumerate(files):
            if file not in there:
                values = values_of(loaded, drawn[index])
                with replacing(file, contended=True) as unfinished, unfinished.open("wb") as stream:
                    np.savez(stream, **values)
            try:
                with np.load(file, allow_pickle=False) as stored:
                    measured.append(dict(stored))
            except (OSError, EOFError, ValueError, BadZipFile) as error:
                raise ValueError(f"{file}: damaged ({error}); delete it") from error
            bar.update()
    now = inputs if loaded is None else _inputs(named, drawn, args)
    if other := [name for name in inputs if now[name] != inputs[name]]:
        shutil.rmtree(folder)
        raise ValueError(f"{named.name}: {', '.join(other)} changed while they were measured; rerun the same command")
    return measured


def refuse_nonfinite(model: str, values: Values) -> None:
    """Raises ValueError where a measured value is NaN or infinite."""
    for name, numbers in values.items():
        if bad := int((~np.isfinite(numbers)).sum()):
            raise ValueError(f"{model}: {bad} of {numbers.size} measured values ({name}) are NaN or infinite")


def _inputs(named: NamedModel, drawn: Samples, args: argparse.Namespace) -> dict[str, str | None]:
    """Digests of the files that are measured."""
    base = revision(args.model_base) if args.model_base else None
    return {"weights": revision(named.path), "base": base, "samples": drawn.content()}


def _name(what: str, inputs: dict[str, str | None], args: argparse.Namespace) -> str:
    settings = inputs | {
        "placement": models.placement(args),
        "made by": made_by(ANALYSIS, (*PACKAGES, "torchvision")),
        "flags": {name: str(getattr(args, name)) for name in _LOADING_FLAGS},
    }
    return f"{what}-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]}"


# --- one pass over the layers -----------------------------------------------------------------------------------------


class Measurement:
    """One model's values of all tokens that are not padding.

    Args:
        measured: what `layer_values` gives, per sample.
    """

    def __init__(self, measured: list[Values]) -> None:
        self.values = {name: np.concatenate([values[name] for values in measured], axis=-1) for name in measured[0]}

    def tokens(self, groups: int | tuple[int, ...], with_sinks: bool = False) -> np.ndarray:
        """Which tokens are of these groups [N] bool."""
        return np.isin(self.values["group"], groups) & (with_sinks | ~self.values["sink"])

    def of(
        self, what: str, groups: int | tuple[int, ...] = VISUAL, layer: int = 0, with_sinks: bool = False
    ) -> np.ndarray:
        """All values of `groups` in one layer, in fp64."""
        if what in (FEATURES, PROJECTED):
            return self.values[what].astype(np.float64)
        return self.values[what][layer][self.tokens(groups, with_sinks)].astype(np.float64)


def measure_layers(named: NamedModel, drawn: Samples, args: argparse.Namespace) -> Measurement:
    """The model's values over the samples. Raises ValueError: see `models.load`; a sample has no visual positions."""

    def measured(probe: Probe, sample: PicturePrompt) -> Values:
        takes_rows = "logits_to_keep" in inspect.signature(probe.model.forward).parameters
        options = {"logits_to_keep": 1} if takes_rows else {}  # all logits of a large vocabulary outgrow the states
        return layer_values(probe.run(probe.prepare(sample), **options), probe.name)

    return Measurement(per_sample("layers", named, drawn, args, measured))


def layer_values(seen: Observation, model: str) -> Values:
    """The values of a batch's tokens, [L + 1, N] of states (`STATE_METRICS`) and [L, N] of steps (`STEP_METRICS`).

    Also per token [N] its `group`, and whether it is a `sink`.

    Raises ValueError: it has no visual positions; a value is NaN or infinite.
    """
    if not bool(seen.visual.any()):
        raise ValueError(f"{model}: a sample has no visual positions")
    groups, states = seen.groups.cpu().numpy(), seen.hidden_states
    there = groups != PADDING
    first = _unit(states[0].float())
    values = {"norm": [_array(state.float().norm(dim=-1)) for state in states]}
    values["drift"] = [_array(angle(first, _unit(state.float()))) for state in states]
    steps = [step_values(before, after) for before, after in seen.steps()]
    values = {name: np.stack(layers) for name, layers in values.items()}
    values |= {name: np.stack([step[name] for step in steps]) for name in STEP_METRICS}
    sinks = is_sink(values["norm"], groups)
    values = {name: layers[:, there] for name, layers in values.items()}
    values[FEATURES], values[PROJECTED] = (
        _array(rows.float().norm(dim=-1)) for rows in (seen.vision_features, seen.projector_output)
    )
    refuse_nonfinite(model, values)
    return values | {"group": groups[there], "sink": sinks[there]}


def step_values(before: torch.Tensor, after: torch.Tensor) -> Values:
    """Every token's `STEP_METRICS` [B, S] between two states [B, S, D]."""
    before, after = before.float(), after.float()
    old, new = _unit(before), _unit(after)
    return {
        "cosine": _array(1 - (new - old).square().sum(-1) / 2),
        "turn": _array(angle(old, new)),
        "update": _array((after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)),
    }


def _unit(states: torch.Tensor) -> torch.Tensor:
    return states / states.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def angle(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Degrees between unit vectors [..., D]; exact for small angles, where the arc cosine is not."""
    return torch.rad2deg(2 * torch.atan2((first - second).norm(dim=-1), (first + second).norm(dim=-1)))


def is_sink(norms: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Which tokens are sinks [B, S], from their norms [L + 1, B, S] and groups [B, S]."""
    sinks = np.zeros(groups.shape, dtype=bool)
    for sample in range(groups.shape[0]):
        visual = groups[sample] == VISUAL
        for kind in (visual, (groups[sample] != PADDING) & ~visual):
            if kind.any():
                chosen = norms[:, sample, kind].astype(np.float64)
                middle = np.maximum(np.median(chosen, axis=1, keepdims=True), 1e-30)
                sinks[sample, kind] = (chosen / middle > SINK_RATIO).any(axis=0)
    return sinks


def sink_mask(seen: Observation) -> torch.Tensor:
    """Which tokens are sinks [B, S] bool, on the CPU."""
    norms = np.stack([_array(states.float().norm(dim=-1)) for states in seen.hidden_states])
    return torch.from_numpy(is_sink(norms, seen.groups.cpu().numpy()))


def _array(values: torch.Tensor) -> np.ndarray:
    return values.cpu().numpy()


# --- numbers of tables ------------------------------------------------------------------------------------------------


def mean(values: np.ndarray) -> float:
    """NaN where there are no values."""
    return float(values.mean()) if len(values) else np.nan


def median(values: np.ndarray) -> float:
    """NaN where there are no values."""
    return float(np.median(values)) if len(values) else np.nan


def summary(values: np.ndarray) -> dict[str, float | int]:
    """What a table shows of values: count, mean, std (divided by n), min, max and `p1` to `p99`."""
    moments = {"count": len(values), "mean": mean(values), "std": float(values.std()) if len(values) else np.nan}
    points = np.percentile(values, (0, 100, *PERCENTILES)).tolist() if len(values) else [np.nan] * 9
    return moments | dict(zip(("min", "max", *(f"p{p}" for p in PERCENTILES)), points, strict=True))
