"""How far the paper's theory (sections 3 and B) holds in a model: its assumptions and predictions, layer by layer.

The update is measured as the theory defines it: between what enters a layer and what leaves it. Attention sinks
(see `layer_statistics`) are counted and left out; the table also has the values with them.

Shapes: N tokens of one modality, D LLM hidden size.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llava.analysis import inputs, loading, resume
from llava.analysis.commands import Needs
from llava.analysis.inputs import PicturePrompt, Samples
from llava.analysis.layer_statistics import sink_mask
from llava.analysis.models import NamedModel, required_models
from llava.analysis.output import TableRow, figure, write_result
from llava.analysis.probe import SPECIAL, TEXT_AFTER, TEXT_BEFORE, Probe
from llava.analysis.probe import VISUAL as VISUAL_GROUP
from llava.analysis.resume import resumed
from llava.analysis.statistics import Stream
from llava.utils.presentation import TEXT_COLOUR, VISUAL_COLOUR

NEEDS = Needs()

RESULT = "theory-model"
MODALITIES = {"visual": (VISUAL_GROUP,), "text": (TEXT_BEFORE, TEXT_AFTER, SPECIAL)}
QUANTITIES = ("norm", "C", "phi", "w")
PARTS = WITHOUT_SINKS, WITH_SINKS = "without sinks", "with sinks"
# Means over pairs of a visual and a text token of one sample.
PAIRS = ("cos before", "cos predicted", "cos measured", "rotations' product")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_arguments(parser)
    inputs.add_arguments(parser, samples=40)
    resume.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes each assumption's measure per model, every layer's numbers (in the JSON) and the figure."""
    samples = inputs.choose(args)
    measured = {model.name: measure_assumptions(model, samples, args) for model in required_models(args.models)}
    summaries = [line for rows in measured.values() for line in summary(rows)]
    write_result(args, summaries, [row for rows in measured.values() for row in rows], name=RESULT)
    draw(args, measured)


def angular_velocity(norm: np.ndarray | float, update: float, phi: float) -> np.ndarray:
    """Angle by which an update turns a hidden state: `tan(w) = C sin(phi) / (|h| + C cos(phi))` (paper eq. 8, 13).

    Args:
        norm: |h|.
        update: C, the length of the update.
        phi: angle between update and hidden state, in radians.

    Returns:
        w in [0, pi]; above pi/2 where the update more than undoes the state, C cos(phi) < -|h|.
    """
    return np.arctan2(update * np.sin(phi), norm + update * np.cos(phi))


