"""What the norm of visual tokens does to a trained model at inference, with a blank picture and no picture as scale.

Visual tokens are scaled by alpha, or each set to the text norm, where they enter the first layer; the text norm is the
median norm of the text tokens that enter beside them.

Shapes: S sequence, V visual tokens, K key/value heads, L layers, C vocabulary.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from llava.analysis import measure, models, samples
from llava.analysis.attention import watched
from llava.analysis.commands import NamedModel, required_models
from llava.analysis.measure import TEXT_GROUPS, Values, embedding_scale, median, sink_mask
from llava.analysis.output import TableRow, figure, write_result
from llava.analysis.probe import VISUAL, Batch, Edit, Probe
from llava.analysis.samples import PicturePrompt
from llava.model.multimodal_projector.norm import mean_text_embedding_norm
from llava.utils.presentation import looks

UNTOUCHED, TEXT_NORM, BLANK, TEXT_ONLY = "untouched", "text norm", "blank picture", "no picture"
GREY = (127, 127, 127)
# Shares of the change that a blank picture makes: scaling is called harmless below the first, breaking from the second.
HARMLESS, BREAKING = 0.1, 0.5
ALIGNED = 1.25
"""Visual norms within this factor of the text norm, or of the mean embedding as it enters, count as aligned already."""
SEES_PICTURES = 0.01
"""Mean KL in nats to the blank picture's output, below which a model is said not to look at its pictures."""


class Run(NamedTuple):
    """One run of one sample.

    Attributes:
        log_probs: of the next token [C].
        shares: each visual token's share of the last token's attention [V], mean over layers with attention, and heads.
        cache: keys and values of the visual tokens [K, V, channels], by layer.
        norms: of the visual tokens where they enter the first layer [V].
        sinks: which visual tokens are sinks [V] (see `measure`).
        text_norm: of the text tokens there that are not sinks, median.
        scale: factor from the embedding matrix's rows to what enters, median over these tokens.
    """

    log_probs: torch.Tensor
    shares: torch.Tensor
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]]
    norms: torch.Tensor
    sinks: torch.Tensor
    text_norm: float
    scale: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measure.add_arguments(parser, default=16)
    parser.add_argument(
        "--alphas", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3, 0.6, 2, 5, 10], help="factors of the sweep"
    )


def run(args: argparse.Namespace) -> None:
    """Writes one row per model and intervention, the figure, and prints one verdict per model."""
    if min(args.alphas) <= 0:
        raise ValueError("--alphas: expected positive factors; no picture at all is always among the controls")
    args.alphas = sorted(args.alphas)
    drawn = samples.choose(args)
    rows, details = [], {}
    for model in required_models(args.models):
        parts = measure_interventions(model, drawn, args)
        own = {str(name): table_row(model.name, str(name), parts) for name in parts[0]["name"]}
        rows += own.values()
        if TEXT_ONLY not in own:
            print(f"{model.name}: not run: {TEXT_ONLY}; its processor makes no inputs of text alone")
        details[model.name] = facts = {
            "visual norm": median(_known(parts, UNTOUCHED, "visual norm without sinks")),
            "visual norm with sinks": median(_known(parts, UNTOUCHED, "visual norm")),
            "text norm": median(_known(parts, UNTOUCHED, "text norm")),
            "embedding norm": float(parts[0]["embedding norm"]),
        }
        scale = median(_known(parts, UNTOUCHED, "scale"))
        facts["embedding norm as it enters"] = scale * facts["embedding norm"]
        facts["verdict"] = verdict(model.name, facts, own)
    write_result(args, rows, details)
    draw(args, rows, details)
    print("\n" + "\n".join(facts["verdict"] for facts in details.values()))


def measure_interventions(named: NamedModel, drawn: samples.Samples, args: argparse.Namespace) -> list[Values]:
    """Per sample, the values of every intervention that it took, by `name`."""

    def start() -> Callable[[Sequence[PicturePrompt]], Values]:
        probe = models.load(named, args)
        embedding_norm = np.array(mean_text_embedding_norm(probe.embedding_weight))

        def measured(part: Sequence[PicturePrompt]) -> Values:
            outcomes = list(outcomes_of(probe, part[0], args.alphas))
            values = {name: np.array([outcome[name] for outcome in outcomes]) for name in outcomes[0]}
            return values | {"embedding norm": embedding_norm}

        return measured

    return measure.batches("interventions", named, drawn, args, start, flags=("alphas",))


