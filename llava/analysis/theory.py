"""How far the paper's theory (sections 3 and B) holds in a model: its assumptions and predictions, layer by layer.

The update is measured as the theory defines it: between what enters a layer and what leaves it. Attention sinks
(see `measure`) are counted and left out; the table also has the values with them.

Shapes: N tokens of one modality, D LLM hidden size.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llava.analysis import measure, models, samples
from llava.analysis.commands import NamedModel, required_models
from llava.analysis.measure import Values, batches, refuse_nonfinite, sink_mask
from llava.analysis.output import TableRow, figure, write_result
from llava.analysis.probe import SPECIAL, TEXT_AFTER, TEXT_BEFORE, VISUAL, Probe
from llava.utils.presentation import TEXT_COLOUR, VISUAL_COLOUR

RESULT = "theory-model"
MODALITIES = {"visual": (VISUAL,), "text": (TEXT_BEFORE, TEXT_AFTER, SPECIAL)}
PARTS = WITHOUT_SINKS, WITH_SINKS = "without sinks", "with sinks"
QUANTITIES = ("|h|", "C", "phi", "w", "w predicted", "error")
# Means over pairs of a visual and a text token of one sample.
PAIRS = ("cos before", "cos predicted", "cos measured", "rotations' product")


add_arguments = measure.add_arguments


def run(args: argparse.Namespace) -> None:
    """Writes each assumption's measure per model, every layer's numbers (in the JSON) and the figure."""
    drawn = samples.choose(args)
    measured = {model.name: measure_assumptions(model, drawn, args) for model in required_models(args.models)}
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


def layer_values(states: torch.Tensor, after: torch.Tensor, members: dict[str, torch.Tensor]) -> Values:
    """One layer of one sample: per modality the values [6, N] of `QUANTITIES` and the sum of its tokens' rotations [D];
    and `PAIRS` [4], what Theorem 1 says of pairs.

    Args:
        states, after: what enters the layer and what leaves it [S, D].
        members: the tokens of each modality [S].
    """
    states, after = states.double().cpu(), after.double().cpu()
    norms = states.norm(dim=-1)
    update, units = after - states, states / norms[:, None]
    along = (update * units).sum(dim=-1)
    across = update - along[:, None] * units
    length, turn = update.norm(dim=-1), across.norm(dim=-1)
    turns = across / turn.clamp(min=1e-30)[:, None]
    phi, w = torch.atan2(turn, along), torch.atan2(turn, norms + along)
    # The paper's assumption: one C and one phi for all tokens of the layer, here their means.
    keep = members["visual"] | members["text"]
    shared = length[keep].mean().item(), phi[keep].mean().item()
    predicted = torch.from_numpy(angular_velocity(norms.numpy(), *shared))
    values = torch.stack([norms, length, phi, w, predicted, (predicted - w).abs()])
    result = {name: values[:, inside].numpy() for name, inside in members.items()}
    result |= {f"{name} turns": turns[inside].sum(dim=0).numpy() for name, inside in members.items()}

    # Means over all pairs of a visual and a text token are products of the modalities' means.
    def pairs(vectors: torch.Tensor) -> float:
        return (vectors[members["visual"]].mean(dim=0) @ vectors[members["text"]].mean(dim=0)).item()

    before, rho = pairs(units), (w[members["visual"]].cos().mean() * w[members["text"]].cos().mean()).item()
    between = pairs(after / after.norm(dim=-1, keepdim=True))
    return result | {"pairs": np.array([before, rho * before, between, pairs(turns)])}


def measure_assumptions(named: NamedModel, drawn: samples.Samples, args: argparse.Namespace) -> list[dict[str, Any]]:
    """`rows_of` all samples."""

    def start() -> Callable[[Sequence[samples.PicturePrompt]], Values]:
        probe = models.load(named, args)
        return lambda part: sample_values(probe, part[0])

    return rows_of(named.name, batches("theory", named, drawn, args, start))


@torch.no_grad()
def sample_values(probe: Probe, sample: samples.PicturePrompt) -> Values:
    """The values of every layer, without sinks and with them, and how many sinks there are.

    Raises ValueError: all tokens of a modality are sinks, or there are none; a value is NaN or infinite.
    """
    seen, values = probe.run(probe.prepare([sample])), {}
    groups, sinks = seen.groups.cpu()[0], sink_mask(seen)[0]
    inside = {name: torch.isin(groups, torch.tensor(ids, dtype=groups.dtype)) for name, ids in MODALITIES.items()}
    for name, tokens in inside.items():
        if not (tokens & ~sinks).any():
            raise ValueError(f"a sample has no {name} tokens besides sinks; the theory is about pairs of both")
        values[f"{name} sinks"] = np.array([int((tokens & sinks).sum())])
    for part in PARTS:
        members = {name: tokens & ~sinks if part == WITHOUT_SINKS else tokens for name, tokens in inside.items()}
        layers = [layer_values(states[0], after[0], members) for states, after in seen.steps()]
        values |= {f"{part} {name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}
    refuse_nonfinite(probe.name, values)
    return values


def rows_of(model: str, measured: list[Values]) -> list[dict[str, Any]]:
    """Two rows per layer over all samples: without attention sinks, and with them."""
    return [
        {"model": model, "layer": layer, "tokens": part} | layer_row(measured, part, layer)
        for part in PARTS
        for layer in range(len(measured[0][f"{part} pairs"]))
    ]


def layer_row(parts: list[Values], part: str, layer: int) -> dict[str, float]:
    """One layer's numbers over all samples; angles in degrees."""
    row: dict[str, float] = {}
    for name in MODALITIES:
        values = np.concatenate([sample[f"{part} {name}"][layer] for sample in parts], axis=1)
        turns = sum(sample[f"{part} {name} turns"][layer] for sample in parts)
        values[2:] = np.degrees(values[2:])
        row |= dict(zip((f"{name} {quantity}" for quantity in QUANTITIES), values.mean(axis=1).tolist(), strict=True))
        row[f"{name} phi std"] = float(values[2].std())
        row[f"{name} C spread"] = float(values[1].std() / values[1].mean())
        row[f"{name} drift"] = float(np.linalg.norm(turns)) / values.shape[1]
        row[f"{name} drift if symmetric"] = 1 / math.sqrt(values.shape[1])
        row[f"{name} sinks"] = sum(int(sample[f"{name} sinks"][0]) for sample in parts) if part == WITHOUT_SINKS else 0
    pairs = np.mean([sample[f"{part} pairs"][layer] for sample in parts], axis=0)
    return row | dict(zip(PAIRS, pairs.tolist(), strict=True))


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