class LayerTally:
    """One layer's streams: |h|, C, phi and w per modality, the prediction of w, and what Theorem 1 says of pairs."""

    def __init__(self) -> None:
        names = (*QUANTITIES, "w predicted", "error")
        self.streams = {name: {quantity: Stream() for quantity in names} for name in MODALITIES}
        self.sinks = dict.fromkeys(MODALITIES, 0)
        self.turns: dict[str, torch.Tensor] = {}
        self.pairs = {name: Stream() for name in PAIRS}

    def add(self, states: torch.Tensor, after: torch.Tensor, groups: torch.Tensor, sinks: torch.Tensor) -> None:
        """Adds one sample: what enters the layer and the next one [S, D], groups, and which tokens are sinks [S]."""
        states, after = states.double().cpu(), after.double().cpu()
        norms = states.norm(dim=-1)
        members = self._members(groups, sinks)
        update, units = after - states, states / norms[:, None]
        along = (update * units).sum(dim=-1)
        across = update - along[:, None] * units
        length, turn = update.norm(dim=-1), across.norm(dim=-1)
        turns = across / turn.clamp(min=1e-30)[:, None]
        phi, w = torch.atan2(turn, along), torch.atan2(turn, norms + along)
        # The paper's assumption: one C and one phi for all tokens of the layer, here their means.
        keep = members["visual"] | members["text"]
        shared = length[keep].mean().item(), phi[keep].mean().item()
        for name, inside in members.items():
            streams = self.streams[name]
            predicted = torch.from_numpy(angular_velocity(norms[inside].numpy(), *shared))
            values = (norms[inside], length[inside], phi[inside], w[inside], predicted, (predicted - w[inside]).abs())
            for stream, value in zip(streams.values(), values, strict=True):
                stream.add(value)
            self.turns[name] = self.turns.get(name, 0) + turns[inside].sum(dim=0)
        # Means over all pairs of a visual and a text token are products of the modalities' means.
        visual, text = members["visual"], members["text"]

        def pairs(vectors: torch.Tensor) -> float:
            return (vectors[visual].mean(dim=0) @ vectors[text].mean(dim=0)).item()

        before = pairs(units)
        rho = (w[visual].cos().mean() * w[text].cos().mean()).item()
        means = (before, rho * before, pairs(after / after.norm(dim=-1, keepdim=True)), pairs(turns))
        for stream, value in zip(self.pairs.values(), means, strict=True):
            stream.add(value)

    def _members(self, groups: torch.Tensor, sinks: torch.Tensor) -> dict[str, torch.Tensor]:
        # The tokens of each modality [S] without its sinks, which are counted.
        members = {}
        for name, ids in MODALITIES.items():
            inside = torch.isin(groups, torch.tensor(ids, dtype=groups.dtype))
            members[name] = inside & ~sinks
            self.sinks[name] += int((inside & sinks).sum())
            if not members[name].any():
                raise ValueError(f"a sample has no {name} tokens besides sinks; the theory is about pairs of both")
        return members

    def row(self) -> dict[str, float]:
        """The layer's numbers; angles in degrees."""
        row: dict[str, float] = {}
        for name in MODALITIES:
            streams = self.streams[name]
            row |= {f"{name} |h|": streams["norm"].mean, f"{name} C": streams["C"].mean}
            for quantity in ("phi", "w", "w predicted", "error"):
                row[f"{name} {quantity}"] = math.degrees(streams[quantity].mean)
            row[f"{name} phi std"] = math.degrees(streams["phi"].std)
            row[f"{name} C spread"] = streams["C"].std / streams["C"].mean
            count = streams["w"].count
            row[f"{name} drift"] = self.turns[name].norm().item() / count
            row[f"{name} drift if symmetric"] = 1 / math.sqrt(count)
            row[f"{name} sinks"] = self.sinks[name]
        return row | {name: stream.mean for name, stream in self.pairs.items()}


class Tallies:
    """Every layer's tally, without sinks and with them (a `resume.State`)."""

    def __init__(self) -> None:
        self.done = 0
        self.kinds = [LayerTally, Stream]
        self.parts: dict[str, list[LayerTally]] = {part: [] for part in PARTS}

    @torch.no_grad()
    def add(self, probe: Probe, sample: PicturePrompt) -> None:
        """Runs one sample through the model."""
        seen = probe.run(probe.prepare([sample]))
        groups, sinks = seen.groups.cpu()[0], sink_mask(seen)[0]
        for part, tallies in self.parts.items():
            tallies += [LayerTally() for _ in probe.parts.layers[len(tallies) :]]
            left_out = sinks if part == WITHOUT_SINKS else torch.zeros_like(sinks)
            for tally, (states, after) in zip(tallies, seen.steps(), strict=True):
                tally.add(states[0], after[0], groups, left_out)

    def rows(self, model: str) -> list[dict[str, Any]]:
        """Two rows per layer: without attention sinks, and with them."""
        return [
            {"model": model, "layer": index, "tokens": part} | tally.row()
            for part, tallies in self.parts.items()
            for index, tally in enumerate(tallies)
        ]


def measure_assumptions(named: NamedModel, samples: Samples, args: argparse.Namespace) -> list[dict[str, Any]]:
    """`Tallies.rows` over all samples, continuing from what `--output-dir` has."""

    def start() -> Callable[[Tallies, Sequence[PicturePrompt]], None]:
        probe = loading.load_with_vision(named, args)
        return lambda state, some: [state.add(probe, sample) for sample in some]

    return resumed(Tallies(), "theory", named, samples, start, args).rows(named.name)


