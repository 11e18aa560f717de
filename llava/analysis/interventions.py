"""What the norm of visual tokens does to a trained model at inference, beside the controls that give it a scale.

Visual tokens are scaled by alpha, or each set to the text norm, where they enter the first layer. Controls: a blank
picture of the same size, no picture, and the visual part of the KV cache (keys, values, both) taken from the blank one.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from tqdm import tqdm

from llava.analysis import inputs, loading
from llava.analysis.attention_watch import Change, watched
from llava.analysis.inputs import Sample
from llava.analysis.models import required_models
from llava.analysis.output import COLOURS, figure, write_result
from llava.analysis.probe import VISUAL, Batch, Edit, Probe
from llava.analysis.statistics import Stream
from llava.model.multimodal_projector.norm import mean_text_embedding_norm

TEXT_NORM, BLANK, TEXT_ONLY = "text norm", "blank picture", "no picture"
SWAPS = {"blank's keys": (True, False), "blank's values": (False, True), "blank's keys and values": (True, True)}
GREY = (127, 127, 127)
# Of the change that a blank picture makes: below the first, scaling is called harmless, above the second, breaking.
HARMLESS, BREAKING = 0.1, 0.5
ALIGNED = 1.25
"""Ratio to the text norm, either way, up to which there is nothing to set."""
SEES_PICTURES = 0.01
"""Mean KL in nats to the blank picture's output, below which a model is said not to look at its pictures."""


class Outcome(NamedTuple):
    """One run beside the untouched one.

    Attributes:
        kl: of the output distribution after the prompt, in nats, from the untouched one.
        rank: of the token that the untouched run chose, from 1.
        visual_share: visual tokens' share of the last token's attention, mean over layers and heads.
        keys, values: cosine of the visual tokens' keys and values with the untouched ones, mean per layer; None
            without a picture.
    """

    kl: float
    rank: int
    visual_share: float
    keys: np.ndarray | None
    values: np.ndarray | None


class _Run(NamedTuple):
    # Log probabilities [C], attention share, keys and values of visual tokens per layer [K, V, channels], their norms
    # [V] where they enter the first layer.
    log_probs: torch.Tensor
    visual_share: float
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    visual_norms: torch.Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_arguments(parser)
    inputs.add_arguments(parser, samples=16)
    parser.add_argument(
        "--alphas", type=float, nargs="+", default=[0.03, 0.1, 0.3, 0.6, 2, 5], help="factors of the sweep"
    )


def run(args: argparse.Namespace) -> None:
    """Writes one row per model and intervention, the figure, and prints one verdict per model."""
    if min(args.alphas) <= 0:
        raise ValueError("--alphas: expected positive factors; no picture at all is always among the controls")
    samples = inputs.choose(args)
    rows, details, verdicts = [], {}, []
    for model in required_models(args.models):
        probe = loading.load_with_vision(model, args)
        found = measure(probe, samples, sorted(args.alphas))
        rows += [table_row(model.name, name, outcomes) for name, outcomes in found["outcomes"].items()]
        verdicts.append(verdict(model.name, found))
        details[model.name] = {
            "visual norm": found["visual norm"],
            "text norm": found["text norm"],
            "verdict": verdicts[-1],
            "per layer": {name: _per_layer(outcomes) for name, outcomes in found["outcomes"].items()},
        }
        del probe  # before the next one is loaded
    write_result(args, rows, details)
    draw(args, rows, details)
    print("\n" + "\n".join(verdicts))


def measure(probe: Probe, samples: Sequence[Sample], alphas: list[float]) -> dict[str, Any]:
    """Every intervention's outcomes over all samples, and the norms of visual tokens and text."""
    outcomes: dict[str, list[Outcome]] = {}
    norms, text_norm = Stream(), mean_text_embedding_norm(probe.embedding_weight)
    for sample in tqdm(samples, desc=f"interventions, {probe.name}"):
        batch = probe.prepare([sample])
        untouched = _run(probe, batch)
        norms.add(untouched.visual_norms)
        for name, other in interventions(probe, sample, batch, alphas, text_norm):
            outcomes.setdefault(name, []).append(compare(untouched, other))
    return {"outcomes": outcomes, "visual norm": norms.mean, "text norm": text_norm}


