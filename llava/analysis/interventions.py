"""What the norm of visual tokens does to a trained model at inference, compared with controls that give it a scale.

Visual tokens are scaled by alpha, or each set to the text norm, where they enter the first layer; the text norm is the
median norm of the text tokens that enter beside them. Controls: a blank picture of the same size, no picture, visual
tokens in another order, and the visual part of the KV cache (keys, values, both) taken from the blank one. A hybrid
decoder's layers without attention have no cache to take: in them the picture stays.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from llava.analysis import attention_watch, inputs, loading, resume
from llava.analysis.attention_watch import Attention, Change
from llava.analysis.commands import Needs
from llava.analysis.inputs import PicturePrompt, Samples
from llava.analysis.layer_statistics import TEXT_GROUPS, embedding_scale, sink_mask
from llava.analysis.models import NamedModel, required_models
from llava.analysis.output import figure, write_result
from llava.analysis.probe import VISUAL, Batch, Edit, Probe
from llava.analysis.resume import Rows, resumed
from llava.analysis.statistics import Stream
from llava.model.multimodal_projector.norm import mean_text_embedding_norm
from llava.utils.presentation import looks

NEEDS = Needs()

UNTOUCHED, TEXT_NORM, BLANK, TEXT_ONLY = "untouched", "text norm", "blank picture", "no picture"
SHUFFLED = "shuffled tokens"
SWAPS = {"blank's keys": (True, False), "blank's values": (False, True), "blank's keys and values": (True, True)}
GREY = (127, 127, 127)
# Shares of the change that a blank picture makes: scaling is called harmless below the first, breaking from the second.
HARMLESS, BREAKING = 0.1, 0.5
ALIGNED = 1.25
"""Visual norms within this factor of the text norm, or of the mean embedding as it enters, count as aligned already."""
SEES_PICTURES = 0.01
"""Mean KL in nats to the blank picture's output, below which a model is said not to look at its pictures."""


class Outcome(NamedTuple):
    """One run of one sample, compared with the untouched run.

    Attributes:
        name: of the intervention.
        kl: of the output distribution after the prompt, in nats, from the untouched one.
        rank: of the token that the untouched run chose, from 1.
        visual_norm: of the visual tokens where they enter the first layer, median; None without a picture.
        text_norm: of the text tokens there that are no sinks, median.
        embedding_scale: factor from the embedding matrix's rows to what enters, median over the text tokens.
        visual_share: visual tokens' share of the last token's attention, mean over layers with attention, and heads.
        keys, values: cosine of the visual tokens' keys and values with the untouched ones, mean per layer, NaN where a
            layer has no attention; None without a picture.
        sinks: how many visual tokens are sinks (see `layer_statistics`) in this run.
        visual_norm_without_sinks, visual_share_without_sinks: of the visual tokens that are not sinks in this run.
        keys_without_sinks, values_without_sinks: of the visual tokens that are not sinks in the untouched run.
    """

    name: str
    kl: float
    rank: int
    visual_norm: float | None
    text_norm: float
    embedding_scale: float
    visual_share: float
    keys: np.ndarray | None
    values: np.ndarray | None
    sinks: int
    visual_norm_without_sinks: float | None
    visual_share_without_sinks: float
    keys_without_sinks: np.ndarray | None
    values_without_sinks: np.ndarray | None