def _assumptions(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    # Each assumption's measure in every layer.
    of = {name: np.array([row[name] for row in rows]) for name in rows[0] if name not in ("model", "tokens")}
    return {
        "norm, visual over text": of["visual |h|"] / of["text |h|"],
        "C, visual over text (assumed 1)": of["visual C"] / of["text C"],
        "C, std over mean within visual (assumed 0)": of["visual C spread"],
        "C, std over mean within text (assumed 0)": of["text C spread"],
        "phi, visual minus text, degrees (assumed 0)": of["visual phi"] - of["text phi"],
        "phi, std within visual, degrees (assumed 0)": of["visual phi std"],
        "phi, std within text, degrees (assumed 0)": of["text phi std"],
        "drift of visual rotations over chance (assumed 1)": of["visual drift"] / of["visual drift if symmetric"],
        "drift of text rotations over chance (assumed 1)": of["text drift"] / of["text drift if symmetric"],
        "product of a visual and a text rotation (assumed 0)": of["rotations' product"],
        "cosine of a visual and a text token, change by a layer": of["cos measured"] - of["cos before"],
        "the same, predicted (Theorem 1)": of["cos predicted"] - of["cos before"],
        "w, text over visual, measured": of["text w"] / of["visual w"],
        "w, text over visual, predicted (eq. 8)": of["text w predicted"] / of["visual w predicted"],
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
