"""How far the paper's theory (sections 3 and B) holds in a model: its assumptions and predictions, layer by layer.

The update is measured as the theory defines it: between what enters a layer and what leaves it. Attention sinks
(see `measure`) are counted and left out.

Shapes: N tokens of one modality, D LLM hidden size.
"""

import argparse
import math
from typing import Any

import numpy as np
import torch

from llava.analysis import measure
from llava.analysis.measure import Values, refuse_nonfinite, sink_mask
from llava.analysis.output import TableRow, write_result
from llava.analysis.probe import SPECIAL, TEXT_AFTER, TEXT_BEFORE, VISUAL, Probe
from llava.analysis.samples import PicturePrompt

RESULT = "theory-model"
MODALITIES = {"visual": (VISUAL,), "text": (TEXT_BEFORE, TEXT_AFTER, SPECIAL)}
QUANTITIES = ("|h|", "C", "phi", "w", "w predicted", "error")
# Means over pairs of a visual and a text token of one sample.
PAIRS = ("cos before", "cos predicted", "cos measured", "rotations' product")

add_arguments = measure.add_arguments


def run(args: argparse.Namespace) -> None:
    """Writes each assumption's measure per model, and every layer's numbers (`-layers`)."""
    models, drawn = measure.begin(args)
    summaries, rows = [], []
    for model in models:
        parts = measure.per_sample("theory", model, drawn, args, sample_values)
        layers = range(len(parts[0]["pairs"]))
        own = [{"model": model.name, "layer": layer} | layer_row(parts, layer) for layer in layers]
        summaries, rows = summaries + summary(own), rows + own
    write_result(args, summaries, name=RESULT)
    write_result(args, rows, name=f"{RESULT}-layers", show=False)


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

    predicted_after = pairs(w.cos()[:, None] * units)  # Theorem 1, pair by pair
    between = pairs(after / after.norm(dim=-1, keepdim=True))
    return result | {"pairs": np.array([pairs(units), predicted_after, between, pairs(turns)])}


@torch.no_grad()
def sample_values(probe: Probe, sample: PicturePrompt) -> Values:
    """The values of every layer for one sample, without its attention sinks, and how many of these there are.

    Raises ValueError: all tokens of a modality are sinks, or there are none; a value is NaN or infinite.
    """
    seen, values, members = probe.run(probe.prepare(sample)), {}, {}
    groups, sinks = seen.groups.cpu()[0], sink_mask(seen)[0]
    for name, ids in MODALITIES.items():
        inside = torch.isin(groups, torch.tensor(ids, dtype=groups.dtype))
        members[name], values[f"{name} sinks"] = inside & ~sinks, np.array([int((inside & sinks).sum())])
        if not members[name].any():
            raise ValueError(f"a sample has no {name} tokens besides sinks; the theory is about pairs of both")
    layers = [layer_values(states[0], after[0], members) for states, after in seen.steps()]
    values |= {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    refuse_nonfinite(probe.name, values)
    return values


def layer_row(parts: list[Values], layer: int) -> dict[str, float]:
    """One layer's numbers over all samples; angles in degrees."""
    row: dict[str, float] = {}
    for name in MODALITIES:
        values = np.concatenate([sample[name][layer] for sample in parts], axis=1)
        turns = sum(sample[f"{name} turns"][layer] for sample in parts)
        values[2:] = np.degrees(values[2:])
        row |= dict(zip((f"{name} {quantity}" for quantity in QUANTITIES), values.mean(axis=1).tolist(), strict=True))
        row[f"{name} phi std"] = float(values[2].std())
        row[f"{name} C spread"] = float(values[1].std() / values[1].mean())
        row[f"{name} drift"] = float(np.linalg.norm(turns)) / values.shape[1]
        row[f"{name} drift if symmetric"] = 1 / math.sqrt(values.shape[1])
        row[f"{name} sinks"] = sum(int(sample[f"{name} sinks"][0]) for sample in parts)
    pairs = np.mean([sample["pairs"][layer] for sample in parts], axis=0)
    return row | dict(zip(PAIRS, pairs.tolist(), strict=True))


def summary(rows: list[dict[str, Any]]) -> list[TableRow]:
    """Each assumption's measure over a model's layers: median, mean, and the range of the middle 80 % of the layers."""
    table = []
    for name, values in _assumptions(rows).items():
        low, middle, high = np.percentile(values, (10, 50, 90))
        cells = {"median layer": float(middle), "mean": float(np.mean(values))}
        cells |= {"10 % of layers below": float(low), "90 % below": float(high)}
        table.append({"model": rows[0]["model"], "assumption": name} | cells)
    return table


def _assumptions(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    # Each assumption's measure in every layer.
    of = {name: np.array([row[name] for row in rows]) for name in rows[0] if name != "model"}
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
