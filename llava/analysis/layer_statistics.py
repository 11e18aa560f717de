"""Measures one model over many samples: norms at the interface, and how fast tokens turn in each layer of the LLM.

One pass serves `interface-norms`, `layer-norms` and `update-rates`. Only one batch's hidden states are held; everything
else is a stream.

States: state l (0 to L) is what enters layer l, state L what leaves the last one. Per token:
    norm        |h_l|
    cosine      cos(h_l, h_{l+1}); its quantiles come from `turn`, the angle in degrees (paper Figures 3 to 5)
    update      |h_{l+1} - h_l| / |h_l|
    drift       angle between h_l and h_0 in degrees
A model that adds visual features between two layers (DeepStack) has h_{l+1} before the addition in the layer's own
cosine, turn and update; those of the addition itself are kept under `ADDED`.
A **sink** is a token whose norm exceeds `SINK_RATIO` times the median of its sample's tokens of its kind (visual, or
text with special tokens) in any state: massive activations, which hardly turn and swamp a mean. A sink's values
are kept apart in every state.

Shapes: B samples, S sequence with visual tokens, D LLM hidden size, L decoder layers.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llava.analysis import inputs, loading, resume
from llava.analysis.models import NamedModel
from llava.analysis.probe import GROUPS, TEXT_AFTER, TEXT_BEFORE, VISUAL, Batch, Observation, Probe
from llava.analysis.statistics import Stream
from llava.utils.commands import whole

SINK_RATIO = 10.0
STATE_METRICS, STEP_METRICS = ("norm", "drift"), ("cosine", "turn", "update")
ADDED = "added "
"""Begins the names of the step metrics of an addition; they are kept under the layer after which it happens."""
SCALE = "embedding scale"
TEXT_GROUPS = (TEXT_BEFORE, TEXT_AFTER)
WITHOUT_SINKS, WITH_SINKS, ONLY_SINKS = (False,), (False, True), (True,)


def add_arguments(parser: argparse.ArgumentParser, samples: int = 40) -> None:
    """The flags of every command that runs models over samples."""
    inputs.add_arguments(parser, samples)
    parser.add_argument("--batch-size", type=whole(1), default=4, help="samples in a batch; does not change results")
    resume.add_arguments(parser)
    loading.add_arguments(parser)


class Measurement:
    """Streams of one model's values, and its sinks (a `resume.State`).

    Attributes:
        streams: by (what, group, layer, whether of sinks); `SCALE` is a text token's norm
            where it enters over its row's in the embedding matrix.
        sinks: by (group, position, token): samples it was found in, first and last layer, largest norm and ratio.
        done: samples measured.
        layers: L.
    """

    def __init__(self) -> None:
        self.streams: dict[tuple, Stream] = {}
        self.sinks: dict[tuple, dict[str, float]] = {}
        self.done = 0
        self.kinds = [Stream]
        self.layers = 0

    def add(self, what: str, group: int, layer: int, of_sinks: bool, values: Any) -> None:
        """Adds values to one of the streams."""
        self.streams.setdefault((what, group, layer, of_sinks), Stream()).add(values)

    def stream(
        self, what: str, groups: int | Sequence[int] = VISUAL, layer: int = 0, part: tuple[bool, ...] = WITHOUT_SINKS
    ) -> Stream:
        """All values of `groups` in one layer, of the tokens that are no sinks, of the sinks, or of both."""
        merged = Stream()
        for group in [groups] if isinstance(groups, int) else groups:
            for of_sinks in part:
                merged.merge(self.streams.get((what, group, layer, of_sinks), Stream()))
        return merged

    def added_layers(self) -> list[int]:
        """The layers after which the model adds visual features."""
        return sorted({layer for what, _, layer, _ in self.streams if what.startswith(ADDED)})


def measure_layers(named: NamedModel, samples: inputs.Samples, args: argparse.Namespace) -> Measurement:
    """The model's statistics over `samples`, continuing from what `--output-dir` has.

    Raises:
        ValueError: see `load`; a batch has no visual positions.
    """

    def start() -> Callable[[Measurement, Sequence[inputs.PicturePrompt]], None]:
        probe = loading.load_with_vision(named, args)
        takes_rows = "logits_to_keep" in inspect.signature(probe.model.forward).parameters
        options = {"logits_to_keep": 1} if takes_rows else {}  # all logits of a large vocabulary outgrow the states

        def add(measurement: Measurement, group: Sequence[inputs.PicturePrompt]) -> None:
            for batch in probe.batches(group):
                observe(measurement, probe.run(batch, **options), batch, probe)

        return add

    return resume.resumed(Measurement(), "layers", named, samples, start, args, size=args.batch_size)


# --- one batch --------------------------------------------------------------------------------------------------------


def observe(measurement: Measurement, seen: Observation, batch: Batch, probe: Probe) -> None:
    """Adds one batch to a measurement.

    Raises:
        ValueError: no sample of it has visual positions.
    """
    if not bool(seen.visual.any()):
        raise ValueError(f"{probe.name}: no visual positions in a batch of {len(seen.groups)} samples")
    measurement.layers = len(seen.hidden_states) - 1
    for what, tensor in (("vision features", seen.vision_features), ("projector output", seen.projector_output)):
        measurement.add(what, VISUAL, 0, False, tensor.float().norm(dim=-1))
    values, scales = token_values(seen), _array(embedding_scale(seen))
    groups = seen.groups.cpu().numpy()
    ratios = norm_ratios(values["norm"], groups)
    sinks = (ratios > SINK_RATIO).any(axis=0)
    for group in GROUPS:
        for of_sinks in (False, True):
            chosen = (groups == group) & (sinks == of_sinks)
            for what, layers in values.items():
                for layer in range(len(layers)) if chosen.any() else ():
                    measurement.add(what, group, layer, of_sinks, layers[layer][chosen])
            for layer, left in seen.left.items():
                state = seen.hidden_states[layer + 1]
                changed = chosen & (left != state).any(dim=-1).cpu().numpy()
                for what, step in step_values(left, state).items() if changed.any() else ():
                    measurement.add(ADDED + what, group, layer, of_sinks, step[changed])
            if group in TEXT_GROUPS and np.isfinite(scales[chosen]).any():
                measurement.add(SCALE, group, 0, of_sinks, scales[chosen & np.isfinite(scales)])
    for sample, position in np.argwhere(sinks & (groups > 0)):
        where = int((groups[sample, :position] == VISUAL).sum()) if groups[sample, position] == VISUAL else position
        token = "" if groups[sample, position] == VISUAL else probe.token_text(int(batch.input_ids[sample, position]))
        key = (int(groups[sample, position]), int(where), token)
        add_sink(measurement.sinks, key, values["norm"][:, sample, position], ratios[:, sample, position])


def token_values(seen: Observation) -> dict[str, np.ndarray]:
    """The values of every token, [L + 1, B, S] of states (`STATE_METRICS`) and [L, B, S] of steps (`STEP_METRICS`)."""
    first = _unit(seen.hidden_states[0].float())
    values = {
        "norm": [_array(state.float().norm(dim=-1)) for state in seen.hidden_states],
        "drift": [_array(angle(first, _unit(state.float()))) for state in seen.hidden_states],
    }
    steps = [step_values(before, after) for before, after in seen.steps()]
    values |= {name: [step[name] for step in steps] for name in STEP_METRICS}
    return {name: np.stack(layers) for name, layers in values.items()}


def step_values(before: torch.Tensor, after: torch.Tensor) -> dict[str, np.ndarray]:
    """Every token's `STEP_METRICS` [B, S] between two states [B, S, D]."""
    before, after = before.float(), after.float()
    old, new = _unit(before), _unit(after)
    return {
        "cosine": _array(1 - (new - old).square().sum(-1) / 2),
        "turn": _array(angle(old, new)),
        "update": _array((after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)),
    }