def outcomes_of(probe: Probe, sample: PicturePrompt, alphas: list[float]) -> Iterator[dict[str, Any]]:
    """Every intervention's outcome for one sample, the untouched run's first, see `compare`.

    Raises ValueError: the sample has no text that enters beside its picture.
    """
    batch = probe.prepare([sample])
    untouched = run_of(probe, batch)
    if not math.isfinite(untouched.text_norm):
        raise ValueError(f"{probe.name}, {sample.name}: no text enters beside the picture, so there is no text norm")
    layers = len(probe.parts.layers)
    yield compare(UNTOUCHED, untouched, untouched, layers)
    for alpha in alphas:
        edited = run_of(probe, batch, at_visual(lambda tokens, alpha=alpha: alpha * tokens))
        yield compare(f"alpha {alpha:g}", untouched, edited, layers)
    edited = run_of(probe, batch, at_visual(lambda tokens: untouched.text_norm * F.normalize(tokens, dim=-1)))
    yield compare(TEXT_NORM, untouched, edited, layers)
    blank = probe.prepare([sample._replace(image=Image.new("RGB", sample.image.size, GREY))])
    yield compare(BLANK, untouched, run_of(probe, blank), layers)
    try:
        text_only = probe.prepare([sample._replace(image=None)])
    except (ValueError, TypeError):  # its processor makes no inputs without a picture (GOT-OCR)
        return
    yield compare(TEXT_ONLY, untouched, run_of(probe, text_only), layers)