class _Run(NamedTuple):
    # Log probabilities [C]; of the V visual tokens: attention share [V], mean over layers and heads; keys and values
    # [K, V, channels] by layer, of those that have attention; norms where they enter the first layer [V]; which are
    # sinks [V]. Of the text: median norm there, and the factor from the embedding matrix.
    log_probs: torch.Tensor
    shares: torch.Tensor
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    norms: torch.Tensor
    sinks: torch.Tensor
    text_norm: float
    embedding_scale: float
    layers: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loading.add_arguments(parser)
    inputs.add_arguments(parser, samples=16)
    parser.add_argument(
        "--alphas", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 0.6, 2, 5, 10], help="factors of the sweep"
    )
    resume.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes one row per model and intervention, the figure, and prints one verdict per model."""
    if min(args.alphas) <= 0:
        raise ValueError("--alphas: expected positive factors; no picture at all is always among the controls")
    args.alphas = sorted(args.alphas)
    samples = inputs.choose(args)
    rows, details, verdicts = [], {}, []
    for model in required_models(args.models):
        measured = measure_interventions(model, samples, args)
        rows += [table_row(model.name, outcomes) for outcomes in measured["outcomes"].values()]
        verdicts.append(verdict(model.name, measured))
        if TEXT_ONLY not in measured["outcomes"]:
            print(f"{model.name}: not run: {TEXT_ONLY}; its processor makes no inputs of text alone")
        without = np.flatnonzero(np.isnan(measured["outcomes"][UNTOUCHED][0].keys))
        if len(without):
            layers = ", ".join(map(str, without))
            print(f"{model.name}: no attention, so no keys and values to compare or to take, in layers {layers}")
        details[model.name] = {name: value for name, value in measured.items() if name != "outcomes"} | {
            "verdict": verdicts[-1],
            "per layer": {name: _per_layer(outcomes) for name, outcomes in measured["outcomes"].items()},
        }
    write_result(args, rows, details)
    draw(args, rows, details)
    print("\n" + "\n".join(verdicts))


def measure_interventions(named: NamedModel, samples: Samples, args: argparse.Namespace) -> dict[str, Any]:
    """Every intervention's outcomes over all samples, and the samples' median norms of visual tokens and text.

    Continues from what `--output-dir` has.
    """

    def start() -> Callable[[Rows, Sequence[PicturePrompt]], None]:
        probe = loading.load_with_vision(named, args)
        embedding_norm = mean_text_embedding_norm(probe.embedding_weight)

        def add(state: Rows, some: Sequence[PicturePrompt]) -> None:
            state.about["embedding norm"] = embedding_norm
            for sample in some:
                state.rows += outcomes_of(probe, sample, args.alphas)

        return add

    state = resumed(Rows(Outcome), "interventions", named, samples, start, args, flags=("alphas",))
    outcomes: dict[str, list[Outcome]] = {}
    for outcome in state.rows:
        outcomes.setdefault(outcome.name, []).append(outcome)
    untouched = outcomes[UNTOUCHED]
    without = [
        outcome.visual_norm_without_sinks for outcome in untouched if outcome.visual_norm_without_sinks is not None
    ]
    scale = float(np.median([outcome.embedding_scale for outcome in untouched]))
    return {
        "outcomes": outcomes,
        "visual norm": float(np.median(without)),
        "visual norm with sinks": float(np.median([outcome.visual_norm for outcome in untouched])),
        "text norm": float(np.median([outcome.text_norm for outcome in untouched])),
        "embedding norm": state.about["embedding norm"],
        "embedding norm as it enters": scale * state.about["embedding norm"],
    }


def outcomes_of(probe: Probe, sample: PicturePrompt, alphas: list[float]) -> Iterator[Outcome]:
    """Every intervention's outcome for one sample, the untouched run's first.

    Raises:
        ValueError: the sample has no text that enters beside its picture.
    """
    batch = probe.prepare([sample])
    untouched = _run(probe, batch)
    if not math.isfinite(untouched.text_norm):
        raise ValueError(f"{probe.name}, {sample.name}: no text enters beside the picture, so there is no text norm")
    yield compare(UNTOUCHED, untouched, untouched)
    for name, other in interventions(probe, sample, batch, alphas, untouched.text_norm):
        yield compare(name, untouched, other)


def interventions(
    probe: Probe, sample: PicturePrompt, batch: Batch, alphas: list[float], text_norm: float
) -> Iterator[tuple[str, _Run]]:
    """Runs the interventions one after the other; yields each one's name and run."""
    for alpha in alphas:
        yield f"alpha {alpha:g}", _run(probe, batch, at_visual(lambda tokens, alpha=alpha: alpha * tokens))
    yield TEXT_NORM, _run(probe, batch, at_visual(lambda tokens: text_norm * F.normalize(tokens, dim=-1)))
    yield SHUFFLED, _run(probe, batch, at_visual(shuffled))
    blank = _run(probe, probe.prepare([sample._replace(image=Image.new("RGB", sample.image.size, GREY))]))
    yield BLANK, blank
    text_only = _text_alone(probe, sample)
    if text_only is not None:
        yield TEXT_ONLY, _run(probe, text_only)
    visual = probe.groups(batch)[0] == VISUAL
    for name, which in SWAPS.items():
        yield name, _run(probe, batch, change=_taking(blank, visual, *which))


def _text_alone(probe: Probe, sample: PicturePrompt) -> Batch | None:
    # None where the model's processor makes no inputs without a picture (GOT-OCR), whichever error it raises.
    try:
        return probe.prepare([sample._replace(image=None)])
    except (ValueError, TypeError):
        return None