def interventions(
    probe: Probe, sample: Sample, batch: Batch, alphas: list[float], text_norm: float
) -> Iterator[tuple[str, _Run]]:
    """Runs each one after the other: name and run."""
    for alpha in alphas:
        yield f"alpha {alpha:g}", _run(probe, batch, at_visual(lambda tokens, alpha=alpha: alpha * tokens))
    yield TEXT_NORM, _run(probe, batch, at_visual(lambda tokens: text_norm * F.normalize(tokens, dim=-1)))
    blank = _run(probe, probe.prepare([sample._replace(image=Image.new("RGB", sample.image.size, GREY))]))
    yield BLANK, blank
    yield TEXT_ONLY, _run(probe, probe.prepare([sample._replace(image=None)]))
    visual = probe.groups(batch)[0] == VISUAL
    for name, which in SWAPS.items():
        yield name, _run(probe, batch, change=_taking(blank, visual, *which))


def at_visual(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The edit that puts `change` of the visual tokens [N, D] in their place."""

    def edit(states: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        states, visual = states.clone(), (groups == VISUAL).to(states.device)
        states[visual] = change(states[visual])
        return states

    return edit


def _taking(source: _Run, visual: torch.Tensor, keys: bool, values: bool) -> Change:
    # Every layer uses the source's keys or values at visual tokens: what follows sees a cache with that part swapped.
    def change(index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        swapped = []
        for tensor, chosen, stored in ((key, keys, source.keys), (value, values, source.values)):
            if chosen:
                tensor = tensor.clone()
                tensor[:, visual.to(tensor.device)] = stored[index].to(tensor)
            swapped.append(tensor)
        return swapped[0], swapped[1]

    return change


def _run(probe: Probe, batch: Batch, edit: Edit | None = None, change: Change | None = None) -> _Run:
    shares, keys, values = [], [], []
    visual = probe.groups(batch)[0] == VISUAL

    def see(index: int, weights: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        at = visual.to(key.device)
        shares.append(weights[:, -1, at].sum(dim=-1).mean().item())
        keys.append(key[:, at].clone())
        values.append(value[:, at].clone())

    with watched(probe.parts.layers, see=see, change=change):
        seen = probe.run(batch, edit)
    log_probs = seen.logits[0, -1].double().log_softmax(dim=-1)
    norms = seen.hidden_states[0][0, visual.to(seen.hidden_states[0].device)].float().norm(dim=-1)
    return _Run(log_probs, float(np.mean(shares)), keys, values, norms)


def compare(untouched: _Run, other: _Run) -> Outcome:
    """The outcome of `other` beside the run of the same sample that nothing touched."""
    expected, found = untouched.log_probs, other.log_probs
    kl = (expected.exp() * (expected - found)).sum().item()
    chosen = expected.argmax()
    rank = int((found > found[chosen]).sum()) + 1
    keys = values = None
    if other.keys[0].shape == untouched.keys[0].shape:
        keys = np.array([_cosine(a, b) for a, b in zip(untouched.keys, other.keys, strict=True)])
        values = np.array([_cosine(a, b) for a, b in zip(untouched.values, other.values, strict=True)])
    return Outcome(max(kl, 0.0), rank, other.visual_share, keys, values)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return F.cosine_similarity(a.float(), b.float(), dim=-1).mean().item()


def table_row(model: str, name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """Means over the samples; KL also as median, since a few answers may carry the mean."""
    kl, rank = _stream([one.kl for one in outcomes]), _stream([one.rank for one in outcomes])
    pictured = outcomes[0].keys is not None
    return {
        "model": model,
        "intervention": name,
        "KL (nats)": kl.mean,
        "KL median": kl.median,
        "KL std": kl.std,
        "rank of chosen": rank.mean,
        "answer changes (%)": 100 * float(np.mean([one.rank > 1 for one in outcomes])),
        "visual attention": float(np.mean([one.visual_share for one in outcomes])),
        "cos of keys": float(np.mean([one.keys for one in outcomes])) if pictured else None,
        "cos of values": float(np.mean([one.values for one in outcomes])) if pictured else None,
    }


def _stream(values: list[float]) -> Stream:
    stream = Stream()
    stream.add(values)
    return stream


def _per_layer(outcomes: list[Outcome]) -> dict[str, list[float]] | None:
    if outcomes[0].keys is None:
        return None
    return {
        "cos of keys": np.mean([one.keys for one in outcomes], axis=0).tolist(),
        "cos of values": np.mean([one.values for one in outcomes], axis=0).tolist(),
    }


def verdict(model: str, found: dict[str, Any]) -> str:
    """What the dispute comes to for one model, in one sentence with its numbers."""
    rows = {name: table_row(model, name, outcomes) for name, outcomes in found["outcomes"].items()}
    ratio = found["visual norm"] / found["text norm"]
    start = f"{model}: visual tokens enter with {ratio:.2f} times the text norm. "
    blank, scaled = rows[BLANK], rows[TEXT_NORM]
    if blank["KL (nats)"] < SEES_PICTURES:
        return start + (
            f"NOT DECIDED: a blank picture changes the output by {blank['KL (nats)']:.4f} nats only, so this model "
            "does not look at its pictures here."
        )
    share = scaled["KL (nats)"] / blank["KL (nats)"]
    word = "HARMLESS" if share < HARMLESS else "WEAKENS" if share < BREAKING else "BREAKS"
    if 1 / ALIGNED < ratio < ALIGNED:
        word = "ALIGNED ALREADY"
    turned = [1 - scaled[f"cos of {part}"] for part in ("values", "keys")]
    more = "more than" if turned[0] > turned[1] else "no more than"
    return start + (
        f"{word}: setting them to the text norm at inference changes the output by {scaled['KL (nats)']:.3f} nats, "
        f"{100 * share:.0f} % of what a blank picture does, and {scaled['answer changes (%)']:.0f} % of the answers; "
        f"values turn (cos {scaled['cos of values']:.3f}) {more} keys (cos {scaled['cos of keys']:.3f})."
    )


def draw(args: argparse.Namespace, rows: list[dict[str, Any]], details: dict[str, Any]) -> None:
    """KL over alpha with the blank picture's as a line; cosines of keys and values over alpha; KL of the swaps."""
    with figure(args, 1, 3, figsize=(13, 4)) as (drawn, (left, middle, right)):
        for index, (model, colour) in enumerate(zip(details, COLOURS * len(details), strict=False)):
            own = {row["intervention"]: row for row in rows if row["model"] == model}
            sweep = {float(name.split()[1]): row for name, row in own.items() if name.startswith("alpha")}
            sweep[1.0] = {"KL (nats)": 0.0, "cos of keys": 1.0, "cos of values": 1.0}
            alphas = sorted(sweep)
            left.plot(alphas, [sweep[a]["KL (nats)"] for a in alphas], "o-", color=colour, label=model, markersize=4)
            left.axhline(own[BLANK]["KL (nats)"], color=colour, linestyle=":", linewidth=1.2)
            at = details[model]["text norm"] / details[model]["visual norm"]
            left.plot([at], [own[TEXT_NORM]["KL (nats)"]], "*", color=colour, markersize=15, markeredgecolor="black")
            for part, style in (("keys", "--"), ("values", "-")):
                cosines = [sweep[a][f"cos of {part}"] for a in alphas]
                middle.plot(alphas, cosines, style, color=colour, label=f"{part}, {model}")
            names = [BLANK, *SWAPS, TEXT_ONLY]
            positions = np.arange(len(names)) + (index - (len(details) - 1) / 2) * 0.8 / len(details)
            heights = [own[name]["KL (nats)"] for name in names]
            right.barh(positions, heights, 0.8 / len(details), color=colour)
        left.set(xscale="log", xlabel="alpha (factor on visual tokens)", ylabel="KL from the untouched output (nats)")
        left.set_title("Scaling at inference\n(dotted: blank picture; star: set to text norm)")
        middle.set(xscale="log", xlabel="alpha (factor on visual tokens)", ylabel="cosine with the untouched ones")
        middle.set_title("Direction of visual keys and values")
        middle.legend()
        right.set(xlabel="KL from the untouched output (nats)", yticks=range(len(names)), yticklabels=names)
        right.set_title("Controls")
        right.invert_yaxis()
        drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