def summary(rows: list[dict[str, Any]]) -> list[TableRow]:
    """Each assumption's measure over one model's layers: median, mean, and the range of the middle 80 % of the layers.

    Sinks are left out; the last column is the median with them.
    """
    without, with_sinks = (_assumptions([row for row in rows if row["tokens"] == part]) for part in PARTS)
    table = []
    for name, values in without.items():
        low, middle, high = np.percentile(values, (10, 50, 90))
        cells = {"median layer": float(middle), "mean": float(np.mean(values))}
        cells |= {"10 % of layers below": float(low), "90 % below": float(high)}
        cells["median layer with sinks"] = float(np.median(with_sinks[name]))
        table.append({"model": rows[0]["model"], "assumption": name} | cells)
    return table


def _assumptions(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    # Each assumption's measure in every layer.
    return {
        "norm, visual over text": [row["visual |h|"] / row["text |h|"] for row in rows],
        "C, visual over text (assumed 1)": [row["visual C"] / row["text C"] for row in rows],
        "C, std over mean within visual (assumed 0)": [row["visual C spread"] for row in rows],
        "C, std over mean within text (assumed 0)": [row["text C spread"] for row in rows],
        "phi, visual minus text, degrees (assumed 0)": [row["visual phi"] - row["text phi"] for row in rows],
        "phi, std within visual, degrees (assumed 0)": [row["visual phi std"] for row in rows],
        "phi, std within text, degrees (assumed 0)": [row["text phi std"] for row in rows],
        "drift of visual rotations over chance (assumed 1)": [
            row["visual drift"] / row["visual drift if symmetric"] for row in rows
        ],
        "drift of text rotations over chance (assumed 1)": [
            row["text drift"] / row["text drift if symmetric"] for row in rows
        ],
        "product of a visual and a text rotation (assumed 0)": [row["rotations' product"] for row in rows],
        "cosine of a visual and a text token, change by a layer": [
            row["cos measured"] - row["cos before"] for row in rows
        ],
        "the same, predicted (Theorem 1)": [row["cos predicted"] - row["cos before"] for row in rows],
        "w, text over visual, measured": [row["text w"] / row["visual w"] for row in rows],
        "w, text over visual, predicted (eq. 8)": [row["text w predicted"] / row["visual w predicted"] for row in rows],
    }


def draw(args: argparse.Namespace, measured: dict[str, list[dict[str, Any]]]) -> None:
    """Per model: update length, phi, and angular velocity measured against predicted, over the layers."""
    size = (12, 3.2 * len(measured) + 0.6)
    with figure(args, len(measured), 3, figsize=size, squeeze=False, name=RESULT) as (drawn, axes):
        for (model, rows), (left, middle, right) in zip(measured.items(), axes, strict=True):
            own = [row for row in rows if row["tokens"] == WITHOUT_SINKS]
            layers = [row["layer"] for row in own]
            for name, colour in (("visual", VISUAL_COLOUR), ("text", TEXT_COLOUR)):
                left.plot(layers, [row[f"{name} C"] for row in own], color=colour, label=name)
                left.plot(layers, [row[f"{name} |h|"] for row in own], color=colour, linestyle=":")
                phi, spread = (np.array([row[f"{name} {key}"] for row in own]) for key in ("phi", "phi std"))
                middle.plot(layers, phi, color=colour)
                middle.fill_between(layers, phi - spread, phi + spread, color=colour, alpha=0.15, linewidth=0)
                right.plot(layers, [row[f"{name} w"] for row in own], color=colour)
                right.plot(layers, [row[f"{name} w predicted"] for row in own], color=colour, linestyle="--")
            left.set(yscale="log", ylabel=model, title="update C (solid), norm |h| (dotted)")
            middle.set(title="phi, with std (degrees)")
            right.set(yscale="log", title="w (degrees): measured, predicted (dashed)")
            for axis in (left, middle, right):
                axis.set_xlabel("layer")
        drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