def at_visual(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The edit that puts `change` of the visual tokens [N, D] in their place."""

    def edit(states: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        states, visual = states.clone(), (groups == VISUAL).to(states.device)
        states[visual] = change(states[visual])
        return states

    return edit


def shuffled(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [..., N, D] in another order, which is the same for all models with this number of tokens."""
    order = torch.randperm(tokens.shape[-2], generator=torch.Generator().manual_seed(0))
    return tokens[..., order.to(tokens.device), :]


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
    shares: list[torch.Tensor] = []
    keys: dict[int, torch.Tensor] = {}
    values: dict[int, torch.Tensor] = {}
    visual = probe.groups(batch)[0].cpu() == VISUAL

    def see(index: int, attention: Attention) -> None:
        at = visual.to(attention.keys.device)
        shares.append(attention.weights[:, -1, at].mean(dim=0).double().cpu())
        keys[index] = attention.keys[:, at].clone()
        values[index] = attention.values[:, at].clone()

    seen = attention_watch.run(probe, batch, edit, see, change)
    log_probs = seen.logits[0, -1].double().log_softmax(dim=-1)
    norms, sinks = seen.hidden_states[0][0].float().norm(dim=-1).cpu(), sink_mask(seen)[0]
    text = torch.isin(seen.groups[0].cpu(), torch.tensor(TEXT_GROUPS)) & ~sinks
    return _Run(
        log_probs,
        torch.stack(shares).mean(dim=0),
        keys,
        values,
        norms[visual],
        sinks[visual],
        *(_median(of[text]) for of in (norms, embedding_scale(seen)[0])),
        len(probe.parts.layers),
    )


def _median(values: torch.Tensor) -> float:
    values = values[values.isfinite()].double().numpy()
    return float(np.median(values)) if len(values) else math.nan


def distance(expected: torch.Tensor, actual: torch.Tensor) -> tuple[float, int]:
    """The KL divergence in nats of log probabilities [C] from the expected ones, and the rank of the latter's token."""
    kl = (expected.exp() * (expected - actual)).sum().item()
    return max(kl, 0.0), int((actual > actual[expected.argmax()]).sum()) + 1


def compare(name: str, untouched: _Run, other: _Run) -> Outcome:
    """The outcome of `other`, compared with the untouched run of the same sample."""
    everything = torch.ones_like(untouched.sinks)
    norm, share = _of_tokens(other, torch.ones_like(other.sinks))
    return Outcome(
        name,
        *distance(untouched.log_probs, other.log_probs),
        norm,
        other.text_norm,
        other.embedding_scale,
        share,
        *_cosines(untouched, other, everything),
        int(other.sinks.sum()),
        *_of_tokens(other, ~other.sinks),
        *_cosines(untouched, other, everything & ~untouched.sinks),
    )


def _of_tokens(run: _Run, chosen: torch.Tensor) -> tuple[float | None, float]:
    # Median norm, and share of the attention.
    return (_median(run.norms[chosen]) if chosen.any() else None), run.shares[chosen].sum().item()


def _cosines(untouched: _Run, other: _Run, chosen: torch.Tensor) -> tuple[np.ndarray | None, np.ndarray | None]:
    # Per layer, of the chosen visual tokens' keys and values; None where there are none to compare.
    if other.norms.shape != untouched.norms.shape or not chosen.any():
        return None, None
    pairs = []
    for before, after in ((untouched.keys, other.keys), (untouched.values, other.values)):
        cosines = np.full(untouched.layers, math.nan)
        for index, tensor in before.items():
            cosines[index] = _cosine(tensor, after[index], chosen)
        pairs.append(cosines)
    return pairs[0], pairs[1]


def _cosine(a: torch.Tensor, b: torch.Tensor, chosen: torch.Tensor) -> float:
    at = chosen.to(a.device)
    return F.cosine_similarity(a[:, at].float(), b[:, at].float(), dim=-1).mean().item()


def table_row(model: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """Means over the samples; KL also as median, since a few answers may carry the mean."""
    kl = Stream()
    kl.add([outcome.kl for outcome in outcomes])
    return {
        "model": model,
        "intervention": outcomes[0].name,
        "KL (nats)": kl.mean,
        "KL median": kl.median,
        "KL std": kl.std,
        "rank of chosen": float(np.mean([outcome.rank for outcome in outcomes])),
        "answer changes (%)": 100 * float(np.mean([outcome.rank > 1 for outcome in outcomes])),
        "visual attention": _mean([outcome.visual_share for outcome in outcomes]),
        "cos of keys": _mean([outcome.keys for outcome in outcomes]),
        "cos of values": _mean([outcome.values for outcome in outcomes]),
        "visual sinks a picture": _mean([outcome.sinks for outcome in outcomes]),
        "visual attention without sinks": _mean([outcome.visual_share_without_sinks for outcome in outcomes]),
        "cos of keys without sinks": _mean([outcome.keys_without_sinks for outcome in outcomes]),
        "cos of values without sinks": _mean([outcome.values_without_sinks for outcome in outcomes]),
    }


def _mean(values: list[Any]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.nanmean(there)) if there else None


def _per_layer(outcomes: list[Outcome]) -> dict[str, list[float]] | None:
    pictured = [outcome for outcome in outcomes if outcome.keys is not None]
    if not pictured:
        return None
    return {
        "cos of keys": np.mean([outcome.keys for outcome in pictured], axis=0).tolist(),
        "cos of values": np.mean([outcome.values for outcome in pictured], axis=0).tolist(),
    }


def verdict(model: str, measured: dict[str, Any]) -> str:
    """In one sentence with numbers, what setting visual tokens to the text norm does to one model."""
    rows = {name: table_row(model, outcomes) for name, outcomes in measured["outcomes"].items()}
    ratio, with_sinks = (measured[norm] / measured["text norm"] for norm in ("visual norm", "visual norm with sinks"))
    to_table = measured["visual norm"] / measured["embedding norm as it enters"]
    start = (
        f"{model}: visual tokens enter with {ratio:.2f} times the text norm (medians; with sinks {with_sinks:.2f}; "
        f"{to_table:.2f} times the mean embedding as it enters). "
    )
    blank, scaled = rows[BLANK], rows[TEXT_NORM]
    if blank["KL (nats)"] < SEES_PICTURES:
        return start + (
            f"NOT DECIDED: a blank picture changes the output by {blank['KL (nats)']:.4f} nats only, so this model "
            "does not look at its pictures here."
        )
    share = scaled["KL (nats)"] / blank["KL (nats)"]
    word = "HARMLESS" if share < HARMLESS else "WEAKENS" if share < BREAKING else "BREAKS"
    if any(1 / ALIGNED < factor < ALIGNED for factor in (ratio, to_table)):
        word = "ALIGNED ALREADY"
    turned = [1 - scaled[f"cos of {part}"] for part in ("values", "keys")]
    more = "more than" if turned[0] > turned[1] else "no more than"
    return start + (
        f"{word}: setting them to the text norm at inference changes the output by {scaled['KL (nats)']:.3f} nats "
        f"(median {scaled['KL median']:.3f}), {100 * share:.0f} % of what a blank picture does (median "
        f"{blank['KL median']:.3f}), and {scaled['answer changes (%)']:.0f} % of the answers; "
        f"values turn (cos {scaled['cos of values']:.3f}) {more} keys (cos {scaled['cos of keys']:.3f})."
    )


def draw(args: argparse.Namespace, rows: list[dict[str, Any]], details: dict[str, Any]) -> None:
    """KL over alpha with the blank picture's as a line; cosines of keys and values over alpha; KL of the swaps."""
    with figure(args, 1, 3, figsize=(13, 4)) as (drawn, (left, middle, right)):
        for index, (model, look) in enumerate(looks(details).items()):
            colour = look["color"]
            own = {row["intervention"]: row for row in rows if row["model"] == model}
            sweep = {float(name.split()[1]): row for name, row in own.items() if name.startswith("alpha")}
            sweep[1.0] = own[UNTOUCHED]
            alphas = sorted(sweep)
            left.plot(alphas, [sweep[a]["KL (nats)"] for a in alphas], "o-", color=colour, label=model, markersize=4)
            left.axhline(own[BLANK]["KL (nats)"], color=colour, linestyle=":", linewidth=1.2)
            at = details[model]["text norm"] / details[model]["visual norm"]
            left.plot([at], [own[TEXT_NORM]["KL (nats)"]], "*", color=colour, markersize=15, markeredgecolor="black")
            for part, style in (("keys", "--"), ("values", "-")):
                cosines = [sweep[a][f"cos of {part}"] for a in alphas]
                middle.plot(alphas, cosines, style, color=colour)
            names = [BLANK, SHUFFLED, *SWAPS, TEXT_ONLY]
            positions = np.arange(len(names)) + (index - (len(details) - 1) / 2) * 0.8 / len(details)
            heights = [own[name]["KL (nats)"] if name in own else math.nan for name in names]
            right.barh(positions, heights, 0.8 / len(details), color=colour)
        left.set(xscale="log", xlabel="alpha (factor on visual tokens)", ylabel="KL from the untouched output (nats)")
        left.set_title("Scaling at inference\n(dotted: blank picture; star: set to text norm)")
        middle.set(xscale="log", xlabel="alpha (factor on visual tokens)", ylabel="cosine with the untouched ones")
        middle.set_title("Direction of visual keys (dashed) and values")
        right.set(xlabel="KL from the untouched output (nats)", yticks=range(len(names)), yticklabels=names)
        right.set_title("Controls")
        right.invert_yaxis()
        drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