def embedding_scale(seen: Observation) -> torch.Tensor:
    """Norm of what enters the LLM over the norm of its row in the embedding matrix [B, S]; NaN where that is 0."""
    norms, rows = seen.hidden_states[0].float().norm(dim=-1).cpu(), seen.row_norms.cpu()
    return torch.where(rows > 0, norms / rows, torch.nan)


def _unit(states: torch.Tensor) -> torch.Tensor:
    return states / states.norm(dim=-1, keepdim=True).clamp(min=1e-30)


def angle(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Degrees between unit vectors [..., D]; exact for small angles, where the arc cosine is not."""
    return torch.rad2deg(2 * torch.atan2((first - second).norm(dim=-1), (first + second).norm(dim=-1)))


def norm_ratios(norms: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each token's norm over the median of its sample's tokens of its kind, [L + 1, B, S]; 0 at padding."""
    ratios = np.zeros_like(norms)
    for sample in range(groups.shape[0]):
        visual = groups[sample] == VISUAL
        for kind in (visual, (groups[sample] > 0) & ~visual):
            if kind.any():
                chosen = norms[:, sample, kind]
                median = np.median(chosen, axis=1, keepdims=True)
                ratios[:, sample, kind] = chosen / np.maximum(median, 1e-30)
    return ratios


def sink_mask(seen: Observation) -> torch.Tensor:
    """Which tokens are sinks [B, S] bool, on the CPU."""
    norms = np.stack([_array(states.float().norm(dim=-1)) for states in seen.hidden_states])
    return torch.from_numpy((norm_ratios(norms, seen.groups.cpu().numpy()) > SINK_RATIO).any(axis=0))


def add_sink(sinks: dict[tuple, dict[str, float]], key: tuple, norms: np.ndarray, ratios: np.ndarray) -> None:
    """Adds to `sinks` one token that is a sink in one sample, with the layers where it is one."""
    layers = np.flatnonzero(ratios > SINK_RATIO)
    old = sinks.get(key, {"samples": 0, "first": int(layers[0]), "last": 0, "norm": 0.0, "ratio": 0.0})
    sinks[key] = {
        "samples": old["samples"] + 1,
        "first": min(old["first"], int(layers[0])),
        "last": max(old["last"], int(layers[-1])),
        "norm": max(old["norm"], float(norms.max())),
        "ratio": max(old["ratio"], float(ratios.max())),
    }


def _array(values: torch.Tensor) -> np.ndarray:
    return values.double().cpu().numpy()