def at_visual(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """The edit that puts `change` of the visual tokens [N, D] in their place."""

    def edit(states: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        states, visual = states.clone(), (groups == VISUAL).to(states.device)
        states[visual] = change(states[visual])
        return states

    return edit


def run_of(probe: Probe, batch: Batch, edit: Edit | None = None) -> Run:
    """Runs a batch of one sample."""
    shares: list[torch.Tensor] = []
    visual = probe.groups(batch)[0].cpu() == VISUAL

    def see(index: int, weights: torch.Tensor, allowed: torch.Tensor) -> None:
        shares.append(weights[:, -1].mean(dim=0).double().cpu())

    with watched(probe.parts.layers, see):
        seen = probe.run(batch, edit, use_cache=True, **whole_cache(probe))
    if not shares:
        raise ValueError(f"{probe.name}: no decoder layer gives its attention weights, so none can be measured")
    cache = {}
    for index, layer in enumerate(getattr(seen.outputs.past_key_values, "layers", ())):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and keys.ndim == 4 and keys.shape[2] == len(visual):
            cache[index] = keys[0][:, visual].float(), values[0][:, visual].float()
    norms, sinks = seen.hidden_states[0][0].float().norm(dim=-1).cpu(), sink_mask(seen)[0]
    text = torch.isin(seen.groups[0].cpu(), torch.tensor(TEXT_GROUPS)) & ~sinks
    return Run(
        seen.logits[0, -1].double().log_softmax(dim=-1),
        torch.stack(shares).mean(dim=0)[visual],
        cache,
        norms[visual],
        sinks[visual],
        *(_median(of[text]) for of in (norms, embedding_scale(seen)[0])),
    )


def whole_cache(probe: Probe) -> dict[str, DynamicCache]:
    """The option of a forward that keeps all keys and values of layers with a sliding window; empty without such."""
    cache = DynamicCache(config=probe.model.config.get_text_config(decoder=True))
    sliding = [type(layer) is DynamicSlidingWindowLayer for layer in cache.layers]
    cache.layers = [DynamicLayer() if slides else layer for slides, layer in zip(sliding, cache.layers, strict=True)]
    return {"past_key_values": cache} if any(sliding) else {}


def _median(values: torch.Tensor) -> float:
    return median(values[values.isfinite()].double().numpy())


def distance(expected: torch.Tensor, actual: torch.Tensor) -> tuple[float, int]:
    """The KL divergence in nats of log probabilities [C] from the expected ones, and the rank of the latter's token."""
    kl = (expected.exp() * (expected - actual)).sum().item()
    return max(kl, 0.0), int((actual > actual[expected.argmax()]).sum()) + 1


def compare(name: str, untouched: Run, other: Run, layers: int) -> dict[str, Any]:
    """What `other` differs in from the untouched run of the same sample: NaN where there is nothing to compare.

    Cosines of visual keys and values with the untouched ones are means per layer [L]. Sinks are those of `other`.
    """
    kl, rank = distance(untouched.log_probs, other.log_probs)
    if not math.isfinite(kl):
        raise ValueError(f"{name}: the KL divergence is {kl}; logits that are NaN or infinite cannot be compared")
    outcome = {"name": name, "kl": kl, "rank": rank, "text norm": other.text_norm, "scale": other.scale}
    outcome |= {"sinks": int(other.sinks.sum()), "visual norm": _median(other.norms)}
    outcome["visual norm without sinks"] = _median(other.norms[~other.sinks])
    outcome["share"] = other.shares.sum().item()
    outcome["share without sinks"] = other.shares[~other.sinks].sum().item()
    cosines = np.full((2, layers), np.nan)
    if other.norms.shape == untouched.norms.shape:
        for index in untouched.cache.keys() & other.cache.keys():
            pairs = zip(untouched.cache[index], other.cache[index], strict=True)
            cosines[:, index] = [F.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairs]
    return outcome | {"keys": cosines[0], "values": cosines[1]}


def _known(parts: list[Values], name: str, what: str) -> np.ndarray:
    """An intervention's values over the samples, without those that are not known."""
    values = np.concatenate([np.ravel(part[what][part["name"] == name]) for part in parts])
    return values[~np.isnan(values)]


def table_row(model: str, name: str, parts: list[Values]) -> TableRow:
    """Means over the samples; KL also as median, since a few answers may dominate the mean."""
    kl, rank = _known(parts, name, "kl"), _known(parts, name, "rank")
    row = {"model": model, "intervention": name, "KL (nats)": float(kl.mean()), "KL median": median(kl)}
    row |= {"KL std": float(kl.std()), "rank of chosen": float(rank.mean())}
    row["answer changes (%)"] = 100 * float((rank > 1).mean())
    columns = {"visual attention": "share", "cos of keys": "keys", "cos of values": "values"}
    columns |= {"visual sinks a picture": "sinks", "visual attention without sinks": "share without sinks"}
    for column, what in columns.items():
        values = _known(parts, name, what)
        row[column] = float(values.mean()) if len(values) else None
    return row


def verdict(model: str, facts: dict[str, Any], rows: dict[str, TableRow]) -> str:
    """In one sentence with numbers, what setting visual tokens to the text norm does to one model."""
    ratio, with_sinks = (facts[norm] / facts["text norm"] for norm in ("visual norm", "visual norm with sinks"))
    to_table = facts["visual norm"] / facts["embedding norm as it enters"]
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
    sentence = start + (
        f"{word}: setting them to the text norm at inference changes the output by {scaled['KL (nats)']:.3f} nats "
        f"(median {scaled['KL median']:.3f}), {100 * share:.0f} % of what a blank picture does (median "
        f"{blank['KL median']:.3f}), and {scaled['answer changes (%)']:.0f} % of the answers"
    )
    if scaled["cos of values"] is None:
        return f"{sentence}."
    more = "more than" if scaled["cos of values"] < scaled["cos of keys"] else "no more than"
    return f"{sentence}; values turn (cos {scaled['cos of values']:.3f}) {more} keys (cos {scaled['cos of keys']:.3f})."


def draw(args: argparse.Namespace, rows: list[TableRow], details: dict[str, Any]) -> None:
    """KL over alpha with the blank picture's and no picture's as lines; cosines of keys and values over alpha."""
    with figure(args, 1, 2, figsize=(9, 4)) as (drawn, (left, right)):
        for model, look in looks(details).items():
            colour = look["color"]
            own = {row["intervention"]: row for row in rows if row["model"] == model}
            sweep = {float(name.split()[1]): row for name, row in own.items() if name.startswith("alpha")}
            sweep[1.0] = own[UNTOUCHED]
            alphas = sorted(sweep)
            left.plot(alphas, [sweep[a]["KL (nats)"] for a in alphas], "o-", color=colour, label=model, markersize=4)
            for name, style in ((BLANK, ":"), (TEXT_ONLY, "--")):
                if name in own:
                    left.axhline(own[name]["KL (nats)"], color=colour, linestyle=style, linewidth=1.2)
            at = details[model]["text norm"] / details[model]["visual norm"]
            left.plot([at], [own[TEXT_NORM]["KL (nats)"]], "*", color=colour, markersize=15, markeredgecolor="black")
            for part, style in (("keys", "--"), ("values", "-")):
                cosines = np.array([sweep[a][f"cos of {part}"] for a in alphas], dtype=float)  # None becomes NaN
                right.plot(alphas, cosines, style, color=colour)
        left.set(xscale="log", xlabel="alpha (factor on visual tokens)", ylabel="KL from the untouched output (nats)")
        left.set_title("Scaling at inference (dotted: blank picture;\ndashed: no picture; star: set to text norm)")
        right.set(xscale="log", xlabel="alpha (factor on visual tokens)", ylabel="cosine with the untouched ones")
        right.set_title("Direction of visual keys (dashed) and values")
        drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
