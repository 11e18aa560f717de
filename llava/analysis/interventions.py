"""What the norm of visual tokens does to a trained model at inference, with a blank picture and no picture as scale.

Visual tokens are scaled by alpha, or each set to the text norm, where they enter the first layer; the text norm is the
median norm of the text tokens that enter beside them. Attention sinks (see `measure`) count in no norm.

Shapes: S sequence, C vocabulary.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from llava.analysis import measure
from llava.analysis.attention import watched
from llava.analysis.measure import TEXT_GROUPS, Values, median, sink_mask
from llava.analysis.output import TableRow, draw_rows, write_result
from llava.analysis.probe import VISUAL, Batch, Edit, Probe
from llava.analysis.samples import PicturePrompt

UNTOUCHED, TEXT_NORM, BLANK, TEXT_ONLY = "untouched", "text norm", "blank picture", "no picture"
GREY = (127, 127, 127)
ALPHAS = (0.01, 0.03, 0.1, 0.3, 0.6, 2.0, 5.0, 10.0)


Run = tuple[torch.Tensor, dict[str, float]]
"""Log-probabilities of the next token [C], and other numbers of one run of one sample, see `run_of`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_arguments(parser, default=16)


def run(args: argparse.Namespace) -> None:
    """Writes one row per model and intervention, and the figure."""
    models, drawn = measure.begin(args)
    rows = []
    for model in models:
        parts = measure.per_sample("interventions", model, drawn, args, outcomes_of)
        own = {str(name): table_row(model.name, str(name), parts) for name in parts[0]["name"]}
        rows += own.values()
        if TEXT_ONLY not in own:
            print(f"{model.name}: not run: {TEXT_ONLY}; its processor makes no inputs of text alone")
    write_result(args, rows)
    axes = {"xscale": "log", "xlabel": "alpha (factor on visual tokens)"}
    sweep = sorted((row for row in rows if row["alpha"] is not None), key=lambda row: row["alpha"])
    draw_rows(args, sweep, "alpha", {"KL (nats)": axes})


def outcomes_of(probe: Probe, sample: PicturePrompt, alphas: Sequence[float] = ALPHAS) -> Values:
    """Every intervention's outcome for one sample, the untouched run's first, by `name`; see `compare`.

    Raises ValueError: the sample has no text that enters beside its picture.
    """
    batch = probe.prepare(sample)
    untouched = run_of(probe, batch)
    if not math.isfinite(text_norm := untouched[1]["text norm"]):
        raise ValueError(f"{probe.name}, {sample.name}: no text enters beside the picture, so there is no text norm")
    changes = {f"alpha {alpha:g}": lambda tokens, alpha=alpha: alpha * tokens for alpha in alphas}
    changes[TEXT_NORM] = lambda tokens: text_norm * F.normalize(tokens, dim=-1)
    runs = {UNTOUCHED: untouched}
    runs |= {name: run_of(probe, batch, at_visual(change)) for name, change in changes.items()}
    runs[BLANK] = run_of(probe, probe.prepare(sample._replace(image=Image.new("RGB", sample.image.size, GREY))))
    try:
        text_only = probe.prepare(sample._replace(image=None))
    except (ValueError, TypeError):
        text_only = None  # some processors make no inputs without a picture (GOT-OCR)
    if text_only is not None:
        runs[TEXT_ONLY] = run_of(probe, text_only)
    outcomes = [compare(name, untouched, run) for name, run in runs.items()]
    return {name: np.array([outcome[name] for outcome in outcomes]) for name in outcomes[0]}


def at_visual(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The edit that puts `change` of the visual tokens [N, D] in their place."""

    def edit(states: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        states, visual = states.clone(), (groups == VISUAL).to(states.device)
        states[visual] = change(states[visual])
        return states

    return edit


def run_of(probe: Probe, batch: Batch, edit: Edit | None = None) -> Run:
    """Runs a batch of one sample.

    Its numbers are `share`, the visual tokens' share of the last token's attention, mean over layers with attention and
    heads, and `visual norm` and `text norm`, medians where tokens enter the first layer; NaN where there are none.
    """
    shares: list[torch.Tensor] = []
    visual = probe.groups(batch)[0].cpu() == VISUAL
    see = lambda index, weights: shares.append(weights[:, -1].mean(dim=0).double().cpu())  # noqa: E731
    with watched(probe.parts.layers, see):
        seen = probe.run(batch, edit)
    if not shares:
        raise ValueError(f"{probe.name}: no decoder layer gives its attention weights, so none can be measured")
    norms, counted = seen.hidden_states[0][0].float().norm(dim=-1).cpu(), ~sink_mask(seen)[0]
    text = torch.isin(seen.groups[0].cpu(), torch.tensor(TEXT_GROUPS))
    numbers = {"share": torch.stack(shares).mean(dim=0)[visual].sum().item()}
    for name, tokens in (("visual norm", visual), ("text norm", text)):
        numbers[name] = median(norms[tokens & counted].double().numpy())
    return seen.logits[0, -1].double().log_softmax(dim=-1), numbers


def compare(name: str, untouched: Run, other: Run) -> dict[str, Any]:
    """What `other` differs in from the untouched run of the same sample.

    `kl` is the divergence of its next token's distribution, in nats; `rank` that of the token the untouched run chose.
    """
    (expected, _), (actual, numbers) = untouched, other
    kl = (expected.exp() * (expected - actual)).sum().item()
    if not math.isfinite(kl):
        raise ValueError(f"{name}: the KL divergence is {kl}; logits that are NaN or infinite cannot be compared")
    rank = 1 + int((actual > actual[expected.argmax()]).sum())
    return {"name": name, "kl": max(kl, 0.0), "rank": rank, **numbers}


def _known(parts: list[Values], name: str, what: str) -> np.ndarray:
    """An intervention's values over the samples, without those that are not known."""
    values = np.concatenate([np.ravel(part[what][part["name"] == name]) for part in parts])
    return values[~np.isnan(values)]


def table_row(model: str, name: str, parts: list[Values]) -> TableRow:
    """Means over the samples, of norms medians; KL also as median, since a few answers may dominate the mean."""
    kl, rank = _known(parts, name, "kl"), _known(parts, name, "rank")
    alpha = 1.0 if name == UNTOUCHED else float(name.split()[1]) if name.startswith("alpha") else None
    row = {"model": model, "intervention": name, "alpha": alpha, "KL (nats)": float(kl.mean()), "KL median": median(kl)}
    row |= {"KL std": float(kl.std()), "rank of chosen": float(rank.mean())}
    row["answer changes (%)"] = 100 * float((rank > 1).mean())
    row["visual attention"] = float(_known(parts, name, "share").mean())
    return row | {norm: median(_known(parts, name, norm)) for norm in ("visual norm", "text norm")}
